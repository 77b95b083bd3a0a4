"""Every field of an image is sent to other ranks, or marked as local."""

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch

from model.cuda.streams import Outputs
from model.denoising.loop import LOCAL, Conditioning, ImageState, Known
from model.denoising.samplers import sampler_schedule
from model.denoising.step_plan import StepPlan
from model.images.pending import PendingImage
from model.ranks.messages import AddImage, TensorShape, put_tensors, take_tensors
from tests.support.linear_networks import SCHEDULE

KEY = ("unet", 64, 96)


class Pickler(pickle.Pickler):
    """Refuses tensors and generators, which would be sent by value."""

    def reducer_override(self, value: Any) -> Any:
        assert not isinstance(value, torch.Tensor | torch.Generator)
        return NotImplemented


def image_with_all_fields() -> ImageState:
    generator = torch.Generator().manual_seed(5)
    numbers = iter(range(1, 100))

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, next(numbers), dtype=dtype)

    shared = tensor(1, 3, dtype=torch.float16)
    plan = StepPlan(
        sampler_schedule("Heun", 2, SCHEDULE),
        guidance=np.array([5, 5, 1], np.float32),
        guidance_rescale=0.5,
        entries=np.array([2, 2, 1], np.int8),
        zero_negative=True,
        requested_step=np.array([0, 0, 1]),
        needs=(frozenset({"control"}), frozenset(), frozenset()),
        uses={"canny": np.array([True, False, False])},
        exact=np.array([True, False, True]),
    )
    image = ImageState(
        3,
        generator,
        plan,
        latents=tensor(1, 4, 8, 12),
        cond=Conditioning({"a": tensor(1, 2), "shared": shared}),
        uncond=Conditioning({"a": tensor(1, 2), "shared": shared}),
        step=1,
        stage=2,
        pass_index=1,
        known=Known(tensor(1, 4, 8, 12), tensor(1, 4, 8, 12), tensor(1, 1, 8, 12)),
        extra_channels=tensor(1, 5, 8, 12),
        inputs=Outputs(None, (tensor(1),)),
        checks={"text": tensor(1)},
        result=Outputs(None, (tensor(1),)),
        pixels=PendingImage(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), torch.ones(1, dtype=torch.bool), None),
    )
    generator.manual_seed(7)
    torch.randn(3, generator=generator)  # a state between two seeds
    return image


def sent(image: ImageState) -> tuple[ImageState, list[torch.Tensor]]:
    """Return the image that another rank gets, and the tensors that were sent for it."""
    message, tensors = take_tensors(AddImage(KEY, 1, image))
    Pickler(file := BytesIO()).dump(message)
    following = iter(tensors)

    def receive(shape: TensorShape) -> torch.Tensor:
        tensor = next(following)
        assert (tensor.shape, tensor.dtype) == (shape.shape, shape.dtype)
        return tensor.clone()

    received = put_tensors(pickle.loads(file.getvalue()), receive)
    assert isinstance(received, AddImage) and (received.key, received.number) == (KEY, 1)
    return received.image, tensors


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if is_dataclass(one):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("name", [one.name for one in fields(ImageState)])
def test_each_field_is_sent_or_marked_as_local(name: str) -> None:
    image, empty = image_with_all_fields(), ImageState(0, torch.Generator(), StepPlan(*[None] * 9))  # type: ignore
    assert not same(getattr(image, name), getattr(empty, name)), f"image_with_all_fields sets no {name}"
    [one] = [one for one in fields(ImageState) if one.name == name]
    expected = empty if one.metadata == LOCAL else image
    assert same(getattr(sent(image)[0], name), getattr(expected, name))


def test_image_with_defaults_is_sent() -> None:
    plain = ImageState(0, torch.Generator(), image_with_all_fields().plan)
    assert same(sent(plain)[0], plain)


def test_shared_tensor_is_sent_once() -> None:
    image, tensors = sent(image_with_all_fields())
    assert len(tensors) == len({id(tensor) for tensor in tensors}) == 1 + 3 + 3 + 1
    assert image.uncond is not None and image.cond.inputs["shared"] is image.uncond.inputs["shared"]
