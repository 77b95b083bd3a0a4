"""The loop whose steps are replayed: held, without a GPU, against the one that runs them op by op."""

import inspect
from collections.abc import Mapping
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
from model.denoising.loop import ImageState, Loop, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines import components
from model.engines.engine import EngineSet
from model.pipeline import loaded_model
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import denoise, prepare_images, request_schedules
from model.store.manifest import Bucket, Span
from model.validation import MAX_STEPS
from tests.stand_ins.line_networks import PLAIN, Stub, line_model, stub

HEIGHT, WIDTH = 64, 96


def bucketed(model: LoadedModel, *rows: int) -> EngineSet:
    """The UNet in static buckets, as it is on a GPU."""
    unet = stub(model, components.UNET)
    engines = []
    for count in rows:
        engine = Stub(unet.component, unet.signature)
        engine.bucket = Bucket(
            rows=Span(min=count, max=count), height=Span(min=HEIGHT, max=HEIGHT), width=Span(min=WIDTH, max=WIDTH)
        )
        engines.append(engine)
    return EngineSet(engines)


class HalfStub(Stub):
    """The UNet for rows of which the second half are the first's latents and no text, whatever it is given there."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        told = inputs["keys_values"].chunk(2)[0]
        sample = inputs["sample"].chunk(2)[0]
        halves = {"sample": torch.cat([sample, sample]), "keys_values": torch.cat([told, torch.zeros_like(told)])}
        return super().run({**inputs, **halves})


class UntoldStub(Stub):
    """The UNet for rows of no text, whatever they are given."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().run({**inputs, "keys_values": torch.zeros_like(inputs["keys_values"])})


def beside(unet: EngineSet, component: str, *rows: int) -> list[Stub]:
    """Engines for guided rows alone, beside those of the UNet's buckets that have so many rows."""
    kind = {components.UNET_UNCONDITIONAL: UntoldStub, components.UNET_GUIDED: HalfStub}[component]
    engines = []
    for plain in unet.engines:
        if plain.bucket.batch.max in rows:
            engines.append(kind(component, plain.signature))
            engines[-1].bucket = plain.bucket
    return engines


def untold(unet: EngineSet) -> list[Stub]:
    return beside(unet, components.UNET_UNCONDITIONAL, 1)


def halved(unet: EngineSet) -> list[Stub]:
    return beside(unet, components.UNET_GUIDED, 2, 4, 6, 8)


@pytest.fixture
def model() -> LoadedModel:
    return line_model()


def row_of(model: LoadedModel, **asked: object) -> ImageState:
    request = replace(PLAIN, **asked)  # type: ignore[arg-type]
    [row] = prepare_images(model, request, request_schedules(model, request)[0])
    return row


def graph_loop(model: LoadedModel, *rows: int) -> GraphLoop:
    return GraphLoop(bucketed(model, *rows), HEIGHT, WIDTH, model.device)


def drawn(loop: Loop, model: LoadedModel, mix: list[tuple[dict[str, object], int]]) -> list[torch.Tensor]:
    """The results of requests that join at given steps, or as soon as there is room."""
    rows = [row_of(model, **asked) for asked, _ in mix]
    waiting = [(joins, index) for index, (_, joins) in enumerate(mix)]
    waiting.sort()
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, rows[waiting[0][1]].unet_batch):
            loop.add(rows[waiting.pop(0)[1]])
        assert unet_batch(loop.images) <= max(2, loop.capacity)
        if loop.images:
            loop.step()
        step += 1
    return [row.latents for row in rows]


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
    buckets=st.sampled_from([(1, 2, 4, 8), (2, 5), (3,), (2,), (1,)]),
)
def test_any_mix_comes_to_what_the_plain_loop_draws(
    mix: list[tuple[dict[str, object], int]], buckets: tuple[int, ...]
) -> None:
    model = line_model()
    unet = bucketed(model, *buckets)
    for guided in ({}, {"guided": halved(unet)}, {"unconditional": untold(unet), "guided": halved(unet)}):
        got = drawn(GraphLoop(unet, HEIGHT, WIDTH, model.device, **guided), model, mix)
        for (asked, _), latents in zip(mix, got, strict=True):
            [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [(asked, 0)])
            torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


def test_guided_engines_run_where_no_row_has_an_unconditional_text(model: LoadedModel) -> None:
    unet = bucketed(model, 2, 6)
    guided = halved(unet)
    calls = [engine.seen for engine in (*unet.engines, *guided)]  # type: ignore[attr-defined]

    def new_calls() -> list[int]:
        counts = [len(seen) for seen in calls]
        for seen in calls:
            seen.clear()
        return counts

    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device, guided=guided)
    first, second = row_of(model, num_inference_steps=4), row_of(model, num_inference_steps=3, seed=4)
    loop.add(first)
    loop.step()
    assert new_calls() == [0, 0, 1, 0]
    loop.add(second)
    loop.step()
    assert new_calls() == [0, 0, 0, 1]  # two images and room for a third
    negative = row_of(model, num_inference_steps=1, negative_prompt="four")
    loop.add(negative)
    loop.step()
    assert new_calls() == [0, 1, 0, 0]
    assert loop.step() == [first, second]
    assert new_calls() == [0, 0, 0, 1]
    loop.add(row_of(model, num_inference_steps=2, end_cfg_frac=0.5))
    loop.step()
    loop.step()
    assert new_calls() == [1, 0, 1, 0]  # its second step is not guided


def test_a_guided_image_alone_takes_the_engines_of_one_row(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    engines = [*unet.engines, *untold(unet), *beside(unet, components.UNET_GUIDED, 4)]
    calls = [engine.seen for engine in engines]  # type: ignore[attr-defined]

    def new_calls() -> list[int]:
        counts = [len(seen) for seen in calls]
        for seen in calls:
            seen.clear()
        return counts

    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device, engines[3:4], engines[4:])
    loop.add(row_of(model, num_inference_steps=4))
    loop.step()
    assert new_calls() == [1, 0, 0, 1, 0]  # a row with its text and one without any
    loop.add(row_of(model, num_inference_steps=1, seed=4))
    loop.step()
    assert new_calls() == [0, 0, 0, 0, 1]  # two images
    loop.add(row_of(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [0, 0, 1, 0, 0]
    loop.step()
    assert new_calls() == [1, 0, 0, 1, 0]
    loop.add(row_of(model, num_inference_steps=1, negative_prompt="four"))
    loop.step()
    assert new_calls() == [2, 0, 0, 0, 0]  # a text each
    for seed in range(2):
        loop.add(row_of(model, num_inference_steps=1, seed=seed, guidance_scale=1.0))
    loop.step()
    assert new_calls() == [0, 1, 0, 0, 0]  # two images, which are not guided


def test_engines_that_may_not_overlap_run_one_after_the_other(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_loop_module, "run_concurrently", lambda works: pytest.fail("concurrent"))
    asked: dict[str, object] = {"negative_prompt": "four", "num_inference_steps": 3}
    [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [(asked, 0)])
    for rows, calls in {(1, 2): [0, 3], (1,): [6]}.items():  # both rows in one call, or in two where there is none
        unet = bucketed(model, *rows)
        for engine in unet.engines:
            engine.concurrent = False
        [latents] = drawn(GraphLoop(unet, HEIGHT, WIDTH, model.device), model, [(asked, 0)])
        assert [len(engine.seen) for engine in unet.engines] == calls  # type: ignore[attr-defined]
        torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


def test_a_gpu_s_loop_is_given_what_a_release_has_for_guided_rows(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = bucketed(model, 1, 2, 4)
    alone, both = untold(unet), halved(unet)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    made = inspect.signature(GraphLoop).bind
    monkeypatch.setattr(loaded_model, "GraphLoop", lambda *given: made(*given).arguments)

    def given(component: str, **guided: list[Stub]) -> tuple[object, object]:
        sets = {name: EngineSet(engines) for name, engines in guided.items()}
        monkeypatch.setattr(model, "engines", {component: unet} | sets)
        arguments: dict[str, object] = loaded_model.make_loop(model, component, HEIGHT, WIDTH)  # type: ignore[assignment]
        assert arguments["unet"] is unet
        return arguments["unconditional"], arguments["guided"]

    assert given(components.UNET) == ([], [])
    assert given(components.UNET, unet_unconditional=alone) == (alone, [])
    assert given(components.UNET, unet_guided=both) == ([], both)
    assert given(components.UNET, unet_unconditional=alone, unet_guided=both) == (alone, both)
    assert given(components.REFINER_UNET, unet_unconditional=alone, unet_guided=both) == ([], [])


def test_no_unconditional_text_is_not_an_empty_one(model: LoadedModel) -> None:
    blank = [row_of(model, negative_prompt=prompt).uncond for prompt in (None, "", "four")]
    assert [text and text.is_zero for text in blank] == [True, False, False]
    assert not any(text.keys_values.any() for text in blank[:1] if text)
    model.settings = model.settings.model_copy(update={"force_zeros_for_empty_prompt": False})
    unconditional = row_of(model).uncond
    assert unconditional is not None and not unconditional.is_zero


def test_the_smallest_bucket_that_holds_the_rows_runs(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 6)
    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device)
    assert loop.capacity == 6
    guided = row_of(model, num_inference_steps=3, end_cfg_frac=0.34)
    plain = row_of(model, guidance_scale=1.0, num_inference_steps=2)
    loop.add(guided)
    loop.add(plain)
    assert loop.step() == []  # 3 rows
    assert loop.step() == [plain]  # 2 rows: all but the first of its steps are not guided
    assert loop.step() == [guided]
    assert [len(engine.seen) for engine in unet.engines] == [1, 1, 1]  # type: ignore[attr-defined]


def test_a_guided_image_is_drawn_also_where_the_largest_bucket_has_one_row(model: LoadedModel) -> None:
    """As a few-step model's engines are built, which need no guidance: a request may ask for it all the same."""
    unet = bucketed(model, 1)
    asked: dict[str, object] = {"negative_prompt": "four", "end_cfg_frac": 0.5}
    row = row_of(model, **asked)
    denoise(GraphLoop(unet, HEIGHT, WIDTH, model.device), [row])
    assert len(unet.engines[0].seen) == 2 + 2 + 1 + 1  # type: ignore[attr-defined]
    [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [(asked, 0)])
    torch.testing.assert_close(row.latents, expected, rtol=1e-4, atol=1e-4)


def test_fewer_may_be_let_in_than_fit(model: LoadedModel) -> None:
    unet = bucketed(model, 2, 8)
    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device)
    loop.capacity = 4
    rows = [row_of(model, seed=seed) for seed in range(3)]
    denoise(loop, rows)
    engine = unet.engines[-1]
    assert {len(inputs["sample"][:4].unique(dim=0)) for inputs in engine.seen} == {2}  # type: ignore[attr-defined]
    for seed, row in enumerate(rows):
        [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [({"seed": seed}, 0)])
        torch.testing.assert_close(row.latents, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guided, plain", [(4, 0), (3, 2), (1, 6), (0, 8)])
def test_guided_images_and_others_fill_a_bucket_to_the_last_row(guided: int, plain: int, model: LoadedModel) -> None:
    unet = bucketed(model, 8)
    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device)
    asked: list[dict[str, object]] = [{"prompt": "sixsix", "negative_prompt": "four", "seed": n} for n in range(guided)]
    asked += [{"guidance_scale": 1.0, "scheduler": "LCM", "seed": n} for n in range(guided, guided + plain)]
    rows = [row_of(model, **each) for each in asked]
    for row in rows:
        assert has_room(loop, row.unet_batch)
        loop.add(row)
    assert not has_room(loop, 1)
    while loop.images:
        loop.step()
    [first, *_] = unet.engines[0].seen  # type: ignore[attr-defined]
    assert len(torch.cat([first["sample"].flatten(1), first["keys_values"].flatten(1)], 1).unique(dim=0)) == 8
    for row, each in zip(rows, asked, strict=True):
        [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [(each, 0)])
        torch.testing.assert_close(row.latents, expected, rtol=1e-4, atol=1e-4)


def test_what_is_never_guided_reads_its_own_text_though_it_has_two(model: LoadedModel) -> None:
    rows = []
    for _ in range(2):
        rows.append(row_of(model, negative_prompt="four"))
        rows[-1].guidance = np.ones_like(rows[-1].guidance)
    denoise(graph_loop(model, 2), rows[:1])
    denoise(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), rows[1:])
    torch.testing.assert_close(rows[0].latents, rows[1].latents, rtol=1e-4, atol=1e-4)


def test_company_is_felt_through_the_bucket_alone(model: LoadedModel) -> None:
    """On a GPU in fp16 each bucket rounds in its own way, and so draws a picture that is its own to the last bit."""

    class Rounding(Stub):
        def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"noise": super().run(inputs)["noise"] * (1 + self.bucket.batch.max * 2**-10)}

    unet = bucketed(model, 1, 2, 4, 8)
    for engine in unet.engines:
        engine.__class__ = Rounding
    asked: list[dict[str, object]] = [
        {"seed": 1, "end_cfg_frac": 0.5}, {"seed": 2, "guidance_scale": 1.0, "scheduler": "Euler a"},
        {"seed": 3, "negative_prompt": "four", "scheduler": "DPM++ 2M"},
    ]  # fmt: skip
    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device)
    alone = [drawn(loop, model, [(each, 0)])[0] for each in asked]
    together = drawn(loop, model, [(each, 0) for each in asked])
    assert not any(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    loop.capacity = 1
    one_by_one = drawn(loop, model, [(each, 0) for each in asked])
    assert all(torch.equal(one, other) for one, other in zip(one_by_one, alone, strict=True))
    of_eight = [GraphLoop(EngineSet(unet.engines[3:]), HEIGHT, WIDTH, model.device) for _ in range(2)]
    assert all(
        torch.equal(one, drawn(of_eight[1], model, [(each, 0)])[0])
        for one, each in zip(drawn(of_eight[0], model, [(each, 0) for each in asked]), asked, strict=True)
    )


def test_buffer_shapes_follow_from_the_signature(model: LoadedModel) -> None:
    """At the width of SDXL's text: conditioning by slot and in batch order, 77 tokens of 166,400 keys and values in
    fp16, and little else."""
    unet = stub(model, components.UNET)
    shapes = {"keys_values": ("rows", 77, 166_400), "time_embeds": ("rows", 1280)}
    inputs = [
        spec.model_copy(update={"shape": shapes.get(spec.name, spec.shape), "dtype": "float16"})
        for spec in unet.signature.inputs
    ]
    signature = unet.signature.model_copy(update={"inputs": tuple(inputs)})
    eight, four = (
        sum(buffer.bytes for buffer in buffer_shapes(signature, HEIGHT, WIDTH, [2, batch]).values())
        for batch in (16, 8)
    )
    texts = 2 * 16 * 77 * 166_400 * 2 + 16 * MAX_STEPS * 1280 * 2
    assert texts < eight < 1.01 * texts
    assert eight == pytest.approx(2 * four, rel=0.01)


@pytest.mark.parametrize("batches", [(1,), (2,), (1, 2, 4)])
def test_a_loop_allocates_exactly_its_buffer_shapes(model: LoadedModel, batches: tuple[int, ...]) -> None:
    loop = GraphLoop(bucketed(model, *batches), HEIGHT, WIDTH, model.device)
    signature = model.engines[components.UNET].signature
    expected = sum(buffer.bytes for buffer in buffer_shapes(signature, HEIGHT, WIDTH, batches).values())
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in vars(loop).values()
        if isinstance(tensor, torch.Tensor)
    }
    assert sum(held.values()) == expected


def test_a_row_in_the_loop_keeps_no_text_of_its_own(model: LoadedModel) -> None:
    loop = graph_loop(model, 4)
    row, plain = row_of(model), row_of(model, guidance_scale=1.0)
    for one in (row, plain):
        loop.add(one)
        assert not one.cond.keys_values.numel() and not one.cond.time_embeds.numel()
    assert row.guided and not plain.guided


def test_nothing_is_captured_anew_for_other_settings(model: LoadedModel) -> None:
    loop = graph_loop(model, 2)
    [before] = loop._replays.values()
    for scheduler in SAMPLERS:
        denoise(loop, [row_of(model, scheduler=scheduler, num_inference_steps=5, guidance_scale=3.0)])
    assert list(loop._replays.values()) == [before]


def test_steps_of_many_pixels_are_captured_without_a_workspace(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = bucketed(model, 1, 2, 4)
    loop = GraphLoop(unet, HEIGHT, WIDTH, model.device)
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
    assert captured == {(1,): True, (2,): True, (4,): False, (1, 1): False}  # nor are branches


class LateDevice:
    """A device as late as it may be: it reads what was sent to it, and does a step, when the host waits for that."""

    def __init__(self, loop: GraphLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]  # of each step: what is read, as it was sent
        self.done = 0
        device = self

        class Noise:
            def __getitem__(self, rows: slice) -> "Noise":
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
        monkeypatch.setattr(loop, "_replays", {rows: lambda: None for rows in loop._replays})

    def run(self, step: int) -> None:
        for staged, sent in self.queued[step]:
            assert torch.equal(staged, sent), "the host has drawn over noise that was not read yet"


def test_the_host_stays_two_steps_ahead_and_overwrites_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = graph_loop(model, 2)
    device = LateDevice(loop, monkeypatch)
    loop.add(row_of(model, scheduler="Euler a", num_inference_steps=20))
    ahead = []
    while loop.images:
        loop.step()
        ahead.append(len(device.queued) - 1 - device.done)
    assert ahead == [1, 2, *18 * [2]]
    assert sum(len(sent) for sent in device.queued) == 20  # as diffusers, which draws for the last one, too


def test_a_broken_row_poisons_neither_its_companions_nor_the_next_in_its_slot(model: LoadedModel) -> None:
    loop = graph_loop(model, 4)
    broken, companion = row_of(model, seed=1), row_of(model, seed=2, scheduler="DPM++ 2M")
    broken.latents = broken.latents * float("nan")
    loop.add(broken)
    loop.add(companion)
    loop.step()
    assert not loop.latents(broken).isfinite().any()
    loop.remove(broken)
    newcomer = row_of(model, seed=3, scheduler="DPM++ 2M SDE Karras")
    loop.add(newcomer)
    while loop.images:
        loop.step()
    for row, asked in (
        (companion, {"seed": 2, "scheduler": "DPM++ 2M"}),
        (newcomer, {"seed": 3, "scheduler": "DPM++ 2M SDE Karras"}),
    ):
        [expected] = drawn(EagerLoop(bucketed(model, 2), HEIGHT, WIDTH), model, [(asked, 0)])
        torch.testing.assert_close(row.latents, expected, rtol=1e-4, atol=1e-4)
