"""The comparison of a model with diffusers at the start of a build: it finds wrappers that ignore a part of a model."""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import diffusers
import numpy as np
import pytest
import torch
import transformers

from engine_builder.building import compare_with_diffusers as comparison
from engine_builder.building import eager_model
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.building.compare_with_diffusers import DiffersFromDiffusers, compare_with_diffusers
from engine_builder.building.counterparts import LIMITS
from engine_builder.building.diffusers_pipeline import texts
from engine_builder.checkpoints.folder import Checkpoint, CheckpointConfig, CheckpointError, IpAdapterFiles
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.networks import network_check as check
from engine_builder.networks.config_rules import RULES, UNCHECKED, check_config, rules_of
from engine_builder.stores.store import open_writable_store
from model.engines.features import CONTROL, IMAGE_PROMPT, LORA
from model.loading.target import Target
from model.pipeline.components import find_component
from model.store.manifest import Family, ModelFacts
from model.store.precision import BF16, FP16, FP32, Precision
from tests.engine_builder.helpers import edit_json, edit_weights
from tests.support import controlnets, ip_adapters, recipes, toy_safety_checker, toy_sd, toy_sdxl
from tests.support.published_configs import PUBLISHED
from tests.support.recipes import RECIPES
from tests.support.repository import MODEL_FOLDER

TOKENIZER = MODEL_FOLDER / "tokenizer"
FAMILIES: tuple[Family, ...] = ("sdxl", "sd")
# The class whose arguments are the entries of a network's config.json.
OF_CONSTRUCTORS: dict[str, Any] = {
    "UNet2DConditionModel": diffusers.UNet2DConditionModel,
    "ControlNetModel": diffusers.ControlNetModel,
    "ControlNetUnionModel": diffusers.ControlNetUnionModel,
    "AutoencoderKL": diffusers.AutoencoderKL,
    "CLIPTextModel": transformers.CLIPTextConfig,
    "CLIPTextModelWithProjection": transformers.CLIPTextConfig,
    "CLIPVisionModelWithProjection": transformers.CLIPVisionConfig,
    "StableDiffusionSafetyChecker": transformers.CLIPConfig,
}
PROVENANCE = {"self", "architectures", "dtype"}


def test_rules_cover_each_entry_of_a_class_and_its_default() -> None:
    """Fails when a library gains an entry. Decide whether the wrappers read it, and add its rule."""
    for class_name in RULES:
        parameters = inspect.signature(OF_CONSTRUCTORS[class_name].__init__).parameters
        assert not set(parameters) - PROVENANCE - rules_of(class_name, "sdxl").keys()
        for family in FAMILIES:
            rules = {key: rule for key, rule in rules_of(class_name, family).items() if key in parameters}
            stated = {key: rule.default for key, rule in rules.items() if rule.default is not UNCHECKED}
            assert stated == {key: parameters[key].default for key in stated}, (class_name, family)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_sdxl.write(tmp_path_factory.mktemp("toys") / "toy", TOKENIZER)


@pytest.fixture
def folder(toy: Path, tmp_path: Path) -> Path:
    """A copy of the toy, for changes."""
    return Path(shutil.copytree(toy, tmp_path / "copy"))


def plan_of(checkpoint: Checkpoint, target: Target, precision: Precision = FP32, **options: Any) -> BuildPlan:
    return BuildPlan("compared", checkpoint, None, target, precision, **options)


def test_compares_all_networks_of_a_plan(
    toy: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that a build can add. The guided variants are built for GPUs."""
    encoder = ip_adapters.write_encoder(tmp_path / "image_encoder")
    kinds: tuple[ip_adapters.Kind, ...] = ("plain", "plus", "full")
    adapters = tuple(
        IpAdapterFiles(kind, ip_adapters.write_adapter(tmp_path / f"{kind}.safetensors", toy, kind), encoder)
        for kind in kinds
    )
    nets: tuple[controlnets.Kind, ...] = ("full", "small", "union")
    folders = tuple((kind, controlnets.write(tmp_path / kind, toy, kind)) for kind in nets)
    image = np.zeros((64, 64, 3), np.uint8)
    checker = toy_safety_checker.write(tmp_path / "checker", [image, 255 - image]) / "safety_checker"
    checkpoint = Checkpoint(toy, controlnets=folders, ip_adapters=adapters, safety_checker=checker)
    monkeypatch.setattr(BuildPlan, "network_device", "cpu")
    gpu = replace(target, device="cuda")
    combined = (frozenset({CONTROL, LORA}), frozenset({IMAGE_PROMPT, CONTROL, LORA}))
    plan = plan_of(checkpoint, gpu, lora_rank=2, bands=(2,), sizes=(Size(2, 256, 256),), combine=combined)
    report = compare_with_diffusers(plan)
    of_images = {"unet_ip", "unet.image_prompt.control.lora"}
    steps = {name for name in plan.components if find_component(name).phase == "step"} - of_images
    others = {"text_encoder", "text_encoder_2", "vae_encoder", "vae_decoder", "safety_checker"}
    of_adapters = {f"{name} with {kind}" for name in of_images for kind in kinds}
    of_adapters |= {f"image_encoder.{kind}" for kind in kinds}
    assert {one.name for one in report.networks} == steps | others | of_adapters
    variants = {"unet_guided", "unet_lora", "unet_lora_guided", "unet_2_bands", "unet_controlled", "unet.control.lora"}
    assert variants < steps


MODELS: dict[str, Callable[[Path], Path]] = {
    "for inpainting": lambda path: toy_sdxl.write(path, TOKENIZER, unet_channels=9),
    "with embedded guidance": lambda path: toy_sdxl.write(path, TOKENIZER, timestep_cond=16),
    "1.5": lambda path: toy_sd.write(path, TOKENIZER, "1.5"),
    "2.1": lambda path: toy_sd.write(path, TOKENIZER, "2.1"),
    "1.5 for inpainting": lambda path: toy_sd.write(path, TOKENIZER, "1.5", channels=9),
}


@pytest.mark.parametrize("kind", MODELS)
def test_accepts_every_kind_of_model(kind: str, target: Target, tmp_path: Path) -> None:
    compare_with_diffusers(plan_of(Checkpoint(MODELS[kind](tmp_path / "model")), target, lora_rank=2))


def test_accepts_an_inpainting_model_with_a_refiner(target: Target, tmp_path: Path) -> None:
    """Its image is compared without the refiner, and the refiner's networks are compared."""
    folder = Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))

    def add_channels(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["conv_in.weight"]
        tensors["conv_in.weight"] = torch.cat([weight, torch.zeros(len(weight), 5, 3, 3).to(weight)], dim=1)

    edit_weights(folder / "unet", add_channels)
    edit_json(folder / "unet" / "config.json", in_channels=9)
    edit_json(folder / "model_index.json", _class_name="StableDiffusionXLInpaintPipeline")
    refiner = Checkpoint(folder / "refiner")
    report = compare_with_diffusers(replace(plan_of(Checkpoint(folder), target), refiner=refiner))
    assert "refiner_unet" in {one.name for one in report.networks}


def test_accepts_the_configs_of_published_models() -> None:
    for class_name, family, entries in PUBLISHED.values():
        check_config(CheckpointConfig(Path("config.json"), entries), class_name, family)


QUICK = ("sdxl without attention in the middle", "sdxl controlnet without attention", "sd lcm", "sd 2 v-prediction")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in RECIPES]
)
def test_accepts_the_sizes_of_diffusers_tests(name: str, target: Target, tmp_path: Path) -> None:
    folder = recipes.write(tmp_path / "model", RECIPES[name], TOKENIZER)
    nets = (("net", folder / "controlnet"),) if RECIPES[name].controlnet is not None else ()
    checkpoint = Checkpoint(folder, controlnets=nets)
    check.check_model(checkpoint, None)
    report = compare_with_diffusers(plan_of(checkpoint, target, lora_rank=2))
    assert {one.name for one in report.networks} >= {f"controlnet.{net}" for net, _ in nets}


@pytest.mark.parametrize("precision", [FP16, BF16], ids=str)
def test_accepts_weights_in_half_precision(precision: Precision, toy: Path, target: Target) -> None:
    report = compare_with_diffusers(plan_of(Checkpoint(toy), target, precision, lora_rank=2))
    assert {one.limit for one in report.networks} == {LIMITS["float32"], LIMITS[precision.storage]}


def change(file: str, **entries: object) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / file, **entries)


def use_attention_in_vae(folder: Path) -> None:
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    made = diffusers.AutoencoderKL.from_config(
        vae.config,
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
    )
    made.save_pretrained(folder / "vae")


IGNORED_ENTRIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "centred input": (change("unet/config.json", center_input_sample=True), "^unet of .* differs from"),
    "scale of the middle": (change("unet/config.json", mid_block_scale_factor=2), "^unet of .* differs from"),
    "attention in a VAE": (use_attention_in_vae, "^vae_decoder of .* differs from"),
    "padding on the left": (change("tokenizer/tokenizer_config.json", padding_side="left"), "in other tokens"),
}


@pytest.mark.parametrize("case", IGNORED_ENTRIES)
def test_finds_an_entry_that_no_wrapper_reads(
    case: str, folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rules of entries, which refuse most of these. Nothing is stored."""
    change, words = IGNORED_ENTRIES[case]
    change(folder)
    monkeypatch.setattr(check, "check_config", lambda *_: None)
    with pytest.raises(DiffersFromDiffusers, match=words):
        build(plan_of(Checkpoint(folder), target), open_writable_store(tmp_path / "store"))
    assert not list((tmp_path / "store").rglob("*"))


@pytest.mark.parametrize("case", [name for name in IGNORED_ENTRIES if "left" not in name])
def test_refuses_such_an_entry_by_name(case: str, folder: Path) -> None:
    IGNORED_ENTRIES[case][0](folder)
    with pytest.raises(CheckpointError, match="center_input_sample|mid_block_scale_factor|Attn.*Block2D"):
        check.check_model(Checkpoint(folder), None)


def test_finds_a_difference_of_the_pipeline(toy: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_empty_prompts(base: Checkpoint, refiner: Checkpoint | None) -> ModelFacts:
        return read_model_facts(base, refiner).model_copy(update={"force_zeros_for_empty_prompt": False})

    monkeypatch.setattr(eager_model, "read_model_facts", encode_empty_prompts)
    with pytest.raises(DiffersFromDiffusers, match="An image of .* differs .* by [0-9]+ of 255 levels; at most 2"):
        compare_with_diffusers(plan_of(Checkpoint(toy), target))


def test_a_model_is_compared_once(toy: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is a record of the store. Another digest of the files is compared again."""
    store, plan = open_writable_store(tmp_path / "store"), plan_of(Checkpoint(toy), target)
    assert comparison.compare_once(plan, store, {"source": "a"}) is not None

    def fail(*_: object) -> NoReturn:
        raise DiffersFromDiffusers("compared again")

    monkeypatch.setattr(comparison, "compare_with_diffusers", fail)
    assert comparison.compare_once(plan, store, {"source": "a"}) is None
    with pytest.raises(DiffersFromDiffusers, match="compared again"):
        comparison.compare_once(plan, store, {"source": "b"})


def test_texts_are_many_and_different() -> None:
    assert len(set(texts())) >= 198 and len(texts()) == 200
    assert "" in texts() and any(not text.isascii() for text in texts())
