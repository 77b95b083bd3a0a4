"""Reference images with IP-Adapters: diffusers' own pipelines, in float32 on the CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from model.pipeline.params import GenerationParams
from tests.support.control_reference import ControlReference


class IpReference(ControlReference):
    """The pipelines of a model folder, of ControlNets, and of IP-Adapters that have one image encoder."""

    def __init__(
        self, folder: Path, controlnets: Mapping[str, Path], adapters: Mapping[str, Path], encoder: Path
    ) -> None:
        from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection

        super().__init__(folder, controlnets)
        self._adapters = dict(adapters)
        self._encoder: Any = CLIPVisionModelWithProjection.from_pretrained(encoder)
        side = self._encoder.config.image_size
        self._processor = CLIPImageProcessorPil(size=side, crop_size=side)

    def generate(self, params: GenerationParams) -> npt.NDArray[np.uint8]:
        """Return the first image of a request. All pipelines share the UNet that adapters change."""
        if not params.image_prompts:
            return super().generate(params)
        for pipeline in self._base.values():
            pipeline.register_modules(image_encoder=self._encoder, feature_extractor=self._processor)
        base = self._base["text to image"]
        paths = [self._adapters[prompt.name] for prompt in params.image_prompts]
        base.load_ip_adapter(
            [str(path.parent) for path in paths],
            subfolder=[""] * len(paths),
            weight_name=[path.name for path in paths],
            image_encoder_folder=None,
        )
        base.set_ip_adapter_scale([prompt.scale for prompt in params.image_prompts])
        try:
            return super().generate(params)
        finally:
            base.unload_ip_adapter()

    def _image_prompt_arguments(self, params: GenerationParams) -> dict[str, Any]:
        if not params.image_prompts:
            return {}
        images = [[Image.fromarray(levels) for levels in prompt.levels] for prompt in params.image_prompts]
        return {"ip_adapter_image": images}
