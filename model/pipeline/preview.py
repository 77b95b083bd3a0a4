"""Small previews of images that are still being denoised: a linear map from latents to RGB, one pixel for each latent.

The warm-up fits the map to the model's own decoder, so it works for any VAE.
"""

import base64
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool2d, interpolate

from model.cuda.streams import to_device
from model.images.encode import encode
from model.pipeline.decode import decode_latents
from model.pipeline.loaded_model import LoadedModel

_JPEG_QUALITY = 80
# The map is fitted on random latents that change smoothly from corner to corner. Of the corner counts and standard
# deviations (1 to 3) tried on data/tiny-sdxl, these gave the most accurate previews: mean error 15 % of the range.
_CORNER_DEVIATION, _CORNERS = 1.5, 2
_RIDGE = 1e-3  # weight of the penalty on the map's coefficients


@dataclass(frozen=True)
class PreviewMap:
    """rgb = latents @ weight + bias, in [-1, 1]. weight: float32 [channels, 3]; bias: [3]; on the model's device."""

    weight: torch.Tensor
    bias: torch.Tensor


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
    return PreviewMap(solution[:-1].to(model.device), solution[-1].to(model.device))


class Preview:
    """One preview, queued on the device. `encode` may be called from any thread."""

    def __init__(self, preview_map: PreviewMap, latents: torch.Tensor) -> None:
        """`latents`: the denoised estimate, [1, channels, height/8, width/8]."""
        rgb = torch.einsum("chw,cr->hwr", latents[0].float(), preview_map.weight) + preview_map.bias
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
