"""Latents -> pixels, asynchronously."""

import torch

from model.engines import components
from model.engines.shapes import DTYPES
from model.images.encode import Pixels, to_levels
from model.pipeline.loaded_model import LoadedModel


class PendingImage:
    """An image whose VAE decode is queued on the device. `wait` may be called from any thread.

    The GPU continues with other images while this one is decoded, copied to the host and encoded there.
    """

    def __init__(self, model: LoadedModel, latents: torch.Tensor) -> None:
        """Queue the decode of `latents`, float32 [1, channels, height/8, width/8]."""
        with model.decode_stream.run_after(latents):
            levels, finite = to_levels(decode_latents(model, latents))
            self._levels, self._finite, self._done = levels[0], finite, None
            if levels.is_cuda:
                self._levels, self._finite = _to_pinned(levels[0]), _to_pinned(finite)
                self._done = torch.cuda.current_stream(model.device).record_event()

    def wait(self) -> Pixels | None:
        """uint8 [height, width, 3]; None if the image holds NaN or infinity."""
        if self._done is not None:
            self._done.synchronize()
        if not bool(self._finite):
            return None
        pixels: Pixels = self._levels.numpy()
        return pixels


def decode_latents(model: LoadedModel, latents: torch.Tensor) -> torch.Tensor:
    """[1, channels, height/8, width/8] -> [1, 3, height, width], nominally in [-1, 1], on `model.decode_stream`."""
    decoder, scale = model.engines[components.VAE_DECODER], model.settings.vae_scale_factor
    dtype = DTYPES[decoder.signature.inputs[0].dtype]
    height, width = latents.shape[-2] * scale, latents.shape[-1] * scale
    inputs = {"latents": (latents / model.settings.vae_scaling_factor).to(dtype)}
    return decoder.run(inputs, height, width)["pixels"].float()


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
