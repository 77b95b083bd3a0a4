"""Prompt -> image, as plain functions over loaded engines: base_rows, denoise, refiner_row, Decoding.

The arithmetic is that of diffusers' StableDiffusionXLPipeline and, for the refiner, of StableDiffusionXLImg2ImgPipeline
with denoising_end/denoising_start. Rows of one batch may differ in prompt, seed, sampler, steps and guidance. This
module knows nothing of HTTP, of stores, or of which runtime an engine is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from model.api.request import GenerationSettings
from model.cuda.streams import (
    Laps,
    SideStream,
    to_device,
)
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import (
    Conditioning,
    Loop,
    Row,
    StepLoop,
    has_room,
)
from model.denoising.noise_schedule import (
    Floats,
    NoiseSchedule,
)
from model.denoising.samplers import (
    Table,
    split,
    stack,
    table,
)
from model.engines import components
from model.engines.components import DTYPES
from model.engines.engine import EngineSet
from model.images.encode import (
    Pixels,
    broken_image,
    to_levels,
)
from model.pipeline.guidance import (
    embed_guidance,
    guidance_by_step,
    scale_by_step,
)
from model.pipeline.tokenizer import ClipTokenizer
from model.store.manifest import Settings

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5  # diffusers' defaults for the refiner


@dataclass
class LoadedModel:
    """What a release is once loaded: engines by component, tokenizers, noise schedules and settings."""

    engines: dict[str, EngineSet]
    tokenizers: dict[str, ClipTokenizer]
    noise_schedules: dict[str, NoiseSchedule]
    settings: Settings
    device: torch.device
    shares_text_encoder_2: bool = False
    loops: dict[tuple[str, int, int], Loop] = field(default_factory=dict)
    efficient_pixels: int | None = None
    """Of the rows of one step, where the loops of sizes that nobody measured are to take them for `efficient`."""
    text_stream: SideStream = field(init=False)
    first_text_stream: SideStream = field(init=False)
    decode_stream: SideStream = field(init=False)
    """Where text is read (by the first text encoder beside all else) and latents are decoded, beside the loops: never
    engines of one of them on another."""

    def __post_init__(self) -> None:
        self.text_stream, self.first_text_stream = SideStream(self.device), SideStream(self.device)
        self.decode_stream = SideStream(self.device)

    def loop(self, component: str, height: int, width: int) -> Loop:
        """The one loop of that UNet and size (pixels); it is made at first use and kept, for it may hold much."""
        key = (component, height, width)
        if key not in self.loops:
            loop = self.loops[key] = make_loop(self, component, height, width)
            if self.efficient_pixels is not None:
                loop.efficient = min(loop.capacity, max(1, self.efficient_pixels // (height * width)))
        return self.loops[key]


def make_loop(model: LoadedModel, component: str, height: int, width: int) -> Loop:
    """A new loop for `component`, one of the UNets, at a size in pixels: where its implementation is chosen."""
    unet = model.engines[component]
    if model.device.type == "cuda" and unet.is_static(height, width):
        names = components.GUIDED if component == components.UNET else ()
        some = {name: model.engines[name].of_size(height, width) for name in names if name in model.engines}
        unconditional, guided = some.get(components.UNET_UNCONDITIONAL, []), some.get(components.UNET_GUIDED, [])
        return GraphLoop(unet, height, width, model.device, unconditional, guided)
    return StepLoop(unet, height, width)


def generate(
    model: LoadedModel, batch: Sequence[GenerationSettings]
) -> tuple[list[Pixels], dict[str, float], list[str]]:
    """Draw every image of every request of `batch`, all of one size, from the first step to the last.

    Returns the pictures (uint8 [height, width, 3], requests in order, each request's images in order), the
    milliseconds of each stage, and warnings. Raises BrokenImage, never returns a picture with NaN in it.
    """
    laps = Laps(model.device)
    steps = [request_tables(model, request) for request in batch]
    rows = draw(model, batch, steps, laps.end)
    warnings = [
        text for one, (_, rest) in zip(batch, steps, strict=True) for text in request_warnings(model, one, rest)
    ]
    # One picture a call: a decoder's activations are the largest of the pipeline, and batching them gains nothing.
    with torch.inference_mode():
        decodings = [Decoding(model, row.latents) for row in rows]
    pictures = [decoding.wait() for decoding in decodings]
    laps.end("decode")
    broken = [index for index, picture in enumerate(pictures) if picture is None]
    if broken:
        raise broken_image(broken, len(pictures))
    return [picture for picture in pictures if picture is not None], laps.milliseconds(), warnings


@torch.inference_mode()
def draw(
    model: LoadedModel,
    batch: Sequence[GenerationSettings],
    steps: Sequence[tuple[Table, Table | None]],
    lap: Callable[[str], None],
) -> list[Row]:
    """All of `generate` but the decoding: a row for each image, its latents queued on the current stream. `steps`: the
    `request_tables` of each request. `lap` is told of each stage once it is queued."""
    height, width = batch[0].height, batch[0].width
    rows = [base_rows(model, request, base) for request, (base, _) in zip(batch, steps, strict=True)]
    lap("text")
    denoise(model.loop(components.UNET, height, width), [row for some in rows for row in some])
    lap("denoise")
    for index, (request, (_, rest)) in enumerate(zip(batch, steps, strict=True)):
        if rest:
            text = refiner_text(model, request, rest)
            rows[index] = [refiner_row(request, rest, row, text) for row in rows[index]]
    refined = [row for some, (_, rest) in zip(rows, steps, strict=True) if rest for row in some]
    if refined:
        denoise(model.loop(components.REFINER_UNET, height, width), refined)
        lap("refine")
    return [row for some in rows for row in some]


def denoise(loop: Loop, rows: Sequence[Row]) -> None:
    """Run every row through all of its steps, as many at once as the loop takes; `row.latents` is then the result.

    A row without steps keeps its latents. None of them is in the loop afterwards, whatever happened.
    """
    waiting = [row for row in rows if row.table.steps]
    try:
        while waiting or loop.rows:
            while waiting and has_room(loop, waiting[0].unet_rows):
                loop.join(waiting.pop(0))
            loop.step()
    finally:
        for row in list(loop.rows):
            loop.leave(row)


def request_tables(model: LoadedModel, request: GenerationSettings) -> tuple[Table, Table | None]:
    """The steps of the base and, where the request uses the refiner, of the refiner (possibly none)."""
    noise_schedule = model.noise_schedules["base"]
    whole = table(request.scheduler, request.num_inference_steps, noise_schedule)
    if not request.use_refiner:
        return whole, None
    return split(whole, noise_schedule, request.denoising_frac)


def base_rows(model: LoadedModel, request: GenerationSettings, steps: Table) -> list[Row]:
    """The rows of one request: its first latents, its text, its guidance by step."""
    settings = model.settings
    size = [float(request.height), float(request.width)]
    time_ids = [*size, 0.0, 0.0, *size]
    conditional, unconditional = _read_beside(model, request, False, (time_ids, time_ids), steps)
    shape = (
        1,
        settings.latent_channels,
        request.height // settings.vae_scale_factor,
        request.width // settings.vae_scale_factor,
    )
    guidance = guidance_by_step(request)[: steps.steps]
    rows = []
    for seed in request.seeds:
        generator = torch.Generator("cpu").manual_seed(seed)
        latents = torch.randn(shape, generator=generator) * steps.init_sigma
        rows.append(Row(to_device(latents, model.device), steps, guidance, generator, conditional, unconditional))
    return rows


def embeds_guidance(model: LoadedModel, refiner: bool) -> bool:
    """Whether a UNet was distilled to take the guidance scale as an input: it then runs once a step, and no negative
    prompt reaches it."""
    time = model.engines[components.REFINER_UNET_TIME if refiner else components.UNET_TIME]
    return components.timestep_cond_width(time.signature) > 0


def is_guided(model: LoadedModel, request: GenerationSettings, refiner: bool, begin: int = 0) -> bool:
    """Whether a UNet that begins with step `begin` takes two rows for each image of a request, as long as its guidance
    lasts."""
    return bool((guidance_by_step(request)[begin:] > 1).any()) and not embeds_guidance(model, refiner)


def _read_beside(
    model: LoadedModel,
    request: GenerationSettings,
    refiner: bool,
    time_ids: tuple[list[float], list[float]],
    steps: Table,
) -> tuple[Conditioning, Conditioning | None]:
    """`encode_prompt` on the text's own stream, for the loops' to read."""
    with model.text_stream.beside():
        read = encode_prompt(model, request, refiner, time_ids, steps)
    conditionings = [one for one in read if one is not None]
    model.text_stream.hand_over(tensor for one in conditionings for tensor in (one.keys_values, one.time_embeds))
    return read


def encode_prompt(
    model: LoadedModel,
    request: GenerationSettings,
    refiner: bool,
    time_ids: tuple[list[float], list[float]],
    steps: Table,
) -> tuple[Conditioning, Conditioning | None]:
    """Text -> what conditions the UNet, and its counterpart for guidance (None where no step is guided).

    The base reads both encoders' penultimate states side by side, the refiner the second's alone; the pooled
    projection is always the second's. `time_ids`: sizes (and aesthetic score) for each of the two. What the UNet makes
    of the text and of every time in `steps` is computed here, once for all steps. There is no counterpart for a UNet
    that embeds guidance, as in diffusers.
    """
    if refiner:
        assert model.settings.refiner is not None
        zeros = model.settings.refiner.force_zeros_for_empty_prompt
    else:
        zeros = model.settings.force_zeros_for_empty_prompt
    begin = request.num_inference_steps - steps.steps if refiner else 0
    scales = scale_by_step(request)[begin:]
    guided = is_guided(model, request, refiner, begin)
    zero_negative = request.negative_prompt is None and zeros
    texts = [request.prompt]
    if guided and not zero_negative:
        texts.append(request.negative_prompt or "")
    second = components.TEXT_ENCODER_2
    if refiner and not model.shares_text_encoder_2:
        second = components.REFINER_TEXT_ENCODER_2
    encoded = _encode_texts(model, second, "tokenizer_2", texts)
    hidden, pooled = encoded["hidden_states"], encoded["pooled"]
    if not refiner:
        # Queued after the second, which is the larger by far and has been at work meanwhile.
        with model.first_text_stream.beside():
            first = _encode_texts(model, components.TEXT_ENCODER, "tokenizer", texts)["hidden_states"]
        model.first_text_stream.hand_over([first])
        hidden = torch.cat([first.to(hidden.dtype), hidden], dim=-1)
    if guided and zero_negative:
        hidden = torch.cat([hidden, torch.zeros_like(hidden)])
        pooled = torch.cat([pooled, torch.zeros_like(pooled)])
    conditional, *unconditional = _conditionings(model, refiner, hidden, pooled, time_ids, steps, scales)
    return conditional, replace(unconditional[0], blank=zero_negative) if unconditional else None


def _conditionings(
    model: LoadedModel,
    refiner: bool,
    hidden: torch.Tensor,
    pooled: torch.Tensor,
    time_ids: Sequence[list[float]],
    steps: Table,
    scales: Floats,
) -> list[Conditioning]:
    """One for each text: hidden [texts, tokens, width], pooled [texts, width] with that text's `time_ids`. `scales`:
    the guidance scale of each step, which counts for a UNet that embeds it."""
    text = model.engines[components.REFINER_UNET_TEXT if refiner else components.UNET_TEXT]
    time = model.engines[components.REFINER_UNET_TIME if refiner else components.UNET_TIME]
    dtype = DTYPES[text.signature.inputs[0].dtype]
    keys_values = text.run({"encoder_hidden_states": hidden.to(dtype)})["keys_values"]
    count = max(1, steps.steps)  # a request may leave one of its two UNets no step
    timesteps = to_device(torch.from_numpy(stack([steps], count)[0][0]), model.device)
    width = components.timestep_cond_width(time.signature)
    guidance = {}
    if width:
        guidance[components.TIMESTEP_COND] = to_device(
            embed_guidance(np.resize(scales, count), width).to(dtype), model.device
        )
    made = []
    for index in range(len(hidden)):
        embedded = time.run(
            {
                "timestep": timesteps,
                "text_embeds": pooled[index].to(dtype).expand(count, -1),
                "time_ids": to_device(torch.tensor(time_ids[index]), model.device).expand(count, -1),
                **guidance,
            }
        )
        made.append(Conditioning(keys_values[index : index + 1], embedded["time_embeds"]))
    return made


def _encode_texts(model: LoadedModel, component: str, tokenizer: str, texts: list[str]) -> dict[str, torch.Tensor]:
    ids = [model.tokenizers[tokenizer].encode(text)[0] for text in texts]
    return model.engines[component].run({"input_ids": to_device(torch.tensor(ids), model.device)})


def request_warnings(model: LoadedModel, request: GenerationSettings, rest: Table | None) -> list[str]:
    """One line for each thing that is not done to the letter: the end of a prompt that the encoders do not read, a
    refiner without a step. `rest`: the refiner's steps, None where it is not asked for."""
    warnings = []
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        tokenizer = model.tokenizers["tokenizer_2"]
        lost = tokenizer.encode(text)[1] if text else 0
        if lost:
            warnings.append(
                f"{name}: the encoders read {tokenizer.settings.max_length} tokens; the last {lost} were left out: "
                f"{tokenizer.dropped_text(text)[:200]!r}"
            )
    if request.negative_prompt and request.guidance_scale > 1 and embeds_guidance(model, False):
        warnings.append(
            "negative_prompt: this model's UNet takes the guidance scale as an input and reads no negative prompt"
            f"{'; only the refiner does' if rest and not embeds_guidance(model, True) else ''}."
        )
    if rest is not None and not rest:
        warnings.append(
            f"denoising_frac: {request.denoising_frac} of {request.num_inference_steps} steps leaves the "
            "refiner no step; it was not used."
        )
    return warnings


def refiner_text(
    model: LoadedModel, request: GenerationSettings, steps: Table
) -> tuple[Conditioning, Conditioning | None]:
    """What conditions the refiner in its `steps`, for all images of a request."""
    settings = model.settings.refiner
    assert settings is not None
    size = [float(request.height), float(request.width), 0.0, 0.0]
    scores = (
        ([AESTHETIC_SCORE], [NEGATIVE_AESTHETIC_SCORE]) if settings.requires_aesthetics_score else (size[:2], size[:2])
    )
    return _read_beside(model, request, True, ([*size, *scores[0]], [*size, *scores[1]]), steps)


def refiner_row(
    request: GenerationSettings, steps: Table, row: Row, text: tuple[Conditioning, Conditioning | None]
) -> Row:
    """What the refiner's loop goes on with after the base has finished `row`: `steps`, conditioned by `refiner_text`.

    The latents go over as the base left them, and so does the image's generator.
    """
    guidance = guidance_by_step(request)[request.num_inference_steps - steps.steps :]
    return Row(row.latents, steps, guidance, row.generator, *text)


class Decoding:
    """One image on its way from latents to pixels: queued on the device by whoever makes it, waited for by any thread.

    So a GPU goes on with other rows while it is decoded, on its way to the host and encoded there.
    """

    def __init__(self, model: LoadedModel, latents: torch.Tensor) -> None:
        """`latents`: [1, channels, height/8, width/8]."""
        with model.decode_stream.beside(latents):
            levels, finite = to_levels(decoded(model, latents))
            self._levels, self._finite, self._done = levels[0], finite, None
            if levels.is_cuda:
                self._levels, self._finite = _to_pinned(levels[0]), _to_pinned(finite)
                self._done = torch.cuda.current_stream(model.device).record_event()

    def wait(self) -> Pixels | None:
        """uint8 [height, width, 3]; None where the picture is not all numbers."""
        if self._done is not None:
            self._done.synchronize()
        if not bool(self._finite):
            return None
        pixels: Pixels = self._levels.numpy()
        return pixels


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def decoded(model: LoadedModel, latents: torch.Tensor) -> torch.Tensor:
    """[1, channels, height/8, width/8] -> [1, 3, height, width], nominally in [-1, 1]. To be called beside the loops,
    in `model.decode_stream`."""
    decoder, scale = model.engines[components.VAE_DECODER], model.settings.vae_scale_factor
    dtype = DTYPES[decoder.signature.inputs[0].dtype]
    height, width = latents.shape[-2] * scale, latents.shape[-1] * scale
    return decoder.run({"latents": (latents / model.settings.vae_scaling_factor).to(dtype)}, height, width)[
        "pixels"
    ].float()
