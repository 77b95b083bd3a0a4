"""FP8 engines: built beside those of full precision, reused, chosen by a deployment. A CPU computes the same products.

Only tests build FP8 engines for a CPU: `preheat build` and `preheat publish` refuse them.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from prometheus_client import REGISTRY
from safetensors.torch import load_file

from engine_builder.building import build as build_module
from engine_builder.building.build import BuildResult, build
from engine_builder.building.build_plan import BuildPlan, Size, SizesRefused
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_conv import CONV_VERSION
from engine_builder.networks.network import ModuleReader
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.quantization_plan import Quantization, plan_quantization
from engine_builder.quantization.record import CalibrationError
from engine_builder.releases.publish import MissingFp16Engines, check_fp16_steps, merge_drafts, read_drafts
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import ServedPrecision
from model.engines.engine import EngineSet
from model.errors import ConfigError, NoEngineForTarget
from model.images.distance import psnr
from model.loading.load import Loaded
from model.loading.select import select
from model.loading.target import detect_targets
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.scheduling.comparison import ImageComparison
from model.store.manifest import EngineRecord, Fp16Steps, Manifest
from model.store.manifest_json import parse_constants
from model.store.precision import FP8, FP16, FP32, INT8, Precision
from preheat.commands.build_report import _vae_remark
from tests.engine_builder.helpers import edit_json, folder_of
from tests.support.deployments import deployed, load_release
from tests.support.quantization import run

pytestmark = pytest.mark.usefixtures("quick_builds")

KEPT = ["*.proj_in", "*.proj_out"]
VAE_POLICY = Policy(keep_fp16=KEPT, vae_convolutions=["decoder.*"])
REQUEST = GenerationRequest(prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)


@pytest.fixture(scope="module")
def quick_builds(uncompiled_builds: None) -> Iterator[None]:
    """Builds compile nothing, compare nothing with diffusers and fit no map for previews: other tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "compare_once", lambda *_: None)
        patch.setattr(build_module, "with_preview_map", lambda facts, *_: facts)
        yield


class BuildStarted(Exception):
    """Raised instead of the first step of a build."""


def stop_build(*progress: object) -> None:
    raise BuildStarted


def calibrate(store: WritableStore, folder: Path, *options: str) -> None:
    prompts = folder_of(store) / "prompts.txt"
    prompts.write_text("a circle\na square\n")
    status, output = run(
        "calibrate", folder, "--prompts", prompts, "--steps", 2, "--size", "64x64", "--store", store.url, *options
    )
    assert status == 0, output


def quantized_plan(plan: BuildPlan, policy: Policy, store: WritableStore, precision: Precision = FP8) -> BuildPlan:
    quantization = plan_quantization(plan.base, None, policy, store, precision=precision)
    return replace(plan, precision=precision, quantization=quantization)


def copy_of(store: WritableStore, folder: Path) -> WritableStore:
    return open_writable_store(shutil.copytree(folder_of(store), folder / "store"))


@pytest.fixture(scope="module")
def fp8_store(quick_builds: None, toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    return copy_of(toy_store, tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def fp8_plan(toy_plan: BuildPlan, fp8_store: WritableStore) -> BuildPlan:
    """The toy's plan in FP8, with its outer linears in fp16."""
    calibrate(fp8_store, toy_plan.base.root)
    return quantized_plan(toy_plan, Policy(keep_fp16=KEPT), fp8_store)


@pytest.fixture(scope="module")
def built(fp8_plan: BuildPlan, fp8_store: WritableStore) -> tuple[WritableStore, Manifest]:
    """A release of the toy in fp32 and FP8."""
    result = build(fp8_plan, fp8_store)
    assert "unet" in result.compiled
    return fp8_store, write_release(fp8_store, read_drafts(fp8_store, "toy-sdxl")[0], "mixed")


@pytest.fixture(scope="module")
def with_fp16(built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan) -> WritableStore:
    """The store with the release toy-sdxl/steps, in fp16 and FP8, whose first two steps run in fp16."""
    store, _ = built
    build(replace(fp8_plan, precision=FP16, quantization=None), store)
    result = build(quantized_plan(fp8_plan, Policy(keep_fp16=KEPT, fp16_steps=Fp16Steps(first=2)), store), store)
    assert result.compiled == () and result.draft.fp16_steps == Fp16Steps(first=2)
    manifest = write_release(store, drafts_without_fp32(store), "steps")
    assert manifest.fp16_steps == Fp16Steps(first=2)
    check_fp16_steps(manifest)
    return store


def drafts_without_fp32(store: WritableStore) -> list[Manifest]:
    drafts, _ = read_drafts(store, "toy-sdxl")
    return [draft for draft in drafts if not any(engine.precision == FP32 for engine in draft.engines)]


def write_release(store: WritableStore, drafts: list[Manifest], version: str) -> Manifest:
    manifest = merge_drafts(drafts).model_copy(update={"version": version})
    store.write_release(manifest)
    return manifest


def load(store: WritableStore, version: str, served: ServedPrecision) -> Loaded:
    return load_release(store, deployed(f"toy-sdxl/{version}", precision=served), detect_targets(), ColdStart())


def picture(loaded: Loaded, model: LoadedModel | None = None) -> NDArray[np.int64]:
    """Return the picture of REQUEST by a loaded release, or by another model with the same settings."""
    return generate(model or loaded.model, [resolve(REQUEST, loaded.served)])[0][0].astype(np.int64)


def assert_nearly_equal(first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    assert 0 < np.abs(first - second).mean() < 12, "the same picture, or another one"


def engine_of(manifest: Manifest, component: str, precision: Precision) -> EngineRecord:
    [engine] = [one for one in manifest.engines if (one.component, one.precision) == (component, precision)]
    return engine


def tensors_of(store: WritableStore, engine: EngineRecord) -> dict[str, str]:
    """Return the type of each tensor that an engine reads. Weights and scales must be among them."""
    constants = parse_constants(store.get(engine.constants.sha256, engine.constants.bytes).read_bytes())
    tensors = {constant.tensor: constant.dtype for constant in constants.values()}
    quantized = [name for name, dtype in tensors.items() if dtype in ("float8_e4m3fn", "int8")]
    assert len(quantized) > 5
    for name in quantized:
        for scale in (f"{name}_scale", f"{name.removesuffix('weight')}input_scale"):
            assert tensors[scale] == "float32", "another model's scale must not be compiled in"
    return tensors


def test_only_unets_are_fp8(built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan) -> None:
    store, manifest = built
    everything = set(fp8_plan.components)
    for precision, expected in ((FP8, {"unet"}), (FP16, everything - {"unet"}), (FP32, everything)):
        assert {engine.component for engine in manifest.engines if engine.precision == precision} == expected
    unet = engine_of(manifest, "unet", FP8)
    assert {spec.dtype for spec in (*unet.signature.inputs, *unet.signature.outputs)} == {"float16"}
    assert unet.required_schema == 2 and manifest.required_schema == 5
    quantized = [name for name, dtype in tensors_of(store, unet).items() if dtype == "float8_e4m3fn"]
    assert not any(".proj_" in name for name in quantized)
    [record] = [weights for weights in manifest.weights if weights.component == "unet" and weights.precision == FP8]
    tensors = {k: t for blob in record.blobs for k, t in load_file(store.get(blob.sha256, blob.bytes)).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float8_e4m3fn, torch.float16, torch.float32}
    assert all(t.ndim == 0 for t in tensors.values() if t.dtype == torch.float32), "only scales are float32"


def test_deployment_chooses_the_precision(built: tuple[WritableStore, Manifest]) -> None:
    default, fp8 = (load(built[0], "mixed", ServedPrecision(precision)) for precision in (None, FP8))
    for loaded, dtype in ((default, "float32"), (fp8, "float16")):
        names = {name for name, engines in loaded.model.engines.items() if engines.signature.outputs[0].dtype == dtype}
        assert {"unet", "unet_text", "unet_time", "vae_decoder"} <= names
    assert default.served == fp8.served
    assert_nearly_equal(picture(default), picture(fp8))


def test_refuses_a_precision_that_the_release_lacks(built: tuple[WritableStore, Manifest]) -> None:
    store, mixed = built
    without_fp8 = store.read_release("toy-sdxl/1")
    no_fp16 = r"no unet engine in fp16 for .*\. It has fp32, fp8\."
    for manifest, served, error, words in (
        (without_fp8, ServedPrecision(FP8), NoEngineForTarget,
         r"no unet engine in fp8 for .*\. It has fp32\..*--precision fp8"),
        (mixed, ServedPrecision(FP8, Fp16Steps(first=1)), NoEngineForTarget, no_fp16),
        (mixed, ServedPrecision(FP8, compares=True), NoEngineForTarget, r"no unet engine in fp16 .*`compare_every`"),
        (mixed, ServedPrecision(compares=True), ConfigError,
         r"release toy-sdxl/mixed is served in fp32\..*`compare_every`"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            select(manifest, detect_targets(), deployed(precision=served))
    for steps in (None, Fp16Steps()):
        check_fp16_steps(mixed.model_copy(update={"fp16_steps": steps}))
    with pytest.raises(MissingFp16Engines, match=r"an engine of unet for cpu-.* exists only in fp8.*--precision fp16"):
        check_fp16_steps(mixed.model_copy(update={"fp16_steps": Fp16Steps(last=1)}))


def test_builds_again_only_for_another_policy_or_version(
    built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines hold neither weights nor scales: another clip compiles nothing, and has other weights."""
    store, manifest = built
    build(fp8_plan, store)  # another test may have built with another policy since
    assert build(fp8_plan, store, stop_build).compiled == ()
    with pytest.raises(BadPolicy, match="matches no layer"):
        quantized_plan(fp8_plan, Policy(keep_fp16=["down.*"]), store)
    with pytest.raises(BuildStarted):
        build(quantized_plan(fp8_plan, Policy(), store), store, stop_build)
    monkeypatch.setattr("engine_builder.building.build.LINEAR_VERSION", 99)
    with pytest.raises(BuildStarted):
        build(fp8_plan, store, stop_build)
    monkeypatch.undo()
    result = build(quantized_plan(fp8_plan, Policy(keep_fp16=KEPT, clip="percentile", percentile=0.95), store), store)
    assert result.compiled == ()
    [weights] = [record for record in result.draft.weights if record.component == "unet"]
    assert weights.identity not in {record.identity for record in manifest.weights}


@pytest.mark.parametrize(
    ("configured", "precision_of_steps"),
    [(None, "16 16 8 8 8 8"), (Fp16Steps(), "8 8 8 8 8 8"), (Fp16Steps(first=1, last=2), "16 8 8 8 16 16")],
)
def test_first_and_last_steps_run_in_fp16(
    configured: Fp16Steps | None, precision_of_steps: str, with_fp16: WritableStore
) -> None:
    """The release's steps, unless the deployment sets others."""
    loaded = load(with_fp16, "steps", ServedPrecision(FP8, configured))
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
    exact = picture(load(with_fp16, "steps", ServedPrecision(FP16, Fp16Steps())))
    errors = [
        float(np.square(picture(load(with_fp16, "steps", ServedPrecision(FP8, Fp16Steps(first=first)))) - exact).mean())
        for first in (0, 5, 6)
    ]
    assert errors[2] == 0 < errors[1] < errors[0] / 2
    selection = select(with_fp16.read_release("toy-sdxl/steps"), detect_targets(), deployed())
    assert selection.fp16_steps is None, "they are ignored unless the UNet is 8-bit"
    assert {engine.precision for engine in selection.engines["unet"]} == {FP16}


def test_images_in_fp8_are_compared_with_fp16(with_fp16: WritableStore) -> None:
    """With engines: all steps of the comparison run in fp16, and the distance is that of both precisions' pictures."""
    loaded = load(with_fp16, "steps", ServedPrecision(FP8, Fp16Steps(), compares=True))
    params = resolve(REQUEST, loaded.served)
    found = generate(loaded.model, [params])[0][0]
    exact = picture(load(with_fp16, "steps", ServedPrecision(FP16))).astype(np.uint8)
    expected = psnr(exact, found)
    ran: list[str] = []
    record_runs(loaded.model.fp16_engines["unet"], "16", ran)
    record_runs(loaded.model.engines["unet"], "8", ran)
    comparison = ImageComparison(loaded.model, every=1)
    assert comparison.offer(params, 0, found)
    before = REGISTRY.get_sample_value("preheat_comparison_decibels_sum") or 0.0
    assert comparison.work is not None
    list(comparison.work)
    assert ran == ["16"] * 6
    reported = (REGISTRY.get_sample_value("preheat_comparison_decibels_sum") or 0.0) - before
    assert reported == pytest.approx(expected, abs=1e-6) and expected < 60


@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        (INT8, Policy(keep_fp16=KEPT, smoothing=0.8)),
        (FP8, Policy(keep_fp16=KEPT, convolutions=["mid_block.*"])),
    ],
    ids=["int8", "convolutions"],
)
def test_unet_is_built_and_served_in_other_8_bits(
    precision: Precision, policy: Policy, built: tuple[WritableStore, Manifest], fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """With the same calibration, in an engine of its own."""
    store = copy_of(built[0], tmp_path)
    result = build(quantized_plan(fp8_plan, policy, store, precision), store)
    assert result.compiled == ("unet",)
    names = tensors_of(store, engine_of(result.draft, "unet", precision)).items()
    convolutions = [name for name, dtype in names if ".conv" in name and dtype == "float8_e4m3fn"]
    if precision == INT8:
        again = build(quantized_plan(fp8_plan, Policy(keep_fp16=KEPT, smoothing=0.5), store, precision), store)
        assert again.compiled == () and not convolutions
    else:
        assert len(convolutions) >= 4 and result.draft.builder["fp8_convolutions"] == str(CONV_VERSION)
        assert "fp8_convolutions" not in built[1].builder
    write_release(store, [result.draft], "other")
    loaded = load(store, "other", ServedPrecision(precision))
    assert loaded.precision == precision
    assert_nearly_equal(picture(load(store, "mixed", ServedPrecision())), picture(loaded))


def build_wide_vae(store: WritableStore, fp8_plan: BuildPlan, folder: Path) -> BuildResult:
    """Build the toy with a VAE whose decoder is wide enough for FP8, in fp16 and in FP8. The toy's own is not."""
    with pytest.raises(BadPolicy, match="quantizes no layer of vae_decoder"):
        quantized_plan(fp8_plan, VAE_POLICY, store).load("vae_decoder", ModuleReader())
    levels = 2
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels, norm_num_groups=8, force_upcast=False,
        scaling_factor=fp8_plan.base.config("vae")["scaling_factor"],
    ).save_pretrained(folder)  # fmt: skip
    plan = replace(fp8_plan, base=replace(fp8_plan.base, vae=folder))
    with pytest.raises(CalibrationError, match="no intact calibration of this model's vae_decoder"):
        quantized_plan(plan, VAE_POLICY, store)
    calibrate(store, plan.base.root, "--vae", str(folder))
    build(replace(plan, precision=FP16, quantization=None), store)
    return build(quantized_plan(plan, VAE_POLICY, store), store)


@pytest.mark.full
def test_vae_decoder_in_fp8_is_built_served_and_compared_with_fp16(
    with_fp16: WritableStore, fp8_plan: BuildPlan, tmp_path: Path
) -> None:
    """Its linears stay in fp16. A comparison decodes in fp16, too."""
    store = copy_of(with_fp16, tmp_path)
    result = build_wide_vae(store, fp8_plan, tmp_path / "vae")
    assert result.compiled == ("vae_decoder",), "the UNet's engine is that of the policy without the entry"
    assert result.draft.builder["fp8_convolutions"] == str(CONV_VERSION)
    tensors = tensors_of(store, engine_of(result.draft, "vae_decoder", FP8)).items()
    assert all(".conv" in name or ".phases" in name for name, dtype in tensors if dtype == "float8_e4m3fn")
    write_release(store, drafts_without_fp32(store), "decoder")
    exact = load(store, "decoder", ServedPrecision(FP16))
    fp8 = load(store, "decoder", ServedPrecision(FP8, compares=True))
    assert not exact.model.fp16_engines and set(fp8.model.fp16_engines) == {"unet", "vae_decoder"}
    np.testing.assert_array_equal(picture(fp8, fp8.model.in_fp16()), picture(exact))
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
