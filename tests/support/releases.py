"""A release of toy networks: each component is a `Toy` with its own weights. The tokenizers know three words.

A release with `FAKE_ENGINE` needs no compiler. Everything but opening the engines works. `compiled_toy` compiles a
`Toy` once in each process, which takes some ten seconds.
"""

import functools
import hashlib
import json
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import nn

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.networks.network import Network
from engine_builder.releases.publish import write_once
from engine_builder.stores.store import WritableStore
from model.denoising.noise_schedule import NoiseSchedule
from model.engines.shapes import dtype_name
from model.errors import ReleaseExists
from model.loading.target import Target, detect_targets
from model.store.manifest import (
    Accuracy,
    Blob,
    Bucket,
    EngineRecord,
    Manifest,
    ModelFacts,
    RefinerFacts,
    Signature,
    TensorSpec,
    TokenizerRecord,
    WeightsRecord,
)
from model.store.precision import FP32
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.waiting import TIMEOUT_SECONDS

RELEASE_NAME = "toy/1"
_SHAPE = ("rows", 4, "height/8", "width/8")
TOY_SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=_SHAPE),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=_SHAPE),),
)
TOY_BUCKET = compiler.dynamic_bucket(8, max_batch=4, max_side=512)


class Toy(nn.Module):
    """[batch, 4, height/8, width/8] -> the same shape: linear, ReLU, linear, over the channels."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.b(torch.relu(self.a(x.movedim(1, -1)))).movedim(-1, 1).contiguous(),)


@dataclass(frozen=True)
class EngineFiles:
    """The bytes of an engine, and of its map of constants (JSON)."""

    engine: bytes
    constants: bytes


FAKE_ENGINE = EngineFiles(b"not an engine", b"{}")


@functools.cache
def compiled_toy() -> EngineFiles:
    """Compile a `Toy` for this machine."""
    network = Network(
        component="unet",
        module=Toy().eval(),
        signature=TOY_SIGNATURE,
        architecture={},
        precision=FP32,
        layout="plain",
        multiple=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        compiled = compiler.compile_network(network, compiler.build_target(), TOY_BUCKET, Path(folder) / "toy.pt2")
        return EngineFiles(compiled.package.read_bytes(), compiled.constants_json())


def cpu_target() -> Target:
    """Return the CPU target that this machine builds for: never x86_64_v4, which no build targets."""
    return next(target for target in detect_targets() if target.product != "x86_64_v4")


def toy_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of a `Toy`."""
    return dict(Toy(seed).named_parameters())


def put_blob(store: WritableStore, data: bytes) -> Blob:
    """Put bytes into the store. Return the manifest's entry for them."""
    return Blob(sha256=store.put_bytes(data), bytes=len(data))


def tokenizer_json() -> bytes:
    """Return a tokenizer file of the words <s>, </s> and cat. All other words become cat."""
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "cat": 2}, unk_token="cat"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return str(tokenizer.to_str()).encode()


def draft_release(
    store: WritableStore, files: EngineFiles = FAKE_ENGINE, refiner: bool = False, bucket: Bucket = TOY_BUCKET
) -> Manifest:
    """Put all blobs of a release into the store, and return its unpublished manifest.

    Each component has two blobs of weights.
    """
    component_names = BASE_COMPONENTS + (REFINER_COMPONENTS if refiner else ())
    engine, constants = put_blob(store, files.engine), put_blob(store, files.constants)
    weights = []
    for seed, name in enumerate(component_names):
        tensors = toy_tensors(seed)
        layers = [{key: tensors[key] for key in tensors if key.startswith(layer)} for layer in ("a", "b")]
        blobs = tuple(put_blob(store, save(layer)) for layer in layers)
        weights.append(WeightsRecord(component=name, precision="fp32", layout="plain", blobs=blobs))
    tokenizer = TokenizerRecord(
        blob=put_blob(store, tokenizer_json()), max_length=8, pad_token_id=1, bos_token_id=0, eos_token_id=1
    )
    schedule = NoiseSchedule(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
        set_alpha_to_one=False,
    ).to_dict()
    return Manifest(
        model="toy",
        version="1",
        family="sdxl",
        created="2026-01-01T00:00:00+00:00",
        builder={"preheat": "0"},
        settings=ModelFacts(
            native_height=64,
            native_width=64,
            vae_scale_factor=8,
            vae_scaling_factor=0.13025,
            latent_channels=4,
            force_zeros_for_empty_prompt=True,
            refiner=RefinerFacts(force_zeros_for_empty_prompt=True, requires_aesthetics_score=False)
            if refiner
            else None,
        ),
        defaults={"num_inference_steps": 4},
        schedulers={"base": schedule} | ({"refiner": schedule} if refiner else {}),
        tokenizers={"tokenizer": tokenizer, "tokenizer_2": tokenizer},
        architectures={name: hashlib.sha256(b"toy").hexdigest() for name in component_names},
        engines=tuple(
            EngineRecord(
                component=name,
                key=hashlib.sha256(b"key").hexdigest(),
                target=cpu_target().key,
                runtime="aot_inductor",
                runtime_version="2",
                bucket=bucket,
                precision="fp32",
                layout="plain",
                signature=TOY_SIGNATURE,
                blob=engine,
                constants=constants,
                accuracy=Accuracy(worst=0.0, mean=0.0, relative=0.0, cases=1),
                build_seconds=1.5,
            )
            for name in component_names
        ),
        weights=tuple(weights),
    )


def write_manifest(root: Path, content: dict[str, Any] | bytes, name: str = RELEASE_NAME) -> None:
    """Write a manifest, valid or not, into the store in `root`."""
    path = root / "releases" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def set_entry(entries: Any, path: str, value: object) -> None:
    """Set a value in a manifest as JSON, at a path such as engines.0.blob.sha256."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        entries = entries[part]
    entries[last] = value


def toy_constants(changes: dict[str, dict[str, Any]] | None = None) -> bytes:
    """Return the map of constants of a `Toy` as JSON. `changes`: the entries to change or add, by name."""
    constants: dict[str, dict[str, Any]] = {
        name: {"tensor": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        for name, tensor in toy_tensors(0).items()
    }
    for name, change in (changes or {}).items():
        constants[name] = constants.get(name, {}) | change
    return json.dumps(constants, sort_keys=True).encode()


class _Simultaneous:
    """A store for threads that publish at once: each has chosen a version before the first one writes."""

    def __init__(self, store: WritableStore, writers: int) -> None:
        self._store = store
        self._barrier = threading.Barrier(writers)
        self._waited: set[threading.Thread] = set()

    def write_release(self, manifest: Manifest) -> None:
        if threading.current_thread() not in self._waited:  # else it has lost a race, and chosen again
            self._waited.add(threading.current_thread())
            self._barrier.wait(TIMEOUT_SECONDS)
        self._store.write_release(manifest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def publish_at_once(store: WritableStore, contents: Sequence[Manifest], version: str) -> list[str]:
    """Publish all contents at the same time. Returns for each "published", "unchanged" or the error."""
    simultaneous: Any = _Simultaneous(store, len(contents))

    def publish(content: Manifest) -> str:
        try:
            return "published" if write_once(simultaneous, content, version)[1] else "unchanged"
        except ReleaseExists as error:
            return str(error)

    with ThreadPoolExecutor(len(contents)) as threads:
        return list(threads.map(publish, contents))
