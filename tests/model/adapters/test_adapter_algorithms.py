"""Images with adapters of each algorithm are those of the libraries that train them: at most 2 of 255 apart."""

import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_builder.adapters.add import add_adapter
from engine_builder.adapters.offline import read_merge
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.stores.store import WritableStore, open_writable_store
from model.cold_start import ColdStart
from model.deployment import ServedAdapters
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from tests.model.adapters.test_adapter_parity import TOLERANCE, params
from tests.support.adapters import copy_store
from tests.support.deployments import deployed, load_release
from tests.support.images import largest_difference
from tests.support.lycoris_adapters import ALGORITHMS, LycorisAdapter
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

# Of each algorithm: linears of all fused forms and of the text encoders, convolutions of all forms, and norms.
CHANGED = re.compile(
    r"unet\..*(mid_block\.attentions|up_blocks\.0\.attentions\.0)\..*(to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|norm3)"
    r"|unet\.up_blocks\.0\.(resnets\.0\.(conv\d|conv_shortcut|time_emb_proj|norm1)|upsamplers\.0\.conv)"
    r"|unet\.(conv_in|time_embedding\.linear_1)|text_encoder(_2)?\..*layers\.0\.(mlp\.fc1|self_attn\.(q|v)_proj)"
)
DECOMPOSED = ("dora", "dora-inputs", "doha", "dokr")
SEED = {name: number for number, name in enumerate(ALGORITHMS)}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_FOLDER)


@pytest.fixture(scope="module")
def trained(reference: Reference) -> dict[str, LycorisAdapter]:
    return {name: LycorisAdapter(reference.networks, CHANGED, name, seed) for name, seed in SEED.items()}


PEFT: dict[str, dict[str, Any]] = {
    "peft-dora": {"use_dora": True},
    "peft-rslora": {"use_rslora": True, "lora_alpha": 4},
    "peft-dora-rslora": {"use_dora": True, "use_rslora": True},
    "peft-with-bias": {"lora_bias": True},
}
"""Name -> options of PEFT's LoraConfig."""


@pytest.fixture(scope="module")
def peft_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of PEFT's adapters, written by diffusers with PEFT's options in the header."""
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
    from peft import LoraConfig, get_peft_model_state_dict

    folder, files = tmp_path_factory.mktemp("peft"), {}
    for seed, (name, options) in enumerate(PEFT.items()):
        unet: Any = UNet2DConditionModel.from_pretrained(MODEL_FOLDER / "unet")
        generator = torch.Generator().manual_seed(seed)
        targets = ["to_out.0", "ff.net.2"] if "lora_bias" in options else ["to_q", "to_k", "to_out.0", "conv1"]
        config = LoraConfig(**{"r": 4, "lora_alpha": 2, "target_modules": targets} | options)
        unet.add_adapter(config)
        with torch.no_grad():
            for key, parameter in unet.named_parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                if "lora_magnitude_vector" in key:
                    parameter.mul_(1 + 0.2 * drawn)
                elif "lora_" in key:
                    parameter.copy_(0.2 * drawn)
        with warnings.catch_warnings(action="ignore"):  # PEFT expects no vectors among a LoRA's tensors
            tensors = get_peft_model_state_dict(unet)
        StableDiffusionXLPipeline.save_lora_weights(
            folder / name,
            unet_lora_layers=tensors,
            unet_lora_adapter_metadata=config.to_dict(),
            weight_name=f"{name}.safetensors",
        )
        files[name] = folder / name / f"{name}.safetensors"
    return files


@pytest.fixture(scope="module")
def peft_reference(peft_files: Mapping[str, Path]) -> Reference:
    reference = Reference(MODEL_FOLDER)
    for name, path in peft_files.items():
        reference.load_lora(name, path)
    return reference


@pytest.fixture(scope="module")
def adapted(
    store: WritableStore,
    release: str,
    trained: Mapping[str, LycorisAdapter],
    peft_files: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Loaded:
    folder = tmp_path_factory.mktemp("algorithms")
    own = open_writable_store(copy_store(store, folder / "store"))
    files = {name: adapter.write(folder / f"{name}.safetensors") for name, adapter in trained.items()} | dict(
        peft_files
    )
    for name, path in files.items():
        add_adapter(own, name, path)
    return load_release(own, deployed(release, adapters=ServedAdapters(tuple(files))), detect_targets(), ColdStart())


def image(loaded: Loaded, *loras: Any) -> Pixels:
    return generate(loaded.model, [params(*loras)])[0][0]


def library_image(reference: Reference, trained: Mapping[str, LycorisAdapter], *loras: tuple[str, float]) -> Pixels:
    with ExitStack() as stack:
        for name, scale in loras:
            stack.enter_context(trained[name].applied(scale))
        return reference.generate(params())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_image_is_that_of_lycoris(
    name: str, adapted: Loaded, reference: Reference, trained: Mapping[str, LycorisAdapter]
) -> None:
    # LyCORIS and PEFT differ in what a scale of DoRA multiplies. Preheat follows PEFT.
    scale = 1.0 if name in DECOMPOSED else 0.7
    generated = image(adapted, (name, scale))
    assert largest_difference(generated, library_image(reference, trained, (name, scale))) <= TOLERANCE
    assert largest_difference(generated, image(adapted)) > 10 * TOLERANCE


def test_scale_0_of_a_block_leaves_out_a_dora(adapted: Loaded) -> None:
    nothing = tuple((f"{component}.", 0.0) for component in ("unet", "text_encoder", "text_encoder_2"))
    assert np.array_equal(image(adapted, ("dora", nothing)), image(adapted))


def test_three_algorithms_add_up(adapted: Loaded, reference: Reference, trained: Mapping[str, LycorisAdapter]) -> None:
    plain = image(adapted)
    for loras in (
        (("loha", 0.6), ("lokr", -0.5), ("locon", 0.4)),
        (("dokr", 1.0), ("dora", 1.0), ("full", 0.3)),  # each decomposes the model's own weight
    ):
        expected = library_image(reference, trained, *loras)
        assert largest_difference(image(adapted, *loras), expected) <= TOLERANCE, loras
    assert np.array_equal(image(adapted), plain)


def test_build_merges_every_algorithm(
    reference: Reference, trained: Mapping[str, LycorisAdapter], tmp_path: Path
) -> None:
    """`preheat build --lora` changes the checkpoint's networks, with which diffusers makes the same image."""
    loras = (("dokr", 1.0), ("loha-tucker", 0.6), ("full", 0.4), ("ia3", 0.5))
    files = [(trained[name].write(tmp_path / f"{name}.safetensors"), scale) for name, scale in loras]
    merge, merged = read_merge(Checkpoint(MODEL_FOLDER), files), Reference(MODEL_FOLDER)
    for component, network in merged.networks.items():
        merge.change(MODEL_FOLDER, component, network)
    expected = library_image(reference, trained, *loras)
    assert largest_difference(merged.generate(params()), expected) <= TOLERANCE


def test_images_are_those_of_peft(adapted: Loaded, peft_reference: Reference) -> None:
    plain = image(adapted)
    # PEFT's DoRA scales what earlier adapters of a layer added, so that its result depends on their order. The first
    # one changes the model's own weight, as every one does here.
    sets = [[(name, 0.7)] for name in PEFT]
    sets += [[("peft-dora", 0.7), ("peft-rslora", 0.4), ("peft-with-bias", -0.5)]]
    for loras in sets:
        generated = image(adapted, *loras)
        assert largest_difference(generated, peft_reference.generate(params(*loras))) <= TOLERANCE, loras
        assert largest_difference(generated, plain) > 10 * TOLERANCE, loras
