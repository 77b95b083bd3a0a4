"""The safety checker of Stable Diffusion 1: decide which finished images show what it was made to find.

The checker compares an image with fixed concepts. Its engine returns for each concept the cosine similarity less the
concept's threshold. The rules of the decision are those of diffusers' `StableDiffusionSafetyChecker`.
"""

import torch

from model.engines.shapes import DTYPES
from model.images.clip_input import clip_input
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import SAFETY_CHECKER

_ADJUSTMENT = 0.01  # of all later scores, once a special concept was found
_DECIMALS = 3  # scores are rounded before they are compared with 0


def check_image(model: LoadedModel, levels: torch.Tensor) -> torch.Tensor | None:
    """Return bool [1] on the device, true for a flagged image; None if no safety checker is loaded.

    `levels`: uint8 [1, height, width, 3]. Call it on `model.decode_stream`.
    """
    if (checker := model.engines.get(SAFETY_CHECKER)) is None:
        return None
    [pixel_values] = checker.signature.inputs
    pixels = clip_input(levels, side=int(pixel_values.shape[-1])).to(DTYPES[pixel_values.dtype])
    scores = checker.run({pixel_values.name: pixels})
    return decide(scores["special_scores"], scores["concept_scores"])


def decide(special_scores: torch.Tensor, concept_scores: torch.Tensor) -> torch.Tensor:
    """Return which images are flagged, bool [images], from float32 scores [images, concepts] of two kinds of concepts.

    An image is flagged if a concept's score, rounded to three decimals, is positive. A positive score of a special
    concept flags nothing itself. It raises the scores of the later special concepts and of all concepts by 0.01.
    """
    adjustment = torch.zeros_like(special_scores[:, 0])
    for scores in special_scores.T:
        found = (scores + adjustment).round(decimals=_DECIMALS) > 0
        adjustment = torch.where(found, _ADJUSTMENT, adjustment)
    return ((concept_scores + adjustment[:, None]).round(decimals=_DECIMALS) > 0).any(dim=1)
