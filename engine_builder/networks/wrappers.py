"""The wrapper of each component by name, and the library's class that it wraps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from engine_builder.networks.controlnet import ControlnetImageNetwork, ControlnetNetwork, controlnet_time_network
from engine_builder.networks.ip_adapter import ImageEncoderNetwork, IpAdapterNetwork
from engine_builder.networks.safety_checker import SafetyCheckerNetwork
from engine_builder.networks.text import FinalTextNetwork, PooledTextNetwork, TextNetwork
from engine_builder.networks.unet import StepUnet, UnetTextNetwork, time_network
from engine_builder.networks.vae import VaeDecoderNetwork, VaeEncoderNetwork


@dataclass(frozen=True)
class Wrapper:
    """A wrapper, and the class that reads its network from a checkpoint.

    `other_classes`: further classes that a network's config.json may name. `wrap` takes the network and, if
    `accepts_winograd`, the option `use_winograd`. A denoiser's also takes `features`, `rank` and `bands`, see
    `StepUnet`.
    """

    package: str
    class_name: str
    wrap: Callable[..., nn.Module]
    accepts_winograd: bool = False
    other_classes: tuple[str, ...] = ()

    def class_of(self, config: Mapping[str, Any]) -> str:
        """Return the class of the network that a config.json describes."""
        name = config.get("_class_name")
        return str(name) if name in self.other_classes else self.class_name


_CONTROLNET = ("diffusers", "ControlNetModel")
_UNION = ("ControlNetUnionModel",)
_UNET = ("diffusers", "UNet2DConditionModel")
# A component names its wrapper in `model.pipeline.spec` or `families`. A variant of a UNet has the UNet's wrapper.
WRAPPERS = {
    "TextNetwork": Wrapper("transformers", "CLIPTextModel", TextNetwork),
    "FinalTextNetwork": Wrapper("transformers", "CLIPTextModel", FinalTextNetwork),
    "PooledTextNetwork": Wrapper("transformers", "CLIPTextModelWithProjection", PooledTextNetwork),
    "UnetTextNetwork": Wrapper(*_UNET, UnetTextNetwork),
    "UnetTimeNetwork": Wrapper(*_UNET, time_network),
    "StepUnet": Wrapper(*_UNET, StepUnet, accepts_winograd=True),
    "ImageEncoderNetwork": Wrapper("transformers", "CLIPVisionModelWithProjection", ImageEncoderNetwork),
    "IpAdapterNetwork": Wrapper("diffusers", "IPAdapter", IpAdapterNetwork),  # of a file, not of a class's folder
    "ControlnetTextNetwork": Wrapper(*_CONTROLNET, UnetTextNetwork, other_classes=_UNION),
    "ControlnetTimeNetwork": Wrapper(*_CONTROLNET, controlnet_time_network, other_classes=_UNION),
    "ControlnetImageNetwork": Wrapper(*_CONTROLNET, ControlnetImageNetwork, other_classes=_UNION),
    "ControlnetNetwork": Wrapper(*_CONTROLNET, ControlnetNetwork, accepts_winograd=True, other_classes=_UNION),
    "VaeEncoderNetwork": Wrapper("diffusers", "AutoencoderKL", VaeEncoderNetwork),
    "VaeDecoderNetwork": Wrapper("diffusers", "AutoencoderKL", VaeDecoderNetwork),
    "SafetyCheckerNetwork": Wrapper(
        "diffusers.pipelines.stable_diffusion.safety_checker",
        "StableDiffusionSafetyChecker",
        SafetyCheckerNetwork,
    ),
}
