"""A ControlNet as networks that run once per text, once per request, once per control image and once per step.

Together they compute what diffusers' `ControlNetModel` and `ControlNetUnionModel` compute without `guess_mode`, from
the same checkpoint. The network for texts is `UnetTextNetwork`. A network of a step returns its outputs scaled, so the
loop only adds the outputs of several ControlNets.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.blocks import concat_linears
from engine_builder.networks.unet import (
    encode,
    is_read_by_step,
    keep_parameters,
    prepare_blocks,
    resnets,
    time_network,
)
from model.pipeline.components import find_component
from model.pipeline.spec import CONTROLNET_TEXT, control_components

_TIME_PARAMETERS = ("time_embedding.", "add_embedding.", "control_add_embedding.")
_IMAGE_PARAMETERS = ("controlnet_cond_embedding.", "task_embedding", "transformer_layes.", "spatial_ch_projs.")


def components_of_controlnets(base: Checkpoint) -> tuple[str, ...]:
    """Return the names of the components that a model's ControlNets add to a build. Empty without ControlNets."""
    names = control_components([name for name, _ in base.controlnets])
    return tuple(name for name in names if not name.startswith(CONTROLNET_TEXT) or _reads_text(base, name))


def _reads_text(base: Checkpoint, name: str) -> bool:
    """True if a ControlNet has attention to the text. A small one may have none."""
    config = base.config(find_component(name).checkpoint_folder)
    blocks = config.get("down_block_types", ("CrossAttnDownBlock2D",) * 3)
    layers = config.get("transformer_layers_per_block", 1)
    layers = layers if isinstance(layers, list) else [layers] * len(blocks)
    middle = config.get("mid_block_type", "UNetMidBlock2DCrossAttn")
    pairs = zip([*blocks, middle], [*layers, layers[-1]], strict=False)
    return any("CrossAttn" in block and count for block, count in pairs)


def is_union(network: Any) -> bool:
    """True for a network with several types of control images."""
    return hasattr(network, "control_type_proj")


def control_type_count(network: Any) -> int:
    """Return the number of types of control images of a Union network, 0 for another network."""
    return int(network.config.num_control_type) if is_union(network) else 0


class UnionTimeNetwork(nn.Module):
    """A `UnetTimeNetwork` with a further input control_type [batch, types], 1 for the control image's type."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.biases = concat_linears([block.time_emb_proj for block in resnets(network)])
        keep_parameters(network, lambda name: name.startswith(_TIME_PARAMETERS))

    def forward(
        self, timestep: Tensor, text_embeds: Tensor, time_ids: Tensor, control_type: Tensor
    ) -> tuple[Tensor, ...]:
        network, dtype, batch = self.network, text_embeds.dtype, timestep.shape[0]
        embedded = network.time_embedding(network.time_proj(timestep).to(dtype))
        types = network.control_type_proj(control_type.flatten()).reshape(batch, -1).to(dtype)
        embedded = embedded + network.control_add_embedding(types)
        sizes = network.add_time_proj(time_ids.flatten()).reshape(batch, -1).to(dtype)
        embedded = F.silu(embedded + network.add_embedding(torch.cat([text_embeds, sizes], dim=-1)))
        return (self.biases(embedded),)


def controlnet_time_network(network: Any) -> nn.Module:
    """Wrap a ControlNet as the network that embeds timesteps, pooled text and sizes."""
    return UnionTimeNetwork(network) if is_union(network) else time_network(network)


class ControlnetImageNetwork(nn.Module):
    """pixels in [0, 1], [batch, 3, height, width] -> control [batch, channels, height/8, width/8].

    A Union network also takes control_type [batch, types].
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self._reversed = network.config.controlnet_conditioning_channel_order == "bgr"
        keep_parameters(network, lambda name: name.startswith(_IMAGE_PARAMETERS))

    def forward(self, pixels: Tensor, control_type: Tensor | None = None) -> tuple[Tensor, ...]:
        control = self.network.controlnet_cond_embedding(pixels.flip(1) if self._reversed else pixels)
        return (control if control_type is None else control + self._shift(control, control_type),)

    def _shift(self, control: Tensor, control_type: Tensor) -> Tensor:
        """Return what a Union network adds to each channel of a control image's embedding, [batch, channels, 1, 1].

        The network has a transformer of two tokens, the means of the control image and of the latents. Its attention
        has `batch_first=False`, so a token attends to the same token of the other entries of a batch. Entries of one
        request have the same control image. So the attention returns the token's own value, and no latents are read.
        """
        network = self.network
        token = control.mean(dim=(2, 3)) + control_type.to(control.dtype) @ network.task_embedding
        for layer in network.transformer_layes:  # the library's spelling
            attention, width = layer.attn, token.shape[1]
            weight, bias = attention.in_proj_weight[-width:], attention.in_proj_bias[-width:]  # of the values
            token = token + attention.out_proj(F.linear(layer.ln_1(token), weight, bias))
            token = token + layer.mlp(layer.ln_2(token))
        shift: Tensor = network.spatial_ch_projs(token)
        return shift[:, :, None, None]


class ControlnetNetwork(nn.Module):
    """sample, time_embeds, keys_values, control and scale -> residuals of the UNet's skip connections and middle.

    Without attention to the text there is no keys_values. scale is float32 [batch, 1]. Where it is zero, the outputs
    are zeros for any other inputs, also for NaN: an image that does not use the network is unaffected by it.
    """

    def __init__(self, network: Any, use_winograd: bool = False) -> None:
        """`use_winograd`: as in `StepUnet`."""
        super().__init__()
        self.network = network
        self.widths = prepare_blocks(network, use_winograd)
        elsewhere = (*_TIME_PARAMETERS, *_IMAGE_PARAMETERS)
        keep_parameters(network, lambda name: is_read_by_step(name) and not name.startswith(elsewhere))

    def forward(self, sample: Tensor, time_embeds: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        network = self.network
        *texts_of_network, control, scale = inputs
        biases, contexts = self.widths.biases(time_embeds), self.widths.contexts(*texts_of_network)
        results = encode(network, network.conv_in(sample) + control, biases, contexts)
        projections = [*network.controlnet_down_blocks, network.controlnet_mid_block]
        factor = scale[:, :, None, None]
        return tuple(
            torch.where(factor == 0, 0.0, projection(result).float() * factor).to(sample.dtype)
            for projection, result in zip(projections, results, strict=True)
        )
