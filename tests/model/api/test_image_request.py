"""Requests with images and masks: their fields, their resolution to pixels, and what is refused."""

import base64
import io
import itertools
import struct
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pydantic
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from model.api.images import read_images, resolve_with_images
from model.api.resolve import resolve
from model.errors import Cancelled, RequestRefused
from model.images.inputs import read_image
from model.images.postprocess import feather
from model.loading.served import Defaults, ServedModel, SizeList
from model.pipeline.params import REPAINTED_LEVEL, GenerationParams
from model.pipeline.request_plan import plan_request
from model.request_fields import GenerationRequest
from tests.support.images import file_of
from tests.support.linear_networks import linear_model
from tests.support.odd_images import chunk

SIZES = SizeList(((128, 128), (192, 128)))
SERVED = ServedModel(128, 128, SIZES, has_refiner=True, defaults=Defaults(), release="toy/1", image_sizes=SIZES)
Pixels = npt.NDArray[np.uint8]


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def damaged_png(width: int, height: int) -> str:
    """Return a PNG with a valid header, whose pixels cannot be decoded."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT") + chunk(b"IEND")).decode()


def half(width: int, height: int, level: int = 255) -> Pixels:
    """Return a mask whose right half has this level."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, width // 2 :] = level
    return mask


def resolved(served: ServedModel = SERVED, **fields: Any) -> GenerationParams:
    request = GenerationRequest(**{"prompt": "a cat", "image": file_of(noise(128, 128))} | fields)
    return resolve_with_images(request, served)


def test_image_alone_gets_the_defaults_of_diffusers() -> None:
    params = resolved()
    assert params.image is not None
    assert np.array_equal(params.image, noise(128, 128))
    assert (params.width, params.height, params.strength, params.masks, params.task) == (
        128, 128, 0.3, (), "image_to_image",
    )  # fmt: skip
    assert resolve(GenerationRequest(prompt="a cat"), SERVED).task == "text_to_image"


def test_masks_inherit_the_settings_of_the_request() -> None:
    masks = [
        {"image": file_of(half(128, 128))},
        {"image": file_of(half(128, 128, 127)), "prompt": "a dog", "negative_prompt": "", "strength": 0.5},
        {"image": file_of(half(128, 128, 128)), "feather": 4},
    ]
    first, second, third = resolved(masks=masks, negative_prompt="blue").masks
    assert (first.prompt, first.negative_prompt, first.strength) == ("a cat", "blue", 0.9999)
    assert (second.prompt, second.negative_prompt, second.strength) == ("a dog", "", 0.5)
    assert np.array_equal(first.levels, half(128, 128)) and not second.levels.any()
    assert np.array_equal(third.levels, feather(half(128, 128), 4))
    assert resolved(masks=masks).task == "inpaint"
    assert [mask.strength for mask in resolved(masks=masks, strength=0.8).masks] == [0.8, 0.5, 0.8]


def test_default_strengths_leave_a_step() -> None:
    """The default is raised to the smallest strength that leaves a step. More of the steps run with larger defaults."""
    masks = [{"image": file_of(half(128, 128))}]
    for sampler, steps in itertools.product(("Euler", "Heun"), (1, 2, 3, 4, 7, 10)):
        fields: dict[str, Any] = {"num_inference_steps": steps, "scheduler": sampler}
        for params, default in [(resolved(**fields), 0.3), (resolved(**fields, masks=masks), 0.9999)]:
            assert params.strength == max(default, np.ceil(1e4 / steps) / 1e4)
            run = max(1, int(steps * default))
            entries = 2 * run - 1 if sampler == "Heun" else run  # Heun runs the UNet twice, except in its last step
            assert plan_request(linear_model(), params).steps == entries
            assert [mask.strength for mask in params.masks] == [params.strength] * len(params.masks)
    assert resolved(timesteps=[900, 500], scheduler="Euler").strength == 0.5


def test_feather_repaints_what_diffusers_repaints() -> None:
    mask = np.zeros((128, 128), np.uint8)
    mask[20:70, 30:90] = 255
    [feathered] = resolved(masks=[{"image": file_of(mask), "feather": 8}]).masks
    processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # diffusers with NumPy 2
        expected = processor.preprocess(processor.blur(Image.fromarray(mask), blur_factor=8))
    assert np.array_equal(feathered.levels >= REPAINTED_LEVEL, expected[0, 0].numpy() == 1)
    assert len(np.unique(feathered.levels)) > 100


def test_refuses_a_blur_that_leaves_nothing_to_repaint() -> None:
    mask = np.zeros((128, 128), np.uint8)
    mask[60:64, 60:64] = 255
    black = {"image": file_of(np.zeros_like(mask)), "feather": 64}
    resolved(masks=[black])
    with pytest.raises(RequestRefused, match="64 pixels leaves no level of at least 128 in the mask") as refused:
        resolved(masks=[black, {"image": file_of(mask), "feather": 64}])
    assert refused.value.field == "masks.1.feather"


def test_size_defaults_to_that_of_the_image() -> None:
    params = resolved(image=file_of(noise(192, 128)))
    assert (params.width, params.height) == (192, 128)
    with pytest.raises(RequestRefused, match=r"missing\. 64x128 is not a size served here; .* 128x128, 192x128"):
        resolved(image=file_of(noise(64, 128)))


def test_resizes_image_and_masks_alike() -> None:
    image = np.repeat(half(96, 96)[..., None], 3, axis=2)
    masks = [{"image": file_of(half(96, 96))}]
    for resize in ("stretch", "crop", "pad"):
        params = resolved(image=file_of(image), masks=masks, width=192, height=128, resize=resize)
        assert params.image is not None
        assert params.image.shape == (128, 192, 3) and params.masks[0].levels.shape == (128, 192)
        assert np.array_equal(params.image[..., 0] >= 128, params.masks[0].levels == 255)


MASK = {"image": file_of(half(128, 128))}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"width": 192}, "image", "the image has 128 x 128 pixels, but 192 x 128 are requested"),
        ({"strength": 0.03}, "strength", "0.03 of 30 steps leaves no step. Set at least 0.0334."),
        ({"num_inference_steps": 2, "strength": 0.3}, "strength", "0.3 of 2 steps leaves no step. Set at least 0.5."),
        (
            {"num_inference_steps": 1, "strength": 0.9999, "masks": [MASK]}, "strength",
            "0.9999 of 1 steps leaves no step. Set at least 1.",
        ),
        ({"masks": [{"image": file_of(half(128, 64))}]}, "masks.0.image", "the mask has 128 x 64 pixels"),
        ({"masks": [MASK, MASK | {"strength": 0.0}]}, "masks.1.strength", "0 of 30 steps leaves no step"),
        ({"masks": [{"image": "@"}]}, "masks.0.image", "the text is not base64"),
    ],
)  # fmt: skip
def test_refuses_what_does_not_fit_together(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        resolved(**fields)
    assert refused.value.field == field


def test_refuses_fields_that_need_an_image_or_masks() -> None:
    image, missing = {"image": file_of(noise(128, 128))}, "needs `image`, which is missing"
    for fields, others, message in (
        ({"strength": 0.5}, {}, missing),
        ({"masks": [{"image": "AAAA"}]}, {}, missing),
        ({"resize": "crop"}, {}, missing),
        ({"resize": "refuse"}, {}, missing),
        ({"composite": True}, {}, "true needs `masks`, which are missing"),
        ({"color_match": True}, image, "true needs `masks`, which are missing"),
    ):
        with pytest.raises(RequestRefused, match=message) as refused:
            resolve(GenerationRequest(prompt="a cat", **fields, **others), SERVED)
        assert refused.value.field == next(iter(fields))
    resolve(GenerationRequest(prompt="a cat", composite=False, color_match=False), SERVED)


def test_abandoned_request_decodes_no_further_image() -> None:
    """`abandoned` turns true before the headers are read, before the image and before the mask is decoded."""
    image, damaged = file_of(noise(128, 128)), damaged_png(128, 128)
    images = [{"image": "AAAA"}, {"image": damaged}, {"image": image, "masks": [{"image": damaged}]}]
    for checks, fields in enumerate(images):
        request = GenerationRequest(prompt="a cat", **fields)
        with pytest.raises(RequestRefused):
            resolve_with_images(request, SERVED)
        answers = iter([False] * checks + [True])
        with pytest.raises(Cancelled):
            resolve_with_images(request, SERVED, lambda answers=answers: next(answers))  # type: ignore[misc]


LARGE = file_of(np.zeros((4000, 8000), np.uint8))


def test_refuses_too_many_pixels_in_all_images() -> None:
    masks, controls = [{"image": LARGE}] * 8, [{"name": "edges", "image": LARGE}] * 2
    with pytest.raises(RequestRefused, match="have 352.0 megapixels. At most 320 are accepted") as refused:
        resolved(resize="stretch", width=128, height=128, image=LARGE, masks=masks, controls=controls)
    assert refused.value.field == "controls.1.image"


def test_prices_are_known_before_pixels_are_decoded() -> None:
    """In pixels of a simple file: each scan of a JPEG counts, and the bytes if they are more."""
    file = io.BytesIO()
    Image.fromarray(noise(128, 192)).save(file, "jpeg", progressive=True)
    scans, damaged = base64.b64encode(file.getvalue()).decode(), damaged_png(128, 192)
    request = GenerationRequest(
        prompt="a cat", image=scans, masks=[{"image": damaged}], width=128, height=128, resize="crop"
    )
    image, mask = read_images(request, SERVED).parts
    assert image.price == 128 * 192 * read_image(scans, "image").container.scans > 6 * 128 * 192
    assert mask.price == 128 * 192
    with pytest.raises(RequestRefused, match="damaged"):
        mask.decode()


def test_refuses_an_image_of_a_size_without_encoder() -> None:
    served = replace(SERVED, image_sizes=SizeList(((192, 128),)))
    with pytest.raises(RequestRefused, match="encoder for 128x128, only for 192x128 .* with `resize`") as refused:
        resolved(served)
    assert refused.value.field == "image"
    with pytest.raises(RequestRefused, match="no VAE encoder for the sizes served here. Build the model again"):
        resolved(replace(SERVED, image_sizes=None))
    assert resolved(served, width=192, height=128, resize="stretch").width == 192
    assert resolve(GenerationRequest(prompt="a cat"), served).width == 128


def test_refuses_wrong_values() -> None:
    for fields, message in (
        ({"masks": []}, "masks: got a list, expected a list of 1 to 8 entries"),
        ({"masks": [{"image": "AAAA"}] * 9}, "masks: got a list, expected a list of 1 to 8 entries"),
        ({"masks": [{}]}, "masks.0.image: is required: a string"),
        ({"masks": [MASK | {"feather": -1}]}, "masks.0.feather: got -1, expected a number from 0 to 256"),
        ({"masks": [MASK | {"prompt": " "}]}, 'masks.0.prompt: got " ", nothing but whitespace'),
        ({"masks": [MASK | {"colour": 1}]}, "masks.0.colour: is not a known field; the fields are image"),
        ({"strength": 1.5}, "strength: got 1.5, expected a number from 0 to 1"),
        ({"resize": "zoom"}, 'resize: got "zoom", expected one of "refuse"'),
        ({"image": 3}, "image: got 3, expected a string"),
        ({"upscale": 4}, "upscale: got 4, expected"),
    ):
        with pytest.raises(pydantic.ValidationError) as refused:
            GenerationRequest(prompt="a cat", **fields)
        [problem] = refused.value.errors()
        assert message in f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
