"""Presets of few-step models, and VAEs in place of a model's own."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from typer.testing import CliRunner

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.presets import PRESETS
from engine_builder.checkpoints.release_settings import read_model_facts, read_noise_schedules, read_release_defaults
from engine_builder.networks.network_check import check_model
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.loading.load import Loaded
from model.loading.served import read_defaults
from model.pipeline.spec import VAE_DECODER, VAE_ENCODER
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP16, FP32
from preheat.main import app
from tests.engine_builder.helpers import drop_json_key, edit_json
from tests.support import toy_sd, toy_sdxl
from tests.support.images import largest_difference
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

pytestmark = pytest.mark.usefixtures("uncompiled_builds")

TOLERANCE = 2  # of 255: float32 rounding, in another order


@pytest.fixture(scope="module")
def sd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_sd.write(tmp_path_factory.mktemp("sd") / "model", MODEL_FOLDER / "tokenizer", "1.5")


@pytest.fixture(scope="module")
def other_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with other weights."""
    return toy_sdxl.write(tmp_path_factory.mktemp("other") / "model", MODEL_FOLDER / "tokenizer", seed=1)


# -- Presets ---------------------------------------------------------------------------------------------------------


def test_every_preset_has_valid_defaults(toy_folder: Path, sd_folder: Path) -> None:
    folders = {"sdxl": toy_folder, "sd": sd_folder}
    pairs = [(preset, family) for preset in PRESETS.values() for family in preset.families]
    for preset, family in pairs:
        base = Checkpoint(folders[family], preset=preset)
        defaults = read_defaults(read_release_defaults(base, None))
        values = {key: value for key, value in preset.defaults.items() if key not in ("width", "height")}
        assert {key: getattr(defaults, key) for key in values} == values
        assert ("guidance_scale" in values) or preset.name in ("v-prediction", "sd-2.1-base")
        schedule = read_noise_schedules(base, None)["base"]
        own = read_noise_schedules(Checkpoint(base.root), None)["base"]
        changed = {key: value for key, value in preset.scheduler.items() if hasattr(own, key)}
        assert schedule == replace(own, **changed)
        if "_class_name" in preset.scheduler:
            assert schedule.timestep_spacing == "trailing"
        else:
            assert defaults.scheduler == preset.defaults.get("scheduler", "Euler")


def test_sd_turbo_predicts_noise_although_its_family_predicts_the_velocity(sd_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(sd_folder, folder := tmp_path / "sd")
    edit_json(folder / "scheduler" / "scheduler_config.json", prediction_type="v_prediction")
    schedule = read_noise_schedules(Checkpoint(folder, preset=PRESETS["sd-turbo"]), None)["base"]
    assert schedule.prediction_type == "epsilon"


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("hyper-sd-8-guided", "sdxl-turbo")]


@pytest.mark.parametrize("name", ["hyper-sd-4", "lightning-2", *FULL])
def test_images_of_a_preset_are_those_of_diffusers(name: str, loaded: Loaded, tmp_path: Path) -> None:
    """diffusers reads a folder with the preset's scheduler_config.json."""
    preset = PRESETS[name]
    folder = tmp_path / "model"
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("refiner", "defaults.json"))
    edit_json(folder / "scheduler" / "scheduler_config.json", **preset.scheduler)
    base = Checkpoint(folder, preset=preset)
    served = replace(loaded.served, defaults=read_defaults(read_release_defaults(base, None)))
    model = replace(loaded.model, noise_schedules=read_noise_schedules(base, None), loops={})
    request = GenerationRequest(prompt="a large red circle on a blue background", seed=7, width=128, height=128)
    params = resolve(request, served)
    [image], _, _ = generate(model, [params])
    assert largest_difference(image, Reference(folder).generate(params)) <= TOLERANCE
    [plain], _, _ = generate(replace(loaded.model, loops={}), [params])  # with the model's own spacing of timesteps
    assert largest_difference(image, plain) > TOLERANCE


def test_preset_replaces_the_sampler_of_the_folder(toy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy_folder, folder)
    edit_json(
        folder / "scheduler" / "scheduler_config.json",
        _class_name="DPMSolverMultistepScheduler",
        use_karras_sigmas=True,
        algorithm_type="sde-dpmsolver++",
    )
    edit_json(folder / "model_index.json", scheduler=["diffusers", "DPMSolverMultistepScheduler"])
    assert read_release_defaults(Checkpoint(folder), None)["scheduler"] == "DPM++ 2M SDE Karras"
    facts = read_model_facts(Checkpoint(toy_folder, preset=PRESETS["sdxl-turbo"]), None)
    assert (facts.native_width, facts.native_height) == (512, 512)
    base = Checkpoint(folder, preset=PRESETS["lightning-4"])
    assert read_release_defaults(base, None)["scheduler"] == "Euler"
    assert read_noise_schedules(base, None)["base"].timestep_spacing == "trailing"


def refusal_of(base: Checkpoint, target: Any, tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        build(BuildPlan("model", base, None, target, FP32), open_writable_store(tmp_path / "store"))
    assert not list((tmp_path / "store").rglob("*"))
    return str(refusal.value)


def test_refuses_a_preset_that_does_not_fit(
    toy_folder: Path, folder_copy: Path, sd_folder: Path, target: Any, tmp_path: Path
) -> None:
    """One of another family, one for the other kind of UNet, and one that contradicts the folder."""
    distilled = toy_sdxl.write(tmp_path / "distilled", MODEL_FOLDER / "tokenizer", timestep_cond=24)
    check_model(Checkpoint(distilled, preset=PRESETS["lcm"]), None)
    (folder_copy / "defaults.json").write_text('{"num_inference_steps": 30}')
    for folder, preset, words in (
        (sd_folder, "lightning-4", "The preset lightning-4 is for Stable Diffusion XL, and .*sd-turbo"),
        (toy_folder, "lcm", "takes no guidance scale as an input.*--preset lcm-lora"),
        (distilled, "lightning-4", "takes the guidance scale as an input.*--preset lcm "),
        (folder_copy, "lightning-4", "defaults.json sets num_inference_steps to 30, and the preset lightning-4 to 4"),
    ):
        message = refusal_of(Checkpoint(folder, preset=PRESETS[preset]), target, tmp_path)
        assert re.search(words, message), message


def test_refuses_an_unknown_preset(toy_folder: Path) -> None:
    result = CliRunner().invoke(app, ["build", str(toy_folder), "--preset", "lightning"])
    assert isinstance(result.exception, CheckpointError)
    assert "There is no preset 'lightning'. Choose one of sdxl-turbo, " in str(result.exception)


def test_release_has_the_preset(toy_plan: BuildPlan, store_copy: WritableStore) -> None:
    plan = replace(toy_plan, base=replace(toy_plan.base, preset=PRESETS["hyper-sd-4"]))
    result = build(plan, store_copy)
    assert not result.compiled
    assert result.draft.defaults == {"scheduler": "DDIM", "num_inference_steps": 4, "guidance_scale": 0.0}
    assert result.draft.schedulers["base"]["timestep_spacing"] == "trailing"
    assert "hyper-sd-4" in result.draft.builder["preset"]
    assert store_copy.read_release("toy-sdxl/1").defaults == {"scheduler": "Euler"}  # the same model without it


# -- Separate VAEs ---------------------------------------------------------------------------------------------------


def test_release_has_the_separate_vae(
    toy_plan: BuildPlan, toy_folder: Path, other_toy: Path, store_copy: WritableStore
) -> None:
    """Its weights, and nothing else of the other model. Engines are those of the architecture."""
    own = {record.component: record.blobs for record in store_copy.read_release("toy-sdxl/1").weights}
    base, _ = find_checkpoints(str(toy_folder), None, str(other_toy / "vae"))
    assert find_checkpoints(str(toy_folder), None, str(other_toy))[0].folder("vae") == base.folder("vae")
    result = build(replace(toy_plan, base=base), store_copy)
    assert not result.compiled and result.draft.builder["vae"] == "vae"
    changed = {record.component for record in result.draft.weights if record.blobs != own[record.component]}
    assert changed == {VAE_ENCODER, VAE_DECODER}
    decoder = next(record for record in result.draft.weights if record.component == VAE_DECODER)
    data = [load(store_copy.get(blob.sha256, blob.bytes).read_bytes()) for blob in decoder.blobs]
    [stored] = [tensor for tensors in data for name, tensor in tensors.items() if name.endswith("conv_out.bias")]
    weights = load_file(other_toy / "vae" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(stored, weights["decoder.conv_out.bias"])


def test_force_upcast_is_that_of_the_separate_vae(toy_plan: BuildPlan, toy_folder: Path, tmp_path: Path) -> None:
    vae = Path(shutil.copytree(toy_folder / "vae", tmp_path / "vae"))
    plan = replace(toy_plan, base=Checkpoint(toy_folder, vae), precision=FP16)
    assert plan.precision_of(VAE_DECODER) == FP16
    edit_json(vae / "config.json", force_upcast=True)
    assert plan.precision_of(VAE_DECODER) == FP32


VAE_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "other scaling": ({"scaling_factor": 0.13025}, "scaling_factor is 0.13025, and that of the model's own VAE is 0.5"),
    "other channels": ({"latent_channels": 16}, "takes 4 channels and the VAE returns 16"),
    "normalized latents": ({"latents_mean": [1.0] * 4}, "latents_mean is [1.0, "),
    "another class": ({"_class_name": "AutoencoderTiny"}, "_class_name is 'AutoencoderTiny'"),
}


def test_refuses_a_vae_of_other_latents(toy_folder: Path, other_toy: Path, target: Any, tmp_path: Path) -> None:
    for case, (entries, words) in VAE_CHANGES.items():
        vae = Path(shutil.copytree(other_toy / "vae", tmp_path / case))
        edit_json(vae / "config.json", **entries)
        assert words in refusal_of(Checkpoint(toy_folder, vae), target, tmp_path)
    drop_json_key(vae / "config.json", "scaling_factor")
    drop_json_key(vae / "config.json", "_class_name")
    assert "scaling_factor is 0.18215" in refusal_of(Checkpoint(toy_folder, vae), target, tmp_path)
    (vae / "config.json").unlink()
    assert f"No {vae}/config.json exists" in refusal_of(Checkpoint(toy_folder, vae), target, tmp_path)
