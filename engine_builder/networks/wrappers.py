"""The wrapper of each component by name, and the library's class that it wraps."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from engine_builder.networks.text import PooledTextNetwork, TextNetwork
from engine_builder.networks.unet import (
    GuidedUnetNetwork,
    UnconditionalUnetNetwork,
    UnetNetwork,
    UnetTextNetwork,
    UnetTimeNetwork,
)
from engine_builder.networks.vae import VaeDecoderNetwork


@dataclass(frozen=True)
class Wrapper:
    """`package` and `class_name`: what reads the checkpoint's network, which `wrap` takes. `convolves`: `wrap` also
    takes `use_winograd`."""

    package: str
    class_name: str
    wrap: Callable[..., nn.Module]
    convolves: bool = False


_UNET = ("diffusers", "UNet2DConditionModel")
# A component or variant names its wrapper in `model.pipeline.spec`.
WRAPPERS = {
    "TextNetwork": Wrapper("transformers", "CLIPTextModel", TextNetwork),
    "PooledTextNetwork": Wrapper("transformers", "CLIPTextModelWithProjection", PooledTextNetwork),
    "UnetTextNetwork": Wrapper(*_UNET, UnetTextNetwork),
    "UnetTimeNetwork": Wrapper(*_UNET, UnetTimeNetwork),
    "UnetNetwork": Wrapper(*_UNET, UnetNetwork, convolves=True),
    "UnconditionalUnetNetwork": Wrapper(*_UNET, UnconditionalUnetNetwork, convolves=True),
    "GuidedUnetNetwork": Wrapper(*_UNET, GuidedUnetNetwork, convolves=True),
    "VaeDecoderNetwork": Wrapper("diffusers", "AutoencoderKL", VaeDecoderNetwork),
}
