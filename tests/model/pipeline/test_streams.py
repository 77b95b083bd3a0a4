"""CUDA streams of text encoding and decoding: their work is free of races, and no stream waits without need."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.cuda import graphs
from model.denoising.networks import DenoiserVariant
from model.engines.engine import EngineSet
from model.engines.graphed import GraphedEngine
from model.pipeline import spec
from model.pipeline.components import COMPONENTS
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Mask
from model.pipeline.preview import fit_preview_map
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate, run_stages
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.images import largest_difference, pixels
from tests.support.linear_networks import WIDTHS, Stub, linear_model, stub
from tests.support.loops import bucketed, graph_loop
from tests.support.scheduling import params, results
from tests.support.streams import Race, Stream, Streams
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def graph_unet() -> DenoiserVariant:
    """The engines of the base's graph loop, in buckets as on a GPU."""
    return bucketed(linear_model(), 1, 2, 4, 8)


@pytest.fixture
def model(streams: Streams, graph_unet: DenoiserVariant) -> LoadedModel:
    """A model with a GPU's streams, and a graph loop for the base at the size that most requests here have."""
    model = linear_model()
    streams.add_side_streams(model)
    model.loops[spec.UNET, 64, 96] = graph_loop(graph_unet)
    return model


LEVELS = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
MASK = Mask(np.repeat(np.uint8([[0, 255]]), 48, axis=1).repeat(64, axis=0), "five", None, strength=0.75)
MIX = [
    params(1),
    params(2, use_refiner=True, num_images=2, scheduler="DPM++ 2M SDE Karras"),
    params(3, guidance_scale=1.0, num_inference_steps=7),
    params(4, width=64, use_refiner=True, negative_prompt="four"),
    params(5, image=LEVELS, strength=0.5, num_images=2),
    params(6, image=LEVELS, masks=(MASK, replace(MASK, strength=1.0)), use_refiner=True, scheduler="Euler a"),
]


@contextmanager
def checked_scheduler(model: LoadedModel, streams: Streams, previews: bool = False) -> Iterator[Scheduler]:
    """A scheduler whose thread is checked for races. `previews`: of images of 96x64 pixels."""
    watch, runner = ExitStack(), Runner(model)

    def fit() -> None:
        watch.enter_context(streams.checking())
        runner.preview_map = fit_preview_map(model, 64, 96)

    scheduler = Scheduler([runner], Limits(), lambda: None, prepare=fit if previews else None)
    if not previews:
        scheduler.call(lambda: watch.enter_context(streams.checking())).result(TIMEOUT_SECONDS)
    scheduler.wait_ready()
    yield scheduler
    scheduler.call(watch.close).result(TIMEOUT_SECONDS)
    scheduler.close()


def test_scheduled_images_are_correct_and_free_of_races(
    model: LoadedModel, graph_unet: DenoiserVariant, streams: Streams
) -> None:
    with checked_scheduler(model, streams, previews=True) as scheduler:
        jobs = [scheduler.submit(request, lambda _: None, preview_every=2) for request in MIX]
        images = [result.images for result in results(*jobs)]

    def used_streams(*engine_sets: EngineSet) -> set[str]:
        engines = [engine for engine_set in engine_sets for engine in engine_set.engines if isinstance(engine, Stub)]
        inputs = [tensor for engine in engines for tensors in engine.seen for tensor in tensors.values()]
        return {streams.writer(tensor).name for tensor in inputs}

    used = {name: used_streams(engines) for name, engines in model.engines.items()}
    used[spec.UNET] = used_streams(model.engines[spec.UNET], graph_unet.engines)
    expected = dict.fromkeys(model.engines, {"text"})
    expected |= {spec.UNET: {"main"}, spec.REFINER_UNET: {"main"}}
    assert used == expected | {spec.TEXT_ENCODER: {"first_text"}} | {
        spec.VAE_ENCODER: {"encode"},
        spec.VAE_DECODER: {"decode"},
    }
    by_declared_stream: dict[str, set[str]] = {}  # TensorRT's plans of one stream share a workspace
    for name, names in used.items():
        by_declared_stream.setdefault(COMPONENTS[name].stream, set()).update(names)
    assert len(by_declared_stream) == 5 and all(len(names) == 1 for names in by_declared_stream.values())
    for request, files in zip(MIX, images, strict=True):
        for data, image in zip(files, generate(linear_model(), [request])[0], strict=True):
            assert largest_difference(pixels(data), image) <= 1


def test_inputs_wait_for_no_step_and_steps_for_no_decoding(model: LoadedModel, streams: Streams) -> None:
    with checked_scheduler(model, streams) as scheduler:
        results(*[scheduler.submit(request) for request in MIX if not request.masks])
    main, text, encode, decode = streams.main, streams.side["text"], streams.side["encode"], streams.side["decode"]
    assert text.count and encode.count and decode.count and main.count
    for side in (text, encode):
        assert not side.seen[main] and not side.seen[decode]
    assert not main.seen[decode]
    assert main.seen[text] == text.count and decode.seen[main]


@pytest.mark.parametrize(("omitted", "race"), [("waits", "may not have written yet"), ("records", "may have freed")])
@pytest.mark.parametrize("reader", ["main", "text", "decode"])
def test_every_wait_and_record_is_needed(
    omitted: str, race: str, reader: str, model: LoadedModel, streams: Streams
) -> None:
    """Shows that the tests above can fail."""
    setattr(streams.main if reader == "main" else streams.side[reader], omitted, False)
    runner = Runner(model)
    with pytest.raises(Race, match=f"on {reader} reads what .* {race}"), streams.checking():
        run_stages(runner, [runner.plan(params(1))])


class Graph:
    """A captured graph that counts its replays and does no work."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_graphs_share_memory_with_those_of_their_stream_only(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """And use no workspace of it, because PyTorch may free a stream's workspace at any time."""
    captures: list[tuple[object, Stream, Graph]] = []
    events: list[object] = []

    @contextmanager
    def capture(graph: Graph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        captures.append((pool, stream, graph))
        with streams.use(stream):
            yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    # PyTorch has no public function for it.
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at each matrix product

    def work() -> None:
        events.append((streams.current, os.environ["CUBLAS_WORKSPACE_CONFIG"]))

    side, replays = Stream("side"), []
    for stream, workspace in ((streams.main, True), (side, False), (streams.main, True), (side, False)):
        with streams.use(stream):
            replays.append(graphs.capture(work, workspace))
    pools, captured_on, captured = zip(*captures, strict=True)
    assert pools[0] is pools[2] and pools[1] is pools[3] and pools[0] is not pools[1]
    assert captured_on[0] is captured_on[2] is not streams.main and captured_on[1] is captured_on[3] is side
    runs = [(stream, setting) for stream, setting in zip(captured_on, (":4096:8", ":0:0") * 2, strict=True)]
    assert events == [event for run in runs for event in ("clear", run, run, "clear", run, "clear")]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    replays[0]()
    with streams.use(side), pytest.raises(AssertionError, match="another stream"):
        replays[0]()
    assert [graph.replays for graph in captured] == [1, 0, 0, 0]


def test_graphed_engine_copies_inputs_and_outputs() -> None:
    captured: list[Callable[[], None]] = []

    def capture(work: Callable[[], None], name: str) -> Callable[[], None]:
        assert name.startswith("unet_text_")
        captured.append(work)
        return work

    plain, graphed = (stub(linear_model(), spec.UNET_TEXT) for _ in range(2))
    engine = GraphedEngine(graphed, capture)
    [width] = [tensor.shape[-1] for tensor in plain.signature.inputs]
    inputs = [{"encoder_hidden_states": torch.randn(1, WIDTHS.tokens, int(width))} for _ in range(3)]
    outputs = [engine.run({name: tensor.clone() for name, tensor in each.items()}) for each in inputs]
    for given, returned in zip(inputs, outputs, strict=True):  # also the earlier ones, after the last run
        torch.testing.assert_close(returned, plain.run(given), rtol=0, atol=0)
    assert len(captured) == 1
    with torch.inference_mode():
        captured[0]()  # a replay reads the memory that it was captured with
    assert torch.equal(graphed.seen[-1]["encoder_hidden_states"], inputs[-1]["encoder_hidden_states"])


def test_a_model_that_shares_engines_makes_no_streams(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives 32 streams out in turn, so streams that are dropped come round again."""
    monkeypatch.setattr("model.pipeline.loaded_model.SideStream", None)
    other = model.sharing(settings=model.settings.model_copy(update={"latents_mean": (1.0,), "latents_std": (2.0,)}))
    assert other.decode_stream is model.decode_stream and other.loops == {} != model.loops
    assert other.latents_normalization is not None and model.latents_normalization is None
