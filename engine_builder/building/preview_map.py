"""Fit the map for previews of a release: a network of two small layers from latents to the decoder's colours.

It is fitted to synthetic pictures that the release's own VAE encodes and decodes, and to blends of their latents. Its
error is measured on images that the model generated and on other synthetic pictures, which are not part of the fit.
`model.pipeline.preview` runs it. Linear maps and polynomials were less accurate (docs/log/correctness.md).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import avg_pool2d, interpolate

from engine_builder.building.eager_engine import EagerEngine
from engine_builder.networks.network import Network
from model.engines.engine import EngineSet
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.preview import PreviewMap, neighbourhoods, preview_map_of
from model.pipeline.spec import VAE_DECODER, VAE_ENCODER, Family
from model.pipeline.vae import decode_latents, encode_pixels
from model.store.manifest import MAX_PREVIEW_CHANNELS, ModelFacts, PreviewLayer, PreviewRecord

PREVIEW_VERSION = 1  # of the fit, recorded with each build
_PICTURES, _SIDE = 96, 16  # side in latents
_OTHERS = 16  # pictures that the error is measured on
_BATCH = 8  # pictures that the VAE runs at once
_UNITS = 32
_STEPS, _SAMPLES, _LEARNING_RATE = 1200, 2048, 1e-2
_DIGITS = 6  # of a stored coefficient

Examples = tuple[torch.Tensor, torch.Tensor]
"""Latents [pictures, channels, height/8, width/8] and their colours [pictures, 3, height/8, width/8], on the host."""


def with_preview_map(
    facts: ModelFacts,
    family: Family,
    networks: Mapping[str, Network],
    real_inputs: Mapping[str, Sequence[Mapping[str, torch.Tensor]]],
) -> ModelFacts:
    """Return the facts with a map for previews, or as they are if the VAE is too wide or decodes no picture.

    `real_inputs`: each component's recorded inputs. The map's error is measured on the VAE decoder's inputs too.
    """
    if facts.latent_channels > MAX_PREVIEW_CHANNELS:
        return facts
    engines = {
        name: EngineSet([EagerEngine(name, networks[name].module, networks[name].signature)])
        for name in (VAE_ENCODER, VAE_DECODER)
    }
    device = next(networks[VAE_DECODER].module.parameters()).device
    model = LoadedModel(
        engines=engines, tokenizers={}, noise_schedules={}, settings=facts, device=device, family=family
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        examples = _decode_all(model, _with_blends(_encode_pictures(model, _PICTURES, generator), generator))
        others = _decode_all(model, _encode_pictures(model, _OTHERS, generator))
        generated = [
            _decode_all(model, _scaled(model, inputs["latents"].float())) for inputs in real_inputs[VAE_DECODER]
        ]
    if not len(examples[0]) or not len(others[0]):
        return facts
    layers = _fit(*examples)
    preview = PreviewRecord(version=1, layers=layers, error=0.0)
    error = mean_error(preview_map_of(preview, torch.device("cpu")), [*generated, others])
    return facts.model_copy(update={"preview": preview.model_copy(update={"error": error})})


def mean_error(preview_map: PreviewMap, examples: Sequence[Examples]) -> float:
    """Return the mean difference of a map's colours from the decoder's, as a share of their range, from -1 to 1."""
    errors = [
        (preview_map.colours(latents[None]).clamp(-1, 1).movedim(-1, 0) - colours).abs().mean() / 2
        for picture in examples
        for latents, colours in zip(*picture, strict=True)
    ]
    return round(float(torch.stack(errors).mean()), _DIGITS)


def _encode_pictures(model: LoadedModel, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return the latents of synthetic pictures, [count, channels, _SIDE, _SIDE]."""
    side = _SIDE * model.settings.vae_scale_factor
    pictures = torch.stack([_picture(side, generator) for _ in range(count)])
    return torch.cat([encode_pixels(model, part.to(model.device)).mean for part in torch.split(pictures, _BATCH)])


def _with_blends(latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return latents, and blends of two and of four of them.

    Blends of four resemble the estimates of the first steps. With guidance these are blurred and up to three times as
    large as the latents of pictures.
    """
    share, size = torch.rand((2, len(latents), 1, 1, 1), generator=generator).to(latents)
    of_two = torch.lerp(latents.roll(1, 0), latents, share)
    of_four = (0.5 + 3 * size) * (latents + latents.roll(1, 0) + latents.roll(3, 0) + latents.roll(7, 0)) / 4
    return torch.cat([latents, of_two, of_four])


def _decode_all(model: LoadedModel, latents: torch.Tensor) -> Examples:
    """Return latents and colours, without those that the VAE turned into NaN or infinity."""
    decoded = [_decode(model, part) for part in torch.split(latents, _BATCH)]
    latents, colours = (torch.cat(tensors) for tensors in zip(*decoded, strict=True))
    finite = torch.stack([one.isfinite().flatten(1).all(dim=1) for one in (latents, colours)]).all(dim=0)
    return latents[finite], colours[finite]


def _picture(side: int, generator: torch.Generator) -> torch.Tensor:
    """Return ellipses and rectangles on a plain or shaded ground, float32 [3, side, side] in [-1, 1].

    Half of the pictures have a texture, coarse or fine.
    """

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def colour() -> torch.Tensor:  # half of them black, white or one of the six most saturated ones
        levels = torch.rand((3, 1, 1), generator=generator)
        return 2 * (levels.round() if uniform(0, 1) < 0.5 else levels) - 1

    line = torch.linspace(-1, 1, side)
    y, x = line[:, None], line[None, :]
    angle = uniform(0, 2 * math.pi)
    shade = 0.5 + (x * math.cos(angle) + y * math.sin(angle)) / (2 * math.sqrt(2))
    ground, other = colour(), colour()
    picture = torch.lerp(ground, other, shade) if uniform(0, 1) < 0.3 else ground.expand(3, side, side)
    for _ in range(int(uniform(1, 7))):
        left, top, angle = uniform(-1, 1), uniform(-1, 1), uniform(0, math.pi)
        u = ((x - left) * math.cos(angle) + (y - top) * math.sin(angle)) / uniform(0.05, 0.75)
        v = ((y - top) * math.cos(angle) - (x - left) * math.sin(angle)) / uniform(0.05, 0.75)
        inside = u**2 + v**2 < 1 if uniform(0, 1) < 0.5 else torch.maximum(u.abs(), v.abs()) < 1
        picture = torch.where(inside, colour(), picture)
    cells = int(2 ** uniform(2, math.log2(side)))
    texture = interpolate(torch.randn((1, 3, cells, cells), generator=generator), (side, side), mode="bilinear")[0]
    return (picture + max(0.0, uniform(-0.3, 0.3)) * texture).clamp(-1, 1)


def _decode(model: LoadedModel, latents: torch.Tensor) -> Examples:
    """Return latents and the mean colours of the decoder's pixels for each of them."""
    colours = avg_pool2d(decode_latents(model, latents), model.settings.vae_scale_factor).clamp(-1, 1)
    return latents.cpu(), colours.cpu()


def _scaled(model: LoadedModel, latents: torch.Tensor) -> torch.Tensor:
    """Return the pipeline's latents from the decoder's input: the inverse of `decode_latents`' scaling."""
    if model.latents_normalization is not None:
        mean, deviation = model.latents_normalization
        latents = (latents - mean) / deviation
    return latents * model.settings.vae_scaling_factor


def _fit(latents: torch.Tensor, colours: torch.Tensor) -> tuple[PreviewLayer, PreviewLayer]:
    """Minimize the mean absolute difference with Adam. The squared one would let a few pixels at edges decide."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = neighbourhoods(latents).flatten(0, 2), colours.movedim(1, -1).flatten(0, 2)
    mean, deviation = inputs.mean(dim=0), inputs.std(dim=0).clamp_min(1e-3)
    inputs = (inputs - mean) / deviation
    shapes = ((inputs.shape[1], _UNITS), (1, _UNITS), (_UNITS, 3), (1, 3))
    parameters = [torch.randn(shape, generator=generator) / math.sqrt(shape[0]) for shape in shapes]
    weight, bias, out_weight, out_bias = (parameter.requires_grad_() for parameter in parameters)
    optimizer = torch.optim.Adam(parameters, _LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        chosen = torch.randint(len(inputs), (_SAMPLES,), generator=generator)
        predicted = torch.tanh(inputs[chosen] @ weight + bias) @ out_weight + out_bias
        optimizer.zero_grad()
        (predicted - targets[chosen]).abs().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    weight, bias, out_weight, out_bias = (parameter.detach() for parameter in parameters)
    weight = weight / deviation[:, None]
    return _layer(weight, bias - mean @ weight), _layer(out_weight, out_bias)


def _layer(weight: torch.Tensor, bias: torch.Tensor) -> PreviewLayer:
    rows = [[float(f"{value:.{_DIGITS}g}") for value in row] for row in torch.cat([weight, bias]).T.tolist()]
    return PreviewLayer(weight=tuple(tuple(row[:-1]) for row in rows), bias=tuple(row[-1] for row in rows))
