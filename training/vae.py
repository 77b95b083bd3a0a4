"""Stage one: the autoencoder, on random parts of drawings first and whole drawings at the end. It is over before
compiling it would have paid. Stage two: its decoder alone.

Afterwards the latents' channels are centred and brought to one spread by folding that into `quant_conv` and
`post_quant_conv`, so that `scaling_factor` alone makes them zero-mean and unit-variance.
"""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn

from training import architecture
from training.data import Job
from training.draw import CRISP, render
from training.learner import Learner, precision
from training.run import Run

SIDE = 256
BLURRED = 0.25  # share of the drawings with soft edges, which the refiner's low aesthetic scores stand for
SOFTEST = 8.0  # pixels
CENTRED = 512  # drawings from which the spread of the latents is measured
EDGES = 10.0  # added weight of pixels within three of an edge
ROBUST = 0.05  # standard deviation of noise on the latents, so that the decoder forgives small errors


def train(run: Run) -> tuple[AutoencoderKL, float]:
    """The trained network, in float32, and the seconds it took."""
    settings = run.settings.vae
    network = architecture.vae().to(run.device, memory_format=torch.channels_last)
    learner = Learner(nn.ModuleDict({"vae": network}), settings.steps, settings.rate)
    run.resume("vae", learner)
    random = torch.Generator(run.device).manual_seed(run.settings.seed + learner.step)
    chunks = run.workers.stream(
        Job(run.settings.seed, number, settings.batch, 0, 1.0) for number in itertools.count(learner.step)
    )

    def forward(pictures: Tensor, noise: Tensor) -> Tensor:
        moments = network.quant_conv(network.encoder(pictures.to(network.dtype)))
        mean, spread = moments.float().chunk(2, dim=1)  # [batch, 4, height/8, width/8] each
        spread = spread.clamp(-30, 20)
        latents = mean + (torch.exp(0.5 * spread) + ROBUST) * noise
        drawn = network.decoder(network.post_quant_conv(latents.to(network.dtype))).float()
        wrong = (drawn - pictures).abs().mean()
        for dim in (2, 3):  # edges
            wrong = wrong + 0.5 * (drawn.diff(dim=dim) - pictures.diff(dim=dim)).abs().mean()
        divergence = 0.5 * (mean**2 + spread.exp() - 1 - spread).mean()
        return wrong + settings.kl * divergence

    def loss(step: int) -> Tensor:
        rows = torch.from_numpy(next(chunks).rows).to(run.device, non_blocking=True)
        draws = torch.rand(4, settings.batch, generator=random, device=run.device)
        soft = torch.where(draws[0] < BLURRED, CRISP + draws[1] * (SOFTEST - CRISP), CRISP)
        whole = step >= settings.steps * (1 - settings.whole_share)
        side = SIDE if whole else settings.window
        top, left = ((draws[2:] * (SIDE - side + 1)).floor()).unbind(0)
        if whole:
            rows, soft, top, left = (x[: max(1, settings.batch // 2)] for x in (rows, soft, top, left))
        pictures = render(rows, side, side, soft, torch, (top, left, SIDE, SIDE)) * 2 - 1
        pictures = pictures.permute(0, 3, 1, 2)  # [batch, 3, side, side], channels last
        noise = torch.randn(len(rows), 4, side // 8, side // 8, generator=random, device=run.device)
        return forward(pictures, noise)

    seconds = run.learn("vae", learner, loss)
    chunks.close()
    count = CENTRED if run.device.type == "cuda" else 8
    rows = torch.from_numpy(next(run.workers.stream(iter([Job(run.settings.seed, -1, count, 0, 1.0)]))).rows)
    factor = centre(network, rows.to(run.device))
    run.log(f"vae scaling factor {factor:.5f}, mean absolute error {error(network, rows.to(run.device)):.5f}")
    return network, seconds


def train_decoder(run: Run, network: AutoencoderKL) -> float:
    """The decoder alone, on whole drawings, the latent space as it is: edges and corners of small figures are what
    the first stage learns last. Pixels near an edge weigh more, for they are few. Returns the seconds."""
    settings = run.settings.decoder
    network.to(run.device, memory_format=torch.channels_last)
    encoder = copy.deepcopy(torch.nn.ModuleDict({"encoder": network.encoder, "quant_conv": network.quant_conv}))
    encoder.to(precision(run.device)).eval().requires_grad_(False)
    decoder = nn.ModuleDict({"decoder": network.decoder, "post_quant_conv": network.post_quant_conv})
    decoder.requires_grad_(True).train()
    learner = Learner(decoder, settings.steps, settings.rate)
    run.resume("decoder", learner)
    random = torch.Generator(run.device).manual_seed(run.settings.seed + 1 + learner.step)
    chunks = run.workers.stream(
        Job(run.settings.seed + 1, number, settings.batch, 0, 1.0) for number in itertools.count(learner.step)
    )

    def forward(pictures: Tensor, noise: Tensor) -> Tensor:
        small = pictures.to(precision(run.device))
        with torch.no_grad():
            latents = encoder["quant_conv"](encoder["encoder"](small)).float().chunk(2, dim=1)[0]
            steps = F.pad(pictures.diff(dim=2).abs().amax(1, keepdim=True), (0, 0, 0, 1))
            steps = steps + F.pad(pictures.diff(dim=3).abs().amax(1, keepdim=True), (0, 1, 0, 0))
            weights = 1 + EDGES * F.max_pool2d((steps > 0.05).float(), 7, stride=1, padding=3)
        drawn = network.decoder(network.post_quant_conv((latents + noise).to(small.dtype))).float()
        return ((drawn - pictures).abs() * weights).sum() / (weights.sum() * 3)

    fast = run.compiled(forward, decoder)

    def loss(step: int) -> Tensor:
        rows = torch.from_numpy(next(chunks).rows).to(run.device, non_blocking=True)
        draws = torch.rand(3, settings.batch, generator=random, device=run.device)
        soft = torch.where(draws[0] < BLURRED, CRISP + draws[1] * (SOFTEST - CRISP), CRISP)
        pictures = (render(rows, SIDE, SIDE, soft, torch) * 2 - 1).permute(0, 3, 1, 2)
        noise = torch.randn(len(rows), 4, SIDE // 8, SIDE // 8, generator=random, device=run.device)
        return fast(pictures, noise * (ROBUST * draws[2])[:, None, None, None])

    seconds = run.learn("decoder", learner, loss)
    chunks.close()
    network.eval()
    rows = torch.from_numpy(next(run.workers.stream(iter([Job(run.settings.seed, -1, 64, 0, 1.0)]))).rows)
    run.log(f"vae mean absolute error {error(network, rows.to(run.device)):.5f}")
    return seconds


@torch.no_grad()
def drawings(rows: Tensor) -> Tensor:
    soft = torch.full((len(rows),), CRISP, device=rows.device)
    return (render(rows, SIDE, SIDE, soft, torch) * 2 - 1).permute(0, 3, 1, 2)


@torch.no_grad()
def centre(network: AutoencoderKL, rows: Tensor) -> float:
    """Folds the channels' means and relative spreads into the 1x1 convolutions; returns the scaling factor."""
    latents = torch.cat([network.encode(drawings(part)).latent_dist.mean for part in rows.split(128)])
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))  # [4]
    common = deviation.mean()
    ratio = deviation / common
    quant, post = network.quant_conv, network.post_quant_conv
    channels = len(mean)
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight *= ratio[None, :, None, None]
    quant.bias[:channels] = (quant.bias[:channels] - mean) / ratio
    quant.weight[:channels] /= ratio[:, None, None, None]
    quant.bias[channels:] -= 2 * ratio.log()  # the other half holds log variances
    factor = round(float(1 / common), 5)
    network.register_to_config(scaling_factor=factor)
    return factor


@torch.no_grad()
def error(network: AutoencoderKL, rows: Tensor) -> float:
    """Mean absolute error of decoded drawings, of a range of 2."""
    wrong = [
        F.l1_loss(network.decode(network.encode(part).latent_dist.mean).sample, part)
        for part in drawings(rows[:256]).split(64)
    ]
    return float(torch.stack(wrong).mean())
