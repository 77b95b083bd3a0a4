"""Small previews of images that are still being denoised: a map from latents to RGB, one pixel for each latent.

A release has the map that its build fitted (`engine_builder.building.preview_map`). For a release without one, the
warm-up fits a linear map to the decoder, which is less accurate and works for any VAE.
"""

import base64
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool2d, interpolate, pad, unfold

from model.cuda.streams import to_device
from model.images.encode import encode
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.vae import decode_latents
from model.store.manifest import PreviewRecord

_JPEG_QUALITY = 80
# The linear map is fitted on random latents that change smoothly from corner to corner. Of the corner counts and
# standard deviations (1 to 3) tried on data/tiny-sdxl, these gave the most accurate previews: mean error 15 %.
_CORNER_DEVIATION, _CORNERS = 1.5, 2
_RIDGE = 1e-3  # weight of the penalty on the map's coefficients
_NEIGHBOURS, _CENTRE = 9, 4  # latents of a neighbourhood, and the index of its own pixel


@dataclass(frozen=True)
class PreviewMap:
    """Layers (weight float32 [inputs, outputs], bias [outputs]) on the model's device, with tanh between them.

    The first has the 9 * channels inputs of `neighbourhoods`. The last has the outputs red, green and blue in [-1, 1].
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def colours(self, latents: torch.Tensor) -> torch.Tensor:
        """Return float32 [height/8, width/8, 3], not clamped, from latents [1, channels, height/8, width/8]."""
        values = neighbourhoods(latents.float())[0]
        for index, (weight, bias) in enumerate(self.layers):
            values = (values.tanh() if index else values) @ weight + bias
        return values


def neighbourhoods(latents: torch.Tensor) -> torch.Tensor:
    """Return the 3 x 3 latents around each one, [images, height/8, width/8, 9 * channels], channel by channel.

    Latents at the edges are repeated outside of them.
    """
    images, channels, height, width = latents.shape
    columns = unfold(pad(latents, (1, 1, 1, 1), mode="replicate"), 3)  # [images, 9 * channels, height * width]
    return columns.transpose(1, 2).reshape(images, height, width, _NEIGHBOURS * channels)


def preview_map_of(record: PreviewRecord, device: torch.device) -> PreviewMap:
    """Return the map of a release, on a device."""
    return PreviewMap(
        tuple(
            (to_device(torch.tensor(layer.weight).T.contiguous(), device), to_device(torch.tensor(layer.bias), device))
            for layer in record.layers
        )
    )


def fit_preview_map(model: LoadedModel, height: int, width: int) -> PreviewMap:
    """Fit the linear map nearest to the decoder (ridge regression) at `height` x `width` pixels."""
    scale, channels = model.settings.vae_scale_factor, model.settings.latent_channels
    rows, columns = height // scale, width // scale
    generator = torch.Generator().manual_seed(0)
    corners = _CORNER_DEVIATION * torch.randn((1, channels, _CORNERS, _CORNERS), generator=generator)
    latents = interpolate(corners, (rows, columns), mode="bilinear")
    on_device = to_device(latents, model.device)
    with model.decode_stream.run_after(on_device):
        target = avg_pool2d(decode_latents(model, on_device), scale).clamp(-1, 1)  # [1, 3, rows, columns]
    model.decode_stream.release_to_current([target])
    # Solved on the host: the GPU's solver is a separate library, and every start would load it for a few numbers.
    inputs = torch.cat([latents.flatten(2)[0].T, torch.ones(rows * columns, 1)], dim=1)
    normal = inputs.T @ inputs + _RIDGE * len(inputs) * torch.eye(channels + 1)
    solution = torch.linalg.solve(normal, inputs.T @ target.cpu().flatten(2)[0].T)  # [channels + 1, 3]
    weight = torch.zeros(channels, _NEIGHBOURS, 3)
    weight[:, _CENTRE] = solution[:-1]
    return PreviewMap(((weight.flatten(0, 1).to(model.device), solution[-1].to(model.device)),))


class Preview:
    """One preview, queued on the device. `encode` may be called from any thread."""

    def __init__(self, preview_map: PreviewMap, latents: torch.Tensor) -> None:
        """`latents`: the denoised estimate, [1, channels, height/8, width/8]."""
        rgb = preview_map.colours(latents)
        levels = rgb.mul_(0.5).add_(0.5).nan_to_num_(0.0).clamp_(0, 1).mul_(255).round_().to(torch.uint8)
        self._done: torch.cuda.Event | None = None
        if levels.is_cuda:
            pinned = torch.empty(levels.shape, dtype=levels.dtype, pin_memory=True)
            levels = pinned.copy_(levels, non_blocking=True)
            self._done = torch.cuda.current_stream(latents.device).record_event()
        self._levels = levels

    def encode(self) -> str:
        """Return the base64 of a JPEG of height/8 x width/8 pixels."""
        if self._done is not None:
            self._done.synchronize()
        return base64.b64encode(encode(self._levels.numpy(), "jpeg", _JPEG_QUALITY)).decode("ascii")
