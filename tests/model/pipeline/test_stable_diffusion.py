"""Stable Diffusion 1.5 and 2.1: their images are those of diffusers, and folders that mix models are refused."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine_builder.adapters.add import add_adapter
from engine_builder.backends.aot_inductor.compile import dynamic_bucket, engine_key
from engine_builder.backends.onnx.export_graph import export_graph
from engine_builder.backends.onnx.graph_store import validate_graph
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.eager_model import load_eager_model
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.release_settings import read_model_facts, read_noise_schedules, read_release_defaults
from engine_builder.networks.network import load_network
from engine_builder.networks.network_check import check_model
from engine_builder.stores.store import WritableStore, open_writable_store
from model.denoising.sampler_specs import SAMPLERS
from model.deployment import ServedAdapters
from model.errors import RequestRefused
from model.images.postprocess import feather
from model.loading.load import Loaded
from model.loading.target import Target
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.store.precision import FP16, FP32
from preheat.main import app
from tests.engine_builder.helpers import edit_json
from tests.support import parity, toy_sd
from tests.support.adapters import LINEARS, STYLES, Style, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.images import largest_difference
from tests.support.parity import TOLERANCE, box, check_images, image_of, load, params_of, picture
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

VERSIONS: tuple[toy_sd.Version, ...] = ("1.5", "2.1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The toy of each version."""
    root = tmp_path_factory.mktemp("sd")
    return {version: toy_sd.write(root / version, MODEL_FOLDER / "tokenizer", version) for version in VERSIONS}


@pytest.fixture(scope="module")
def store(folders: dict[str, Path], target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy of 1.5, published as toy-sd/1."""
    return parity.publish("toy-sd", Checkpoint(folders["1.5"]), target, tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def toy(store: WritableStore) -> Loaded:
    return load(store, "toy-sd/1")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(version: str, toy: Loaded, folders: dict[str, Path]) -> LoadedModel:
    """1.5 with its engines, and 2.1 with the same networks as a build compiles, in eager PyTorch."""
    return toy.model if version == "1.5" else load_eager_model(Checkpoint(folders["2.1"]), None, FP32, "cpu")[1]


@pytest.fixture(scope="module")
def reference(version: str, folders: dict[str, Path]) -> Reference:
    return Reference(folders[version])


def random_settings(seed: int) -> list[dict[str, Any]]:
    """Return the settings of nine requests, with every sampler."""
    generator = random.Random(seed)
    return [
        {
            "scheduler": sampler,
            # LCM adds new noise at every step, and guidance amplifies the rounding of a model not distilled for it.
            "guidance_scale": generator.choice((1.0, 2.0) if sampler == "LCM" else (1.0, 3.0, 7.5)),
            "num_inference_steps": generator.randint(2, 12),
            "negative_prompt": generator.choice((None, "", "a green triangle")),
            "width": generator.choice((64, 128)),
            "height": generator.choice((64, 128, 192)),
            "seed": generator.randrange(2**32),
            "guidance_end": generator.choice((1.0, 0.5)),
            "guidance_rescale": generator.choice((0.0, 0.7)),
            "clip_skip": generator.choice((0, 1)),
        }
        for sampler in (*generator.sample(SAMPLERS, len(SAMPLERS)), generator.choice(SAMPLERS))
    ]


def test_image_is_that_of_diffusers(version: str, toy: Loaded, model: LoadedModel, reference: Reference) -> None:
    requests = [params_of(toy, **fields) for fields in random_settings(seed=VERSIONS.index(version))]
    check_images(model, reference, *requests)


MASKED = {"image": picture(0, 128), "masks": (box(40, 24, 110, 90, strength=0.8),)}


def test_images_from_an_image_are_those_of_diffusers(
    version: str, toy: Loaded, model: LoadedModel, reference: Reference
) -> None:
    for sampler in ("Euler", "DDIM") if version == "1.5" else ("Euler a", "DPM++ 2M"):
        masked = params_of(toy, scheduler=sampler, negative_prompt="a green triangle", **MASKED)
        whole = replace(masked, masks=(box(40, 24, 110, 90, strength=1.0),))
        check_images(model, reference, masked, whole, replace(masked, masks=(), strength=0.6))


def test_inpainting_unet_paints_like_diffusers(toy: Loaded, tmp_path: Path) -> None:
    folder = toy_sd.write(tmp_path / "inpaint", MODEL_FOLDER / "tokenizer", "1.5", channels=9)
    edit_json(folder / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
    checkpoint = Checkpoint(folder)
    check_model(checkpoint, None)
    _, model = load_eager_model(checkpoint, None, FP32, "cpu")
    plain, reference = params_of(toy, **MASKED), Reference(folder)
    for strength, blur in ((0.6, 0), (1.0, 0), (0.9, 8)):
        levels = np.array(feather(plain.masks[0].levels, blur))
        mask = replace(plain.masks[0], levels=levels, negative_prompt="a green triangle", strength=strength)
        check_images(model, reference, replace(plain, masks=(mask,)))


def test_each_setting_changes_the_image(toy: Loaded, model: LoadedModel) -> None:
    """A negative prompt that is missing is encoded like an empty one."""
    params = params_of(toy, negative_prompt="", num_inference_steps=6)
    changed: list[dict[str, Any]] = [
        {"scheduler": "DPM++ 2M"},
        {"num_inference_steps": 4},
        {"guidance_scale": 1.0},
        {"negative_prompt": "a green triangle"},
        {"prompt": "a small green triangle on a white background"},
        {"seed": 8},
        {"guidance_rescale": 0.7},
        {"clip_skip": 1},
    ]
    parity.check_all_differ(model, params, *(replace(params, **fields) for fields in changed))
    assert np.array_equal(image_of(model, params), image_of(model, replace(params, negative_prompt=None)))


def test_release_has_the_facts_of_the_model(toy: Loaded, folders: dict[str, Path], store: WritableStore) -> None:
    assert store.read_release("toy-sd/1").family == "sd"
    assert set(toy.model.tokenizers) == {"tokenizer"}
    assert spec.TEXT_ENCODER_FINAL in toy.model.engines and spec.TEXT_ENCODER not in toy.model.engines
    assert (toy.served.native_width, toy.served.native_height) == (toy_sd.SIDE, toy_sd.SIDE)
    assert toy.served.defaults.scheduler == "Euler"  # in place of PNDM
    assert (toy.model.settings.vae_scaling_factor, toy.model.settings.force_zeros_for_empty_prompt) == (
        0.18215,
        False,
    )
    second = Checkpoint(folders["2.1"])
    assert read_release_defaults(second, None)["scheduler"] == "DDIM"
    assert read_noise_schedules(second, None)["base"].prediction_type == "v_prediction"


def test_build_names_the_replaced_scheduler(folders: dict[str, Path], store: WritableStore) -> None:
    arguments = ["build", str(folders["1.5"]), "--name", "toy-sd", "--store", store.url]
    output = " ".join(CliRunner().invoke(app, arguments, catch_exceptions=False).output.split())
    assert "PNDMScheduler is not served. Requests without `scheduler` use Euler" in output


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: [64, 64]}, "is not conditioned on sizes") for name in ("original_size", "crop", "target_size")),
        ({"use_refiner": True}, "this release has no refiner"),
    ],
)
def test_refuses_fields_of_sdxl_by_name(fields: dict[str, object], message: str, toy: Loaded) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        params_of(toy, **fields)
    assert {refused.value.field} == fields.keys()


def test_text_encoder_shares_no_engine_with_sdxls(folders: dict[str, Path], target: Target) -> None:
    """SDXL reads another layer of an encoder with the same configuration."""
    checkpoint = Checkpoint(folders["1.5"])
    networks = [load_network(checkpoint, name, FP32) for name in (spec.TEXT_ENCODER, spec.TEXT_ENCODER_FINAL)]
    assert networks[0].architecture == networks[1].architecture and networks[0].signature == networks[1].signature
    keys = [engine_key(network, target, dynamic_bucket(network.multiple)) for network in networks]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("of_version", "component"),
    [
        ("1.5", spec.TEXT_ENCODER_FINAL),
        pytest.param("1.5", spec.UNET_TIME, marks=pytest.mark.full),
        pytest.param("1.5", spec.UNET_TEXT, marks=pytest.mark.full),
        *(pytest.param("2.1", name, marks=pytest.mark.full) for name in (spec.TEXT_ENCODER_FINAL, spec.UNET_TEXT)),
    ],
)
def test_exports_to_onnx(of_version: str, component: str, folders: dict[str, Path]) -> None:
    network = load_network(Checkpoint(folders[of_version]), component, FP16)
    assert validate_graph(network, export_graph(network)) <= 1e-2


def test_vae_of_sd_is_not_upcast(folders: dict[str, Path], target: Target) -> None:
    """diffusers' pipelines of SD ignore force_upcast, which newer versions write into every config."""
    plan = BuildPlan("toy-sd", Checkpoint(folders["1.5"]), None, target, FP16)
    assert plan.precision_of(spec.VAE_DECODER) == FP16


@pytest.mark.parametrize("style", ["kohya", *(pytest.param(name, marks=pytest.mark.full) for name in STYLES[2:])])
def test_image_with_an_adapter_is_that_of_diffusers(
    style: Style, toy: Loaded, folders: dict[str, Path], store: WritableStore, tmp_path: Path
) -> None:
    """The projections of 1.5 are convolutions in its files, and linears in an engine."""
    deltas = random_deltas(module_shapes(folders["1.5"]), LINEARS, 4, seed=0, spread=0.3)
    assert {len(down.shape) for down, _, _ in deltas.values()} == {2, 4}
    file = write_adapter(tmp_path / "adapter.safetensors", deltas, style)
    copied = open_writable_store(copy_store(store, tmp_path / "store"))
    add_adapter(copied, "adapter", file)
    adapted = load(copied, "toy-sd/1", adapters=ServedAdapters(("adapter",))).model
    params = params_of(toy, num_inference_steps=4, guidance_scale=3.0)
    reference = Reference(folders["1.5"])
    reference.load_lora("adapter", file)
    changed = replace(params, loras=(("adapter", 0.8),))
    check_images(adapted, reference, changed)
    assert largest_difference(image_of(adapted, changed), image_of(adapted, params)) > 5 * TOLERANCE


Change = Callable[[Path, dict[str, Path]], None]


def with_entries(file: str, **entries: Any) -> Change:
    return lambda folder, _: edit_json(folder / file, **entries)


def with_folder(name: str, version: str) -> Change:
    """Take a folder of another model."""

    def change(folder: Path, others: dict[str, Path]) -> None:
        shutil.rmtree(folder / name)
        shutil.copytree(others.get(version, MODEL_FOLDER) / name, folder / name)

    return change


MIXED: list[tuple[Change, str]] = [
    (with_folder("unet", "SDXL"), "addition_embed_type is 'text_time'"),
    (with_folder("unet", "2.1"), "reads texts of width 48"),
    (with_folder("text_encoder", "2.1"), "encoders together return 48"),
    (lambda folder, _: shutil.rmtree(folder / "text_encoder"), "has no text_encoder/config.json"),
    (
        with_entries("vae/config.json", scaling_factor=0.13025),
        "vae is that of a Stable Diffusion XL (scaling_factor 0.13025)",
    ),
    (with_entries("unet/config.json", in_channels=8), "takes 8 channels"),
    (with_entries("unet/config.json", class_embed_type="projection"), "class_embed_type is"),
    (with_entries("text_encoder/config.json", use_attention_mask=True), "use_attention_mask is"),
    (
        with_entries("model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]),
        "_class_name is 'FlowMatchEulerDiscreteScheduler'",
    ),
    (with_entries("model_index.json", _class_name="StableDiffusionXLPipeline"), "text_encoder_2 is None"),
    (
        with_entries("model_index.json", _class_name="StableDiffusion3Pipeline"),
        "'StableDiffusion3Pipeline', not a pipeline of Stable Diffusion XL or Stable Diffusion 1 or 2",
    ),
]


@pytest.mark.parametrize(("change", "words"), MIXED)
def test_refuses_a_mixed_folder(
    change: Change, words: str, folders: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["1.5"], tmp_path / "mixed"))
    change(folder, folders)
    with pytest.raises(CheckpointError) as refusal:
        build(BuildPlan("mixed", Checkpoint(folder), None, target, FP32), open_writable_store(tmp_path / "store"))
    assert words in str(refusal.value) and str(folder) in str(refusal.value)
    assert not list((tmp_path / "store").rglob("*"))


def test_refuses_parts_of_the_other_family(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL_FOLDER, tmp_path / "mixed", ignore=shutil.ignore_patterns("*.safetensors")))
    edit_json(folder / "vae/config.json", scaling_factor=0.18215)
    with pytest.raises(CheckpointError, match=r"vae is that of a Stable Diffusion 1 or 2 \(scaling_factor 0.18215\)"):
        read_model_facts(Checkpoint(folder), None)
    with pytest.raises(CheckpointError, match="Only Stable Diffusion XL has refiners"):
        check_model(Checkpoint(folders["1.5"]), Checkpoint(MODEL_FOLDER / "refiner"))
