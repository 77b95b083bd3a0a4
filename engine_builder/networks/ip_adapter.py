"""An IP-Adapter as two networks, which run once for each reference image: its image encoder, and the adapter itself.

The adapter projects features of an image to tokens, and computes keys and values of all cross-attentions of the UNet.
The projections are diffusers' modules, read by its own conversion of the original files. `StepUnet` reads
the keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, IpAdapterFiles
from engine_builder.checkpoints.ip_adapter import REMEDY, open_adapter
from engine_builder.networks.blocks import concat_linears
from engine_builder.networks.unet import group_linears, keep_parameters, transformer_blocks
from model.pipeline.spec import ip_components


class ImageEncoderNetwork(nn.Module):
    """Normalized pixels [batch, 3, side, side] -> the image embedding [batch, width] of a CLIP vision model."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (self.network(pixels, return_dict=True).image_embeds,)


class ImageStatesNetwork(ImageEncoderNetwork):
    """Normalized pixels [batch, 3, side, side] -> penultimate hidden states [batch, tokens, width]."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        network.vision_model.encoder.layers = network.vision_model.encoder.layers[:-1]
        keep_parameters(network, lambda name: "post_layernorm" not in name and "visual_projection" not in name)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        vision = self.network.vision_model
        hidden = vision.pre_layrnorm(vision.embeddings(pixels))
        return (vision.encoder(inputs_embeds=hidden).last_hidden_state,)


class IpAdapterNetwork(nn.Module):
    """features [batch, width] or [batch, tokens, width] -> image_keys, image_values [batch, tokens, channels of all].

    Their channels are in the order of the UNet's `transformer_blocks`.
    """

    def __init__(self, projection: nn.Module, keys: list[nn.Linear], values: list[nn.Linear]) -> None:
        super().__init__()
        self.image_projection = projection
        self.keys = nn.ModuleList(concat_linears(group) for group in group_linears(keys))
        self.values = nn.ModuleList(concat_linears(group) for group in group_linears(values))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        tokens = self.image_projection(features)
        return tuple(torch.cat([product(tokens) for product in part], dim=-1) for part in (self.keys, self.values))


def components_of_ip_adapters(base: Checkpoint) -> tuple[str, ...]:
    """Return the names of the components that a model's IP-Adapters add to a build. Empty without IP-Adapters."""
    return ip_components([files.name for files in base.ip_adapters])


def image_encoder_network(files: IpAdapterFiles, network: nn.Module) -> nn.Module:
    """Wrap the CLIP vision model of an adapter as the encoder that the adapter's projection reads."""
    return ImageEncoderNetwork(network) if open_adapter(files).reads_embedding else ImageStatesNetwork(network)


def read_ip_adapter(files: IpAdapterFiles, unet: nn.Module, dtype: torch.dtype, device: str) -> IpAdapterNetwork:
    """Return an adapter for a UNet, of which no weight is read. On "meta" it has shapes only.

    Raises CheckpointError.
    """
    from diffusers.loaders.unet import UNet2DConditionLoadersMixin

    with open_adapter(files).tensors() as tensors:
        state = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    convert: Any = UNet2DConditionLoadersMixin._convert_ip_adapter_image_proj_to_diffusers
    of_projection = {
        name.removeprefix("image_proj."): tensor for name, tensor in state.items() if name.startswith("image_proj.")
    }
    try:
        with torch.device(device):
            projection = convert(None, of_projection, low_cpu_mem_usage=False)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{files.path} has a projection of images that is not known ({reason}).", REMEDY
        ) from error
    keys, values = [], []
    numbers = attention_numbers(unet)
    for block in transformer_blocks(unet):
        number = numbers[block.attn2]
        keys.append(_linear(files, state, f"ip_adapter.{number}.to_k_ip.weight", block.attn2.to_k))
        values.append(_linear(files, state, f"ip_adapter.{number}.to_v_ip.weight", block.attn2.to_v))
    return IpAdapterNetwork(projection.to(device, dtype), keys, values)


def attention_numbers(unet: Any) -> dict[nn.Module, int]:
    """Return the number that an adapter's file has for each cross-attention: 1, 3, 5 ... in diffusers' order.

    diffusers lists the down blocks, the up blocks and then the middle block.
    """
    names = [name for name in unet.attn_processors if not name.endswith("attn1.processor")]
    return {unet.get_submodule(name.removesuffix(".processor")): 1 + 2 * index for index, name in enumerate(names)}


def _linear(files: IpAdapterFiles, state: Mapping[str, Tensor], name: str, like: nn.Linear) -> nn.Linear:
    """Return the linear of a weight, which must have the shape of the UNet's own."""
    shape = tuple(like.weight.shape)
    if name not in state or tuple(state[name].shape) != shape:
        found = f"has the shape {list(state[name].shape)}" if name in state else "is missing"
        raise CheckpointError(f"{files.path}: {name} {found}, and that of the UNet is {list(shape)}.", REMEDY)
    linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(state[name], requires_grad=False)
    return linear
