"""The graph loop on the CPU: its choice of engines, captures, memory and queue of steps.

tests/model/denoising/test_loop.py compares its results with the eager loop's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.cuda.graphs import StepQueue
from model.denoising import graph_loop as graph_loop_module
from model.denoising.buffers import MAPPING_ROWS, buffer_shapes
from model.denoising.graph_loop import GraphLoop
from model.denoising.networks import Denoiser, DenoiserVariant
from model.denoising.sampler_specs import SAMPLERS
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import denoise
from model.store.manifest import Signature
from tests.support.linear_networks import Stub, linear_model
from tests.support.loops import (
    CPU,
    HEIGHT,
    WIDTH,
    bucketed,
    graph_loop,
    latents_alone,
    make_image,
    run_to_end,
    stubs,
)

PLAIN: dict[str, object] = {"guidance_scale": 1.0}
ZEROS: dict[str, object] = {}  # guided without a negative prompt
NEGATIVE: dict[str, object] = {"negative_prompt": "four"}


def test_a_failed_step_changes_no_later_image(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends for lack of memory while it tells the device which slots it reads."""
    upload, fails = graph_loop_module.to_device, [False]

    def fail_once(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if fails[0] and len(tensor) == MAPPING_ROWS:
            fails[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return upload(tensor, device)

    monkeypatch.setattr(graph_loop_module, "to_device", fail_once)
    loop = graph_loop(bucketed(model, 1, 2, 4))
    plain: dict[str, Any] = {"guidance_scale": 1.0, "num_inference_steps": 4}
    first, second, third = (make_image(model, seed=seed, prompt="one" * seed, **plain) for seed in (1, 2, 3))
    loop.add(first)
    loop.add(second)
    loop.step()
    loop.remove(first)
    loop.add(third)  # in the first slot; the second image is in the other
    loop.step()
    loop.remove(second)
    fails[0] = True
    with pytest.raises(torch.OutOfMemoryError):
        loop.step()
    loop.remove(third)
    later = make_image(model, seed=5, **plain)
    loop.add(later)
    run_to_end(loop)
    assert torch.equal(later.latents, latents_alone(seed=5, **plain))


@pytest.mark.parametrize(
    ("batches", "guided", "images", "calls"),
    [
        ((1, 2, 4), (2, 4), [PLAIN], [1, 0, 0, 0, 0]),
        ((1, 2, 4), (2, 4), [PLAIN, PLAIN], [0, 1, 0, 0, 0]),
        ((1, 2, 4), (2, 4), [ZEROS], [0, 0, 0, 1, 0]),
        ((1, 2, 4), (2, 4), [ZEROS, ZEROS], [0, 0, 0, 0, 1]),
        ((1, 2, 4), (2, 4), [NEGATIVE], [0, 1, 0, 0, 0]),
        ((1, 2, 4), (2, 4), [ZEROS, NEGATIVE], [0, 0, 1, 0, 0]),
        ((1, 2, 4), (2, 4), [ZEROS, PLAIN], [0, 0, 1, 0, 0]),
        ((2, 6), (2, 6), [ZEROS, ZEROS], [0, 0, 0, 1]),  # with room for a third
        ((1, 2, 6), (), [ZEROS, PLAIN], [1, 1, 0]),
        ((1, 2, 6), (), [ZEROS, ZEROS], [0, 0, 1]),
        ((8,), (), [NEGATIVE] * 3 + [PLAIN] * 2, [1]),
        # Without batch 2 the engine of batch 1 runs twice. Few-step models have only that, since they are not guided.
        ((1,), (), [ZEROS], [2]),
        ((1,), (), [NEGATIVE], [2]),
        ((1, 2), (), [ZEROS], [0, 1]),
        # Releases of earlier builds lack the variant of batch 2.
        ((1, 2, 4), (4,), [ZEROS], [0, 1, 0, 0]),
    ],
)
def test_runs_the_cheapest_engines_that_hold_all_images(
    batches: tuple[int, ...], guided: tuple[int, ...], images: list[dict[str, Any]], calls: list[int]
) -> None:
    """The variant for guided images runs where all images are guided by zeros."""
    model = linear_model()
    unet = bucketed(model, *batches, guided=guided)
    loop = graph_loop(unet)
    for seed, changes in enumerate(images):
        loop.add(make_image(model, seed=seed, **changes))
    loop.step()
    assert [len(engine.seen) for engine in stubs(unet)] == calls


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
    """A load compares them with the free memory."""
    unet, device = bucketed(model, *batches), torch.device("meta")
    with Allocations(device) as allocated:
        GraphLoop(Denoiser((unet,)), HEIGHT, WIDTH, device)
    networks = [network for _, network in Denoiser((unet,)).shapes(HEIGHT, WIDTH)]
    shapes = buffer_shapes(networks, HEIGHT, WIDTH)
    assert {"slot keys_values", "slot time_embeds", "entry keys_values"} < {*shapes}
    assert allocated.bytes == sum(buffer.bytes for buffer in shapes.values())


def test_networks_that_take_an_input_of_different_shapes_are_refused(model: LoadedModel) -> None:
    """For example a variant that was built for longer texts."""
    plain = bucketed(model, 2)
    [unet] = stubs(plain)
    inputs = [
        spec.model_copy(update={"shape": (*spec.shape[:1], 154, *spec.shape[2:])})
        if spec.name == "keys_values"
        else spec
        for spec in unet.signature.inputs
    ]
    longer = Stub("unet_lora", Signature(inputs=tuple(inputs), outputs=unet.signature.outputs))
    longer.bucket = unet.bucket
    denoiser = Denoiser((plain, DenoiserVariant(EngineSet([longer]), frozenset({"lora"}))))
    with pytest.raises(EngineError, match="take keys_values of different shapes or dtypes"):
        GraphLoop(denoiser, HEIGHT, WIDTH, CPU)


class RecordingQueue(StepQueue):
    """Counts the captured steps and their replays."""

    captured = replays = 0

    def capture(self, work: Callable[[], None], workspace: bool, name: str) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_other_settings_need_no_new_capture(model: LoadedModel) -> None:
    queue = RecordingQueue(CPU)
    loop = graph_loop(bucketed(model, 1, 2, 4, guided=(2, 4)), queue)
    for scheduler in SAMPLERS:
        denoise(loop, [make_image(model, scheduler=scheduler, num_inference_steps=5, guidance_scale=3.0)])
    denoise(loop, [make_image(model, timesteps=(900, 500, 1), num_inference_steps=3, guidance_rescale=0.7)])
    # A step is a call and an update. Heun has 9 entries.
    assert queue.captured == 6 and queue.replays == 2 * (5 * len(SAMPLERS) + 4 + 3)


def test_captures_one_graph_in_each_part(model: LoadedModel) -> None:
    """So that other loops can run steps between two of them."""
    queue = RecordingQueue(CPU)
    loop = GraphLoop(Denoiser((bucketed(model, 1, 2, 4),)), HEIGHT, WIDTH, CPU, queue)
    assert [queue.captured for _ in loop.capture()] == [1, 2, 3, 4]


class LateQueue(StepQueue, TorchDispatchMode):
    """The queue of the slowest possible device: it reads what was uploaded for a step only when the host waits."""

    def __init__(self) -> None:
        StepQueue.__init__(self, CPU)
        TorchDispatchMode.__init__(self)
        # Of each step: the host's buffers, and their content when the upload was queued.
        self.uploads: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
        self.steps_done = 0

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
            in_flight.append(len(queue.uploads) - 1 - queue.steps_done)
    assert in_flight == [1, 2, *18 * [2]]
    # Noise is uploaded in every step, because diffusers draws noise for the last step too.
    assert sum(len(uploads) for uploads in queue.uploads) == 20
