"""Streams next to the loops: none reads tensors that another has not finished, and none waits without need."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import pytest
import torch

from model.cuda import graphs
from model.cuda.streams import SideStream, StageTimer
from model.engines import graphed
from model.engines.graphed import GraphedEngine
from model.images.pending import PendingImage
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.preview import fit_preview_map
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate, run_stages
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.linear_networks import WIDTHS, Stub, linear_model, stub
from tests.support.streams import Race, Stream, Streams
from tests.test_graph_loop import bucketed, graph_loop
from tests.test_scheduler import SECONDS, asked, pixels


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def model(streams: Streams) -> LoadedModel:
    """With a GPU's streams, and a graph loop for the base at the size that most requests here have."""
    model = linear_model()
    streams.add_side_streams(model)
    model.loops[(spec.UNET, 64, 96)] = graph_loop(bucketed(model, 1, 2, 4, 8))
    return model


@pytest.fixture
def ran_on(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Component -> the streams that its engine has run on."""
    found: dict[str, set[str]] = {}
    run = Stub.run

    def note(self: Stub, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found.setdefault(self.component, set()).add(streams.current.name)
        return run(self, inputs)

    monkeypatch.setattr(Stub, "run", note)
    return found


MIX = [
    asked(1),
    asked(2, use_refiner=True, num_images=2, scheduler="DPM++ 2M SDE Karras"),
    asked(3, guidance_scale=1.0, num_inference_steps=7),
    asked(4, width=64, use_refiner=True, negative_prompt="four"),
]


@contextmanager
def served(model: LoadedModel, streams: Streams) -> Iterator[Scheduler]:
    """A scheduler whose thread is watched."""
    scheduler, watch = Scheduler(Runner(model), Limits(), lambda: None), ExitStack()
    scheduler.call(lambda: watch.enter_context(streams.checking())).result(SECONDS)
    yield scheduler
    scheduler.call(watch.close).result(SECONDS)
    scheduler.close()


def test_served_images_are_correct_and_free_of_races(
    model: LoadedModel, streams: Streams, ran_on: dict[str, set[str]]
) -> None:
    with served(model, streams) as scheduler:
        scheduler.preview_map = scheduler.call(lambda: fit_preview_map(model, 64, 96)).result(SECONDS)
        jobs = [scheduler.submit(request, lambda _: None, preview_every=2) for request in MIX]
        drawn = [job.result.result(SECONDS).images for job in jobs]
    loops = {spec.UNET: {"main"}, spec.REFINER_UNET: {"main"}}
    texts = {name: {"text"} for name in model.engines.keys() - loops.keys() - {spec.VAE_DECODER}}
    assert ran_on == {
        **loops,
        **texts,
        spec.TEXT_ENCODER: {"first_text"},
        spec.VAE_DECODER: {"decode"},
    }
    sharing: dict[str, set[str]] = {}  # TensorRT's plans of one stream share a workspace
    for name, on in ran_on.items():
        sharing.setdefault(spec.SDXL[name].stream, set()).update(on)
    assert len(sharing) == 4 and all(len(on) == 1 for on in sharing.values())
    for request, images in zip(MIX, drawn, strict=True):
        for data, picture in zip(images, generate(linear_model(), [request])[0], strict=True):
            assert np.abs(pixels(data).astype(int) - picture.astype(int)).max() <= 1


def test_text_waits_for_no_step_and_no_step_for_a_decoding(model: LoadedModel, streams: Streams) -> None:
    with served(model, streams) as scheduler:
        for job in [scheduler.submit(request) for request in MIX]:
            job.result.result(SECONDS)
    text, decode = streams.side["text"], streams.side["decode"]
    assert text.count and decode.count and streams.main.count
    assert not text.seen[streams.main] and not text.seen[decode]
    assert not streams.main.seen[decode]
    assert streams.main.seen[text] == text.count and decode.seen[streams.main]


def queued(model: LoadedModel, params: GenerationParams) -> PendingImage:
    """Queue everything that `generate` does on the device for a request of one image, without waiting for it."""
    runner = Runner(model)
    [image] = run_stages(runner, [runner.plan(params)])
    assert image.pixels is not None
    return image.pixels


@pytest.mark.parametrize("refiner", [False, True])
def test_generate_is_free_of_races(refiner: bool, model: LoadedModel, streams: Streams) -> None:
    request = asked(5, use_refiner=refiner)
    with streams.checking():
        decoding = queued(model, request)
    picture = decoding.wait()
    assert picture is not None
    assert np.abs(picture.astype(int) - generate(linear_model(), [request])[0][0].astype(int)).max() <= 1


@pytest.mark.parametrize("left_out", ["wait", "record"])
@pytest.mark.parametrize("reader", ["main", "text", "decode"])
def test_a_missing_wait_or_record_is_a_race(left_out: str, reader: str, model: LoadedModel, streams: Streams) -> None:
    """The tests above would see it."""
    stream = streams.main if reader == "main" else streams.side[reader]
    stream.waits, stream.records = left_out != "wait", left_out != "record"
    words = "may not have written" if left_out == "wait" else "may have freed"
    with pytest.raises(Race, match=f"on {reader} reads what .* {words}"), streams.checking():
        queued(model, asked(1))


def test_gpu_stages_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last event is waited for, at the end. Times of one stage are summed."""
    waited: list[int] = []

    class Mark:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Mark.made += 1
            self.number = Mark.made

        def synchronize(self) -> None:
            waited.append(self.number)

        def elapsed_time(self, later: "Mark") -> float:
            return 10.0 ** (later.number - self.number) * self.number

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    timer = StageTimer(torch.device("cuda"))
    timer.end("text")
    timer.end("denoise")
    timer.end("text")
    assert not waited
    assert timer.milliseconds() == {"text": 10.0 + 30.0, "denoise": 20.0}
    assert waited == [4]


def test_on_a_cpu_there_are_no_streams() -> None:
    side = SideStream(torch.device("cpu"))
    with side.run_after(torch.zeros(1)):
        side.release_to_current([torch.zeros(1)])


# -- graphs ------------------------------------------------------------------------------------------------------------


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def captures(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, Stream, Graph]]:
    """Pool, stream and graph of each capture."""
    found: list[tuple[object, Stream, Graph]] = []

    @contextmanager
    def capturing(graph: Graph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        found.append((pool, stream, graph))
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            yield

    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: streams.main)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return found


def test_graphs_of_a_stream_share_a_pool_and_those_of_another_do_not(
    captures: list[tuple[object, Stream, Graph]], streams: Streams
) -> None:
    side = Stream("side")
    ran: list[Stream] = []

    def captured(on: Stream) -> Callable[[], None]:
        with torch.cuda.stream(on):  # type: ignore[arg-type]
            return graphs.capture(lambda: ran.append(streams.current))

    replays = [captured(stream) for stream in (streams.main, side, streams.main, side)]
    pools, on, made = zip(*captures, strict=True)
    assert pools[0] is pools[2] and pools[1] is pools[3] and pools[0] is not pools[1]
    assert on[0] is on[2] is not streams.main and on[1] is on[3] is side
    assert ran == [stream for stream in on for _ in range(3)]
    replays[0]()
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        replays[1]()
        with pytest.raises(AssertionError, match="another stream"):
            replays[0]()
    assert [graph.replays for graph in made] == [1, 1, 0, 0]


def test_only_graphs_without_a_workspace_switch_it_off(
    captures: list[tuple[object, Stream, Graph]], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch reads the environment at each product."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    seen: list[tuple[str | None, str | None]] = []

    def work() -> None:
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("CUBLASLT_WORKSPACE_SIZE")))

    with torch.cuda.stream(Stream("side")):  # type: ignore[arg-type]
        for workspace in (True, False, False):
            graphs.capture(work, workspace)()
    assert seen == 3 * [(":4096:8", None)] + 6 * [(":0:0", "0")]
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], "CUBLASLT_WORKSPACE_SIZE" in os.environ) == (":4096:8", False)


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_graph_shares_no_workspace_with_other_work(
    fails: bool, captures: list[tuple[object, Stream, Graph]], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch may free a stream's workspace at any time, so a captured product must allocate its own."""
    events: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)

    def work() -> None:
        events.append("capture" if captures else "warm-up")
        if fails and captures:
            raise ValueError

    with pytest.raises(ValueError) if fails else nullcontext():
        graphs.capture(work)
    assert events == ["clear", "warm-up", "warm-up", "clear", "capture", "clear"]


def test_branches_leave_the_current_stream_and_join_it_again(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran: list[tuple[int, Stream]] = []

    def work(number: int) -> int:
        assert streams.current is home or streams.current.seen[home] == made
        streams.current.count += 1
        ran.append((number, streams.current))
        return number

    home, other, made = streams.main, Stream("other"), 7
    home.count = made
    assert graphs.run_concurrently([lambda: work(0), lambda: work(1), lambda: work(2)]) == [0, 1, 2]
    on = dict(ran)
    assert on[0] is home is streams.current and len({home, on[1], on[2]}) == 3
    assert (home.seen[on[1]], home.seen[on[2]]) == (1, 1)
    made = home.count
    graphs.run_concurrently([lambda: work(3), lambda: work(4)])
    home = other
    with torch.cuda.stream(other):  # type: ignore[arg-type]
        made = other.count
        graphs.run_concurrently([lambda: work(5), lambda: work(6)])
        assert graphs.run_concurrently([lambda: work(7)]) == [7]
    on = dict(ran)
    assert on[4] is on[1] and on[6] not in (on[1], on[2]) and on[5] is on[7] is other


def test_graphed_engine_copies_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Callable[[], None]] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        captured.append(work)
        return work

    monkeypatch.setattr(graphed, "capture", capture)
    plain, behind = (stub(linear_model(), spec.UNET_TEXT) for _ in range(2))
    engine = GraphedEngine(behind)
    width = [tensor.shape[-1] for tensor in plain.signature.inputs][0]
    given = [{"encoder_hidden_states": torch.randn(1, WIDTHS.tokens, int(width))} for _ in range(3)]
    found = [engine.run({name: tensor.clone() for name, tensor in inputs.items()}) for inputs in given]
    for inputs, outputs in zip(given, found, strict=True):  # the earlier ones, too, after the last run
        torch.testing.assert_close(outputs, plain.run(inputs), rtol=0, atol=0)
    assert len(captured) == 1
    # A replay reads and writes the memory that it was captured with.
    with torch.inference_mode():
        captured[0]()
    assert torch.equal(behind.seen[-1]["encoder_hidden_states"], given[-1]["encoder_hidden_states"])
