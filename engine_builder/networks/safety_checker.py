"""The safety checker that Stable Diffusion 1 ships: an image in, a score for each concept out."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn


class SafetyCheckerNetwork(nn.Module):
    """diffusers' StableDiffusionSafetyChecker, without its decision (`model.pipeline.safety`).

    Takes pixel_values [batch, 3, side, side]. Returns the cosine similarities less their thresholds in float32, of the
    special concepts [batch, special concepts] and of the others [batch, concepts].
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the special concepts, and of the others."""
        checker = cast(Any, self.network)
        pooled = checker.vision_model(pixel_values, return_dict=True).pooler_output
        embeds = F.normalize(checker.visual_projection(pooled).float())
        special = embeds @ F.normalize(checker.special_care_embeds.float()).T
        others = embeds @ F.normalize(checker.concept_embeds.float()).T
        return (
            special - checker.special_care_embeds_weights.float(),
            others - checker.concept_embeds_weights.float(),
        )
