"""A feature, a network before the denoiser, and a stage that no other file names.

They shift the predicted noise in proportion to the timestep.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.denoising.graph_loop import GraphLoop
from model.engines import features
from model.engines.engine import EngineSet
from model.engines.features import Feature, Input
from model.images.encode import encode_base64
from model.pipeline.runner import Runner
from model.pipeline.spec import UNET, ComponentSpec
from model.pipeline.stages import STAGES, Denoise
from model.pipeline.text_to_image import generate
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support.linear_networks import PLAIN, WIDTHS, Stub, linear_model

SAMPLE, SHIFT = (TensorSpec(name=name, dtype="float32", shape=WIDTHS.vae.latents) for name in ("sample", "shift"))
TYPES = Signature(inputs=(SAMPLE, TensorSpec(name="scale", dtype="float32", shape=("rows", 1))), outputs=(SHIFT,))
SHIFTER = ComponentSpec(
    "shifter", "base", "", "", lambda *_: TYPES, "step", "cfg_half", inputs=(Input("scale", by_step=True),),
    adds_to="shift",
)  # fmt: skip


class ShiftStub(Stub):
    def outputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "scale" in inputs:
            return {"shift": inputs["scale"][:, :, None, None].expand_as(inputs["sample"])}
        shift = 1e-3 * inputs["time_embeds"][:, :1, None, None]  # in the reference: the embeddings begin with timesteps
        return {"noise": super().outputs(inputs)["noise"] + inputs.get("shift", shift)}


class DenoiseShifted(Denoise):
    def run(self, model, plan, image, encoded):
        loop, own = super().run(model, plan, image, encoded), image.plan
        if plan.params.prompt == "shifted":
            image.plan = replace(own, needs=own.steps * (frozenset({"shift"}),), uses={"shifter": np.ones(own.steps)})
            for half in filter(None, (image.cond, image.uncond)):
                half.inputs["shifter.scale"] = 1e-3 * torch.tensor(own.schedule.timesteps, dtype=torch.float32)[:, None]
        return loop


@pytest.mark.parametrize("in_graphs", [False, True])
def test_adds_a_feature_a_component_and_a_stage(in_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(features.FEATURES, "shift", Feature("shift", (Input("shift", added=True),)))
    plain, reference, model = linear_model(), linear_model(), linear_model()
    signature = plain.engines[UNET].signature
    reference.engines[UNET] = EngineSet([ShiftStub(UNET, signature)])
    shifted = ShiftStub("unet.shift", Signature(inputs=(*signature.inputs, SHIFT), outputs=signature.outputs))
    model.components = model.components | {"shifter": SHIFTER}
    model.engines |= {"unet.shift": EngineSet([shifted]), "shifter": EngineSet([ShiftStub("shifter", TYPES)])}
    if in_graphs:
        for name in (UNET, "unet.shift", "shifter"):
            [engine] = model.engines[name].engines
            engine.bucket = Bucket(rows=Span(min=8, max=8), height=Span(min=64, max=64), width=Span(min=96, max=96))
        model.loops[UNET, 64, 96] = GraphLoop(model.denoiser(UNET, 64, 96), 64, 96, model.device)
    stages = (*STAGES[:2], DenoiseShifted("base", timing="denoise"), *STAGES[3:])
    scheduler = Scheduler(Runner(model, stages), Limits(), lambda: None)
    requests = [PLAIN, replace(PLAIN, prompt="shifted"), replace(PLAIN, guidance_scale=1.0, num_inference_steps=3)]
    jobs = scheduler.call(lambda: [scheduler.submit(params) for params in requests]).result()
    for params, job in zip(requests, jobs, strict=True):
        [[expected], *_] = generate(reference if params.prompt == "shifted" else plain, [params])
        assert job.result.result(60).images == [encode_base64(expected, "png", 95)]
    assert max(len(call["sample"]) for call in shifted.seen) == (8 if in_graphs else 5)  # all ran in the same steps
    scheduler.close()
