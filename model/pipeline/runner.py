"""Plan requests, and advance images through their stages. The scheduler, or an offline call, decides when.

An image passes all stages once, or once for each mask of its request.
"""

from collections.abc import Sequence

import torch

from model.denoising.loop import ImageState
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.params import GenerationParams
from model.pipeline.preview import PreviewMap
from model.pipeline.request_plan import RequestPlan, plan_request
from model.pipeline.stages import STAGES, Stage


class Runner:
    """Runs a pipeline on one model. Holds no state of images: that is in `ImageState`."""

    def __init__(self, model: LoadedModel, stages: Sequence[Stage] = STAGES) -> None:
        self.model = model
        self.stages = stages
        self.preview_map: PreviewMap | None = None
        """Makes previews of latents. None: there are no previews."""

    def plan(self, params: GenerationParams) -> RequestPlan:
        """Plan a request. Any thread may call it. Raises RequestRefused."""
        return plan_request(self.model, params)

    @torch.inference_mode()
    def advance(self, plan: RequestPlan, image: ImageState, encoded: EncodedOnce) -> LoopKey | None:
        """Run an image's next stages, up to the next stage with a loop.

        Returns that stage's loop. Run the image's steps in it and call `advance` again. None: all stages are finished,
        and `image.pixels` is the result. `encoded`: of the request's images that this process generates.
        """
        while image.stage < len(self.stages):
            stage = self.stages[image.stage]
            image.stage += 1
            if (loop := stage.run(self.model, plan.passes[image.pass_index], image, encoded)) is not None:
                return loop
            if image.stage == len(self.stages) and image.pass_index < len(plan.passes) - 1:
                image.pass_index += 1
                image.stage, image.generator = 0, plan.generator(image.index)
        return None

    def current_timing(self, image: ImageState) -> str:
        """Return the `timing` of the stage that an image began last."""
        return self.stages[image.stage - 1].timing
