"""Stages one and two: the autoencoder, then its decoder alone.

The autoencoder trains on random crops of images first and on whole images at the end. It is not compiled, because
compiling would take longer than it saves.

After stage one the latents' channels are centred and scaled to a common standard deviation. The change is folded into
`quant_conv` and `post_quant_conv`. So `scaling_factor` alone gives every channel zero mean and unit variance.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Generator

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn

from training.optimizer import EmaOptimizer, compute_dtype
from training.pictures.dataset import Chunk, ChunkRequest
from training.pictures.render import SHARP_EDGE_PIXELS, render
from training.run import TrainingRun

SOFT_SHARE = 0.25  # share of the images with soft edges
MAX_EDGE_PIXELS = 8.0
MAX_EVALUATION_IMAGES_ON_CPU = 8
EDGE_WEIGHT = 10.0  # additional weight of pixels near an edge in the decoder's loss
MIN_EDGE_DIFFERENCE = 0.05  # a larger `neighbour_difference` is an edge; pixels are in -1..1
EDGE_REACH_PIXELS = 3
LATENT_NOISE = 0.05  # standard deviation of noise on the latents, so that the decoder tolerates small errors


@torch.no_grad()
def render_images(
    vectors: Tensor, size: tuple[int, int], edge_pixels: Tensor | None = None, crop: tuple[Tensor, ...] | None = None
) -> Tensor:
    """Render scene vectors as input of the autoencoder: [batch, 3, height, width] in -1..1, channels last.

    Edges are sharp without `edge_pixels`. See `render.render`.
    """
    if edge_pixels is None:
        edge_pixels = torch.full((len(vectors),), SHARP_EDGE_PIXELS, device=vectors.device)
    return (render(vectors, *size, edge_pixels, torch, crop) * 2 - 1).permute(0, 3, 1, 2)


def train_autoencoder(run: TrainingRun, network: AutoencoderKL) -> float:
    """Train the network in place, in float32. Returns the seconds that it took."""
    settings = run.settings.vae
    height, width = run.settings.native_size
    network.to(run.device, memory_format=torch.channels_last)
    optimizer = EmaOptimizer(nn.ModuleDict({"vae": network}), settings.steps, settings.rate)
    run.resume("vae", optimizer)
    generator = torch.Generator(run.device).manual_seed(run.settings.seed + optimizer.step)
    chunks = _scene_chunks(run, run.settings.seed, settings.batch, optimizer.step)

    def reconstruction_loss(images: Tensor, noise: Tensor) -> Tensor:
        moments = network.quant_conv(network.encoder(images.to(network.dtype)))
        mean, log_variance = moments.float().chunk(2, dim=1)  # [batch, 4, height/8, width/8] each
        log_variance = log_variance.clamp(-30, 20)
        latents = mean + (torch.exp(0.5 * log_variance) + LATENT_NOISE) * noise
        decoded = network.decoder(network.post_quant_conv(latents.to(network.dtype))).float()
        error = (decoded - images).abs().mean()
        for dim in (2, 3):  # edges
            error = error + 0.5 * (decoded.diff(dim=dim) - images.diff(dim=dim)).abs().mean()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return error + settings.kl * divergence

    def loss(step: int) -> Tensor:
        vectors = torch.from_numpy(next(chunks).vectors).to(run.device, non_blocking=True)
        uniform = torch.rand(4, settings.batch, generator=generator, device=run.device)
        edge_pixels = _sample_edge_pixels(uniform[0], uniform[1])
        whole = step >= settings.steps * (1 - settings.whole_share)
        crop_height, crop_width = (height, width) if whole else (settings.window, settings.window)
        top = (uniform[2] * (height - crop_height + 1)).floor()
        left = (uniform[3] * (width - crop_width + 1)).floor()
        if whole:  # fewer images, which are larger
            vectors, edge_pixels, top, left = (
                x[: max(1, settings.batch // 2)] for x in (vectors, edge_pixels, top, left)
            )
        images = render_images(vectors, (crop_height, crop_width), edge_pixels, (top, left, height, width))
        noise = torch.randn(len(vectors), 4, crop_height // 8, crop_width // 8, generator=generator, device=run.device)
        return reconstruction_loss(images, noise)

    seconds = run.optimize("vae", optimizer, loss)
    chunks.close()
    images = _evaluation_images(run, 512)
    factor = centre_latents(network, images)
    error = mean_absolute_error(network, images[:256])
    run.log(f"vae scaling factor {factor:.5f}, mean absolute error {error:.5f}")
    return seconds


def train_decoder(run: TrainingRun, network: AutoencoderKL) -> float:
    """Train the decoder in place, on whole images, without changing the latents. Returns the seconds that it took.

    The first stage learns the edges and corners of small objects last. Pixels near an edge are few, so they have a
    larger weight here.
    """
    settings = run.settings.decoder
    height, width = run.settings.native_size
    network.to(run.device, memory_format=torch.channels_last)
    encoder = copy.deepcopy(torch.nn.ModuleDict({"encoder": network.encoder, "quant_conv": network.quant_conv}))
    encoder.to(compute_dtype(run.device)).eval().requires_grad_(False)
    decoder = nn.ModuleDict({"decoder": network.decoder, "post_quant_conv": network.post_quant_conv})
    decoder.requires_grad_(True).train()
    optimizer = EmaOptimizer(decoder, settings.steps, settings.rate)
    run.resume("decoder", optimizer)
    generator = torch.Generator(run.device).manual_seed(run.settings.seed + 1 + optimizer.step)
    chunks = _scene_chunks(run, run.settings.seed + 1, settings.batch, optimizer.step)

    def weighted_error(images: Tensor, noise: Tensor) -> Tensor:
        inputs = images.to(compute_dtype(run.device))
        with torch.no_grad():
            latents = encoder["quant_conv"](encoder["encoder"](inputs)).float().chunk(2, dim=1)[0]
            is_edge = (neighbour_difference(images) > MIN_EDGE_DIFFERENCE).float()
            near_edge = F.max_pool2d(is_edge, 2 * EDGE_REACH_PIXELS + 1, stride=1, padding=EDGE_REACH_PIXELS)
            weights = 1 + EDGE_WEIGHT * near_edge
        decoded = network.decoder(network.post_quant_conv((latents + noise).to(inputs.dtype))).float()
        return ((decoded - images).abs() * weights).sum() / (weights.sum() * 3)

    compiled_error = run.compile(weighted_error, decoder)

    def loss(step: int) -> Tensor:
        vectors = torch.from_numpy(next(chunks).vectors).to(run.device, non_blocking=True)
        uniform = torch.rand(3, settings.batch, generator=generator, device=run.device)
        images = render_images(vectors, (height, width), _sample_edge_pixels(uniform[0], uniform[1]))
        noise = torch.randn(len(vectors), 4, height // 8, width // 8, generator=generator, device=run.device)
        return compiled_error(images, noise * (LATENT_NOISE * uniform[2])[:, None, None, None])

    seconds = run.optimize("decoder", optimizer, loss)
    chunks.close()
    network.eval()
    run.log(f"vae mean absolute error {mean_absolute_error(network, _evaluation_images(run, 64)):.5f}")
    return seconds


def _scene_chunks(run: TrainingRun, seed: int, batch: int, first: int) -> Generator[Chunk]:
    height, width = run.settings.native_size
    return run.workers.stream(ChunkRequest(seed, number, batch, 0, width / height) for number in itertools.count(first))


def _sample_edge_pixels(uniform: Tensor, softness: Tensor) -> Tensor:
    """Return edge widths [batch]: sharp, or soft for SOFT_SHARE of the images. Both inputs are uniform in 0..1."""
    soft = SHARP_EDGE_PIXELS + softness * (MAX_EDGE_PIXELS - SHARP_EDGE_PIXELS)
    return torch.where(uniform < SOFT_SHARE, soft, SHARP_EDGE_PIXELS)


def _evaluation_images(run: TrainingRun, count: int) -> Tensor:
    """Render `count` scenes that no training step uses. A CPU, which is only for tests, renders fewer."""
    if run.device.type == "cpu":
        count = min(count, MAX_EVALUATION_IMAGES_ON_CPU)
    height, width = run.settings.native_size
    [chunk] = run.workers.stream([ChunkRequest(run.settings.seed, -1, count, 0, width / height)])
    vectors = torch.from_numpy(chunk.vectors).to(run.device)
    return torch.cat([render_images(part, run.settings.native_size) for part in vectors.split(128)])


def neighbour_difference(values: Tensor) -> Tensor:
    """Return each pixel's absolute difference to the pixel below plus that to the pixel on its right.

    `values`: [batch, channels, height, width]. Returns [batch, 1, height, width]. Each of the two differences is the
    maximum over the channels. It is 0 where the neighbour is outside the image.
    """
    rows = F.pad(values.diff(dim=2).abs().amax(1, keepdim=True), (0, 0, 0, 1))
    columns = F.pad(values.diff(dim=3).abs().amax(1, keepdim=True), (0, 1, 0, 0))
    return rows + columns


@torch.no_grad()
def centre_latents(network: AutoencoderKL, images: Tensor) -> float:
    """Fold the channels' means and relative deviations into the 1x1 convolutions. Returns the scaling factor.

    images: [batch, 3, height, width] in -1..1.
    """
    latents = torch.cat([network.encode(part).latent_dist.mean for part in images.split(128)])
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))  # [4]
    mean_deviation = deviation.mean()
    ratio = deviation / mean_deviation
    quant, post_quant = network.quant_conv, network.post_quant_conv
    channels = len(mean)
    post_quant.bias += (post_quant.weight[:, :, 0, 0] * mean).sum(1)
    post_quant.weight *= ratio[None, :, None, None]
    quant.bias[:channels] = (quant.bias[:channels] - mean) / ratio
    quant.weight[:channels] /= ratio[:, None, None, None]
    quant.bias[channels:] -= 2 * ratio.log()  # the other half is log variances
    factor = round(float(1 / mean_deviation), 5)
    network.register_to_config(scaling_factor=factor)
    return factor


@torch.no_grad()
def mean_absolute_error(network: AutoencoderKL, images: Tensor) -> float:
    """Encode and decode images, and return the mean absolute error of pixels in -1..1."""
    errors = [
        F.l1_loss(network.decode(network.encode(part).latent_dist.mean).sample, part) for part in images.split(64)
    ]
    return float(torch.stack(errors).mean())
