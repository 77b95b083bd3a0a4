"""PEFT's options of an adapter give the same scales as in PEFT and diffusers, or are refused by name."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from engine_builder.adapters.bad_adapter import BadAdapter
from engine_builder.adapters.options import NO_EFFECT, PEFT_OPTIONS, READ
from engine_builder.adapters.read import AdapterFile, open_adapter, read_changes
from model.adapters.changes import Change
from model.adapters.layers import Layer
from tests.support.adapters import LINEARS, Delta, module_shapes, random_deltas
from tests.support.repository import MODEL_FOLDER

COMPONENTS = ("unet", "text_encoder", "text_encoder_2")
TARGETS = {"unet": ["to_q", "to_k", "to_v", "to_out.0"]} | dict.fromkeys(COMPONENTS[1:], ["q_proj", "fc1"])
TO_Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
Options = dict[str, Any]


@pytest.fixture(scope="module")
def layers() -> dict[str, Layer]:
    shapes = module_shapes(MODEL_FOLDER)
    return {name: Layer(name, shape, name.partition(".")[0], name) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def deltas(layers: dict[str, Layer]) -> dict[str, Delta]:
    """Factors of rank 4 for the modules of `TARGETS`, and of rank 2 for the UNet's attn2."""
    deltas = random_deltas({name: layer.shape for name, layer in layers.items()}, LINEARS, 4, seed=1)
    chosen = {
        name: delta
        for name, delta in deltas.items()
        if any(name.endswith(f".{target}") for target in TARGETS[name.partition(".")[0]])
    }
    return {name: (d[:2], u[:, :2], a) if ".attn2." in name else (d, u, a) for name, (d, u, a) in chosen.items()}


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(MODEL_FOLDER)


def options_of(**components: Options) -> Options:
    """Return the options that diffusers writes: those that every file has, and more for some components."""
    options = {}
    for component in COMPONENTS:
        every = {"r": 4, "lora_alpha": 4, "target_modules": TARGETS[component], "peft_type": "LORA"}
        if component == "unet":
            every["rank_pattern"] = {r".*attn2\.to_.*": 2}
        options |= {f"{component}.{key}": value for key, value in (every | components.get(component, {})).items()}
    return options


def write(path: Path, deltas: Mapping[str, Delta], options: Options) -> Path:
    ends = (".lora_A.weight", ".lora_B.weight")
    tensors = {name + end: delta[index] for name, delta in deltas.items() for index, end in enumerate(ends)}
    metadata = {"lora_adapter_metadata": json.dumps(options)}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)
    return path


def read(path: Path, layers: dict[str, Layer]) -> tuple[dict[str, Change], AdapterFile]:
    file = open_adapter(path)
    return read_changes(file, layers), file


def diffusers_scales(pipeline: StableDiffusionXLPipeline, path: Path) -> dict[str, float]:
    """Load a file with diffusers. Returns the scale of each layer, without those whose tensors it leaves out."""
    scales = {}
    try:
        with warnings.catch_warnings(action="ignore"):
            pipeline.load_lora_weights(path)
        for component in COMPONENTS:
            for name, module in getattr(pipeline, component).named_modules():
                if isinstance(module, LoraLayer) and bool(module.lora_B["default_0"].weight.any()):
                    prefix = "text_model." if name.startswith("encoder.") else ""
                    scales[f"{component}.{prefix}{name}"] = module.scaling["default_0"]
    finally:
        pipeline.unload_lora_weights()
    return scales


EVERYWHERE = {
    "a fraction": {"lora_alpha": 2.5, "lora_dropout": 0.5, "init_lora_weights": "Gaussian", "inference_mode": True},
    "the first match": {"alpha_pattern": {"attn1.to_q": 64, "0.mlp.fc1": 32, "to_q": 1, "fc1": 2}},
    "the first match, reversed": {"alpha_pattern": {"to_q": 1, "fc1": 2, "attn1.to_q": 64, "0.mlp.fc1": 32}},
    "regular expressions": {"alpha_pattern": {r".*attn1\.to_[qk]": 64, r"layers\.[02]\.mlp\.fc\d": 32, "mlp.fc.": 3}},
    "no ends of words": {"alpha_pattern": {"o_q": 64, "c1": 32, "_proj": 8}},
    "anchored": {"alpha_pattern": {r"^down_blocks\..*": 64, r"^encoder.*": 32, r"^text_model.*": 16}},
    "whole names": {"alpha_pattern": {TO_Q.removeprefix("unet."): 64, "encoder.layers.0.mlp.fc1": 32}},
    "alternatives across the group": {"alpha_pattern": {"to_q)|(fc1": 64}},
    "a zero": {"alpha_pattern": {"to_q": 0, "fc1": -4}, "use_dora": False, "bias": "none", "modules_to_save": None},
}


def assert_equals_diffusers(pipeline: StableDiffusionXLPipeline, path: Path, layers: dict[str, Layer]) -> AdapterFile:
    """Assert that a file gives each layer the scale that it has in diffusers. Returns the read file."""
    factors, file = read(path, layers)
    assert {name: entry.scale for name, entry in factors.items()} == diffusers_scales(pipeline, path)
    return file


@pytest.mark.parametrize("options", EVERYWHERE.values(), ids=EVERYWHERE)
def test_scales_are_those_of_diffusers(
    options: Options, deltas: dict[str, Delta], layers: dict[str, Layer], pipeline: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.safetensors", deltas, options_of(**dict.fromkeys(COMPONENTS, options)))
    assert_equals_diffusers(pipeline, path, layers)


def test_components_have_their_own_options(
    deltas: dict[str, Delta], layers: dict[str, Layer], pipeline: StableDiffusionXLPipeline, tmp_path: Path
) -> None:
    options = options_of(
        unet={"lora_alpha": 12, "alpha_pattern": {"fc1": 100}},
        text_encoder={"lora_alpha": 2, "alpha_pattern": {"q_proj": 8}, "target_modules": r".*(q_proj|fc\d)"},
        text_encoder_2={"alpha_pattern": {r"text_model\..*layers\.1.*": 16}, "layers_to_transform": [0, 1, 2, 3]},
    )
    path = write(tmp_path / "a.safetensors", deltas, options | {"transformer.alpha_pattern": {"to_q": 9}})
    assert_equals_diffusers(pipeline, path, layers)
    assert len(set(diffusers_scales(pipeline, path).values())) > 4


def test_names_of_transformers_4_are_warned_about(
    deltas: dict[str, Delta], layers: dict[str, Layer], pipeline: StableDiffusionXLPipeline, tmp_path: Path
) -> None:
    options = options_of(text_encoder={"alpha_pattern": {r"text_model\.encoder.*": 8}})
    file = assert_equals_diffusers(pipeline, write(tmp_path / "a.safetensors", deltas, options), layers)
    assert "text_encoder.alpha_pattern names text_model" in file.warnings[0]


@pytest.mark.parametrize(
    "targets, ranks, alphas",
    [
        (["to_q", "to_k"], {"attn2.to_k": 2}, {r"down_blocks\.1\..*to_q": 16, "to_q": 2, "^mid_block.*": 5}),
        (r"(down|mid)_blocks?\..*(conv[12]|proj_in|ff\.net\.2)", {r"resnets\.0\.conv1": 3}, {r".*conv\d": 16}),
    ],
)
def test_scales_of_a_folder_are_those_of_peft(
    targets: list[str] | str, ranks: Options, alphas: Options, layers: dict[str, Layer], tmp_path: Path
) -> None:
    config = LoraConfig(
        r=4, target_modules=targets, lora_alpha=6, rank_pattern=ranks, alpha_pattern=alphas, init_lora_weights=False
    )
    trained = get_peft_model(UNet2DConditionModel.from_pretrained(MODEL_FOLDER / "unet"), config)
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(UNet2DConditionModel.from_pretrained(MODEL_FOLDER / "unet"), tmp_path)
    factors, _ = read(tmp_path, layers)
    expected = {
        f"unet.{name.removeprefix('base_model.model.')}": module
        for name, module in loaded.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert factors.keys() == expected.keys()
    for name, entry in factors.items():
        change = expected[name].get_delta_weight("default")
        torch.testing.assert_close(
            (entry.scale * (entry.parts["up"] @ entry.parts["down"].flatten(1))).view_as(change), change
        )


def test_every_option_of_peft_is_known() -> None:
    fields = {field.name for kind in (LoraConfig, LoHaConfig, LoKrConfig) for field in dataclasses.fields(kind)}
    assert fields <= PEFT_OPTIONS.keys(), "decide whether the new options of PEFT change an adapter"


CHANGED = {"bias": "all", "layer_replication": [[0, 1]], "modules_to_save": ["conv_in"], "kasa_config": {}}


@pytest.mark.parametrize("place", ["header", "folder"])
def test_refuses_option(place: str, deltas: dict[str, Delta], tmp_path: Path) -> None:
    deltas = {TO_Q: deltas[TO_Q]}
    for option in [name for name, use in PEFT_OPTIONS.items() if use not in (READ, NO_EFFECT)]:
        value = CHANGED.get(option, True)
        if place == "header":
            path = write(tmp_path / "a.safetensors", deltas, options_of(text_encoder={option: value}))
        else:
            path = tmp_path
            save_file(
                load_file(write(path / "adapter_model.safetensors", deltas, {})), path / "adapter_model.safetensors"
            )
            (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, option: value}))
        with pytest.raises(BadAdapter, match=f"is no adapter that can be used: PEFT's option {option} states"):
            open_adapter(path)


REFUSED: list[tuple[Options, str]] = [
    ({"init_lora_weights": "pissa"}, "option init_lora_weights states a change of the model's own weights .pissa."),
    ({"peft_type": "VERA"}, "option peft_type states VERA"),
    ({"use_dora": True}, "to_q has no magnitude, and PEFT's option use_dora is true"),
    ({"use_future": True}, "option use_future states something unknown"),
    ({"r": 8}, "has rank 4, and PEFT's options state 8"),
    ({"rank_pattern": {"to_q": 3}}, "to_q has rank 4, and PEFT's options state 3"),
    ({"rank_pattern": {"to_q": True}}, "to_q has an invalid rank in PEFT's options"),
    ({"r": 10**400}, "to_q has an invalid rank in PEFT's options"),
    ({"lora_alpha": "8"}, "has an invalid alpha .8."),
    ({"lora_alpha": None}, "has an invalid alpha .None."),
    ({"lora_alpha": 1e9}, "has an invalid alpha"),
    ({"lora_alpha": float("nan")}, "has an invalid alpha .nan."),
    ({"alpha_pattern": {"to_q": [1]}}, "to_q has an invalid alpha"),
    ({"alpha_pattern": ["to_q"]}, "option alpha_pattern is .*, expected an object"),
    ({"alpha_pattern": {"(": 1}}, "patterns cannot be evaluated: '.' is not a regular expression"),
    ({"alpha_pattern": {"a" * 2000: 1}}, "patterns cannot be evaluated: .* has 2000 characters"),
    ({"alpha_pattern": {r"(\w+\.?)+!": 1}}, "patterns cannot be evaluated: they take more than 5 s"),
    ({"rank_pattern": {"(" * 900: 1}}, "patterns cannot be evaluated"),
]


def test_refuses_options(deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path) -> None:
    for options, message in REFUSED:
        path = write(tmp_path / "a.safetensors", {TO_Q: deltas[TO_Q]}, options_of(unet=options))
        with pytest.raises(BadAdapter, match=message):
            read(path, layers)


def test_refuses_tensors_that_diffusers_leaves_out(
    deltas: dict[str, Delta], layers: dict[str, Layer], pipeline: StableDiffusionXLPipeline, tmp_path: Path
) -> None:
    for options in (
        *({"target_modules": ["q_proj"]}, {"target_modules": r".*\.q_proj"}, {"layers_to_transform": [0]}),
        *({"exclude_modules": ["layers.1.mlp.fc1"]}, {"exclude_modules": r".*1\.mlp.*"}),
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"layers_to_transform": [1, 2], "layers_pattern": ["blocks", "layers"]},
    ):
        path = write(tmp_path / "a.safetensors", deltas, options_of(text_encoder=options))
        assert diffusers_scales(pipeline, path).keys() < deltas.keys(), options
        with pytest.raises(BadAdapter, match="leave out .*, which has tensors"):
            read(path, layers)


def test_unknown_number_is_warned_about(deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path) -> None:
    options = options_of(**dict.fromkeys(COMPONENTS, {"future_size": 16, "future_config": None}))
    _, file = read(write(tmp_path / "a.safetensors", deltas, options), layers)
    [warning] = file.warnings
    assert "PEFT's option future_size (16) is unknown and was not read" in warning


def test_alpha_of_file_and_options_must_agree(
    deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.safetensors", {TO_Q: deltas[TO_Q]}, {})
    tensors = load_file(path)

    def set_alpha(alpha: float, stated: float) -> None:
        metadata = {"lora_adapter_metadata": json.dumps(options_of(unet={"lora_alpha": stated}))}
        save_file(tensors | {f"{TO_Q}.alpha": torch.tensor(alpha, dtype=torch.float16)}, path, metadata)

    for alpha in (4, 0.1):  # the second one is rounded to float16 in the file
        set_alpha(alpha, alpha)
        assert read(path, layers)[0][TO_Q].scale == pytest.approx(alpha / 4, rel=1e-3)
    for alpha, stated, message in (
        (16, 4, "has alpha 16, and PEFT's options state 4"),
        (4, 10**400, "has an invalid alpha"),
    ):
        set_alpha(alpha, stated)
        with pytest.raises(BadAdapter, match=message):
            read(path, layers)


def test_bare_keys_take_bare_options(deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path) -> None:
    """As `unet.save_lora_adapter` writes them."""
    options = {"r": 4, "lora_alpha": 2, "alpha_pattern": {"attn1.to_q": 8}}
    bare = {TO_Q.removeprefix("unet."): deltas[TO_Q]}
    assert read(write(tmp_path / "a.safetensors", bare, options), layers)[0][TO_Q].scale == 2
    with pytest.raises(BadAdapter, match="options in the header do not name a component"):
        read(write(tmp_path / "a.safetensors", {TO_Q: deltas[TO_Q]}, options), layers)
