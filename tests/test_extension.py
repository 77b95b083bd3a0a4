"""A feature of the UNet, a network whose outputs it adds and a stage, named by no other file: from build to picture."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine_builder.networks.unet import StepUnet
from engine_builder.networks.wrappers import WRAPPERS, Wrapper
from engine_builder.stores.store import open_writable_store
from model.engines.features import FEATURES, Feature, Input
from model.loading.warmup import warm_up
from model.pipeline.components import FAMILIES
from model.pipeline.spec import ComponentSpec
from model.pipeline.stages import STAGES, Denoise
from model.store.manifest import Signature, TensorSpec
from preheat.main import app
from tests.engine_builder.helpers import edit_weights
from tests.support.images import largest_difference, pixels
from tests.support.in_process import serve_in_process
from tests.support.parity import TOLERANCE, load, params_of, request_of
from tests.support.predictions import predict
from tests.support.reference import Reference
from tests.support.static_tokens import with_graph_loop

SAMPLE = TensorSpec(name="sample", dtype="float32", shape=("rows", 4, "height/2", "width/2"))
SHIFT = SAMPLE.model_copy(update={"name": "shift"})
TYPES = Signature(inputs=(SAMPLE, TensorSpec(name="scale", dtype="float32", shape=("rows", 1))), outputs=(SHIFT,))
SHIFTER = ComponentSpec("shifter", "base", "unet", "Shifter", lambda *_: TYPES, "step", "cfg_half", optional=True)


class Shifter(torch.nn.Module):  # adds three times the UNet's last bias, so a picture is one of a larger bias
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.bias = network.conv_out.bias

    def forward(self, sample: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
        return ((scale * self.bias)[:, :, None, None].expand_as(sample),)


class ShiftedUnet(StepUnet):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if "shift" not in self.features:
            return super().forward(*inputs)
        return (super().forward(*inputs[:-1])[0] + inputs[-1],)


class DenoiseShifted(Denoise):
    def run(self, model, plan, image, encoded):
        loop, own = super().run(model, plan, image, encoded), image.plan
        if plan.params.prompt == "shifted":
            image.plan = replace(own, needs=own.steps * (frozenset({"shift"}),), uses={"shifter": own.guidance > 0})
            image.cond.inputs["shifter.scale"] = image.uncond.inputs["shifter.scale"] = torch.full((own.steps, 1), 3.0)
        return loop


@pytest.mark.usefixtures("uncompiled_builds", "target")
def test_serves_a_new_feature(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEATURES, "shift", Feature("shift", (Input("shift", added=True),), lambda *_: (SHIFT,)))
    spec = replace(SHIFTER, inputs=(Input("scale", "image", by_step=True),), adds_to="shift")
    monkeypatch.setitem(FAMILIES["sdxl"].components, "shifter", spec)
    monkeypatch.setitem(WRAPPERS, "Shifter", Wrapper("diffusers", "UNet2DConditionModel", Shifter))
    monkeypatch.setitem(WRAPPERS, "StepUnet", replace(WRAPPERS["StepUnet"], wrap=ShiftedUnet))
    store, changed = str(tmp_path / "store"), Path(shutil.copytree(toy_folder, tmp_path / "changed"))
    for command in (["build", str(toy_folder), "--name", "toy", "--jobs", "1"], ["publish", "toy"]):
        CliRunner().invoke(app, [*command, "--store", store], catch_exceptions=False)
    warm_up(loaded := load(open_writable_store(store), "toy/1"))
    edit_weights(changed / "unet", lambda tensors: tensors["conv_out.bias"].mul_(1 + 3))
    stages = (*STAGES[:2], DenoiseShifted("base", timing="denoise"), *STAGES[3:])
    for model in (loaded.model, with_graph_loop(loaded.model, 64)):
        with serve_in_process(replace(loaded, model=model), stages=stages) as client:
            for prompt, folder in {"shifted": changed, "plain": toy_folder}.items():
                params = params_of(loaded, prompt=prompt)
                image = pixels(predict(client, **request_of(params))["data"])
                assert largest_difference(image, Reference(folder).generate(params)) <= TOLERANCE
