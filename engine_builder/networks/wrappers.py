"""The wrapper of each component by name, and the library's class that it wraps."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from engine_builder.networks.low_rank import LowRankUnetNetwork
from engine_builder.networks.text import FinalTextNetwork, PooledTextNetwork, TextNetwork
from engine_builder.networks.unet import (
    GuidedUnetNetwork,
    UnconditionalUnetNetwork,
    UnetNetwork,
    UnetTextNetwork,
    time_network,
)
from engine_builder.networks.vae import VaeDecoderNetwork, VaeEncoderNetwork


@dataclass(frozen=True)
class Wrapper:
    """A wrapper, and the class that reads its network from a checkpoint.

    `wrap` takes the network and, if `accepts_winograd`, the option `use_winograd`, and if `accepts_rank`, `rank`.
    """

    package: str
    class_name: str
    wrap: Callable[..., nn.Module]
    accepts_winograd: bool = False
    accepts_rank: bool = False


_UNET = ("diffusers", "UNet2DConditionModel")
# A component or variant names its wrapper in `model.pipeline.spec`.
WRAPPERS = {
    "TextNetwork": Wrapper("transformers", "CLIPTextModel", TextNetwork),
    "FinalTextNetwork": Wrapper("transformers", "CLIPTextModel", FinalTextNetwork),
    "PooledTextNetwork": Wrapper("transformers", "CLIPTextModelWithProjection", PooledTextNetwork),
    "UnetTextNetwork": Wrapper(*_UNET, UnetTextNetwork),
    "UnetTimeNetwork": Wrapper(*_UNET, time_network),
    "UnetNetwork": Wrapper(*_UNET, UnetNetwork, accepts_winograd=True),
    "LowRankUnetNetwork": Wrapper(*_UNET, LowRankUnetNetwork, accepts_winograd=True, accepts_rank=True),
    "UnconditionalUnetNetwork": Wrapper(*_UNET, UnconditionalUnetNetwork, accepts_winograd=True),
    "GuidedUnetNetwork": Wrapper(*_UNET, GuidedUnetNetwork, accepts_winograd=True),
    "VaeEncoderNetwork": Wrapper("diffusers", "AutoencoderKL", VaeEncoderNetwork),
    "VaeDecoderNetwork": Wrapper("diffusers", "AutoencoderKL", VaeDecoderNetwork),
}
