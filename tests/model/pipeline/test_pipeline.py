"""The pipeline on linear networks: the inputs that it passes to them, their order, and errors for NaN."""

from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine_builder.stores.store import WritableStore
from model.adapters.library import AdapterLibrary
from model.engines.aot_inductor.compiled_engine import AotInductorEngine
from model.engines.engine import EngineSet
from model.engines.features import LORA
from model.errors import BrokenImage, OverflowingRequest
from model.loading.load import Loaded
from model.loading.select import select
from model.loading.target import detect_targets
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import REPAINTED_LEVEL, Mask
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.store.manifest import Bucket, Span, TensorSpec
from tests.support.deployments import deployed
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, linear_model, stub
from tests.support.parity import image_of


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


def test_merges_adapters_at_sizes_without_their_unet(model: LoadedModel) -> None:
    """The UNet that takes adapters as inputs is optional, and may lack sizes."""
    signature = stub(model, spec.UNET).signature
    factors = tuple(TensorSpec(name=name, dtype="float32", shape=("rows", 1)) for name in ("lora_down", "lora_up"))
    engine = replace(
        stub(model, spec.UNET), signature=signature.model_copy(update={"inputs": signature.inputs + factors})
    )
    engine.bucket = Bucket(batch=Span(min=1, max=8), height=Span(min=64, max=64), width=Span(min=64, max=64))
    model.engines["unet_lora"] = EngineSet([engine])
    model.adapters = create_autospec(AdapterLibrary, instance=True)
    loras = (("style", 1.0),)
    for width, merged in ((64, ()), (96, loras)):
        plan = Runner(model).plan(replace(PLAIN, height=64, width=width, loras=loras))
        assert plan.adapters.merged == merged and (LORA in plan.first.step_plan.needs[0]) == (not merged)


def batches_of(model: LoadedModel, component: str) -> list[int]:
    """Return the batch of each of a UNet's calls."""
    return [len(inputs["sample"]) for inputs in stub(model, component).seen]


def test_work_is_shared_by_the_images_of_a_request(model: LoadedModel) -> None:
    """Text and times are encoded once, a step of all images is one call, and the images are decoded one by one."""
    generate(model, [replace(PLAIN, negative_prompt="four", num_inference_steps=7, num_images=3)])
    assert batches_of(model, spec.UNET) == [6] * 7
    [text] = stub(model, spec.UNET_TEXT).seen
    assert text["encoder_hidden_states"][:, 1, 0].tolist() == [3.0, 4.0]  # after the begin token
    times = stub(model, spec.UNET_TIME).seen
    assert [inputs["text_embeds"][:, 0].tolist() for inputs in times] == [[3.0] * 7, [4.0] * 7]
    assert times[0]["timestep"].tolist() == times[1]["timestep"].tolist() == [853, 711, 569, 427, 285, 143, 1]
    assert [inputs["latents"].shape for inputs in stub(model, spec.VAE_DECODER).seen] == [(1, 4, 8, 12)] * 3


def test_only_guided_steps_take_two_batch_entries(model: LoadedModel) -> None:
    batch = [
        replace(PLAIN, num_inference_steps=2),
        replace(PLAIN, num_inference_steps=4, guidance_scale=1.0),
        replace(PLAIN, num_inference_steps=4, guidance_end=0.75, num_images=2),
    ]
    generate(model, batch)
    # 2 guided + 1 + 4 guided; then without the finished one; then without guidance.
    assert batches_of(model, spec.UNET) == [7, 7, 5, 3]
    for fraction, batches in ((1.0, [2, 2]), (0.75, [2, 1]), (0.5, [1, 1])):
        refined = linear_model()
        generate(refined, [replace(PLAIN, use_refiner=True, negative_prompt="four", guidance_end=fraction)])
        assert batches_of(refined, spec.REFINER_UNET) == batches
        # Without a guided step, the refiner encodes no negative prompt.
        assert len(stub(refined, spec.REFINER_TEXT_ENCODER_2).seen[0]["input_ids"]) == batches[0]


BASE_NETWORKS = (spec.TEXT_ENCODER, spec.TEXT_ENCODER_2, spec.UNET_TEXT, spec.UNET_TIME, spec.UNET)
REFINER_NETWORKS = (spec.REFINER_TEXT_ENCODER_2, spec.REFINER_UNET_TEXT, spec.REFINER_UNET_TIME, spec.REFINER_UNET)


@pytest.mark.parametrize("fraction, unused", [(0.0, BASE_NETWORKS), (1.0, REFINER_NETWORKS)])
def test_part_without_steps_is_neither_encoded_nor_run(
    fraction: float, unused: tuple[str, ...], model: LoadedModel
) -> None:
    params = replace(PLAIN, use_refiner=True, denoising_frac=fraction, num_images=2)
    images, timings, warnings = generate(model, [params])
    assert len(images) == 2
    for name in (*BASE_NETWORKS, *REFINER_NETWORKS):
        assert bool(stub(model, name).seen) == (name not in unused), name
    assert list(timings) == ["text", "refine" if fraction == 0.0 else "denoise", "decode"]
    fields = [warning.partition(":")[0] for warning in warnings]
    assert fields == (["denoising_frac"] if fraction == 1.0 else [])


def test_requests_of_several_sizes_run_in_one_call(model: LoadedModel) -> None:
    batch = [PLAIN, replace(PLAIN, width=64, seed=4, use_refiner=True), replace(PLAIN, seed=5)]
    for params, image in zip(batch, generate(model, batch)[0], strict=True):
        assert image.shape == (params.height, params.width, 3)
        assert largest_difference(image, image_of(linear_model(), params)) <= 1


def test_every_stage_is_timed(model: LoadedModel) -> None:
    _, timings, _ = generate(model, [replace(PLAIN, use_refiner=True)])
    assert list(timings) == ["text", "denoise", "refine", "decode"]
    assert all(milliseconds > 0 for milliseconds in timings.values())
    assert "refine" not in generate(model, [PLAIN])[1]


def test_warns_of_a_truncated_prompt(model: LoadedModel) -> None:
    _, _, warnings = generate(model, [replace(PLAIN, prompt="a b c d e and more", negative_prompt="a b c d e too")])
    assert warnings == [
        "prompt: the text encoders read 5 tokens; the last 4 were left out: 'd e and more'",
        "negative_prompt: the text encoders read 5 tokens; the last 3 were left out: 'd e too'",
    ]


def test_warns_of_the_field_that_was_truncated(model: LoadedModel) -> None:
    """A mask without a prompt has the request's prompt."""
    mask = Mask(np.full((64, 96), 255, np.uint8), "a b c d e and more", None, strength=0.9999)
    masks = (mask, replace(mask, prompt="short", negative_prompt="a b c d e too"), mask)
    image = np.zeros((64, 96, 3), np.uint8)
    for prompt, fields in [("one", ["masks.0.prompt", "masks.1.negative_prompt", "masks.2.prompt"]),
                           (mask.prompt, ["prompt", "masks.1.negative_prompt"])]:  # fmt: skip
        _, _, warnings = generate(model, [replace(PLAIN, prompt=prompt, image=image, masks=masks)])
        assert [warning.partition(":")[0] for warning in warnings] == fields


def test_warns_of_a_mask_that_repaints_nothing(model: LoadedModel) -> None:
    """The latents read the mask in the pixels whose row and column are multiples of 8."""
    for white, warned in (
        (np.s_[0:0, 0:0], True),
        (np.s_[9:10, :], True),  # a line
        (np.s_[9:16, 9:16], True),
        (np.s_[9:17, 9:17], False),
        (np.s_[16:17, 24:25], False),
        (np.s_[:, :], False),
    ):
        levels = np.full((64, 96), REPAINTED_LEVEL - 1, np.uint8)
        levels[white] = REPAINTED_LEVEL
        mask = Mask(levels, "a cat", None, strength=0.9999)
        masks = (replace(mask, levels=np.full_like(levels, 255)), mask)
        _, _, warnings = generate(model, [replace(PLAIN, image=np.zeros((64, 96, 3), np.uint8), masks=masks)])
        assert warnings == warned * [
            "masks.1.image: the mask marks no latent to repaint, because it is white in no pixel of the result whose "
            "row and column are multiples of 8. Draw white parts of at least 8x8 pixels."
        ]


@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    "component, call, place, remedy",
    [
        (spec.TEXT_ENCODER_2, 0, "in the encoded prompts", "--precision bf16"),
        (spec.VAE_ENCODER, 0, "in the latents of the input image", "--vae-precision bf16"),
        (spec.UNET, 0, "during denoising, before the VAE decoder", "--precision bf16"),
        (spec.UNET, 3, "during denoising, before the VAE decoder", "--precision bf16"),
        (spec.VAE_DECODER, 0, "in the VAE decoder", "--vae-precision bf16"),
    ],
)
def test_states_where_nan_began(
    component: str, call: int, place: str, remedy: str, poison: float, model: LoadedModel
) -> None:
    stub(model, component).poison = (call, poison)
    request = replace(PLAIN, image=np.zeros((64, 96, 3), np.uint8)) if component == spec.VAE_ENCODER else PLAIN
    with pytest.raises(BrokenImage, match=f"NaN or infinite values, which began {place}.*build {remedy}") as broken:
        generate(model, [request])
    assert not isinstance(broken.value, OverflowingRequest)


SUSPECTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "adapters": (spec.UNET, {"loras": (("big", 10.0), ("off", 0.0), ("b", -2.0))}, "loras",
                 'the adapter "big" with scale 10, the adapter "b" with scale -2.'),
    "adapter of a text encoder": (spec.TEXT_ENCODER, {"loras": (("big", 10.0),)}, "loras", 'the adapter "big"'),
    "weights": (spec.UNET, {"prompt": "a (b:-9)", "prompt_syntax": "weighted"}, "prompt", "prompt weights up to 9."),
    "guidance": (spec.UNET, {"guidance_scale": 30.0}, "guidance_scale", "guidance_scale 30."),
}  # fmt: skip


@pytest.mark.parametrize("case", SUSPECTS)
def test_names_values_that_may_overflow(case: str, model: LoadedModel) -> None:
    component, changes, field, named = SUSPECTS[case]
    model.adapters = create_autospec(AdapterLibrary, instance=True, active=changes.get("loras", ()))
    model.adapters.can_pack.return_value = False
    stub(model, component).poison = (0, float("inf"))
    with pytest.raises(OverflowingRequest, match="Use smaller scales and weights") as broken:
        generate(model, [replace(PLAIN, **changes)])
    assert broken.value.field == field and f"The request has {named}" in str(broken.value)
    stub(model, component).poison = None
    stub(model, spec.VAE_DECODER).poison = (len(stub(model, spec.VAE_DECODER).seen), float("inf"))
    with pytest.raises(BrokenImage, match="in the VAE decoder") as broken_by_vae:
        generate(model, [replace(PLAIN, **changes)])
    assert not isinstance(broken_by_vae.value, OverflowingRequest)


def test_huge_latents_are_no_fault_of_the_vae(model: LoadedModel) -> None:
    """They are finite, and overflow in a VAE decoder in fp16."""
    stub(model, spec.UNET).poison = (3, 1e6)
    stub(model, spec.VAE_DECODER).poison = (0, float("inf"))
    with pytest.raises(BrokenImage, match="during denoising"):
        generate(model, [PLAIN])


def test_names_the_broken_image_and_goes_on(model: LoadedModel) -> None:
    expected, decoder = image_of(model, PLAIN), stub(model, spec.VAE_DECODER)
    decoder.poison = (len(decoder.seen) + 1, float("nan"))
    with pytest.raises(BrokenImage, match=r"image 1 of 3 \(counted from 0\)"):
        generate(model, [replace(PLAIN, num_images=3)])
    assert np.array_equal(image_of(model, PLAIN), expected)


@pytest.mark.parametrize(
    ("component", "tensor", "poison"),
    [("unet", "conv_out.bias", float("nan")), ("vae_decoder", "decoder.conv_out.bias", float("inf"))],
)
def test_compiled_engines_pass_nan_and_infinity_on(
    component: str, tensor: str, poison: float, store: WritableStore, loaded: Loaded
) -> None:
    selection = select(store.read_release(loaded.release), detect_targets(), deployed())
    [record], [weights_record] = selection.engines[component], selection.weights[component]
    package, constants = (store.get(blob.sha256, blob.bytes).read_bytes() for blob in (record.blob, record.constants))
    weights: dict[str, torch.Tensor] = {}
    for blob in weights_record.blobs:
        weights |= load_file(store.get(blob.sha256, blob.bytes))
    weights[tensor][0] = poison
    engine = AotInductorEngine(component, package, record.signature, record.bucket, constants, loaded.model.device)
    engine.bind(weights)
    model = replace(loaded.model, engines=loaded.model.engines | {component: EngineSet([engine])}, loops={})
    with pytest.raises(BrokenImage):
        generate(model, [replace(PLAIN, prompt="a circle")])
