"""The engines, selections and pictures of fixtures, as recorded in tests/recorded/*.json.

A change of names or of structure must leave them equal: another key would compile an engine of each release again, and
another selection would load other engines than before. PREHEAT_RECORD=1 writes the files again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import PropertyMock, patch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile import engine_key
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.networks.network import ModuleReader
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantization_plan import Quantization
from model.engines.features import GUIDED_ZEROS, engine_name, parse_name
from model.images.pixels import Pixels
from model.loading.select import Selection
from model.loading.target import Target
from model.pipeline.components import find_component
from model.store.manifest import Accuracy, Blob, Bucket, EngineRecord, Manifest, Signature, WeightsRecord
from model.store.precision import FP8, FP16, FP32, Precision
from tests.support.quantization import ranges_of, unet_inputs
from tests.support.repository import REPOSITORY

FOLDER = REPOSITORY / "tests" / "recorded"
CPU = Target("cpu", "x86_64_v3", "x86_64", "torch2.13")
H100 = Target("cuda", "h100", "sm90", "torch2.13-cu130")
SIZES = (Size(1, 64, 64), Size(2, 64, 64), Size(4, 128, 64))
_THUMBNAIL = 4  # pixels on a side


@dataclass(frozen=True)
class PlannedEngine:
    """An engine of a plan, as far as it is known without compiling it."""

    component: str
    bucket: Bucket
    key: str
    target: Target
    precision: Precision
    layout: str
    signature: Signature

    @property
    def label(self) -> str:
        """The component and the bucket."""
        return f"{self.component} {self.bucket.label}"


def planned_engines(plan: BuildPlan) -> list[PlannedEngine]:
    """Return the engines of a plan. Their networks are loaded on the CPU, also if the target is a GPU."""
    reader, planned = ModuleReader(), []
    with patch.object(BuildPlan, "network_device", PropertyMock(return_value="cpu")), _without_versions():
        for component in plan.components:
            network = plan.load(component, reader)
            for bucket in plan.buckets_of(network):
                key = engine_key(network, plan.target, bucket)
                of_network = (network.precision, network.layout, network.signature)
                planned.append(PlannedEngine(component, bucket, key, plan.target, *of_network))
    return planned


@contextmanager
def _without_versions() -> Iterator[None]:
    """Leave the versions of torch and of other libraries out of engine keys."""
    digest = compiler.digest_json
    with patch.object(compiler, "digest_json", lambda entries: digest(entries | {"torch": "", "libraries": {}})):
        yield


def quantized(plan: BuildPlan, precision: Precision) -> BuildPlan:
    """Return a plan whose UNet is quantized by the ranges of random inputs."""
    exact = replace(plan, precision=FP16)
    with patch.object(BuildPlan, "network_device", PropertyMock(return_value="cpu")):
        unet = replace(exact, precision=FP32).load("unet", ModuleReader())
    ranges = ranges_of(unet, unet_inputs(unet))
    policy = Policy() if precision == FP8 else Policy(smoothing=0.8)
    return replace(
        exact, precision=precision, quantization=Quantization(policy, {"unet": ""}, {"unet": ranges}, precision)
    )


def with_engines(manifest: Manifest, planned: Iterable[PlannedEngine]) -> Manifest:
    """Return a manifest with these engines, and weights for them, in place of its own. Their blobs do not exist."""
    engines, weights = [], {}
    for one in planned:
        name, precision, layout = one.component, one.precision, one.layout
        engines.append(
            EngineRecord(
                component=name,
                key=one.key,
                target=one.target.key,
                runtime="aot_inductor",
                runtime_version="2.13.0",
                bucket=one.bucket,
                precision=precision,
                layout=layout,
                signature=one.signature,
                blob=_blob(one.key),
                constants=_blob(one.key),
                accuracy=Accuracy(worst=0, mean=0, relative=0, cases=1),
                build_seconds=1,
            )  # fmt: skip
        )
        component, features, _ = parse_name(name)  # a paired variant has its component's weights
        owner = find_component(name).same_as or engine_name(component, features - {GUIDED_ZEROS})
        blobs = (_blob(f"{owner} {precision} {layout}"),)
        weights[name, precision.name, layout] = WeightsRecord(
            component=name, precision=precision, layout=layout, blobs=blobs
        )
    return manifest.model_copy(update={"engines": tuple(engines), "weights": tuple(weights.values())})


def _blob(text: str) -> Blob:
    return Blob(sha256=hashlib.sha256(text.encode()).hexdigest(), bytes=1)


def describe_selection(selection: Selection) -> dict[str, Any]:
    """Return what a selection has: engines by component and bucket in their order, weights, what is shared."""
    return {
        "engines": {
            name: [f"{one.component} {one.bucket.label} {one.precision} {one.key[:12]}" for one in records]
            for name, records in selection.engines.items()
        },
        "weights": {name: [one.identity[0][:12] for one in records] for name, records in selection.weights.items()},
        "shared": selection.shared,
        "fp16_steps": selection.fp16_steps and selection.fp16_steps.model_dump(),
        "target": selection.target,
    }


def describe(pixels: Pixels) -> dict[str, Any]:
    """Return the digest of a picture uint8 [height, width, 3], and the mean colours of its 16 parts."""
    height, width, _ = pixels.shape
    parts = pixels.reshape(_THUMBNAIL, height // _THUMBNAIL, _THUMBNAIL, width // _THUMBNAIL, 3).mean((1, 3))
    return {"sha256": hashlib.sha256(pixels.tobytes()).hexdigest(), "colours": parts.round(1).flatten().tolist()}


def compare_with_recorded(name: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is recorded in name.json. With PREHEAT_RECORD, write `found` there first."""
    path = FOLDER / f"{name}.json"
    if os.environ.get("PREHEAT_RECORD"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    recorded: Mapping[str, Any] = json.loads(path.read_text())
    return recorded
