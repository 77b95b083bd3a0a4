"""Builds: what is compiled or reused, what an interruption leaves, what is never stored."""

import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.engines import BuiltEngine
from engine_builder.building.build import build, fingerprint
from engine_builder.building.build_plan import BuildPlan, Size, SizesRefused, default_sizes
from engine_builder.building.validate import InaccurateEngine, validate
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.networks.network import NETWORK_VERSION, Network, load_network
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.errors import BrokenImage
from model.loading.load import Loaded
from model.loading.target import Target, detect_targets
from model.pipeline.spec import REFINER_TEXT_ENCODER_2, TEXT_ENCODER_2
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Bucket, Manifest, Signature
from model.store.precision import BF16, FP16, FP32
from preheat.commands.build import run_build
from preheat.commands.build_arguments import parse_plan
from preheat.main import app
from tests.engine_builder.helpers import (
    PlanOf,
    edit_json,
    edit_weights,
    engine_blobs,
    engine_keys,
    folder_of,
    forget_drafts,
    forget_engine,
    install_metadata,
    perturb,
)
from tests.support.deployments import deployed, load_release
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER, REPOSITORY
from tests.support.uncompiled import builds_without_compiling

VAE = ("vae_encoder", "vae_decoder")


class BuildStarted(Exception):
    """Raised instead of the first step of a build."""


def stop_build(*progress: object) -> None:
    """Raise BuildStarted; passed as the `report` of a build."""
    raise BuildStarted


def list_files(store: WritableStore) -> dict[str, tuple[int, int]]:
    """Return every file of a store with its size and time."""
    root = folder_of(store)
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def weight_blobs(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {record.component: record.identity for record in manifest.weights}


def generate_one(loaded: Loaded, **fields: object) -> tuple[Any, Any]:
    """Return the resolved request and its image."""
    params = resolve(GenerationRequest.model_validate(fields), loaded.served)
    return params, generate(loaded.model, [params])[0][0]


def test_second_model_of_an_architecture_compiles_nothing(
    store_copy: WritableStore, folder_copy: Path, toy_plan: BuildPlan, plan_of: PlanOf
) -> None:
    first = build(toy_plan, store_copy).draft
    for subfolder in ("text_encoder", "text_encoder_2", "unet", "vae"):
        edit_weights(folder_copy / subfolder, perturb)
    stored = {engine.component: engine for engine in first.engines}

    def overwrite_unet(component: str, activity: str, *_: object) -> None:
        """Another build writes the UNet's record after its engine was checked."""
        if (component, activity) == ("vae_decoder", "checking"):  # the last component
            other = store_copy.read_record("engines", stored["vae_decoder"].key) or b""
            store_copy.write_record("engines", stored["unet"].key, other)

    result = build(plan_of(folder_copy, "other"), store_copy, overwrite_unet)
    overwritten = BuiltEngine.find(store_copy, stored["unet"].key)
    assert overwritten is not None and overwritten.blob == stored["vae_decoder"].blob
    assert result.compiled == ()
    assert set(result.reused) == set(toy_plan.components)
    assert engine_blobs(result.draft) == engine_blobs(first)
    assert not set(weight_blobs(result.draft).values()) & set(weight_blobs(first).values())

    publish(store_copy, "other")
    images = []
    for release in ("toy-sdxl/1", "other/1"):
        loaded = load_release(store_copy, deployed(release), detect_targets(), ColdStart())
        params, image = generate_one(loaded, prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)
        images.append(image)
    assert np.abs(images[0].astype(int) - images[1].astype(int)).max() > 20
    expected = Reference(folder_copy).generate(params)
    assert np.abs(images[1].astype(int) - expected.astype(int)).max() <= 2


def test_building_again_does_nothing(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    before = list_files(store_copy)
    result = build(toy_plan, store_copy, stop_build)
    assert result.compiled == () and result.reused == toy_plan.components
    assert list_files(store_copy) == before


def test_draft_of_another_version_or_plan_is_not_current(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    """A new NETWORK_VERSION means new engines, even if no library's version changed."""
    current = build(toy_plan, store_copy, stop_build).draft
    with pytest.raises(BuildStarted):  # the dynamic bucket begins at 64 x 64, the size of the plan
        build(replace(toy_plan, sizes=(Size(1, 64, 64),)), store_copy, stop_build)
    assert current.builder["form"] == str(NETWORK_VERSION)
    older = current.model_copy(update={"builder": {**current.builder, "form": str(NETWORK_VERSION - 1)}})
    store_copy.write_record("drafts", toy_plan.draft_name(toy_plan.target), older.to_json())
    with pytest.raises(BuildStarted):
        build(toy_plan, store_copy, stop_build)


def test_builds_changes_of_the_folder(
    store_copy: WritableStore, folder_copy: Path, toy_plan: BuildPlan, plan_of: PlanOf
) -> None:
    """Under the same name: new weights, and another file."""
    plan = plan_of(folder_copy, "toy-sdxl")
    first = build(toy_plan, store_copy, stop_build).draft
    assert build(plan, store_copy, stop_build).draft == first
    edit_weights(folder_copy / "unet", perturb)
    defaults = {"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "LCM"}
    (folder_copy / "defaults.json").write_text(json.dumps(defaults))
    second = build(plan, store_copy).draft
    changed = {name for name, blobs in weight_blobs(second).items() if blobs != weight_blobs(first)[name]}
    assert changed == {"unet", "unet_text", "unet_time"} and second.defaults == defaults
    (folder_copy / "README.md").write_text("Not served.")
    assert build(plan, store_copy, stop_build).draft == second
    (folder_copy / "defaults.json").write_text('{"num_inference_steps": 5}')
    with pytest.raises(BuildStarted):
        build(plan, store_copy, stop_build)


def test_building_again_replaces_damaged_blobs(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    draft = build(toy_plan, store_copy, stop_build).draft
    [weights] = [record for record in draft.weights if record.component == "unet"]
    path = store_copy.get(weights.blobs[0].sha256, weights.blobs[0].bytes)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert build(toy_plan, store_copy).compiled == ()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == weights.blobs[0].sha256
    publish(store_copy, "toy-sdxl/repaired")

    [engine] = [one for one in draft.engines if one.component == "unet"]
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

def report(component, activity, *_):
    print(component, activity, flush=True)


build(plan, open_writable_store(sys.argv[2]), report)
"""


@pytest.mark.full
def test_continues_a_killed_build(
    compiled_toy_store: WritableStore, toy_folder: Path, toy_plan: BuildPlan, tmp_path: Path
) -> None:
    store_copy = open_writable_store(shutil.copytree(folder_of(compiled_toy_store), tmp_path / "store"))
    draft = build(toy_plan, store_copy).draft
    forget_drafts(store_copy)
    for component in ("unet_text", "unet_time"):
        forget_engine(store_copy, draft, component)
    building = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED_BUILD, str(toy_folder), store_copy.url],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with building:
        assert building.stdout is not None
        lines = []
        for line in building.stdout:
            lines.append(line.strip())
            if lines[-1] == "unet_time compiling":
                os.killpg(building.pid, signal.SIGKILL)
                break
    assert building.returncode == -signal.SIGKILL
    assert lines[-3:] == ["unet_text compiling", "unet_text checking", "unet_time compiling"]

    root = folder_of(store_copy)
    for blob in (root / "blobs" / "sha256").iterdir():
        if not blob.name.startswith("."):
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    for record in (root / "records").rglob("[!.]*.json"):
        json.loads(record.read_bytes())
    assert store_copy.records("drafts") == []

    result = build(toy_plan, store_copy)
    assert result.compiled == ("unet_time",)
    assert engine_keys(result.draft) == engine_keys(draft)


def swap_weights(constants: dict[str, Any]) -> dict[str, Any]:
    """Swap two weights of one shape in the map of constants of the time network."""
    names = {constant["tensor"]: name for name, constant in constants.items()}
    first, second = (names[f"{embedding}.linear_2.weight"] for embedding in ("time_embedding", "add_embedding"))
    return constants | {first: constants[second], second: constants[first]}


def drop_constant(constants: dict[str, Any]) -> dict[str, Any]:
    return dict(list(constants.items())[1:])


def test_does_not_store_an_engine_that_fails_its_check(
    store_copy: WritableStore, toy_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weights of one shape are swapped, so the engine opens and runs, but computes something else."""
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
    before = list_files(store_copy)
    monkeypatch.setattr(compiler, "compile_network", compile_network)
    with pytest.raises(
        InaccurateEngine,
        match=r"The unet engine \(any@1-\d+\) differs by .* entry \d of the batch .* It was not stored",
    ):
        build(toy_plan, store_copy)
    assert list_files(store_copy).keys() == before.keys()
    assert BuiltEngine.find(store_copy, engine.key) is None


def test_two_processes_recompile_engines_that_fail_their_check(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    """One stored engine does not open, another computes something else."""
    draft = build(toy_plan, store_copy).draft
    engines = {engine.component: engine for engine in draft.engines}
    for component, change in (("unet_text", drop_constant), ("unet_time", swap_weights)):
        record = json.loads(store_copy.read_record("engines", engines[component].key) or b"")
        stored = store_copy.get(record["constants"]["sha256"], record["constants"]["bytes"])
        changed = json.dumps(change(json.loads(stored.read_bytes()))).encode()
        record["constants"] = {"sha256": store_copy.put_bytes(changed), "bytes": len(changed)}
        store_copy.write_record("engines", engines[component].key, json.dumps(record).encode())
    forget_drafts(store_copy)
    lines: list[str] = []
    finished_steps: list[int] = []
    process_counts: list[int] = []

    def report(component: str, activity: str, finished: int, steps: int) -> None:
        lines.append(f"{component} {activity}")
        finished_steps.append(finished)
        process_counts.append(len(multiprocessing.active_children()))

    result = build(toy_plan, store_copy, report, processes=2)
    assert sorted(result.compiled) == ["unet_text", "unet_time"]
    reasons = [line for line in lines if "recompiling: the stored engine failed its check. The " in line]
    assert [line.partition(" ")[0] for line in reasons] == ["unet_text", "unet_time"]
    assert "constant map disagree" in reasons[0] and "differs by" in reasons[1]
    assert [line for line in lines if line.endswith(" compiling")] == ["unet_text compiling", "unet_time compiling"]
    assert finished_steps == sorted(finished_steps)
    assert max(process_counts) == 2 and not multiprocessing.active_children()
    rebuilt = {engine.component: engine for engine in result.draft.engines}
    for component in ("unet_text", "unet_time"):
        assert rebuilt[component].constants == engines[component].constants
        assert rebuilt[component].accuracy.relative < 1e-4
        blob = rebuilt[component].blob
        with zipfile.ZipFile(store_copy.get(blob.sha256, blob.bytes)) as package:
            stated = json.loads(package.read(f"{component}-{engines[component].key[:12]}/preheat.json"))
        assert Bucket.model_validate(stated["bucket"]) == rebuilt[component].bucket
        assert Signature.model_validate(stated["signature"]) == rebuilt[component].signature
    assert engine_keys(result.draft) == engine_keys(draft)


def test_does_not_draft_a_model_that_generates_nan(
    store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf
) -> None:
    def fill(subfolder: str, name: str, value: float) -> None:
        edit_weights(folder_copy / subfolder, lambda tensors: tensors[name].fill_(value))

    for subfolder, name, poison in (("vae", "decoder.conv_out.bias", math.inf), ("unet", "conv_out.bias", math.nan)):
        fill(subfolder, name, poison)
        with pytest.raises((InaccurateEngine, BrokenImage)):
            build(plan_of(folder_copy, "broken"), store_copy)
        fill(subfolder, name, 0.0)
    assert not [name for name in store_copy.records("drafts") if name.startswith("broken.")]


def test_engine_that_returns_nan_or_infinity_is_inaccurate(toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "vae_decoder", FP32)
    bucket = compiler.static_bucket(1, 64, 64)
    for poison in (math.nan, math.inf):
        output = {"pixels": torch.tensor(poison)}
        engine: Any = SimpleNamespace(bucket=bucket, run=lambda inputs, output=output: output)
        with pytest.raises(InaccurateEngine, match=f"differs by {poison}"):
            validate(network, engine, [])


def test_release_has_the_folders_facts(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    draft = build(toy_plan, store_copy).draft
    assert (draft.settings.native_width, draft.settings.native_height) == (64, 64)
    assert (draft.settings.vae_scale_factor, draft.settings.vae_scaling_factor) == (2, 0.5)
    assert draft.settings.refiner is None and not draft.has_refiner
    assert draft.defaults == {"scheduler": "Euler"}
    assert all(engine.accuracy.relative <= 1e-4 and engine.accuracy.cases > 3 for engine in draft.engines)


def test_version_is_the_checkouts_even_if_another_is_installed(
    store_copy: WritableStore, toy_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft names the code that built it. Without an installed version the checkout's is used, too."""
    install_metadata(tmp_path / "site-packages", "preheat", "9.9")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert importlib.metadata.version("preheat") == "9.9"
    draft = build(toy_plan, store_copy, stop_build).draft
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert draft.builder["preheat"] == project["version"] != "9.9"


def test_refuses_impossible_sizes_before_compiling(toy_plan: BuildPlan, store_copy: WritableStore) -> None:
    native = Size(1, 64, 64)
    for sizes, message in (
        ((native, Size(1, 64, 66)), "66x64@1 is not a possible size. Give sides that are multiples of 4 from 64 to"),
        ((Size(0, 64, 64),), "64x64@0 is not"),
        ((native, Size(1, 60, 64)), "64x60@1 is not"),
        ((native, Size(1, 64, 4100)), "4100x64@1 is not"),
        ((Size(2, 96, 128),), "generates 64x64 by default, and that size is not built. Add 64x64, or set another "
         'default: {"width": 128, "height": 96} in '),
    ):  # fmt: skip
        with pytest.raises(SizesRefused, match=re.escape(message)):
            build(replace(toy_plan, sizes=sizes), store_copy, stop_build)


def test_checks_sizes_against_refiner_and_defaults(toy_plan: BuildPlan, folder_copy: Path, plan_of: PlanOf) -> None:
    edit_json(folder_copy / "unet" / "config.json", block_out_channels=[8, 16, 16])  # another level: larger steps
    plan = replace(toy_plan, sizes=(Size(1, 64, 64), Size(1, 68, 64)))
    plan.check_sizes()
    with pytest.raises(SizesRefused, match="multiples of 8"):
        replace(plan, refiner=Checkpoint(folder_copy)).check_sizes()

    (folder_copy / "defaults.json").write_text('{"width": 96, "height": 128}')
    tall = replace(plan_of(folder_copy, "tall"), sizes=(Size(2, 128, 96),))
    tall.check_sizes()
    with pytest.raises(SizesRefused, match="generates 96x128 by default"):
        replace(tall, sizes=(Size(2, 96, 128),)).check_sizes()


def test_default_sizes_depend_on_the_device(toy_plan: BuildPlan) -> None:
    for device, sizes in (("cuda", (Size(1, 64, 64), Size(2, 64, 64))), ("cpu", ())):
        assert default_sizes(toy_plan.base, replace(toy_plan.target, device=device)) == sizes


def test_prints_sizes_engines_and_minutes(folder_copy: Path, target: Target, tmp_path: Path) -> None:
    """Before anything is compiled. Of explicit sizes, text networks have batches 1 and 2, and VAEs one for each."""
    shutil.rmtree(folder_copy / "tokenizer")  # so that the build is refused
    two_sizes = ["--size", "64x64@8", "--size", "96x64", "--size", "64x64@8", "--lora-rank", "4"]
    for options, sizes, rows in (
        ([], "", "text_encoder 1 0.1, unet 1 0.9, all 7 2"),
        (two_sizes, "; sizes @ batch: 64x64@8, 96x64@2", "text_encoder 2 0.3, unet 2 1.9, unet_lora 2 1.9, all 15 6"),
    ):
        result = CliRunner().invoke(app, ["build", str(folder_copy), "--store", str(tmp_path / "store"), *options])
        assert isinstance(result.exception, CheckpointError)
        assert " ".join(result.output.split()).startswith(f"Building copy for {target.key} in fp32{sizes} estimated")
        assert {*rows.split(", ")} <= {" ".join(line.split()) for line in result.output.splitlines()}, result.output


def test_no_refiner_leaves_the_models_own_out(toy_folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(toy_folder, tmp_path / "model"))
    shutil.copytree(MODEL_FOLDER / "refiner", model / "refiner")
    assert parse_plan(str(model)).refiner is not None
    assert parse_plan(str(model), with_refiner=False).refiner is None
    both = CliRunner().invoke(app, ["build", str(model), "--refiner", str(model / "refiner"), "--no-refiner"])
    assert both.exit_code == 2 and "contradicts --refiner" in both.output


def test_base_and_refiner_share_equal_text_encoder(store: WritableStore, release: str, loaded: Loaded) -> None:
    manifest = store.read_release(release)
    weights = weight_blobs(manifest)
    assert weights[TEXT_ENCODER_2] == weights[REFINER_TEXT_ENCODER_2]
    assert engine_blobs(manifest)[TEXT_ENCODER_2] == engine_blobs(manifest)[REFINER_TEXT_ENCODER_2]
    assert loaded.model.engines[REFINER_TEXT_ENCODER_2] is loaded.model.engines[TEXT_ENCODER_2]
    once = {blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}
    twice = sum(blob.bytes for record in manifest.weights for blob in record.blobs)
    assert loaded.weight_bytes <= sum(once.values()) < twice


# -- the VAE's precision ---------------------------------------------------------------------------------------------


def test_vae_of_fp16_model_is_fp32_if_config_has_force_upcast(
    folder_copy: Path, plan_of: PlanOf, store_copy: WritableStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder_copy / "tokenizer")
    for precision, vae_precision, force_upcast, expected, remark in (
        (FP16, None, True, FP32, "VAE in fp32 (force_upcast: it would overflow in fp16)"),
        (FP16, None, False, FP16, ""),
        (FP16, FP16, True, FP16, "its config says that it overflows in fp16"),
        (FP16, BF16, True, BF16, "VAE in bf16"),
        (BF16, None, True, BF16, ""),
        (BF16, FP32, False, FP32, "VAE in fp32"),
        (FP32, None, True, FP32, ""),
    ):
        edit_json(folder_copy / "vae" / "config.json", force_upcast=force_upcast)
        plan = replace(plan_of(folder_copy, "other"), precision=precision, vae_precision=vae_precision)
        assert {plan.precision_of(name) for name in VAE} == {expected}
        assert {plan.precision_of(name) for name in plan.components if name not in VAE} == {precision}
        with pytest.raises(CheckpointError):  # after the line that is printed first
            run_build(store_copy, plan)
        line = " ".join(capsys.readouterr().out.split())
        assert remark in line and bool(remark) == ("VAE" in line)


def test_builds_and_serves_a_vae_of_another_precision(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    """The new VAE replaces the previous one: a release has one VAE per target."""
    with builds_without_compiling():
        result = build(replace(toy_plan, vae_precision=BF16), store_copy)
    assert result.compiled == VAE
    assert {e.component for e in result.draft.engines if e.precision == BF16} == {*VAE}
    assert {w.component for w in result.draft.weights if w.precision == BF16} == {*VAE}
    manifest, _ = publish(store_copy, "toy-sdxl")
    assert manifest.name == "toy-sdxl/2" and len(manifest.engines) == len(toy_plan.components)

    mixed, plain = (load_release(store_copy, deployed(f"toy-sdxl/{v}"), detect_targets(), ColdStart()) for v in (2, 1))
    assert mixed.model.engines["vae_decoder"].signature.inputs[0].dtype == "bfloat16"
    assert mixed.model.engines["unet"].signature.inputs[0].dtype == "float32"
    images = [
        generate_one(one, prompt="a circle", seed=3, num_inference_steps=6)[1].astype(int) for one in (mixed, plain)
    ]
    assert 0 < np.abs(images[0] - images[1]).max() <= 8

    again = build(toy_plan, store_copy)
    assert again.compiled == () and engine_blobs(again.draft) == engine_blobs(store_copy.read_release("toy-sdxl/1"))


def test_refuses_a_vae_that_overflows_in_fp16(store_copy: WritableStore, folder_copy: Path, plan_of: PlanOf) -> None:
    edit_weights(folder_copy / "vae", lambda tensors: tensors["decoder.conv_in.weight"].mul_(1e5))
    plan = plan_of(folder_copy, "overflowing")
    with pytest.raises(BrokenImage, match="preheat build --vae-precision bf16"):
        build(replace(plan, vae_precision=FP16), store_copy)
    assert not [name for name in store_copy.records("drafts") if name.startswith("overflowing.")]


def test_fingerprint_follows_links_to_folders(folder_copy: Path, tmp_path: Path) -> None:
    vae = tmp_path / "another VAE"
    shutil.move(folder_copy / "vae", vae)
    (folder_copy / "vae").symlink_to(vae, target_is_directory=True)
    (vae / "back").symlink_to(folder_copy, target_is_directory=True)
    base = Checkpoint(folder_copy)
    before = fingerprint(base, None)
    assert fingerprint(base, None) == before
    edit_weights(vae, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    assert fingerprint(base, None) != before


def test_fingerprint_tells_names_of_networks_apart(folder_copy: Path) -> None:
    """Two ControlNets with exchanged names are another model."""
    folders = [folder_copy / "unet", folder_copy / "vae"]

    def named(*names: str) -> str:
        return fingerprint(Checkpoint(folder_copy, controlnets=tuple(zip(names, folders, strict=True))), None)

    assert named("a", "b") == named("a", "b") != named("b", "a")


def test_refuses_invalid_defaults_before_compiling(
    folder_copy: Path, plan_of: PlanOf, store_copy: WritableStore
) -> None:
    for defaults, error, message in (
        ('{"widht": 512}', CheckpointError, "widht"),
        ('{"num_inference_steps": 400}', CheckpointError, "num_inference_steps"),
        ('{"use_refiner": true}', CheckpointError, "use_refiner is true, but there is no refiner"),
        ('{"clip_skip": 31}', CheckpointError, "clip_skip is 31, and a text encoder has . layers.*Set 0 to"),
        ('{"width": 2048, "height": 64}', SizesRefused, "generates 2048x64 by default, .* sides up to 1024"),
    ):
        (folder_copy / "defaults.json").write_text(defaults)
        with pytest.raises(error, match=message):
            build(plan_of(folder_copy, "toy-sdxl"), store_copy, stop_build)
    (folder_copy / "defaults.json").unlink()
    edit_json(folder_copy / "vae" / "config.json", latents_mean=[0.0] * 4)
    with pytest.raises(CheckpointError, match="latents_std is None"):
        build(plan_of(folder_copy, "toy-sdxl"), store_copy, stop_build)
