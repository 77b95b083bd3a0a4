"""Text to image without a queue: generate all images of one or several requests in one call.

The arithmetic is that of diffusers' StableDiffusionXLPipeline and, for the refiner, of StableDiffusionXLImg2ImgPipeline
with denoising_end/denoising_start. Images of one batch may differ in prompt, seed, sampler, steps and guidance, but
not in merged adapters. The engines may be of any runtime.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from model.cuda.streams import StageTimer
from model.denoising.loop import ImageState, Loop, has_room
from model.images.pixels import Pixels
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.overflow import CHECKS, broken_images
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import RequestPlan
from model.pipeline.runner import Runner


def generate(model: LoadedModel, batch: Sequence[GenerationParams]) -> tuple[list[Pixels], dict[str, float], list[str]]:
    """Generate every image of every request of `batch`.

    Returns the images (uint8 [height, width, 3], in the order of requests, then of seeds), the milliseconds of each
    stage, and warnings. Raises RequestRefused, AdapterError, and BrokenImage for an image with NaN or infinity.
    """
    runner, timer = Runner(model), StageTimer(model.device)
    plans = [runner.plan(params) for params in batch]
    if model.adapters is not None:
        model.adapters.load([name for params in batch for name, _ in params.loras])
    [merged] = {plan.adapters.merged for plan in plans}
    model.use_adapters(merged)
    images = run_stages(runner, plans, timer.end)
    pixels = [image.pixels.wait() for image in images if image.pixels is not None]
    timer.end("decode")
    broken = [index for index, levels in enumerate(pixels) if levels is None]
    if broken:
        pending, owners = images[broken[0]].pixels, [plan for plan in plans for _ in range(plan.params.num_images)]
        assert pending is not None
        raise broken_images(owners[broken[0]], broken, len(pixels), CHECKS[pending.failed_check()])
    warnings = [text for plan in plans for text in plan.warnings]
    return [levels for levels in pixels if levels is not None], timer.milliseconds(), warnings


def run_stages(
    runner: Runner, plans: Sequence[RequestPlan], end_timing: Callable[[str], None] = lambda _: None
) -> list[ImageState]:
    """Run all stages of all images of these requests. Returns once the work is queued on the device.

    `end_timing` is called with the name of a timing (see `Stage`) once its work is queued: the first stage's before the
    first loop, and that of each stage with a loop.
    """
    images = [(plan, image) for plan in plans for image in plan.images()]
    encoded = {plan: EncodedOnce(range(plan.params.num_images)) for plan in plans}
    by_loop = _advance(runner, images, encoded)
    end_timing(runner.stages[0].timing)
    while by_loop:
        for key, members in by_loop.items():
            denoise(runner.model.loop(*key), [image for _, image in members])
            end_timing(runner.current_timing(members[0][1]))
        by_loop = _advance(runner, [member for members in by_loop.values() for member in members], encoded)
    return [image for _, image in images]


def _advance(
    runner: Runner, images: Iterable[tuple[RequestPlan, ImageState]], encoded: Mapping[RequestPlan, EncodedOnce]
) -> dict[LoopKey, list[tuple[RequestPlan, ImageState]]]:
    """Advance images to their next loops, and return them by loop. Finished images are left out."""
    by_loop: dict[LoopKey, list[tuple[RequestPlan, ImageState]]] = {}
    for plan, image in images:
        if (key := runner.advance(plan, image, encoded[plan])) is not None:
            by_loop.setdefault(key, []).append((plan, image))
    return by_loop


def denoise(loop: Loop, images: Sequence[ImageState]) -> None:
    """Run all steps of all images, as many at once as fit into the loop. The results are in `image.latents`.

    The loop is empty afterwards, also after an error.
    """
    waiting = list(images)
    try:
        while waiting or loop.images:
            while waiting and has_room(loop, waiting[0].now.slots):
                loop.add(waiting.pop(0))
            loop.step()
    finally:
        for image in list(loop.images):
            loop.remove(image)
