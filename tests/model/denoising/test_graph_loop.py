"""The graph loop, run on the CPU and compared with the eager loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model.cuda.graphs import StepQueue
from model.denoising.buffers import buffer_shapes
from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import ImageState, Known, Loop, StepNetworks, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.engines.signatures import unet_signature
from model.pipeline import loaded_model, spec
from model.pipeline.loaded_model import LoadedModel, make_loop
from model.pipeline.params import Mask
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from model.store.manifest import Bucket, Span
from model.validation import MAX_STEPS
from tests.support.linear_networks import PLAIN, WIDTHS, Stub, linear_model, stub

HEIGHT, WIDTH = 64, 96
CPU = torch.device("cpu")


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
    model: LoadedModel,
    *batches: int,
    guided: Sequence[int] = (),
    height: int = HEIGHT,
    width: int = WIDTH,
    kind: type[Stub] = Stub,
) -> EngineSet:
    """Return the UNet in static buckets, as on a GPU. `guided`: the batches with an engine of the variant, too."""
    signature = stub(model, spec.UNET).signature
    sides = {"height": Span(min=height, max=height), "width": Span(min=width, max=width)}

    def engines(kind: type[Stub], component: str, sizes: Sequence[int]) -> list[Stub]:
        stubs = [kind(component, signature) for _ in sizes]
        for engine, batch in zip(stubs, sizes, strict=True):
            engine.bucket = Bucket(batch=Span(min=batch, max=batch), **sides)
        return stubs

    of_variant = engines(GuidedStub, spec.UNET_GUIDED, [batch for batch in batches if batch in guided])
    return EngineSet(engines(kind, spec.UNET, batches), of_variant)


def stubs(unet: EngineSet) -> list[Stub]:
    """Return the engines of a UNet, then those of its variant."""
    return [*unet.engines, *unet.guided]  # type: ignore[list-item]


class NewCalls:
    """Counts the calls of each engine since the last count."""

    def __init__(self, unet: EngineSet) -> None:
        self._seen = [engine.seen for engine in stubs(unet)]

    def __call__(self) -> list[int]:
        counts = [len(seen) for seen in self._seen]
        for seen in self._seen:
            seen.clear()
        return counts


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


def make_image(model: LoadedModel, **changes: object) -> ImageState:
    """Return an image at the start of its first loop."""
    runner = Runner(model)
    plan = runner.plan(replace(PLAIN, **changes))  # type: ignore[arg-type]
    [image] = plan.images()
    assert runner.advance(plan, image) == (spec.UNET, HEIGHT, WIDTH)
    return image


def graph_loop(unet: EngineSet, queue: StepQueue | None = None) -> GraphLoop:
    return GraphLoop(StepNetworks(unet, ["time_embeds"]), HEIGHT, WIDTH, CPU, queue)


def eager_latents(model: LoadedModel, **changes: object) -> torch.Tensor:
    """Return the result of a request that runs alone in the eager loop."""
    image = make_image(model, **changes)
    denoise(EagerLoop(StepNetworks(bucketed(model, 2), ["time_embeds"]), HEIGHT, WIDTH), [image])
    return image.latents


def run_mix(loop: Loop, model: LoadedModel, mix: list[tuple[dict[str, object], int]]) -> list[torch.Tensor]:
    """Return the results of requests that join at given steps, or as soon as there is room."""
    images = [make_image(model, **changes) for changes, _ in mix]
    waiting = sorted((first_step, index) for index, (_, first_step) in enumerate(mix))
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, images[waiting[0][1]].unet_batch):
            loop.add(images[waiting.pop(0)[1]])
        assert unet_batch(loop.images) <= max(2, loop.capacity)
        if loop.images:
            loop.step()
        step += 1
    return [image.latents for image in images]


LEVELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
MASK = Mask(np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH), np.uint8), "one", None, strength=1.0)
INPUTS: list[dict[str, object]] = [{}, {"image": LEVELS}, {"image": LEVELS, "masks": (MASK,)}]
requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["one", "two words", "sixsix and more"]),
        "negative_prompt": st.sampled_from([None, "four"]),
        "seed": st.integers(0, 2**32 - 1),
        "scheduler": st.sampled_from(SAMPLERS),
        "num_inference_steps": st.integers(1, 9),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.0, 0.4, 1.0]),
        "guidance_rescale": st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    }
).flatmap(lambda request: st.sampled_from([request | inputs for inputs in INPUTS]))


@settings(max_examples=100, deadline=None)
@given(
    mix=st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=8),
    batches=st.sampled_from([(1, 2, 4, 8), (2, 5), (3,), (2,), (1,)]),
)
def test_any_mix_equals_the_eager_loop(mix: list[tuple[dict[str, object], int]], batches: tuple[int, ...]) -> None:
    model = linear_model()
    expected = [eager_latents(model, **changes) for changes, _ in mix]
    for guided in ((), (2, 4, 8)):
        results = run_mix(graph_loop(bucketed(model, *batches, guided=guided)), model, mix)
        for latents, alone in zip(results, expected, strict=True):
            torch.testing.assert_close(latents, alone, rtol=1e-4, atol=1e-4)


def with_chunks(model: LoadedModel, chunks: int | None) -> LoadedModel:
    """Let the UNet read so many chunks of text."""
    stub(model, spec.UNET).signature = unet_signature(replace(WIDTHS, unet_chunks=chunks), "float32")
    return model


def test_texts_of_other_lengths_share_a_batch(model: LoadedModel) -> None:
    def images() -> list[ImageState]:
        generator = torch.Generator().manual_seed(0)
        made = [make_image(linear_model(), seed=seed, negative_prompt="four") for seed in range(3)]
        for image, chunks in zip(made, (1, 2, 4), strict=True):
            shape = (1, chunks * WIDTHS.tokens, WIDTHS.keys_values_width)
            image.cond.inputs["keys_values"] = torch.randn(shape, generator=generator)
        return made

    alone = images()
    for image in alone:
        denoise(eager_loop(bucketed(with_chunks(model, None), 6)), [image])
    for loop in (
        graph_loop(bucketed(with_chunks(model, 4), 6)),
        eager_loop(bucketed(with_chunks(model, 4), 6)),
        eager_loop(bucketed(with_chunks(model, None), 6)),
    ):
        together = images()
        denoise(loop, together)
        for image, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(image.latents, expected.latents, rtol=1e-4, atol=1e-4)


def eager_loop(unet: EngineSet) -> EagerLoop:
    return EagerLoop(StepNetworks(unet, ["time_embeds"]), HEIGHT, WIDTH)


@pytest.mark.parametrize("make_loop", [graph_loop, eager_loop])
def test_each_step_keeps_the_image_outside_of_the_mask(
    make_loop: Callable[[EngineSet], Loop], model: LoadedModel
) -> None:
    right_half = np.zeros((HEIGHT, WIDTH), np.uint8)
    right_half[:, WIDTH // 2 :] = 255
    loop = make_loop(bucketed(model, 2))
    for steps in (1, PLAIN.num_inference_steps):
        image = make_image(model, image=LEVELS, masks=(replace(MASK, levels=right_half),))
        assert image.known is not None
        loop.add(image)
        for _ in range(steps):
            loop.step()
        expected = image.known.latents
        if loop.images:  # noised as much as the next step expects
            loop.take(image)
            signal, noise = image.schedule.noising[1].tolist()
            expected = signal * image.known.latents + noise * image.known.noise
        left, right = image.latents.chunk(2, dim=-1)
        torch.testing.assert_close(left, expected.chunk(2, dim=-1)[0])
        assert not torch.isclose(right, expected.chunk(2, dim=-1)[1]).any()


@pytest.mark.parametrize("make_loop", [graph_loop, eager_loop])
def test_an_earlier_image_leaves_nothing(make_loop: Callable[[EngineSet], Loop], model: LoadedModel) -> None:
    loop, results = make_loop(bucketed(model, 2)), []
    for _ in range(2):
        plain = make_image(model)
        denoise(loop, [plain])
        results.append(plain.latents)
        poisoned = make_image(model, image=LEVELS, masks=(MASK,))
        nan = torch.full_like(poisoned.latents, torch.nan)
        poisoned.known = Known(nan, nan, nan[:, :1])
        loop.add(poisoned)
        loop.remove(poisoned)
    assert torch.equal(*results)


class InpaintStub(Stub):
    """A UNet that takes further channels after the latents, and does not use them."""

    def outputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().outputs({**inputs, "sample": inputs["sample"][:, :4]})


@pytest.mark.parametrize("make_loop", [graph_loop, eager_loop])
def test_unet_gets_the_extra_channels_of_each_image(make_loop: Callable[[EngineSet], Loop], model: LoadedModel) -> None:
    sample, *others = stub(model, spec.UNET).signature.inputs
    wide = sample.model_copy(update={"shape": ("rows", 9, *sample.shape[2:])})
    signature = stub(model, spec.UNET).signature.model_copy(update={"inputs": (wide, *others)})
    unet = InpaintStub(spec.UNET, signature)
    unet.bucket = bucketed(model, 2).engines[0].bucket
    loop = make_loop(EngineSet([unet]))
    extra = torch.randn(1, 5, HEIGHT // 8, WIDTH // 8)
    plain, inpainted = (make_image(model, guidance_scale=1.0, num_inference_steps=2, seed=seed) for seed in (1, 2))
    inpainted.extra_channels = extra
    loop.add(inpainted)
    loop.add(plain)
    loop.step()
    loop.step()
    for call in unet.seen[-2:]:
        assert torch.equal(call["sample"][:, 4:], torch.cat([extra, torch.zeros_like(extra)]))
    unet.seen.clear()
    again = make_image(model, guidance_scale=1.0, num_inference_steps=2, seed=1)
    denoise(loop, [again])  # in the slot of the inpainted image
    assert not any(call["sample"][0, 4:].any() for call in unet.seen)
    torch.testing.assert_close(again.latents, plain.latents)


def test_guided_variant_runs_where_all_images_use_zeros(model: LoadedModel) -> None:
    unet = bucketed(model, 2, 6, guided=(2, 6))
    new_calls, loop = NewCalls(unet), graph_loop(unet)
    first, second = make_image(model, num_inference_steps=4), make_image(model, num_inference_steps=3, seed=4)
    loop.add(first)
    loop.step()
    assert new_calls() == [0, 0, 1, 0]
    loop.add(second)
    loop.step()
    assert new_calls() == [0, 0, 0, 1]  # two images and room for a third
    negative = make_image(model, num_inference_steps=1, negative_prompt="four")
    loop.add(negative)
    loop.step()
    assert new_calls() == [0, 1, 0, 0]
    assert loop.step() == [first, second]
    assert new_calls() == [0, 0, 0, 1]
    for image, changes in ((first, {}), (second, {"seed": 4, "num_inference_steps": 3})):
        torch.testing.assert_close(image.latents, eager_latents(model, **changes), rtol=1e-4, atol=1e-4)
    loop.add(make_image(model, num_inference_steps=2, end_cfg_frac=0.5))
    loop.step()
    loop.step()
    assert new_calls() == [1, 0, 1, 0]  # its second step is not guided


def test_single_guided_image_runs_in_one_call(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4, guided=(2, 4))
    new_calls, loop = NewCalls(unet), graph_loop(unet)
    loop.add(make_image(model, num_inference_steps=4))
    loop.step()
    assert new_calls() == [0, 0, 0, 1, 0]
    loop.add(make_image(model, num_inference_steps=1, seed=4))
    loop.step()
    assert new_calls() == [0, 0, 0, 0, 1]  # two images
    loop.add(make_image(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [0, 0, 1, 0, 0]
    loop.step()
    assert new_calls() == [0, 0, 0, 1, 0]
    loop.add(make_image(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [0, 1, 0, 0, 0]  # each half has a text
    loop.add(make_image(model, num_inference_steps=1, guidance_scale=1.0))
    loop.step()
    assert new_calls() == [1, 0, 0, 0, 0]  # one half
    for seed in range(2):
        loop.add(make_image(model, num_inference_steps=1, seed=seed, guidance_scale=1.0))
    loop.step()
    assert new_calls() == [0, 1, 0, 0, 0]  # two images, which are not guided


@pytest.mark.parametrize(
    ("batches", "guided", "calls"),
    [((1,), (), [6]), ((1, 2), (), [0, 3]), ((1, 2, 4), (4,), [0, 3, 0, 0])],
    ids=["batch 1 only", "no variant", "no variant of batch 2"],
)
def test_guided_image_without_a_variant_of_batch_two(
    batches: tuple[int, ...], guided: tuple[int, ...], calls: list[int], model: LoadedModel
) -> None:
    """Without batch 2 the engine of batch 1 runs twice. Releases of earlier builds lack the variant of batch 2."""
    unet, image = bucketed(model, *batches, guided=guided), make_image(model, num_inference_steps=3)
    denoise(graph_loop(unet), [image])
    assert [len(engine.seen) for engine in stubs(unet)] == calls
    torch.testing.assert_close(image.latents, eager_latents(model, num_inference_steps=3), rtol=1e-4, atol=1e-4)


def test_each_batch_is_captured_once(model: LoadedModel) -> None:
    queue = RecordingQueue()
    graph_loop(bucketed(model, 1, 2, 4, guided=(2, 4)), queue)
    assert len(queue.captured) == 5


@pytest.mark.parametrize("name", [spec.UNET, spec.REFINER_UNET])
def test_gpu_loop_gets_the_engines_and_variants_of_a_unet(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unet = bucketed(model, 1, 2, 4, guided=(2, 4))
    model.device, model.engines = torch.device("cuda"), {name: unet}
    monkeypatch.setattr(loaded_model, "GraphLoop", lambda *arguments: arguments)
    networks, *size = make_loop(model, name, HEIGHT, WIDTH)  # type: ignore[misc]
    assert networks == StepNetworks(unet, ["time_embeds"])
    assert size == [HEIGHT, WIDTH, model.device]


def test_only_a_missing_negative_prompt_is_marked_as_zeros(model: LoadedModel) -> None:
    unconds = [make_image(model, negative_prompt=prompt).uncond for prompt in (None, "", "four")]
    assert [uncond and uncond.is_zero for uncond in unconds] == [True, False, False]
    assert unconds[0] is not None and not unconds[0].inputs["keys_values"].any()
    model.settings = model.settings.model_copy(update={"force_zeros_for_empty_prompt": False})
    encoded = make_image(model).uncond
    assert encoded is not None and not encoded.is_zero


def test_runs_the_smallest_bucket_that_holds_all_images(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 6)
    loop = graph_loop(unet)
    assert loop.capacity == 6
    guided = make_image(model, num_inference_steps=3, end_cfg_frac=0.34)
    plain = make_image(model, guidance_scale=1.0, num_inference_steps=2)
    loop.add(guided)
    loop.add(plain)
    assert loop.step() == []  # batch 3
    assert loop.step() == [plain]  # batch 2: only the first step is guided
    assert loop.step() == [guided]
    assert [len(engine.seen) for engine in stubs(unet)] == [1, 1, 1]


def test_guided_image_runs_where_the_largest_batch_is_one(model: LoadedModel) -> None:
    """The engines of few-step models have batch 1, because they need no guidance. A request may still use it."""
    unet = bucketed(model, 1)
    image = make_image(model, negative_prompt="four", end_cfg_frac=0.5)
    denoise(graph_loop(unet), [image])
    assert len(stubs(unet)[0].seen) == 2 + 2 + 1 + 1
    expected = eager_latents(model, negative_prompt="four", end_cfg_frac=0.5)
    torch.testing.assert_close(image.latents, expected, rtol=1e-4, atol=1e-4)


def test_lowered_capacity_limits_the_batch(model: LoadedModel) -> None:
    unet = bucketed(model, 2, 8)
    loop = graph_loop(unet)
    loop.capacity = 4
    images = [make_image(model, seed=seed) for seed in range(3)]
    denoise(loop, images)
    assert {len(inputs["sample"][:4].unique(dim=0)) for inputs in stubs(unet)[-1].seen} == {2}
    for seed, image in enumerate(images):
        torch.testing.assert_close(image.latents, eager_latents(model, seed=seed), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guided, plain", [(4, 0), (3, 2), (1, 6), (0, 8)])
def test_guided_and_plain_images_fill_a_bucket_completely(guided: int, plain: int, model: LoadedModel) -> None:
    unet = bucketed(model, 8)
    loop = graph_loop(unet)
    mix: list[dict[str, object]] = [{"prompt": "sixsix", "negative_prompt": "four", "seed": n} for n in range(guided)]
    mix += [{"guidance_scale": 1.0, "scheduler": "LCM", "seed": n} for n in range(guided, guided + plain)]
    images = [make_image(model, **changes) for changes in mix]
    for image in images:
        assert has_room(loop, image.unet_batch)
        loop.add(image)
    assert not has_room(loop, 1)
    while loop.images:
        loop.step()
    [first, *_] = stubs(unet)[0].seen
    assert len(torch.cat([first["sample"].flatten(1), first["keys_values"].flatten(1)], 1).unique(dim=0)) == 8
    for image, changes in zip(images, mix, strict=True):
        torch.testing.assert_close(image.latents, eager_latents(model, **changes), rtol=1e-4, atol=1e-4)


def test_unguided_image_with_two_texts_uses_its_prompt(model: LoadedModel) -> None:
    images = []
    for _ in range(2):
        images.append(make_image(model, negative_prompt="four"))
        images[-1].guidance = np.ones_like(images[-1].guidance)
    denoise(graph_loop(bucketed(model, 2)), images[:1])
    denoise(EagerLoop(StepNetworks(bucketed(model, 2), ["time_embeds"]), HEIGHT, WIDTH), images[1:])
    torch.testing.assert_close(images[0].latents, images[1].latents, rtol=1e-4, atol=1e-4)


def test_other_images_matter_only_through_the_bucket(model: LoadedModel) -> None:
    """On a GPU in fp16 each bucket rounds in its own way, so the last bits of a result depend on the buckets."""

    class RoundingStub(Stub):
        def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"noise": super().run(inputs)["noise"] * (1 + self.bucket.batch.max * 2**-10)}

    def run_alone(loop: GraphLoop) -> list[torch.Tensor]:
        return [run_mix(loop, model, [request])[0] for request in mix]

    mix: list[tuple[dict[str, object], int]] = [
        ({"seed": 1, "end_cfg_frac": 0.5}, 0), ({"seed": 2, "guidance_scale": 1.0, "scheduler": "Euler a"}, 0),
        ({"seed": 3, "negative_prompt": "four", "scheduler": "DPM++ 2M"}, 0),
    ]  # fmt: skip
    loop = graph_loop(bucketed(model, 1, 2, 4, 8, kind=RoundingStub))
    alone, together = run_alone(loop), run_mix(loop, model, mix)
    assert not any(map(torch.equal, together, alone))
    loop.capacity = 1
    assert all(map(torch.equal, run_mix(loop, model, mix), alone))
    one_bucket = graph_loop(bucketed(model, 8, kind=RoundingStub))
    assert all(map(torch.equal, run_mix(one_bucket, model, mix), run_alone(one_bucket)))


def test_buffer_shapes_follow_from_the_signature(model: LoadedModel) -> None:
    """SDXL's text dominates: conditioning by slot and in batch order, 77 tokens of 166,400 keys and values in fp16."""
    unet = stub(model, spec.UNET)
    shapes = {"keys_values": ("rows", 77, 166_400), "time_embeds": ("rows", 1280)}
    inputs = [
        tensor.model_copy(update={"shape": shapes.get(tensor.name, tensor.shape), "dtype": "float16"})
        for tensor in unet.signature.inputs
    ]
    signature = unet.signature.model_copy(update={"inputs": tuple(inputs)})
    sixteen, eight = (
        sum(buffer.bytes for buffer in buffer_shapes([signature], ["time_embeds"], HEIGHT, WIDTH, [2, batch]).values())
        for batch in (16, 8)
    )
    texts = 2 * 16 * 77 * 166_400 * 2 + 16 * MAX_STEPS * 1280 * 2
    assert texts < sixteen < 1.01 * texts
    assert sixteen == pytest.approx(2 * eight, rel=0.01)


class Allocations(TorchDispatchMode):
    """Adds up the bytes of the tensors that are created on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.bytes = 0
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        has_inputs = any(isinstance(argument, torch.Tensor) for argument in args)
        if isinstance(result, torch.Tensor) and result.device == self._device and not has_inputs:
            self.bytes += result.nbytes
        return result


@pytest.mark.parametrize("batches", [(1,), (2,), (1, 2, 4)], ids=str)
def test_loop_allocates_exactly_its_buffer_shapes(model: LoadedModel, batches: tuple[int, ...]) -> None:
    unet, device = bucketed(model, *batches), torch.device("meta")
    with Allocations(device) as allocated:
        GraphLoop(StepNetworks(unet, ["time_embeds"]), HEIGHT, WIDTH, device)
    shapes = buffer_shapes([unet.signature], ["time_embeds"], HEIGHT, WIDTH, batches)
    assert {"cond keys_values", "cond time_embeds", "batch keys_values"} < {*shapes}
    assert "batch time_embeds" not in shapes
    assert allocated.bytes == sum(buffer.bytes for buffer in shapes.values())


def test_loop_takes_the_conditioning_from_an_image(model: LoadedModel) -> None:
    loop = graph_loop(bucketed(model, 4))
    guided, plain = make_image(model), make_image(model, guidance_scale=1.0)
    for image in (guided, plain):
        loop.add(image)
        assert not image.cond.inputs
    assert guided.uncond is not None and guided.uncond.is_zero and not guided.uncond.inputs
    assert guided.guided and not plain.guided


class RecordingQueue(StepQueue):
    """Records the captured steps, and if they may use a workspace. Counts the replays."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.captured: list[tuple[Callable[[], None], bool]] = []
        self.replays = 0

    def capture(self, work: Callable[[], None], workspace: bool, name: str) -> Callable[[], None]:
        self.captured.append((work, workspace))

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_other_settings_need_no_new_capture(model: LoadedModel) -> None:
    queue = RecordingQueue()
    loop = graph_loop(bucketed(model, 2), queue)
    for scheduler in SAMPLERS:
        denoise(loop, [make_image(model, scheduler=scheduler, num_inference_steps=5, guidance_scale=3.0)])
    denoise(loop, [make_image(model, timesteps=(900, 500, 1), num_inference_steps=3, guidance_rescale=0.7)])
    assert len(queue.captured) == 1 and queue.replays == 5 * len(SAMPLERS) + 4 + 3  # Heun has 9 entries


def test_calls_of_many_pixels_are_captured_without_a_workspace(model: LoadedModel) -> None:
    queue, unet = RecordingQueue(), bucketed(model, 1, 2, 4, height=1024, width=1024)
    new_calls = NewCalls(unet)
    GraphLoop(StepNetworks(unet, ["time_embeds"]), 1024, 1024, CPU, queue)
    calls = []
    with torch.inference_mode():
        for work, workspace in queue.captured:
            work()
            calls.append((new_calls(), workspace))
    assert calls == [([1, 0, 0], True), ([0, 1, 0], True), ([0, 0, 1], False)]


class LateQueue(StepQueue, TorchDispatchMode):
    """The queue of the slowest possible device: it reads what was uploaded for a step only when the host waits."""

    def __init__(self) -> None:
        StepQueue.__init__(self, CPU)
        TorchDispatchMode.__init__(self)
        # Of each step: the host's buffers, and their content when the upload was queued.
        self.uploads: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
        self.steps_done = 0

    @property
    def steps_in_flight(self) -> int:
        return len(self.uploads) - 1 - self.steps_done

    def capture(self, work: Callable[[], None], workspace: bool, name: str) -> Callable[[], None]:
        return lambda: None

    def mark(self) -> Callable[[], None]:
        step = len(self.uploads)
        self.uploads.append([])

        def wait() -> None:
            for uploads in self.uploads[self.steps_done : step]:
                assert all(torch.equal(buffer, content) for buffer, content in uploads), "overwritten before it is read"
            self.steps_done = max(self.steps_done, step)

        return wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and True in args[2:]:  # non_blocking
            self.uploads[-1].append((args[1], args[1].clone()))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_host_stays_two_steps_ahead_and_overwrites_nothing(model: LoadedModel) -> None:
    queue = LateQueue()
    loop = graph_loop(bucketed(model, 2), queue)
    loop.add(make_image(model, scheduler="Euler a", num_inference_steps=20))
    in_flight = []
    with queue:
        while loop.images:
            loop.step()
            in_flight.append(queue.steps_in_flight)
    assert in_flight == [1, 2, *18 * [2]]
    # Noise is uploaded in every step, because diffusers draws noise for the last step too.
    assert sum(len(uploads) for uploads in queue.uploads) == 20


def test_nan_reaches_neither_other_images_nor_the_next_in_a_slot(model: LoadedModel) -> None:
    loop = graph_loop(bucketed(model, 4))
    broken, other = make_image(model, seed=1), make_image(model, seed=2, scheduler="DPM++ 2M")
    broken.latents = broken.latents * float("nan")
    loop.add(broken)
    loop.add(other)
    loop.step()
    assert not loop.latents(broken).isfinite().any()
    loop.remove(broken)
    following = make_image(model, seed=3, scheduler="DPM++ 2M SDE Karras")
    loop.add(following)
    while loop.images:
        loop.step()
    for image, changes in (
        (other, {"seed": 2, "scheduler": "DPM++ 2M"}),
        (following, {"seed": 3, "scheduler": "DPM++ 2M SDE Karras"}),
    ):
        torch.testing.assert_close(image.latents, eager_latents(model, **changes), rtol=1e-4, atol=1e-4)
