"""FP8 engines: built beside those of full precision, reused, chosen by a deployment. A CPU computes the same products.

Only tests build FP8 engines for a CPU: `preheat build` and `preheat publish` refuse them.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from prometheus_client import REGISTRY
from safetensors.torch import load_file
from typer.testing import CliRunner

from engine_builder.benchmarks.latency import Case, measure_cases
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size, SizesRefused
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.build_report import _vae_remark
from engine_builder.commands.main import app
from engine_builder.networks.fp8_conv import CONV_VERSION
from engine_builder.networks.network import ModuleReader
from engine_builder.quantization.plan import Quantization, plan_quantization
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.record import CalibrationError
from engine_builder.releases.publish import MissingFp16Engines, check_fp16_steps, merge_drafts, read_drafts
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.engines.engine import EngineSet
from model.errors import ConfigError, NoEngineForTarget
from model.images.distance import psnr
from model.loading.load import Loaded, load_release
from model.loading.select import select
from model.loading.target import detect_targets
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.scheduling.comparison import ImageComparison
from model.settings import ServedPrecision
from model.store.manifest import Fp16Steps, Manifest
from model.store.manifest_json import parse_constants
from model.store.precision import FP8, FP16, FP32, INT8, Precision
from tests.engine_builder.helpers import edit_json, folder_of

pytestmark = pytest.mark.usefixtures("uncompiled_builds")

VAE_POLICY = Policy(keep_fp16=["*.proj_in", "*.proj_out"], vae_convolutions=["decoder.*"])


class BuildStarted(Exception):
    """Raised instead of the first step of a build."""


def stop_build(*progress: object) -> None:
    raise BuildStarted


def calibrate(store: WritableStore, folder: Path, *options: str) -> None:
    prompts = Path(folder_of(store)) / "prompts.txt"
    prompts.write_text("a circle\na square\n")
    arguments = ["calibrate", str(folder), "--prompts", str(prompts), "--steps", "2", "--size", "64x64"]
    ran = CliRunner().invoke(app, [*arguments, *options, "--store", store.url], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output


def quantized_plan(plan: BuildPlan, policy: Policy, store: WritableStore) -> BuildPlan:
    return replace(plan, quantization=plan_quantization(plan.base, None, policy, store))


@pytest.fixture(scope="module")
def fp8_plan(toy_plan: BuildPlan, fp8_store: WritableStore) -> BuildPlan:
    """The toy's plan in FP8, with its outer linears in fp16."""
    calibrate(fp8_store, toy_plan.base.root)
    quantization = plan_quantization(toy_plan.base, None, Policy(keep_fp16=["*.proj_in", "*.proj_out"]), fp8_store)
    return replace(toy_plan, precision=FP8, quantization=quantization)


@pytest.fixture(scope="module")
def fp8_store(toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    return open_writable_store(shutil.copytree(folder_of(toy_store), tmp_path_factory.mktemp("fp8") / "store"))


@pytest.fixture(scope="module")
def built(fp8_plan: BuildPlan, fp8_store: WritableStore) -> tuple[WritableStore, Manifest]:
    """A release of the toy in fp32 and FP8."""
    result = build(fp8_plan, fp8_store)
    assert "unet" in result.compiled
    manifest = merge_drafts(read_drafts(fp8_store, "toy-sdxl")).model_copy(update={"version": "mixed"})
    fp8_store.write_release(manifest)
    return fp8_store, manifest


def load(store: WritableStore, precision: Precision | None, fp16_steps: Fp16Steps | None = None) -> Loaded:
    served = ServedPrecision(precision, fp16_steps)
    return load_release(store, "toy-sdxl/mixed", detect_targets(), [], ColdStart(), precision=served)


def picture(loaded: Loaded) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return generate_one(loaded.model, loaded)


def generate_one(model: LoadedModel, loaded: Loaded) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    request = GenerationRequest(prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)
    return generate(model, [resolve(request, loaded.served)])[0][0]


def test_only_unets_are_fp8(built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan) -> None:
    store, manifest = built
    by_precision = {
        precision: {e.component for e in manifest.engines if e.precision == precision}
        for precision in (FP8, FP16, FP32)
    }
    assert by_precision[FP8] == {"unet"}
    assert by_precision[FP16] == set(fp8_plan.components) - {"unet"}
    assert by_precision[FP32] == set(fp8_plan.components)
    [unet] = [engine for engine in manifest.engines if engine.precision == FP8]
    assert {spec.dtype for spec in (*unet.signature.inputs, *unet.signature.outputs)} == {"float16"}
    assert unet.required_schema == 2 and manifest.required_schema == 5
    constants = parse_constants(store.get(unet.constants.sha256, unet.constants.bytes).read_bytes())
    quantized = {constant.tensor for constant in constants.values() if constant.dtype == "float8_e4m3fn"}
    assert len(quantized) > 5 and not any(".proj_" in tensor for tensor in quantized)
    scales = {constant.tensor for constant in constants.values() if constant.tensor.endswith("_scale")}
    assert len(scales) == 2 * len(quantized), "scales are weights: another model's must not be compiled in"


def test_deployment_chooses_the_precision(built: tuple[WritableStore, Manifest]) -> None:
    store, _ = built
    default, fp8 = load(store, None), load(store, FP8)
    for loaded, dtype in ((default, "float32"), (fp8, "float16")):
        names = {name for name, engines in loaded.model.engines.items() if engines.signature.outputs[0].dtype == dtype}
        assert {"unet", "unet_text", "unet_time", "vae_decoder"} <= names
    assert default.served == fp8.served
    difference = np.abs(picture(default).astype(int) - picture(fp8).astype(int))
    assert 0 < difference.mean() < 12, "the same picture, or another one"


def test_release_without_the_precision_is_refused(built: tuple[WritableStore, Manifest]) -> None:
    released = built[0].read_release("toy-sdxl/1")
    with pytest.raises(NoEngineForTarget, match=r"no unet engine in fp8 for .*\. It has fp32\..*--precision fp8"):
        select(released, detect_targets(), [], precision=ServedPrecision(FP8))


def test_first_and_last_steps_need_fp16_engines(built: tuple[WritableStore, Manifest]) -> None:
    with pytest.raises(NoEngineForTarget, match=r"no unet engine in fp16 for .*\. It has fp32, fp8\."):
        load(built[0], FP8, Fp16Steps(first=1))


def test_comparison_needs_fp16_engines(built: tuple[WritableStore, Manifest]) -> None:
    served = ServedPrecision(FP8, compares=True)
    with pytest.raises(NoEngineForTarget, match=r"no unet engine in fp16 .*`compare_every`"):
        select(built[1], detect_targets(), [], precision=served)


def test_comparison_needs_an_8_bit_unet(built: tuple[WritableStore, Manifest]) -> None:
    with pytest.raises(ConfigError, match=r"release toy-sdxl/mixed is served in fp32\..*`compare_every`"):
        select(built[1], detect_targets(), [], precision=ServedPrecision(compares=True))


def test_code_of_another_version_is_built_again(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(fp8_plan, built[0])
    monkeypatch.setattr("engine_builder.building.build.LINEAR_VERSION", 99)
    with pytest.raises(BuildStarted):
        build(fp8_plan, built[0], stop_build)


def test_release_with_fp16_steps_needs_the_fp16_engines(built: tuple[WritableStore, Manifest]) -> None:
    for steps in (None, Fp16Steps()):
        check_fp16_steps(built[1].model_copy(update={"fp16_steps": steps}))
    with pytest.raises(MissingFp16Engines, match=r"an engine of unet for cpu-.* exists only in fp8.*--precision fp16"):
        check_fp16_steps(built[1].model_copy(update={"fp16_steps": Fp16Steps(last=1)}))


@pytest.fixture(scope="module")
def with_fp16(built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan) -> WritableStore:
    """The store with the release toy-sdxl/steps, in fp16 and FP8, whose first two steps run in fp16."""
    store, _ = built
    build(replace(fp8_plan, precision=FP16, quantization=None), store)
    assert fp8_plan.quantization is not None
    policy = fp8_plan.quantization.policy.model_copy(update={"fp16_steps": Fp16Steps(first=2)})
    result = build(replace(fp8_plan, quantization=plan_quantization(fp8_plan.base, None, policy, store)), store)
    assert result.compiled == () and result.draft.fp16_steps == Fp16Steps(first=2)
    manifest = merge_drafts([draft for draft in read_drafts(store, "toy-sdxl") if not has_fp32(draft)])
    assert manifest.fp16_steps == Fp16Steps(first=2) and manifest.schema_version == 5
    check_fp16_steps(manifest)
    store.write_release(manifest.model_copy(update={"version": "steps"}))
    return store


def has_fp32(draft: Manifest) -> bool:
    return any(engine.precision == FP32 for engine in draft.engines)


@pytest.mark.parametrize(
    ("configured", "precision_of_steps"),
    [(None, "16 16 8 8 8 8"), (Fp16Steps(), "8 8 8 8 8 8"), (Fp16Steps(first=1, last=2), "16 8 8 8 16 16")],
)
def test_first_and_last_steps_run_in_fp16(
    configured: Fp16Steps | None, precision_of_steps: str, with_fp16: WritableStore
) -> None:
    """The release's steps, unless the deployment sets others."""
    served = ServedPrecision(FP8, configured)
    loaded = load_release(with_fp16, "toy-sdxl/steps", detect_targets(), [], ColdStart(), precision=served)
    ran: list[str] = []
    for engines, name in ((loaded.model.engines["unet"], "8"), (loaded.model.fp16_engines.get("unet"), "16")):
        if engines is not None:
            record_runs(engines, name, ran)
    picture(loaded)
    assert " ".join(ran) == precision_of_steps


def record_runs(engines: EngineSet, name: str, ran: list[str]) -> None:
    run = engines.run

    def recording(*arguments: object, **named: object) -> dict[str, torch.Tensor]:
        ran.append(name)
        return run(*arguments, **named)  # type: ignore[arg-type]

    engines.run = recording  # type: ignore[method-assign]


def test_pictures_with_fp16_steps_are_nearer_to_fp16(with_fp16: WritableStore) -> None:
    def picture_with(precision: Precision, steps: Fp16Steps) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        served = ServedPrecision(precision, steps)
        loaded = load_release(with_fp16, "toy-sdxl/steps", detect_targets(), [], ColdStart(), precision=served)
        return picture(loaded).astype(np.int64)

    exact = picture_with(FP16, Fp16Steps())
    errors = [float(np.square(picture_with(FP8, Fp16Steps(first=first)) - exact).mean()) for first in (0, 5)]
    assert 0 < errors[1] < errors[0] / 2
    np.testing.assert_array_equal(picture_with(FP8, Fp16Steps(first=6)), exact)


def test_benchmark_compares_two_precisions(with_fp16: WritableStore, capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        load_release(
            with_fp16, "toy-sdxl/steps", detect_targets(), [], ColdStart(), precision=ServedPrecision(precision)
        )
        for precision in (FP16, FP8)
    ]
    cases = [Case("2-steps", 2, 2, side=64), Case("both", 1, 2, images=2, side=64, throughput=True)]
    rows = list(measure_cases(models, cases=cases))
    assert [(row.case, row.precision, row.unit, row.runs) for row in rows] == [
        ("2-steps, fp16", "float16", "ms", 2),
        ("2-steps, fp8", "fp8", "ms", 2),
        ("both, fp16", "float16", "images/s", 1),
        ("both, fp8", "fp8", "images/s", 1),
    ]
    ratios = {"2-steps": rows[0].value / rows[1].value, "both": rows[3].value / rows[2].value}
    printed = capsys.readouterr().out
    for case, ratio in ratios.items():
        assert f"{case}: fp8 is {ratio:.3f} times as fast as fp16" in printed


def test_images_in_fp8_are_compared_with_fp16(with_fp16: WritableStore) -> None:
    """With engines: all steps of the comparison run in fp16, and the distance is that of both precisions' pictures."""
    fp8 = ServedPrecision(FP8, Fp16Steps(), compares=True)
    loaded, exact = (
        load_release(with_fp16, "toy-sdxl/steps", detect_targets(), [], ColdStart(), precision=served)
        for served in (fp8, ServedPrecision(FP16))
    )
    request = GenerationRequest(prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)
    found = picture(loaded)
    expected = psnr(picture(exact), found)
    ran: list[str] = []
    record_runs(loaded.model.fp16_engines["unet"], "16", ran)
    record_runs(loaded.model.engines["unet"], "8", ran)
    comparison = ImageComparison(loaded.model, every=1)
    assert comparison.offer(resolve(request, loaded.served), 0, found)
    before = REGISTRY.get_sample_value("preheat_comparison_decibels_sum") or 0.0
    assert comparison.work is not None
    list(comparison.work)
    assert ran == ["16"] * 6
    reported = (REGISTRY.get_sample_value("preheat_comparison_decibels_sum") or 0.0) - before
    assert reported == pytest.approx(expected, abs=1e-6) and expected < 60


def test_fp16_steps_are_ignored_unless_the_unet_is_8_bit(with_fp16: WritableStore) -> None:
    selection = select(with_fp16.read_release("toy-sdxl/steps"), detect_targets(), [])
    assert selection.fp16_steps is None
    assert {engine.precision for engine in selection.engines["unet"]} == {FP16}


def test_building_again_does_nothing_unless_the_policy_changed(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan
) -> None:
    store, _ = built
    build(fp8_plan, store)  # another test may have built with another policy since
    assert build(fp8_plan, store, stop_build).compiled == ()
    every = plan_quantization(fp8_plan.base, None, Policy(), store)
    with pytest.raises(BuildStarted):
        build(replace(fp8_plan, quantization=every), store, stop_build)


def test_unet_is_built_and_served_in_int8(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """With the same calibration. Weights and scales are not in the engine."""
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    policy = Policy(keep_fp16=["*.proj_in", "*.proj_out"], smoothing=0.8)
    plan = replace(fp8_plan, precision=INT8)
    result = build(replace(plan, quantization=plan_quantization(plan.base, None, policy, store, precision=INT8)), store)
    assert result.compiled == ("unet",)
    store.write_release(merge_drafts([result.draft]).model_copy(update={"version": "mixed-2"}))
    served = ServedPrecision(INT8, None)
    loaded = load_release(store, "toy-sdxl/mixed-2", detect_targets(), [], ColdStart(), precision=served)
    assert loaded.precision == INT8
    [unet] = [engine for engine in result.draft.engines if engine.component == "unet"]
    constants = parse_constants(store.get(unet.constants.sha256, unet.constants.bytes).read_bytes())
    quantized = {constant.tensor for constant in constants.values() if constant.dtype == "int8"}
    scales = {constant.tensor for constant in constants.values() if constant.tensor.endswith("_scale")}
    assert len(quantized) > 5 and len(scales) == 2 * len(quantized)
    difference = np.abs(picture(load(store, None)).astype(int) - picture(loaded).astype(int))
    assert 0 < difference.mean() < 12, "the same picture, or another one"
    other = policy.model_copy(update={"smoothing": 0.5})
    again = plan_quantization(plan.base, None, other, store, precision=INT8)
    assert build(replace(plan, quantization=again), store).compiled == ()


def test_convolutions_in_fp8_are_built_and_served(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """With the same calibration, in an engine of its own. Weights and scales are not in the engine."""
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    policy = Policy(keep_fp16=["*.proj_in", "*.proj_out"], convolutions=["mid_block.*"])
    quantization = plan_quantization(fp8_plan.base, None, policy, store)
    result = build(replace(fp8_plan, quantization=quantization), store)
    assert result.compiled == ("unet",) and result.draft.builder["fp8_convolutions"] == str(CONV_VERSION)
    assert "fp8_convolutions" not in built[1].builder
    [unet] = [engine for engine in result.draft.engines if engine.component == "unet"]
    constants = parse_constants(store.get(unet.constants.sha256, unet.constants.bytes).read_bytes())
    tensors = {constant.tensor: constant.dtype for constant in constants.values()}
    convolutions = [name for name, dtype in tensors.items() if ".conv" in name and dtype == "float8_e4m3fn"]
    assert len(convolutions) >= 4 and all(tensors[f"{name}_scale"] == "float32" for name in convolutions)
    draft = merge_drafts([result.draft])
    store.write_release(draft.model_copy(update={"version": "mixed-3"}))
    served = ServedPrecision(FP8, None)
    loaded = load_release(store, "toy-sdxl/mixed-3", detect_targets(), [], ColdStart(), precision=served)
    difference = np.abs(picture(load(store, None)).astype(int) - picture(loaded).astype(int))
    assert 0 < difference.mean() < 12, "the same picture, or another one"


def test_vae_decoder_in_fp8_is_built_served_and_compared_with_fp16(
    with_fp16: WritableStore, fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """Its linears stay in fp16. A comparison decodes in fp16, too. The toy's own VAE is too narrow for FP8."""
    store = open_writable_store(shutil.copytree(folder_of(with_fp16), tmp_path / "store"))
    with pytest.raises(BadPolicy, match="quantizes no layer of vae_decoder"):
        quantized_plan(fp8_plan, VAE_POLICY, store).load("vae_decoder", ModuleReader())
    vae, levels = tmp_path / "vae", 2
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels, norm_num_groups=8, force_upcast=False,
        scaling_factor=fp8_plan.base.config("vae")["scaling_factor"],
    ).save_pretrained(vae)  # fmt: skip
    plan = replace(fp8_plan, base=replace(fp8_plan.base, vae=vae))
    with pytest.raises(CalibrationError, match="no intact calibration of this model's vae_decoder"):
        quantized_plan(plan, VAE_POLICY, store)
    calibrate(store, plan.base.root, "--vae", str(vae))
    build(replace(plan, precision=FP16, quantization=None), store)
    result = build(quantized_plan(plan, VAE_POLICY, store), store)
    assert result.compiled == ("vae_decoder",), "the UNet's engine is that of the policy without the entry"
    assert result.draft.builder["fp8_convolutions"] == str(CONV_VERSION)
    [decoder] = [engine for engine in result.draft.engines if engine.component == "vae_decoder"]
    constants = parse_constants(store.get(decoder.constants.sha256, decoder.constants.bytes).read_bytes())
    tensors = {constant.tensor: constant.dtype for constant in constants.values()}
    quantized = [name for name, dtype in tensors.items() if dtype == "float8_e4m3fn"]
    assert len(quantized) > 5 and all(".conv" in name or ".phases" in name for name in quantized)
    assert all(tensors[f"{name}_scale"] == "float32" for name in quantized)
    drafts = [draft for draft in read_drafts(store, "toy-sdxl") if not has_fp32(draft)]
    store.write_release(merge_drafts(drafts).model_copy(update={"version": "mixed-4"}))

    def load_in(served: ServedPrecision) -> Loaded:
        return load_release(store, "toy-sdxl/mixed-4", detect_targets(), [], ColdStart(), precision=served)

    exact, fp8 = load_in(ServedPrecision(FP16)), load_in(ServedPrecision(FP8, compares=True))
    assert not exact.model.fp16_engines and set(fp8.model.fp16_engines) == {"unet", "vae_decoder"}
    np.testing.assert_array_equal(generate_one(fp8.model.in_fp16(), fp8), picture(exact))
    latents = {"latents": torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)).half()}
    found, expected = (
        loaded.model.engines["vae_decoder"].run(latents, 64, 64)["pixels"].double() for loaded in (fp8, exact)
    )
    noise = (found - expected).square().mean() / expected.square().mean()
    assert 1e-5 < noise < 1e-1, "between 10 and 50 dB; weights are random"


def with_fp8_decoder(plan: BuildPlan) -> BuildPlan:
    """Return a plan whose VAE decoder is quantized, without ranges."""
    return replace(plan, precision=FP8, quantization=Quantization(VAE_POLICY, {}, {"unet": {}, "vae_decoder": {}}))


@pytest.mark.parametrize(
    ("force_upcast", "vae_precision", "remark"),
    [(False, None, ""), (True, FP16, "although its config says that it overflows in fp16")],
)
def test_build_says_that_the_decoder_is_fp8(
    force_upcast: bool, vae_precision: Precision | None, remark: str, toy_plan: BuildPlan, folder_copy: Path
) -> None:
    edit_json(folder_copy / "vae" / "config.json", force_upcast=force_upcast)
    plan = replace(with_fp8_decoder(toy_plan), base=Checkpoint(folder_copy), vae_precision=vae_precision)
    found = _vae_remark(plan)
    assert found.startswith(", its VAE decoder in fp8") and remark in found
    assert "decoder" not in _vae_remark(replace(plan, quantization=None))


def test_sizes_whose_pixels_a_kernel_cannot_count_are_refused(toy_plan: BuildPlan, folder_copy: Path) -> None:
    """In FP8 a tensor of the decoder has fewer than 2^31 elements; SDXL's has 256 channels at full size."""
    edit_json(folder_copy / "vae" / "config.json", block_out_channels=[128, 256, 512, 512])
    (folder_copy / "defaults.json").write_text('{"width": 2048, "height": 2048}')
    sizes = Size(1, 2048, 2048), Size(1, 2896, 2880)
    plan = replace(toy_plan, base=Checkpoint(folder_copy), sizes=(*sizes, Size(1, 3072, 3072)))
    plan.check_sizes()
    with_fp8_decoder(replace(plan, sizes=sizes)).check_sizes()
    with pytest.raises(SizesRefused, match="3072x3072 is too large for a VAE decoder in fp8"):
        with_fp8_decoder(plan).check_sizes()


def test_another_clip_reuses_the_engine_with_other_weights(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """Engines hold neither weights nor scales."""
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    assert fp8_plan.quantization is not None
    policy = fp8_plan.quantization.policy.model_copy(update={"clip": "percentile", "percentile": 0.95})
    other = plan_quantization(fp8_plan.base, None, policy, store)
    result = build(replace(fp8_plan, quantization=other), store)
    assert result.compiled == ()
    [weights] = [record for record in result.draft.weights if record.component == "unet"]
    assert weights.identity not in {record.identity for record in built[1].weights}


def test_quantized_tensors_are_stored_as_such(built: tuple[WritableStore, Manifest]) -> None:
    store, manifest = built
    [record] = [weights for weights in manifest.weights if weights.component == "unet" and weights.precision == FP8]
    tensors = {k: t for blob in record.blobs for k, t in load_file(store.get(blob.sha256, blob.bytes)).items()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    assert dtypes == {torch.float8_e4m3fn, torch.float16, torch.float32}
    assert all(t.ndim == 0 for t in tensors.values() if t.dtype == torch.float32), "only scales are float32"


def test_pattern_of_no_layer_is_refused(built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan) -> None:
    with pytest.raises(BadPolicy, match="matches no layer"):
        plan_quantization(fp8_plan.base, None, Policy(keep_fp16=["down.*"]), built[0])
