"""The graph loop, run on the CPU and compared with the eager loop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising import graph_loop as graph_loop_module
from model.denoising.buffers import buffer_shapes
from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import ImageState, Loop, StepNetworks, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.pipeline import loaded_model, spec
from model.pipeline.loaded_model import LoadedModel, make_loop
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from model.store.manifest import Bucket, Span
from model.validation import MAX_STEPS
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub

HEIGHT, WIDTH = 64, 96


def bucketed(model: LoadedModel, *batches: int, uncond: Sequence[int] = (), both: Sequence[int] = ()) -> EngineSet:
    """The UNet in static buckets, as on a GPU. `uncond`, `both`: those of `batches` with an engine of that variant."""
    unet = stub(model, spec.UNET)

    def engines(kind: type[Stub], component: str, sizes: Sequence[int]) -> list[Stub]:
        made = [kind(component, unet.signature) for _ in sizes]
        for engine, batch in zip(made, sizes, strict=True):
            engine.bucket = Bucket(
                batch=Span(min=batch, max=batch), height=Span(min=HEIGHT, max=HEIGHT), width=Span(min=WIDTH, max=WIDTH)
            )
        return made

    variants = {
        "uncond": engines(UncondStub, spec.UNET_UNCONDITIONAL, [batch for batch in batches if batch in uncond]),
        "both": engines(BothStub, spec.UNET_GUIDED, [batch for batch in batches if batch in both]),
    }
    return EngineSet(engines(Stub, spec.UNET, batches), variants)


def stubs(unet: EngineSet) -> list[Stub]:
    """Its engines, then those of its variants."""
    return [*unet.engines, *unet.variants["uncond"], *unet.variants["both"]]  # type: ignore[list-item]


class BothStub(Stub):
    """The variant whose batch holds conditional halves, then unconditional ones. It ignores what it is given for the
    latter: it takes the first half's latents, and zeros for text."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        cond = inputs["keys_values"].chunk(2)[0]
        sample = inputs["sample"].chunk(2)[0]
        halves = {"sample": torch.cat([sample, sample]), "keys_values": torch.cat([cond, torch.zeros_like(cond)])}
        return super().run({**inputs, **halves})


class UncondStub(Stub):
    """The variant for unconditional halves only. It takes zeros for text, whatever it is given."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().run({**inputs, "keys_values": torch.zeros_like(inputs["keys_values"])})


class NewCalls:
    """Counts the calls of each engine since it was last asked."""

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
    """An image at the start of its first loop."""
    runner = Runner(model)
    plan = runner.plan(replace(PLAIN, **changes))  # type: ignore[arg-type]
    [image] = plan.images()
    assert runner.advance(plan, image) == (spec.UNET, HEIGHT, WIDTH)
    return image


def graph_loop(unet: EngineSet) -> GraphLoop:
    return GraphLoop(StepNetworks(unet, ["time_embeds"]), HEIGHT, WIDTH, torch.device("cpu"))


def eager_latents(model: LoadedModel, **changes: object) -> torch.Tensor:
    """The result of a request alone in the eager loop."""
    image = make_image(model, **changes)
    denoise(EagerLoop(StepNetworks(bucketed(model, 2), ["time_embeds"]), HEIGHT, WIDTH), [image])
    return image.latents


def run_mix(loop: Loop, model: LoadedModel, mix: list[tuple[dict[str, object], int]]) -> list[torch.Tensor]:
    """The results of requests that join at given steps, or as soon as there is room."""
    images = [make_image(model, **changes) for changes, _ in mix]
    waiting = sorted((joins, index) for index, (_, joins) in enumerate(mix))
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, images[waiting[0][1]].unet_batch):
            loop.add(images[waiting.pop(0)[1]])
        assert unet_batch(loop.images) <= max(2, loop.capacity)
        if loop.images:
            loop.step()
        step += 1
    return [image.latents for image in images]


requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["one", "two words", "sixsix and more"]),
        "negative_prompt": st.sampled_from([None, "four"]),
        "seed": st.integers(0, 2**32 - 1),
        "scheduler": st.sampled_from(SAMPLERS),
        "num_inference_steps": st.integers(1, 9),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.0, 0.4, 1.0]),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    mix=st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=8),
    batches=st.sampled_from([(1, 2, 4, 8), (2, 5), (3,), (2,), (1,)]),
)
def test_any_mix_equals_the_eager_loop(mix: list[tuple[dict[str, object], int]], batches: tuple[int, ...]) -> None:
    model = linear_model()
    even = (2, 4, 6, 8)
    for variants in ({}, {"both": even}, {"uncond": (1,), "both": even}):
        got = run_mix(graph_loop(bucketed(model, *batches, **variants)), model, mix)
        for (changes, _), latents in zip(mix, got, strict=True):
            torch.testing.assert_close(latents, eager_latents(model, **changes), rtol=1e-4, atol=1e-4)


def test_both_variant_runs_where_all_images_use_zeros(model: LoadedModel) -> None:
    unet = bucketed(model, 2, 6, both=(2, 6))
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


def test_single_guided_image_uses_engines_of_batch_one(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4, uncond=(1,), both=(4,))
    new_calls, loop = NewCalls(unet), graph_loop(unet)
    loop.add(make_image(model, num_inference_steps=4))
    loop.step()
    assert new_calls() == [1, 0, 0, 1, 0]  # its conditional half, and its unconditional one
    loop.add(make_image(model, num_inference_steps=1, seed=4))
    loop.step()
    assert new_calls() == [0, 0, 0, 0, 1]  # two images
    loop.add(make_image(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [0, 0, 1, 0, 0]
    loop.step()
    assert new_calls() == [1, 0, 0, 1, 0]
    loop.add(make_image(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [2, 0, 0, 0, 0]  # each half has a text
    for seed in range(2):
        loop.add(make_image(model, num_inference_steps=1, seed=seed, guidance_scale=1.0))
    loop.step()
    assert new_calls() == [0, 1, 0, 0, 0]  # two images, which are not guided


def test_engines_that_may_not_overlap_run_one_after_the_other(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_loop_module, "run_concurrently", lambda works: pytest.fail("concurrent"))
    expected = eager_latents(model, negative_prompt="four", num_inference_steps=3)
    for batches, calls in {(1, 2): [0, 3], (1,): [6]}.items():  # both halves in one call, or in two
        unet = bucketed(model, *batches)
        for engine in unet.engines:
            engine.concurrent = False
        image = make_image(model, negative_prompt="four", num_inference_steps=3)
        denoise(graph_loop(unet), [image])
        assert [len(engine.seen) for engine in stubs(unet)] == calls
        torch.testing.assert_close(image.latents, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [spec.UNET, spec.REFINER_UNET])
def test_gpu_loop_gets_the_engines_and_variants_of_a_unet(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unet = bucketed(model, 1, 2, 4, uncond=(1,), both=(2, 4))
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(model, "engines", {name: unet})
    monkeypatch.setattr(loaded_model, "GraphLoop", lambda *arguments: arguments)
    networks, *size = make_loop(model, name, HEIGHT, WIDTH)  # type: ignore[misc]
    assert networks == StepNetworks(unet, ["time_embeds"])
    assert size == [HEIGHT, WIDTH, model.device]


def test_zeros_for_a_missing_negative_prompt_are_no_text(model: LoadedModel) -> None:
    uncond = [make_image(model, negative_prompt=prompt).uncond for prompt in (None, "", "four")]
    assert [one and one.is_zero for one in uncond] == [True, False, False]
    assert uncond[0] is not None and not uncond[0].inputs["keys_values"].any()
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
    """A few-step model's engines are built so, because it needs no guidance. A request may ask for it all the same."""
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
    every: list[dict[str, object]] = [{"prompt": "sixsix", "negative_prompt": "four", "seed": n} for n in range(guided)]
    every += [{"guidance_scale": 1.0, "scheduler": "LCM", "seed": n} for n in range(guided, guided + plain)]
    images = [make_image(model, **changes) for changes in every]
    for image in images:
        assert has_room(loop, image.unet_batch)
        loop.add(image)
    assert not has_room(loop, 1)
    while loop.images:
        loop.step()
    [first, *_] = stubs(unet)[0].seen
    assert len(torch.cat([first["sample"].flatten(1), first["keys_values"].flatten(1)], 1).unique(dim=0)) == 8
    for image, changes in zip(images, every, strict=True):
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

    class Rounding(Stub):
        def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"noise": super().run(inputs)["noise"] * (1 + self.bucket.batch.max * 2**-10)}

    unet = bucketed(model, 1, 2, 4, 8)
    for engine in unet.engines:
        engine.__class__ = Rounding
    every: list[dict[str, object]] = [
        {"seed": 1, "end_cfg_frac": 0.5}, {"seed": 2, "guidance_scale": 1.0, "scheduler": "Euler a"},
        {"seed": 3, "negative_prompt": "four", "scheduler": "DPM++ 2M"},
    ]  # fmt: skip
    loop = graph_loop(unet)
    alone = [run_mix(loop, model, [(changes, 0)])[0] for changes in every]
    together = run_mix(loop, model, [(changes, 0) for changes in every])
    assert not any(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    loop.capacity = 1
    one_by_one = run_mix(loop, model, [(changes, 0) for changes in every])
    assert all(torch.equal(one, other) for one, other in zip(one_by_one, alone, strict=True))
    of_eight = [graph_loop(EngineSet(unet.engines[3:])) for _ in range(2)]
    assert all(
        torch.equal(one, run_mix(of_eight[1], model, [(changes, 0)])[0])
        for one, changes in zip(run_mix(of_eight[0], model, [(each, 0) for each in every]), every, strict=True)
    )


def test_buffer_shapes_follow_from_the_signature(model: LoadedModel) -> None:
    """At the width of SDXL's text: conditioning by slot and in batch order, 77 tokens of 166,400 keys and values in
    fp16, and little else."""
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


@pytest.mark.parametrize("batches", [(1,), (2,), (1, 2, 4)])
def test_loop_allocates_exactly_its_buffer_shapes(model: LoadedModel, batches: tuple[int, ...]) -> None:
    loop = graph_loop(bucketed(model, *batches))
    signature = model.engines[spec.UNET].signature
    shapes = buffer_shapes([signature], ["time_embeds"], HEIGHT, WIDTH, batches)
    assert {"cond keys_values", "cond time_embeds", "batch keys_values"} < {*shapes}
    assert "batch time_embeds" not in shapes
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for value in vars(loop).values()
        for tensor in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tensor, torch.Tensor)
    }
    assert sum(held.values()) == sum(buffer.bytes for buffer in shapes.values())


def test_loop_takes_the_conditioning_from_an_image(model: LoadedModel) -> None:
    loop = graph_loop(bucketed(model, 4))
    guided, plain = make_image(model), make_image(model, guidance_scale=1.0)
    for image in (guided, plain):
        loop.add(image)
        assert not image.cond.inputs
    assert guided.uncond is not None and guided.uncond.is_zero and not guided.uncond.inputs
    assert guided.guided and not plain.guided


def test_other_settings_need_no_new_capture(model: LoadedModel) -> None:
    loop = graph_loop(bucketed(model, 2))
    [before] = loop._replays.values()
    for scheduler in SAMPLERS:
        denoise(loop, [make_image(model, scheduler=scheduler, num_inference_steps=5, guidance_scale=3.0)])
    assert list(loop._replays.values()) == [before]


def test_steps_of_many_pixels_are_captured_without_a_workspace(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = bucketed(model, 1, 2, 4)
    loop = graph_loop(unet)
    captured: dict[tuple[int, ...], bool] = {}

    def capture(work: "partial[None]", workspace: bool) -> "partial[None]":
        captured[tuple(engine.bucket.batch.max for engine in work.args[0])] = workspace
        return work

    monkeypatch.setattr(graph_loop_module, "capture", capture)
    monkeypatch.setattr(graph_loop_module, "_LARGE_STEP_PIXELS", 4 * HEIGHT * WIDTH)
    monkeypatch.setattr(loop, "_device", torch.device("cuda"))
    for engine in unet.engines:
        loop._replay_of(engine)
    loop._replay_of(unet.engines[0], unet.engines[0])
    assert captured == {(1,): True, (2,): True, (4,): False, (1, 1): False}  # nor are concurrent engines


class LateDevice:
    """The slowest possible device: it runs a step, and reads what was uploaded for it, only when the host waits."""

    def __init__(self, loop: GraphLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        # Of each step: buffers, and their content when it was queued.
        self.queued: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
        self.done = 0
        device = self

        class Noise:
            def __getitem__(self, slots: slice) -> "Noise":
                return self

            def copy_(self, staged: torch.Tensor, non_blocking: bool) -> None:
                assert non_blocking
                device.queued[-1].append((staged, staged.clone()))

        class Event:
            def record(self) -> None:
                self.step = len(device.queued)
                device.queued.append([])

            def synchronize(self) -> None:
                while device.done < self.step:
                    device.run(device.done)
                    device.done += 1

        monkeypatch.setattr(graph_loop_module, "to_device", lambda tensor, device: tensor)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(loop, "_device", torch.device("cuda"))
        monkeypatch.setattr(loop, "_noise", Noise())
        monkeypatch.setattr(loop, "_replays", {batch: lambda: None for batch in loop._replays})

    def run(self, step: int) -> None:
        for staged, sent in self.queued[step]:
            assert torch.equal(staged, sent), "the host has overwritten noise that was not read yet"


def test_the_host_stays_two_steps_ahead_and_overwrites_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = graph_loop(bucketed(model, 2))
    device = LateDevice(loop, monkeypatch)
    loop.add(make_image(model, scheduler="Euler a", num_inference_steps=20))
    ahead = []
    while loop.images:
        loop.step()
        ahead.append(len(device.queued) - 1 - device.done)
    assert ahead == [1, 2, *18 * [2]]
    assert sum(len(sent) for sent in device.queued) == 20  # like diffusers, which draws for the last step too


def test_nan_reaches_neither_other_images_nor_the_next_in_a_slot(model: LoadedModel) -> None:
    loop = graph_loop(bucketed(model, 4))
    broken, other = make_image(model, seed=1), make_image(model, seed=2, scheduler="DPM++ 2M")
    broken.latents = broken.latents * float("nan")
    loop.add(broken)
    loop.add(other)
    loop.step()
    assert not loop.latents(broken).isfinite().any()
    loop.remove(broken)
    newcomer = make_image(model, seed=3, scheduler="DPM++ 2M SDE Karras")
    loop.add(newcomer)
    while loop.images:
        loop.step()
    for image, changes in (
        (other, {"seed": 2, "scheduler": "DPM++ 2M"}),
        (newcomer, {"seed": 3, "scheduler": "DPM++ 2M SDE Karras"}),
    ):
        torch.testing.assert_close(image.latents, eager_latents(model, **changes), rtol=1e-4, atol=1e-4)
