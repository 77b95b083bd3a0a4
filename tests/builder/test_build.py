"""Building: what is compiled or reused, what an interruption leaves, what is never stored."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.engines import BuiltEngine
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, SizesRefused
from engine_builder.building.validate import InaccurateEngine
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.commands.build import _bucket_remark, _vae_remark, parse_plan
from engine_builder.commands.main import app
from engine_builder.networks.network import NETWORK_VERSION, Network
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore
from model.api.request import GenerationRequest, resolve
from model.cold_start import ColdStart
from model.errors import BrokenImage
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.spec import REFINER_TEXT_ENCODER_2, TEXT_ENCODER_2
from model.pipeline.text_to_image import generate
from model.store.manifest import Bucket, Manifest, Signature
from model.store.precision import BF16, FP16, FP32, Precision
from tests.conftest import REPOSITORY
from tests.support.reference import Reference

PlanOf = Callable[[Path, str], BuildPlan]
EditWeights = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]


def files(store: WritableStore) -> dict[str, tuple[int, int]]:
    """Return every file of a store with its size and time."""
    root = Path(store.url.removeprefix("file://"))
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def engines_of(manifest: Manifest) -> dict[str, tuple[str, str, str]]:
    return {e.component: (e.key, e.blob.sha256, e.constants.sha256) for e in manifest.engines}


def weights_of(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {record.component: record.identity for record in manifest.weights}


def forget_engine(store: WritableStore, manifest: Manifest, component: str) -> None:
    """Remove an engine from a store."""
    root = Path(store.url.removeprefix("file://"))
    [engine] = [engine for engine in manifest.engines if engine.component == component]
    (root / "records" / "engines" / f"{engine.key}.json").unlink()
    (root / "blobs" / "sha256" / engine.blob.sha256).unlink()


def forget_drafts(store: WritableStore) -> None:
    shutil.rmtree(Path(store.url.removeprefix("file://")) / "records" / "drafts")


def perturb(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))


def generate_one(loaded: Loaded, **fields: object) -> tuple[Any, Any]:
    """Return the resolved request and its image."""
    params = resolve(GenerationRequest.model_validate(fields), loaded.served)
    return params, generate(loaded.model, [params])[0][0]


def test_second_model_of_an_architecture_compiles_nothing(
    store_copy: WritableStore, folder_copy: Path, toy_plan: BuildPlan, plan_of: PlanOf, edit_weights: EditWeights
) -> None:
    first = build(toy_plan, store_copy).draft
    for subfolder in ("text_encoder", "text_encoder_2", "unet", "vae"):
        edit_weights(folder_copy / subfolder, perturb)
    result = build(plan_of(folder_copy, "other"), store_copy)
    assert result.compiled == ()
    assert set(result.reused) == set(toy_plan.components)
    assert engines_of(result.draft) == engines_of(first)
    assert not set(weights_of(result.draft).values()) & set(weights_of(first).values())

    publish(store_copy, "other")
    images = []
    for release in ("toy-sdxl/1", "other/1"):
        loaded = load_release(store_copy, release, detect_targets(), [], ColdStart())
        params, image = generate_one(loaded, prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)
        images.append(image)
    assert np.abs(images[0].astype(int) - images[1].astype(int)).max() > 20
    expected = Reference(folder_copy).draw(params)
    assert np.abs(images[1].astype(int) - expected.astype(int)).max() <= 2


def test_building_again_does_nothing(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    before = files(store_copy)
    reports: list[tuple[str, str, int, int]] = []
    result = build(toy_plan, store_copy, lambda *report: reports.append(report))
    assert result.compiled == () and result.reused == toy_plan.components
    assert reports == []
    assert files(store_copy) == before


def test_draft_of_another_network_version_is_not_current(
    store_copy: WritableStore, toy_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new NETWORK_VERSION means new engines, even if no library's version changed."""
    before = build(toy_plan, store_copy).draft
    monkeypatch.setattr("engine_builder.building.build.NETWORK_VERSION", NETWORK_VERSION + 1)
    reports: list[str] = []
    after = build(toy_plan, store_copy, lambda component, *_: reports.append(component)).draft
    assert "unet" in reports
    assert after.builder == {**before.builder, "form": str(NETWORK_VERSION + 1)}


def test_builds_changes_of_the_folder(
    store_copy: WritableStore, folder_copy: Path, toy_plan: BuildPlan, plan_of: PlanOf, edit_weights: EditWeights
) -> None:
    """Under the same name: new weights, and another file."""
    first = build(toy_plan, store_copy).draft
    assert build(plan_of(folder_copy, "toy-sdxl"), store_copy).draft == first
    edit_weights(folder_copy / "unet", perturb)
    second = build(plan_of(folder_copy, "toy-sdxl"), store_copy).draft
    changed = {name for name, blobs in weights_of(second).items() if blobs != weights_of(first)[name]}
    assert changed == {"unet", "unet_text", "unet_time"}
    (folder_copy / "defaults.json").write_text('{"num_inference_steps": 7}')
    third = build(plan_of(folder_copy, "toy-sdxl"), store_copy).draft
    assert third.defaults["num_inference_steps"] == 7
    (folder_copy / "README.md").write_text("Not served.")
    assert build(plan_of(folder_copy, "toy-sdxl"), store_copy).draft == third


def test_building_again_replaces_a_damaged_blob(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    draft = build(toy_plan, store_copy).draft
    [weights] = [record for record in draft.weights if record.component == "unet"]
    path = store_copy.get(weights.blobs[0].sha256, weights.blobs[0].bytes)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = build(toy_plan, store_copy)
    assert result.compiled == ()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == weights.blobs[0].sha256
    publish(store_copy, "toy-sdxl/repaired")


def test_does_not_reuse_a_damaged_engine(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    [engine] = [e for e in build(toy_plan, store_copy).draft.engines if e.component == "unet"]
    assert BuiltEngine.find(store_copy, engine.key) is not None
    path = store_copy.get(engine.blob.sha256, engine.blob.bytes)
    path.write_bytes(path.read_bytes()[:-1])
    assert BuiltEngine.find(store_copy, engine.key) is None
    store_copy.write_record("engines", engine.key, b"{")
    assert BuiltEngine.find(store_copy, engine.key) is None


KILLED_BUILD = """
import sys
from pathlib import Path
from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.stores.store import open_writable_store
from model.store.precision import FP32

plan = BuildPlan("toy-sdxl", Checkpoint(Path(sys.argv[1])), None, compiler.build_target(), FP32)
build(plan, open_writable_store(sys.argv[2]), lambda component, activity, *_: print(component, activity, flush=True))
"""


def test_continues_a_killed_build(
    store_copy: WritableStore, toy_folder: Path, toy_plan: BuildPlan, tmp_path: Path
) -> None:
    draft = build(toy_plan, store_copy).draft
    forget_drafts(store_copy)
    for component in ("text_encoder", "text_encoder_2"):
        forget_engine(store_copy, draft, component)
    building = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED_BUILD, str(toy_folder), store_copy.url],
        cwd=REPOSITORY,
        # Its own cache. Otherwise the compiler finds the results for the copied store.
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with building:
        assert building.stdout is not None
        lines = []
        for line in building.stdout:
            lines.append(line.strip())
            if lines[-1] == "text_encoder_2 compiling":
                os.killpg(building.pid, signal.SIGKILL)
                break
    assert building.returncode == -signal.SIGKILL
    assert lines[-3:] == ["text_encoder compiling", "text_encoder checking", "text_encoder_2 compiling"]

    root = Path(store_copy.url.removeprefix("file://"))
    for blob in (root / "blobs" / "sha256").iterdir():
        if not blob.name.startswith("."):
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    for record in (root / "records").rglob("[!.]*.json"):
        json.loads(record.read_bytes())
    assert store_copy.records("drafts") == []

    result = build(toy_plan, store_copy)
    assert result.compiled == ("text_encoder_2",)
    assert {component: key for component, (key, _, _) in engines_of(result.draft).items()} == {
        component: key for component, (key, _, _) in engines_of(draft).items()
    }


def swap_weights(constants: dict[str, Any]) -> dict[str, Any]:
    """Swap two weights of one shape in an engine's map of constants."""
    names = {constant["tensor"]: name for name, constant in constants.items()}
    first, second = (names[f"text_model.encoder.layers.0.mlp.{layer}.weight"] for layer in ("fc1", "fc2"))
    return constants | {first: constants[second], second: constants[first]}


def drop_one(constants: dict[str, Any]) -> dict[str, Any]:
    return dict(list(constants.items())[1:])


def blob_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {"digest": entry["sha256"], "size": entry["bytes"]}


def test_does_not_store_an_engine_that_fails_its_check(
    store_copy: WritableStore, toy_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled correctly, but with two weights of one shape swapped: it opens, runs, and computes something else."""
    draft = build(toy_plan, store_copy).draft
    [engine] = [engine for engine in draft.engines if engine.component == "unet"]
    package = store_copy.get(engine.blob.sha256, engine.blob.bytes).read_bytes()
    constants = json.loads(store_copy.get(engine.constants.sha256, engine.constants.bytes).read_bytes())
    swapped = {"down_blocks.0.resnets.0.conv1.bias", "down_blocks.0.resnets.0.conv2.bias"}
    first, second = (name for name, constant in constants.items() if constant["tensor"] in swapped)
    constants[first], constants[second] = constants[second], constants[first]

    def compile_network(network: Network, target: object, bucket: object, path: Path) -> compiler.CompiledNetwork:
        path.write_bytes(package)
        return compiler.CompiledNetwork(path, constants)

    forget_drafts(store_copy)
    forget_engine(store_copy, draft, "unet")
    before = files(store_copy)
    monkeypatch.setattr(compiler, "compile_network", compile_network)
    with pytest.raises(InaccurateEngine, match="The unet engine differs by .* It was not stored"):
        build(toy_plan, store_copy)
    assert files(store_copy).keys() == before.keys()
    assert BuiltEngine.find(store_copy, engine.key) is None


def test_recompiles_a_stored_engine_that_fails_its_check(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    """Nor can one that does not open block a later build."""
    draft = build(toy_plan, store_copy).draft
    engines = {engine.component: engine for engine in draft.engines}
    for component, change in (("text_encoder", drop_one), ("text_encoder_2", swap_weights)):
        record = json.loads(store_copy.read_record("engines", engines[component].key) or b"")
        constants = json.loads(store_copy.get(**blob_of(record["constants"])).read_bytes())
        changed = json.dumps(change(constants)).encode()
        record["constants"] = {"sha256": store_copy.put_bytes(changed), "bytes": len(changed)}
        store_copy.write_record("engines", engines[component].key, json.dumps(record).encode())
    forget_drafts(store_copy)
    lines: list[str] = []
    result = build(toy_plan, store_copy, lambda component, activity, *_: lines.append(f"{component} {activity}"))
    assert sorted(result.compiled) == ["text_encoder", "text_encoder_2"]
    reported = [line for line in lines if "recompiling: the stored engine failed its check. The " in line]
    assert [line.partition(" ")[0] for line in reported] == ["text_encoder", "text_encoder_2"]
    assert "constant map disagree" in reported[0] and "differs by" in reported[1]
    rebuilt = {engine.component: engine for engine in result.draft.engines}
    for component in ("text_encoder", "text_encoder_2"):
        assert rebuilt[component].constants == engines[component].constants
        assert rebuilt[component].accuracy.relative < 1e-4
        blob = rebuilt[component].blob
        with zipfile.ZipFile(store_copy.get(blob.sha256, blob.bytes)) as package:
            stated = json.loads(package.read(f"{component}-{engines[component].key[:12]}/preheat.json"))
        assert Bucket.model_validate(stated["bucket"]) == rebuilt[component].bucket
        assert Signature.model_validate(stated["signature"]) == rebuilt[component].signature
    assert rebuilt.keys() == engines.keys()


def test_draft_names_the_checked_engine(
    store_copy: WritableStore, toy_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another build writes that engine's record meanwhile."""
    draft = build(toy_plan, store_copy).draft
    engines = {engine.component: engine for engine in draft.engines}
    text = engines["text_encoder"]
    package = store_copy.get(text.blob.sha256, text.blob.bytes).read_bytes()
    constants = json.loads(store_copy.get(text.constants.sha256, text.constants.bytes).read_bytes())

    def compile_network(network: Network, target: object, bucket: object, path: Path) -> compiler.CompiledNetwork:
        other = store_copy.read_record("engines", engines["vae_decoder"].key) or b""
        store_copy.write_record("engines", engines["unet"].key, other)
        path.write_bytes(package)
        return compiler.CompiledNetwork(path, constants)

    forget_drafts(store_copy)
    forget_engine(store_copy, draft, "text_encoder")
    monkeypatch.setattr(compiler, "compile_network", compile_network)
    result = build(toy_plan, store_copy)
    assert result.compiled == ("text_encoder",)
    assert [engine.blob for engine in result.draft.engines if engine.component == "unet"] == [engines["unet"].blob]


@pytest.mark.parametrize("subfolder", ["unet", "vae"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_does_not_draft_a_model_that_generates_nan(
    subfolder: str,
    poison: float,
    store_copy: WritableStore,
    folder_copy: Path,
    plan_of: PlanOf,
    edit_weights: EditWeights,
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["conv_out.bias" if subfolder == "unet" else "decoder.conv_out.bias"][0] = poison

    edit_weights(folder_copy / subfolder, spoil)
    with pytest.raises((InaccurateEngine, BrokenImage)):
        build(plan_of(folder_copy, "broken"), store_copy)
    assert not [name for name in store_copy.records("drafts") if name.startswith("broken.")]


def test_engine_that_returns_nan_is_inaccurate(
    store_copy: WritableStore, toy_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "model.engines.aot_inductor.engine.AotInductorEngine.run",
        lambda self, inputs: {spec.name: torch.tensor(float("nan")) for spec in self.signature.outputs},
    )
    forget_drafts(store_copy)
    with pytest.raises(InaccurateEngine, match="differs by nan"):
        build(toy_plan, store_copy)
    assert store_copy.records("drafts") == []


def test_release_has_the_folders_facts(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    draft = build(toy_plan, store_copy).draft
    assert (draft.settings.native_width, draft.settings.native_height) == (64, 64)
    assert (draft.settings.vae_scale_factor, draft.settings.vae_scaling_factor) == (2, 0.5)
    assert draft.settings.refiner is None and not draft.has_refiner
    assert draft.defaults == {"scheduler": "Euler"}
    assert all(engine.accuracy.relative <= 1e-4 and engine.accuracy.cases > 3 for engine in draft.engines)


def test_release_has_the_folders_defaults(store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf) -> None:
    defaults = {"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "LCM"}
    (folder_copy / "defaults.json").write_text(json.dumps(defaults))
    assert build(plan_of(folder_copy, "turbo"), store_copy).draft.defaults == defaults
    (folder_copy / "defaults.json").write_text('{"num_inference_steps": 400}')
    with pytest.raises(CheckpointError, match="num_inference_steps"):
        build(plan_of(folder_copy, "turbo"), store_copy)


def test_builds_from_a_checkout_that_is_not_installed(
    store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "preheat":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert build(plan_of(folder_copy, "checkout"), store_copy).draft.builder["preheat"] == installed("preheat")


def test_distinguishes_static_and_dynamic_drafts(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    """A dynamic build's draft is not current for a plan with sizes, although its bucket begins at 64 x 64."""
    from engine_builder.building.build import _current_draft, fingerprint

    source = fingerprint(toy_plan)
    assert _current_draft(toy_plan, store_copy, source) is not None
    assert _current_draft(replace(toy_plan, sizes=((1, 64, 64),)), store_copy, source) is None
    assert _current_draft(toy_plan, store_copy, "another") is None


@pytest.mark.parametrize(
    "sizes, message",
    [
        (((1, 64, 64), (1, 64, 66)), "66x64@1 is not a possible size. Give sides that are multiples of 4 from 64 to"),
        (((0, 64, 64),), "64x64@0 is not"),
        (((1, 64, 64), (1, 60, 64)), "64x60@1 is not"),
        (((1, 64, 64), (1, 64, 4100)), "4100x64@1 is not"),
        (((2, 96, 128),), 'generates 64x64 by default, and that size is not built. Add 64x64, or set another default: '
         '{"width": 128, "height": 96} in '),
    ],
)  # fmt: skip
def test_refuses_impossible_sizes_before_compiling(
    sizes: tuple[tuple[int, int, int], ...], message: str, toy_plan: BuildPlan, store_copy: WritableStore
) -> None:
    before = files(store_copy)
    with pytest.raises(SizesRefused, match=re.escape(message)):
        build(replace(toy_plan, sizes=sizes), store_copy)
    assert files(store_copy) == before


def test_checks_sizes_against_refiner_and_defaults(toy_plan: BuildPlan, folder_copy: Path, plan_of: PlanOf) -> None:
    config = folder_copy / "unet" / "config.json"
    deeper = json.loads(config.read_text())
    deeper["block_out_channels"] = [8, 16, 16]
    config.write_text(json.dumps(deeper))
    plan = replace(toy_plan, sizes=((1, 64, 64), (1, 68, 64)))
    plan.check_sizes()
    with pytest.raises(SizesRefused, match="multiples of 8"):
        replace(plan, refiner=Checkpoint(folder_copy)).check_sizes()

    (folder_copy / "defaults.json").write_text('{"width": 96, "height": 128}')
    tall = replace(plan_of(folder_copy, "tall"), sizes=((2, 128, 96),))
    tall.check_sizes()
    with pytest.raises(SizesRefused, match="generates 96x128 by default"):
        replace(tall, sizes=((2, 96, 128),)).check_sizes()


@pytest.mark.parametrize(
    "device, options, planned",
    [
        ("cuda", [], ((1, 64, 64), (2, 64, 64))),
        ("cuda", ["--size", "64x64@8", "--size", "96x64", "--size", "64x64@8"], ((8, 64, 64), (2, 64, 96))),
        ("cpu", [], ()),
    ],
)
def test_sizes_of_a_build_with_and_without_size_option(
    device: str,
    options: list[str],
    planned: tuple[tuple[int, int, int], ...],
    toy_plan: BuildPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[BuildPlan] = []

    def stop(plan: BuildPlan, *_: object) -> None:
        plans.append(plan)
        raise BrokenImage("far enough")

    monkeypatch.setattr(
        "engine_builder.backends.aot_inductor.compile.build_target", lambda: replace(toy_plan.target, device=device)
    )
    monkeypatch.setattr("engine_builder.building.build.build", stop)
    arguments = ["build", str(toy_plan.base.root), "--store", str(tmp_path), *options]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, BrokenImage)
    assert plans[0].sizes == planned
    output = re.sub(r"\s+", " ", result.output)
    assert all(f"{width}x{height}@{batch}" in output for batch, height, width in planned)
    assert bool(planned) == ("sizes @ batch" in output)


def test_no_refiner_leaves_the_models_own_out(toy_folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(toy_folder, tmp_path / "model"))
    (model / "refiner").mkdir()
    (model / "refiner" / "model_index.json").write_text("{}")
    assert parse_plan(str(model)).refiner is not None
    assert parse_plan(str(model), with_refiner=False).refiner is None
    both = CliRunner().invoke(app, ["build", str(model), "--refiner", str(model / "refiner"), "--no-refiner"])
    assert both.exit_code == 2 and "contradicts --refiner" in both.output


def test_refuses_a_vae_that_normalizes_latents(store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf) -> None:
    config = folder_copy / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latents_mean": [0.0] * 4}))
    with pytest.raises(CheckpointError, match="normalizes latents"):
        build(plan_of(folder_copy, "other"), store_copy)


def test_base_and_refiner_share_equal_text_encoder(store: WritableStore, release: str, loaded: Loaded) -> None:
    manifest = store.read_release(release)
    weights = weights_of(manifest)
    assert weights[TEXT_ENCODER_2] == weights[REFINER_TEXT_ENCODER_2]
    assert engines_of(manifest)[TEXT_ENCODER_2] == engines_of(manifest)[REFINER_TEXT_ENCODER_2]
    assert loaded.model.engines[REFINER_TEXT_ENCODER_2] is loaded.model.engines[TEXT_ENCODER_2]
    once = {blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}
    twice = sum(blob.bytes for record in manifest.weights for blob in record.blobs)
    assert loaded.weight_bytes <= sum(once.values()) < twice


@pytest.mark.parametrize(
    "bucket, remark",
    [
        (compiler.static_bucket(2, 1216, 832), "832x1216@2"),
        (compiler.static_bucket(1, None, None), "@1"),
        (compiler.dynamic_bucket(8, max_batch=16), "any@1-16"),
        (compiler.dynamic_bucket(None, max_batch=100), "@1-100"),
    ],
)
def test_bucket_remark(bucket: Bucket, remark: str) -> None:
    assert _bucket_remark(bucket) == remark


# -- the VAE's precision ---------------------------------------------------------------------------------------------


def set_force_upcast(folder: Path, force_upcast: bool) -> None:
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"force_upcast": force_upcast}))


@pytest.mark.parametrize(
    "precision, vae_precision, force_upcast, expected, remark",
    [
        (FP16, None, True, FP32, "VAE in fp32 (force_upcast: it would overflow in fp16)"),
        (FP16, None, False, FP16, ""),
        (FP16, FP16, True, FP16, "its config says that it overflows in fp16"),
        (FP16, BF16, True, BF16, "VAE in bf16"),
        (BF16, None, True, BF16, ""),
        (BF16, FP32, False, FP32, "VAE in fp32"),
        (FP32, None, True, FP32, ""),
    ],
)
def test_vae_of_fp16_model_is_fp32_if_config_has_force_upcast(
    precision: Precision,
    vae_precision: Precision | None,
    force_upcast: bool,
    expected: Precision,
    remark: str,
    folder_copy: Path,
    plan_of: PlanOf,
) -> None:
    set_force_upcast(folder_copy, force_upcast)
    plan = replace(plan_of(folder_copy, "other"), precision=precision, vae_precision=vae_precision)
    assert plan.precision_of("vae_decoder") == expected
    assert {plan.precision_of(name) for name in plan.components if name != "vae_decoder"} == {precision}
    assert remark in _vae_remark(plan) and bool(remark) == bool(_vae_remark(plan))


def test_builds_and_serves_a_vae_of_another_precision(
    store_copy: WritableStore, toy_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the previous one: a release has one VAE per target. The tuning folder is used."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    result = build(replace(toy_plan, vae_precision=BF16), store_copy, tuning=tmp_path / "tuning")
    assert any((tmp_path / "tuning").rglob("*.cpp"))
    assert result.compiled == ("vae_decoder",)
    assert {e.component for e in result.draft.engines if e.precision == BF16} == {"vae_decoder"}
    assert {w.component for w in result.draft.weights if w.precision == BF16} == {"vae_decoder"}
    manifest, _ = publish(store_copy, "toy-sdxl")
    assert manifest.name == "toy-sdxl/2" and len(manifest.engines) == len(toy_plan.components)

    mixed, plain = (load_release(store_copy, f"toy-sdxl/{v}", detect_targets(), [], ColdStart()) for v in (2, 1))
    assert mixed.model.engines["vae_decoder"].signature.inputs[0].dtype == "bfloat16"
    assert mixed.model.engines["unet"].signature.inputs[0].dtype == "float32"
    images = [
        generate_one(one, prompt="a circle", seed=3, num_inference_steps=6)[1].astype(int) for one in (mixed, plain)
    ]
    assert 0 < np.abs(images[0] - images[1]).max() <= 8

    again = build(toy_plan, store_copy)
    assert again.compiled == () and engines_of(again.draft) == engines_of(store_copy.read_release("toy-sdxl/1"))


def test_refuses_a_vae_that_overflows_in_fp16(
    store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf, edit_weights: EditWeights
) -> None:
    edit_weights(folder_copy / "vae", lambda tensors: tensors["decoder.conv_in.weight"].mul_(1e5))
    plan = plan_of(folder_copy, "overflowing")
    with pytest.raises(BrokenImage, match="preheat build --vae-precision bf16"):
        build(replace(plan, vae_precision=FP16), store_copy)
    assert not [name for name in store_copy.records("drafts") if name.startswith("overflowing.")]
    build(plan, store_copy)  # it does not overflow in fp32


def test_fingerprint_follows_links_to_folders(
    toy_plan: BuildPlan, folder_copy: Path, tmp_path: Path, edit_weights: Callable[..., None]
) -> None:
    from engine_builder.building.build import fingerprint

    vae = tmp_path / "another VAE"
    shutil.move(folder_copy / "vae", vae)
    (folder_copy / "vae").symlink_to(vae, target_is_directory=True)
    (vae / "back").symlink_to(folder_copy, target_is_directory=True)
    plan = replace(toy_plan, base=Checkpoint(folder_copy))
    before = fingerprint(plan)
    assert fingerprint(plan) == before
    edit_weights(vae, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    assert fingerprint(plan) != before


@pytest.mark.parametrize(
    "defaults, error, message",
    [
        ('{"widht": 512}', CheckpointError, "widht"),
        ('{"use_refiner": true}', CheckpointError, "use_refiner is true, but there is no refiner"),
        ('{"width": 2048, "height": 64}', SizesRefused, "generates 2048x64 by default, .* sides up to 1024"),
    ],
)
def test_refuses_invalid_defaults_before_compiling(
    defaults: str,
    error: type[Exception],
    message: str,
    toy_plan: BuildPlan,
    folder_copy: Path,
    store_copy: WritableStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder_copy / "defaults.json").write_text(defaults)
    monkeypatch.setattr("engine_builder.building.build.load_network", lambda *_: pytest.fail("loaded"))
    with pytest.raises(error, match=message):
        build(replace(toy_plan, base=Checkpoint(folder_copy)), store_copy)
