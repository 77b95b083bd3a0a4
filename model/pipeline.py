"""Prompt -> image, as plain functions over loaded engines: encode_prompt, denoise, refine, decode.

The arithmetic is that of diffusers' StableDiffusionXLPipeline and, for the refiner, of StableDiffusionXLImg2ImgPipeline
with denoising_end/denoising_start. Rows of one batch may differ in prompt, seed, sampler, steps and guidance. This
module knows nothing of HTTP, of stores, or of which runtime an engine is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from model import components
from model.components import DTYPES
from model.engines import EngineSet
from model.image import Pixels, to_uint8
from model.request import GenerationSettings
from model.schedule import NoiseSchedule, Table, split, stack, table
from model.store.manifest import Settings
from model.tokenizer import ClipTokenizer

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5  # diffusers' defaults for the refiner
_COEFFICIENTS = 7


@dataclass
class LoadedModel:
    """What a release is once loaded: engines by component, tokenizers, noise schedules and settings."""

    engines: dict[str, EngineSet]
    tokenizers: dict[str, ClipTokenizer]
    noise_schedules: dict[str, NoiseSchedule]
    settings: Settings
    device: torch.device
    shares_text_encoder_2: bool = False


@dataclass
class Conditioning:
    """What tells the UNet what to draw: hidden [n, tokens, width], pooled [n, pooled width], time_ids [n, 5 or 6]."""

    hidden: torch.Tensor
    pooled: torch.Tensor
    time_ids: torch.Tensor


@dataclass
class Row:
    """One image on its way through the loop. `guidance` [steps]: 1 where the step is unguided.

    latents: float32 [1, channels, height/8, width/8]. The generator is that of the image's seed and is drawn from
    exactly as diffusers does: the first latents, then each step's noise.
    """

    latents: torch.Tensor
    table: Table
    guidance: NDArray[np.float32]
    generator: torch.Generator
    conditional: Conditioning
    unconditional: Conditioning | None


OnStep = Callable[[int, int], None]


def generate(
    model: LoadedModel, batch: Sequence[GenerationSettings], on_step: OnStep | None = None
) -> tuple[list[Pixels], dict[str, float], list[str]]:
    """Draw every image of every request of `batch`, all of one size.

    Returns the pictures (uint8 [height, width, 3], requests in order, each request's images in order), the
    milliseconds of each stage, and warnings. Raises BrokenImage, never returns a picture with NaN in it.
    """
    timings: dict[str, float] = {}
    clock = perf_counter()

    def lap(stage: str) -> None:
        nonlocal clock
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        now = perf_counter()
        timings[stage] = timings.get(stage, 0.0) + (now - clock) * 1000
        clock = now

    height, width = batch[0].height, batch[0].width
    warnings = [text for request in batch for text in prompt_warnings(model, request)]
    with torch.inference_mode():
        base, refiner = [], []
        for request in batch:
            tables = request_tables(model, request)
            rows = base_rows(model, request, tables[0])
            base += rows
            if tables[1] is not None:
                if tables[1].steps:
                    refiner.append((request, rows, tables))
                else:
                    warnings.append(
                        f"denoising_frac: {request.denoising_frac} of {request.num_inference_steps} steps leaves the "
                        "refiner no step; it was not used."
                    )
        lap("text")
        finished = denoise(model.engines[components.UNET], base, height, width, on_step)
        lap("denoise")
        if refiner:
            finished = refine(model, base, finished, refiner, on_step)
            lap("refine")
        pixels = decode(model, finished)
        lap("decode")
    return list(pixels), timings, warnings


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
    conditional, unconditional = encode_prompt(model, request, refiner=False, time_ids=(time_ids, time_ids))
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
        rows.append(Row(latents.to(model.device), steps, guidance, generator, conditional, unconditional))
    return rows


def guidance_by_step(request: GenerationSettings) -> NDArray[np.float32]:
    """Guidance scale of each step, [num_inference_steps]: 1 (none) from round(end_cfg_frac * steps) on."""
    guided = round(request.end_cfg_frac * request.num_inference_steps)
    scale = max(request.guidance_scale, 1.0)
    return np.array([scale if step < guided else 1.0 for step in range(request.num_inference_steps)], np.float32)


def encode_prompt(
    model: LoadedModel, request: GenerationSettings, refiner: bool, time_ids: tuple[list[float], list[float]]
) -> tuple[Conditioning, Conditioning | None]:
    """Text -> what conditions the UNet, and its counterpart for guidance (None where no step is guided).

    The base reads both encoders' penultimate states side by side, the refiner the second's alone; the pooled
    projection is always the second's. `time_ids`: sizes (and aesthetic score) for each of the two.
    """
    if refiner:
        assert model.settings.refiner is not None
        zeros = model.settings.refiner.force_zeros_for_empty_prompt
    else:
        zeros = model.settings.force_zeros_for_empty_prompt
    guided = bool((guidance_by_step(request) > 1).any())
    zero_negative = request.negative_prompt is None and zeros
    texts = [request.prompt]
    if guided and not zero_negative:
        texts.append(request.negative_prompt or "")
    second = components.TEXT_ENCODER_2
    if refiner and not model.shares_text_encoder_2:
        second = components.REFINER_TEXT_ENCODER_2
    encoded = _encode_texts(model, second, "tokenizer_2", texts)
    hidden, pooled = encoded["hidden_states"].float(), encoded["pooled"].float()
    if not refiner:
        first = _encode_texts(model, components.TEXT_ENCODER, "tokenizer", texts)["hidden_states"]
        hidden = torch.cat([first.float(), hidden], dim=-1)

    def conditioning(hidden: torch.Tensor, pooled: torch.Tensor, ids: list[float]) -> Conditioning:
        return Conditioning(hidden, pooled, torch.tensor([ids], device=model.device))

    conditional = conditioning(hidden[:1], pooled[:1], time_ids[0])
    if not guided:
        return conditional, None
    if zero_negative:
        return conditional, conditioning(torch.zeros_like(hidden[:1]), torch.zeros_like(pooled[:1]), time_ids[1])
    return conditional, conditioning(hidden[1:], pooled[1:], time_ids[1])


def _encode_texts(model: LoadedModel, component: str, tokenizer: str, texts: list[str]) -> dict[str, torch.Tensor]:
    ids = [model.tokenizers[tokenizer].encode(text)[0] for text in texts]
    return model.engines[component].run({"input_ids": torch.tensor(ids, device=model.device)})


def prompt_warnings(model: LoadedModel, request: GenerationSettings) -> list[str]:
    """One line for each prompt of which the encoders do not read the end."""
    warnings = []
    for field in ("prompt", "negative_prompt"):
        text = getattr(request, field)
        tokenizer = model.tokenizers["tokenizer_2"]
        lost = tokenizer.encode(text)[1] if text else 0
        if lost:
            warnings.append(
                f"{field}: the encoders read {tokenizer.settings.max_length} tokens; the last {lost} were left out: "
                f"{tokenizer.dropped_text(text)[:200]!r}"
            )
    return warnings


def denoise(
    unet: EngineSet, rows: Sequence[Row], height: int, width: int, on_step: OnStep | None = None
) -> list[torch.Tensor]:
    """Run every row through all of its steps; rows with fewer finish earlier. Returns latents, one [1, ...] a row.

    One step, for all rows that are not finished:
        eps      = UNet(c_in * x), guided: unconditional + guidance * (conditional - unconditional)
        denoised = a * x + b * eps
        next x   = x_coef * x + denoised_coef * denoised + prev_coef * previous denoised + noise_coef * noise
    """
    x = torch.cat([row.latents for row in rows])  # [rows, channels, height/8, width/8], float32
    device = x.device
    previous = torch.zeros_like(x)
    longest = max(row.table.steps for row in rows)
    host_timesteps, host_coefficients = stack([row.table for row in rows], longest)
    timesteps = torch.from_numpy(host_timesteps).to(device)  # [rows, steps]
    coefficients = torch.from_numpy(host_coefficients).to(device)  # [rows, steps, 7]
    for step in range(longest):
        active = [index for index, row in enumerate(rows) if step < row.table.steps]
        at = torch.tensor(active, device=device)
        c_in, a, b, *update = coefficients[at, step].T.reshape(_COEFFICIENTS, -1, 1, 1, 1)
        now = x[at]
        eps = _predict_noise(unet, [rows[i] for i in active], c_in * now, timesteps[at, step], step, height, width)
        denoised = a * now + b * eps
        noise = _draw_noise([rows[i] for i in active], step, now)
        x_coef, denoised_coef, prev_coef, noise_coef = update
        x[at] = x_coef * now + denoised_coef * denoised + prev_coef * previous[at] + noise_coef * noise
        previous[at] = denoised
        if on_step is not None:
            on_step(step + 1, longest)
    return [x[index : index + 1] for index in range(len(x))]


def _predict_noise(
    unet: EngineSet,
    rows: Sequence[Row],
    model_input: torch.Tensor,
    timesteps: torch.Tensor,
    step: int,
    height: int,
    width: int,
) -> torch.Tensor:
    """The UNet's guided prediction for each row, float32. A guided image takes two UNet rows, an unguided one one."""
    guided = [i for i, row in enumerate(rows) if row.guidance[step] > 1 and row.unconditional is not None]
    order = torch.tensor([*guided, *range(len(rows))], device=model_input.device)
    texts = [text for i in guided if (text := rows[i].unconditional) is not None] + [row.conditional for row in rows]
    dtype = DTYPES[unet.signature.outputs[0].dtype]
    eps = unet.run(
        {
            "sample": model_input[order].to(dtype),
            "timestep": timesteps[order],
            "encoder_hidden_states": torch.cat([text.hidden for text in texts]).to(dtype),
            "text_embeds": torch.cat([text.pooled for text in texts]).to(dtype),
            "time_ids": torch.cat([text.time_ids for text in texts]),
        },
        height,
        width,
    )["noise"].float()
    unconditional, conditional = eps[: len(guided)], eps[len(guided) :]
    if guided:
        conditional = conditional.clone()
        at = torch.tensor(guided, device=eps.device)
        scale = torch.tensor([float(rows[i].guidance[step]) for i in guided], device=eps.device).reshape(-1, 1, 1, 1)
        conditional[at] = unconditional + scale * (conditional[at] - unconditional)
    return conditional


def _draw_noise(rows: Sequence[Row], step: int, like: torch.Tensor) -> torch.Tensor:
    """This step's noise for each row, from the row's own generator; zeros where the sampler draws none."""
    if not any(row.table.noise_drawn[step] for row in rows):
        return torch.zeros_like(like)
    shape = (1, *like.shape[1:])
    drawn = [
        torch.randn(shape, generator=row.generator) if row.table.noise_drawn[step] else torch.zeros(shape)
        for row in rows
    ]
    return torch.cat(drawn).to(like.device)


def refine(
    model: LoadedModel,
    rows: Sequence[Row],
    latents: list[torch.Tensor],
    refined: Sequence[tuple[GenerationSettings, list[Row], tuple[Table, Table | None]]],
    on_step: OnStep | None = None,
) -> list[torch.Tensor]:
    """Give the rows of the requests in `refined` their last steps on the refiner's UNet; the others pass unchanged.

    The latents go over as the base left them, and so does each image's generator.
    """
    settings = model.settings.refiner
    assert settings is not None
    where = {id(row): index for index, row in enumerate(rows)}
    handed_over: list[Row] = []
    indices: list[int] = []
    for request, request_rows, (base, rest) in refined:
        assert rest is not None
        size = [float(request.height), float(request.width), 0.0, 0.0]
        scores = (
            ([AESTHETIC_SCORE], [NEGATIVE_AESTHETIC_SCORE])
            if settings.requires_aesthetics_score
            else (size[:2], size[:2])
        )
        time_ids = ([*size, *scores[0]], [*size, *scores[1]])
        conditional, unconditional = encode_prompt(model, request, refiner=True, time_ids=time_ids)
        guidance = guidance_by_step(request)[base.steps :]
        for row in request_rows:
            indices.append(where[id(row)])
            handed_over.append(Row(latents[where[id(row)]], rest, guidance, row.generator, conditional, unconditional))
    height = refined[0][0].height
    width = refined[0][0].width
    finished = denoise(model.engines[components.REFINER_UNET], handed_over, height, width, on_step)
    result = list(latents)
    for index, latent in zip(indices, finished, strict=True):
        result[index] = latent
    return result


def decode(model: LoadedModel, latents: Sequence[torch.Tensor]) -> Pixels:
    """Latents, one [1, channels, height/8, width/8] an image -> uint8 [images, height, width, 3].

    Raises BrokenImage where any value of a picture is not a finite number.
    """
    decoder, scale = model.engines[components.VAE_DECODER], model.settings.vae_scale_factor
    dtype = DTYPES[decoder.signature.inputs[0].dtype]
    scaled = torch.cat(list(latents)) / model.settings.vae_scaling_factor
    height, width = scaled.shape[-2] * scale, scaled.shape[-1] * scale
    # One picture a call: a decoder's activations are the largest of the pipeline, and batching them gains nothing.
    pictures = [
        decoder.run({"latents": one.to(dtype)}, height, width)["pixels"].float() for one in scaled.chunk(len(scaled))
    ]
    return to_uint8(torch.cat(pictures))
