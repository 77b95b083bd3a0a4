"""Denoising loops on linear networks: their images, UNets in buckets, and requests that join a loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from model.cuda.graphs import StepQueue
from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import ImageState, Loop, has_room, slots
from model.denoising.networks import Denoiser, DenoiserVariant
from model.denoising.sampler_specs import SAMPLERS
from model.engines.engine import EngineSet
from model.pipeline import spec
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Mask
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from model.store.manifest import Bucket, Span
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub

HEIGHT, WIDTH = 64, 96
CPU = torch.device("cpu")
MakeLoop = Callable[[DenoiserVariant], Loop]


class GuidedStub(Stub):
    """The variant for guided images, whose batch holds conditional halves, then unconditional ones.

    Its second half uses the latents of the first, and zeros for text.
    """

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        cond = inputs["keys_values"].chunk(2)[0]
        sample = inputs["sample"].chunk(2)[0]
        halves = {"sample": torch.cat([sample, sample]), "keys_values": torch.cat([cond, torch.zeros_like(cond)])}
        return super().run({**inputs, **halves})


def bucketed(
    model: LoadedModel, *batches: int, guided: Sequence[int] = (), height: int = HEIGHT, width: int = WIDTH
) -> DenoiserVariant:
    """Return the UNet in static buckets, as on a GPU. `guided`: the batches with an engine of the variant, too."""
    signature = stub(model, spec.UNET).signature
    sides = {"height": Span(min=height, max=height), "width": Span(min=width, max=width)}

    def engines(kind: type[Stub], component: str, sizes: Sequence[int]) -> list[Stub]:
        stubs = [kind(component, signature) for _ in sizes]
        for engine, batch in zip(stubs, sizes, strict=True):
            engine.bucket = Bucket(batch=Span(min=batch, max=batch), **sides)
        return stubs

    paired = engines(GuidedStub, "unet_guided", [batch for batch in batches if batch in guided])
    return DenoiserVariant(EngineSet(engines(Stub, spec.UNET, batches)), paired=EngineSet(paired) if paired else None)


def stubs(unet: DenoiserVariant) -> list[Stub]:
    """Return the engines of a UNet, then the paired ones."""
    return [*unet.engines.engines, *(unet.paired.engines if unet.paired else ())]  # type: ignore[list-item]


def make_image(model: LoadedModel, **changes: Any) -> ImageState:
    """Return an image at the start of its first loop."""
    runner = Runner(model)
    plan = runner.plan(replace(PLAIN, **changes))
    [image] = plan.images()
    assert runner.advance(plan, image, EncodedOnce([0])) == (spec.UNET, HEIGHT, WIDTH)
    return image


def graph_loop(unet: DenoiserVariant, queue: StepQueue | None = None) -> GraphLoop:
    return captured(GraphLoop(Denoiser((unet,)), HEIGHT, WIDTH, CPU, queue))


def captured(loop: GraphLoop) -> GraphLoop:
    """Return a loop with all of its graphs."""
    for _ in loop.capture():
        pass
    return loop


def eager_loop(unet: DenoiserVariant) -> EagerLoop:
    return EagerLoop(Denoiser((unet,)), HEIGHT, WIDTH)


def run_to_end(loop: Loop) -> None:
    while loop.images:
        loop.step()


def latents_alone(**changes: object) -> torch.Tensor:
    """Return the result of a request that runs alone in the eager loop."""
    model = linear_model()
    image = make_image(model, **changes)
    denoise(eager_loop(bucketed(model, 2)), [image])
    return image.latents


def assert_latents(latents: torch.Tensor, **changes: object) -> None:
    """The latents are the result of a request that runs alone."""
    torch.testing.assert_close(latents, latents_alone(**changes), rtol=1e-4, atol=1e-4)


Mix = list[tuple[dict[str, object], int]]
"""Requests, as changes of PLAIN, each with the step at which it joins."""


def run_mix(loop: Loop, images: Sequence[ImageState], first_steps: Sequence[int]) -> None:
    """Run images that join at given steps, or as soon as there is room."""
    waiting = sorted(zip(first_steps, range(len(images)), strict=True))
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, images[waiting[0][1]].now.slots):
            loop.add(images[waiting.pop(0)[1]])
        assert slots(loop.images) <= max(2, loop.capacity)
        if loop.images:
            loop.step()
        step += 1


def check_mix(loop: Loop, model: LoadedModel, mix: Mix) -> None:
    """Requests of a mix have the results that they have alone."""
    images = [make_image(model, **changes) for changes, _ in mix]
    run_mix(loop, images, [first_step for _, first_step in mix])
    for image, (changes, _) in zip(images, mix, strict=True):
        assert_latents(image.latents, **changes)


LEVELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
MASK = Mask(np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH), np.uint8), "one", None, strength=1.0)
INPUTS: list[dict[str, object]] = [{}, {"image": LEVELS}, {"image": LEVELS, "masks": (MASK,)}]
requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["one", "two words", "sixsix and more"]),
        "negative_prompt": st.sampled_from([None, "four"]),
        "seed": st.integers(0, 2**32 - 1),
        "scheduler": st.sampled_from(SAMPLERS),
        "num_inference_steps": st.integers(1, 16),
        "forecast": st.sampled_from(["off", "fast"]),
        "guidance_start": st.sampled_from([0.0, 0.2]),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "guidance_end": st.sampled_from([0.0, 0.4, 1.0]),
        "guidance_rescale": st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    }
).flatmap(lambda request: st.sampled_from([request | inputs for inputs in INPUTS]))
mixes = st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=8)
