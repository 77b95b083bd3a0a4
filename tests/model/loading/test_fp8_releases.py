"""Releases in FP8: which engines and which decoder are served, and what a validation compares with."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine_builder.quantization.validation.stored import write_validation
from engine_builder.quantization.validation.thresholds import Thresholds
from engine_builder.releases.publish import merge_drafts
from engine_builder.releases.validation_gate import require_validation
from engine_builder.stores.local import WritableLocalStore
from model.deployment import ServedPrecision
from model.loading.select import select
from model.pipeline.spec import control_components
from model.store.manifest import Fp16Steps, Manifest, Signature
from model.store.precision import BF16, FP8, FP16, FP32, Dtype, Precision
from tests.support import releases
from tests.support.deployments import deployed
from tests.support.quantization import GPU, report_of


def recast(signature: Signature, dtype: Dtype) -> Signature:
    """Return a signature whose floating-point tensors have this type."""
    tensors = {
        field: tuple(
            spec.model_copy(update={"dtype": dtype}) if "float" in spec.dtype else spec
            for spec in getattr(signature, field)
        )
        for field in ("inputs", "outputs")
    }
    return signature.model_copy(update=tensors)


def draft_in(draft: Manifest, precisions: dict[str, Precision], **builder: str) -> Manifest:
    """Return a draft for the GPU whose components have these precisions, by default fp16."""
    engines = []
    for engine in draft.engines:
        precision = precisions.get(engine.component, FP16)
        key = hashlib.sha256(f"{engine.key}{precision}".encode()).hexdigest()
        signature = recast(engine.signature, precision.io)
        changes = {"target": GPU.key, "precision": precision, "key": key, "signature": signature}
        engines.append(engine.model_copy(update=changes))
    weights = [
        record.model_copy(update={"precision": precisions.get(record.component, FP16)}) for record in draft.weights
    ]
    entries = {"engines": tuple(engines), "weights": tuple(weights), "builder": {"source": "1", **builder}}
    return draft.model_copy(update=entries)


def release(folder: Path, vae: Precision) -> Manifest:
    """Return a release in fp16 and FP8. The VAE of the fp16 build has the precision `vae`."""
    draft = releases.draft_release(WritableLocalStore(folder))
    unquantized = draft_in(draft, {"vae_decoder": vae, "vae_encoder": vae})
    quantized = draft_in(draft, {"unet": FP8, "refiner_unet": FP8, "vae_decoder": FP8}, quantization="ab" * 32)
    return merge_drafts([quantized, unquantized]).model_copy(update={"version": "1"})


@pytest.mark.parametrize("vae", [FP16, FP32, BF16])
@pytest.mark.parametrize(
    ("served", "decoders"),
    [
        (ServedPrecision(FP16), ["fp16's"]),
        (ServedPrecision(FP8), ["fp8"]),
        (ServedPrecision(FP8, compares=True), ["fp8", "fp16's"]),
    ],
    ids=["fp16", "fp8", "compared"],
)
def test_decoder_has_the_precision_of_the_unet(
    served: ServedPrecision, decoders: list[str], vae: Precision, tmp_path: Path
) -> None:
    """A comparison decodes as a deployment in fp16 does."""
    selection = select(release(tmp_path, vae), [GPU], deployed(precision=served))
    expected = [{"fp8": FP8, "fp16's": vae}[name] for name in decoders]
    assert [engine.precision for engine in selection.engines["vae_decoder"]] == expected


@pytest.mark.parametrize("vae", [FP32, BF16])
def test_validation_compares_with_the_unets_precision(vae: Precision, tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path)
    manifest = release(tmp_path, vae)
    digest = manifest.builder["quantization"]
    for reference, refused in (("fp16", False), (vae.name, True)):
        write_validation(store, report_of(reference=reference, identity={"quantization": digest}), b"pictures")
        found = require_validation(store, manifest, Thresholds(), accept=True).validation
        assert found is not None
        assert any("a comparison with fp16 is required" in sentence for sentence in found.violations) == refused


@pytest.mark.parametrize("also", [(), (FP16,)], ids=["fp8", "fp8 and fp16"])
def test_optional_engines_without_fp16_are_not_served_beside_steps_in_fp16(
    also: tuple[Precision, ...], tmp_path: Path
) -> None:
    """A request for them is then refused when it is read, not in its first step."""
    content = release(tmp_path, FP16)
    names = control_components(["canny"])
    precisions = {name: (FP8, *also) if name == "unet_controlled" else (FP16,) for name in names}

    def added(records: Iterable[Any]) -> list[Any]:
        return [
            record.model_copy(update={"component": name})
            for record in records
            for name in names
            if record.component == "unet" and record.precision in precisions[name]
        ]

    entries: dict[str, Any] = {
        field: (*getattr(content, field), *added(getattr(content, field))) for field in ("engines", "weights")
    }
    entries["architectures"] = content.architectures | dict.fromkeys(names, content.architectures["unet"])
    content = content.model_copy(update=entries)

    def served(precision: ServedPrecision) -> list[Precision]:
        selection = select(content, [GPU], deployed(precision=precision))
        assert len(selection.engines.keys() & set(names)) in (0, len(names))
        return [engine.precision for engine in selection.engines.get("unet_controlled", ())]

    assert served(ServedPrecision(FP8)) == [FP8]
    assert served(ServedPrecision(FP8, Fp16Steps(first=1))) == ([FP8, FP16] if also else [])
