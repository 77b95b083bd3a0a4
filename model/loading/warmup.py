"""Run everything once before the replica is ready, so that no request waits for lazy loading or finds memory full.

The warm-up makes every loop that requests can need, with the graphs of all engines of its size. It generates and
decodes an image of every size, and encodes text in every batch size. The peak memory of serving has then been allocated
once.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from model.cold_start import ColdStart, warm_up_part
from model.cuda.probe import DeviceProbe
from model.errors import EngineError, OutOfDeviceMemory
from model.loading.interfaces import check_interfaces
from model.loading.load import Loaded
from model.loading.served import ServedModel, SizeList
from model.pipeline.loaded_model import LoadedModel, run_to_end
from model.pipeline.params import Control, GenerationParams, ImagePrompt
from model.pipeline.preview import PreviewMap, fit_preview_map, preview_map_of
from model.pipeline.prompt import encode_prompt
from model.pipeline.request_plan import plan_request
from model.pipeline.text_to_image import generate
from model.scheduling.comparison import ImageComparison
from model.scheduling.step_times import measure_step_times

_END = object()
_STEPS = 2  # of the image; with a refiner, one of them is its own


def warm_up(
    loaded: Loaded,
    probe: DeviceProbe | None = None,
    cold_start: ColdStart | None = None,
    comparison: ImageComparison | None = None,
) -> PreviewMap:
    """Warm up `ServedModel.warmed_sizes`. Returns the map for previews. See `warm_up_in_parts`."""
    return run_to_end(warm_up_in_parts(loaded, probe, cold_start, comparison))


def warm_up_in_parts(
    loaded: Loaded,
    probe: DeviceProbe | None = None,
    cold_start: ColdStart | None = None,
    comparison: ImageComparison | None = None,
) -> Generator[None, None, PreviewMap]:
    """Warm up `ServedModel.warmed_sizes`. Returns the map for previews: the release's, or one fitted here.

    Yields after each part: a graph of a loop, an image, or texts. Other models may generate images meanwhile.

    `probe` defaults to one of the model's device. `cold_start` records the phase `warm_up` and its parts.
    `comparison`: if images are compared with fp16. Raises OutOfDeviceMemory if the configured buckets do not fit into
    the GPU's memory, and EngineError if the release's engines do not fit together.
    """
    check_interfaces(loaded.model.engines)
    model, served = loaded.model, loaded.served
    probe = probe or DeviceProbe(model.device)
    cold_start = cold_start or ColdStart(is_exported=False)
    refusals = probe.refused_allocations()

    @contextmanager
    def part(name: str) -> Iterator[None]:
        with _release_errors(loaded, probe, refusals), cold_start.phase("warm_up"), cold_start.timing_parts():
            with warm_up_part(name):
                yield

    requests = [_warm_up_params(served, width, height) for width, height in served.warmed_sizes]
    works = [(f"image_{one.width}x{one.height}", _generate_images(model, served, one, comparison)) for one in requests]
    # Texts first, so that their engines' first runs are parts, and not the beginning of an image.
    for name, work in [("texts", _encode_every_text(model, requests[-1])), *works]:
        has_more = True
        while has_more:
            with part(name):
                has_more = next(work, _END) is None
            yield
    with part("preview"):
        return find_preview_map(model, served)


@contextmanager
def _release_errors(loaded: Loaded, probe: DeviceProbe, refusals: int) -> Iterator[None]:
    """Raise errors of the warm-up as those of the release. `refusals`: allocations that were refused before it."""
    try:
        yield
    except EngineError as error:
        # No request has run yet, so the release is wrong. Its remedy differs from the remedy of a wrong call.
        raise EngineError(f"The engines of {loaded.release} do not fit together. {error.args[0]}") from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or probe.refused_allocations() > refusals:
            raise OutOfDeviceMemory(
                f"{loaded.release} does not fit into this GPU's memory with every configured bucket running."
            ) from error
        raise


def _generate_images(
    model: LoadedModel, served: ServedModel, params: GenerationParams, comparison: ImageComparison | None
) -> Iterator[None]:
    """Make the loops of a size, and generate an image for each kind of request. Yields after each part."""
    for plan in plan_request(model, params).passes[0].denoise.values():
        yield from model.prepare_loop(plan.loop)
    size = (params.width, params.height)
    encodes = served.image_sizes is not None and served.image_sizes.holds(*size)
    generate(model, [_from_image(params) if encodes else params])
    yield
    if comparison is not None:
        comparison.warm_up(params)
        yield
    if (with_controls := _with_controls(params, served)).controls:
        generate(model, [with_controls])
        yield
    if served.ip_adapter_sizes is not None and served.ip_adapter_sizes.holds(*size):
        for name in served.ip_adapters:
            generate(model, [_with_image_prompt(params, served, name)])
            yield


def step_measurement(loaded: Loaded, probe: DeviceProbe | None = None) -> Iterator[None]:
    """Return the work of `model.scheduling.step_times.measure_step_times` for the sizes that were warmed up."""
    requests = [_warm_up_params(loaded.served, width, height) for width, height in loaded.served.warmed_sizes]
    return measure_step_times(loaded.model, requests, probe)


def find_preview_map(model: LoadedModel, served: ServedModel) -> PreviewMap:
    """Return the release's map for previews, or a linear one that is fitted to the decoder. It has run once."""
    record = model.settings.preview
    if record is None:
        preview_map = fit_preview_map(model, *_preview_size(served))
    else:
        preview_map = preview_map_of(record, model.device)
    preview_map.colours(torch.zeros((1, model.settings.latent_channels, 2, 2), device=model.device))
    return preview_map


def _preview_size(served: ServedModel) -> tuple[int, int]:
    """Return the height and width at which the map for previews is fitted: half of the native ones if they are served.

    The fit has five unknowns for each color, and thousands of pixels at either size. Decoding takes most of its time.
    """
    if isinstance(served.sizes, SizeList):
        width, height = min(served.warmed_sizes, key=lambda size: size != (served.native_width, served.native_height))
        return height, width
    multiple, least = served.sizes.multiple, served.sizes.min_side
    halves = (side // 2 // multiple * multiple for side in (served.native_height, served.native_width))
    height, width = (max(least, half) for half in halves)
    return height, width


def _warm_up_params(served: ServedModel, width: int, height: int) -> GenerationParams:
    """Return a request that runs each UNet."""
    steps = {"num_inference_steps": _STEPS, "use_refiner": served.has_refiner, "denoising_frac": 0.5}
    values = served.defaults.model_dump() | steps
    return GenerationParams(prompt="warm up", negative_prompt=None, width=width, height=height, seed=0, **values)


def _from_image(params: GenerationParams) -> GenerationParams:
    """Return the request with a black image to start from. All of its steps run."""
    return replace(params, image=np.zeros((params.height, params.width, 3), np.uint8), strength=1.0)


def _with_controls(params: GenerationParams, served: ServedModel) -> GenerationParams:
    """Return the request with a black control image for every ControlNet of its size."""
    levels = np.zeros((params.height, params.width, 3), np.uint8)
    controls = (
        Control(name, levels, scale=1.0, start=0.0, end=1.0, mode=0 if types else None)
        for name, types in served.controlnets.items()
        if served.control_sizes[name].holds(params.width, params.height)
    )
    return replace(params, use_refiner=False, controls=tuple(controls))


def _with_image_prompt(params: GenerationParams, served: ServedModel, name: str) -> GenerationParams:
    """Return the request with black reference images, the most that an IP-Adapter takes."""
    adapter = served.ip_adapters[name]
    levels = np.zeros((adapter.images, adapter.side, adapter.side, 3), np.uint8)
    return replace(params, use_refiner=False, image_prompts=(ImagePrompt(name, levels, scale=1.0),))


def _encode_every_text(model: LoadedModel, params: GenerationParams) -> Iterator[None]:
    """Encode with a negative prompt and without guidance: together these use both batch sizes of the text networks.

    Yields after each of them.
    """
    for negative_prompt, guidance_scale in (("warm up", 2.0), (None, 1.0)):
        varied = replace(params, negative_prompt=negative_prompt, guidance_scale=guidance_scale)
        [plan] = plan_request(model, varied).passes
        for denoiser in model.family.denoisers:
            if denoiser.unet in plan.denoise:
                encode_prompt(model, plan, denoiser)
        yield
