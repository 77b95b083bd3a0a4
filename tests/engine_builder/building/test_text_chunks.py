"""`preheat build --text-chunks`: engines of one size that read prompts of several chunks."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from typer.testing import CliRunner

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.networks.network import load_network
from engine_builder.releases.publish import publish
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.target import detect_targets
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP32
from preheat.main import app
from tests.support.deployments import deployed, load_release

pytestmark = pytest.mark.usefixtures("uncompiled_builds")

SIDE = 64
PROMPTS = ("a red circle", "red " * 70 + "(a blue square:1.4) " + "green " * 10, "a large circle " * 95)


def test_static_engines_read_prompts_of_any_length(
    toy_plan: BuildPlan, toy_store: WritableStore, tmp_path: Path
) -> None:
    """Images equal those of the engines that take any number of tokens."""
    shutil.copytree(toy_store.url.removeprefix("file:"), tmp_path / "store")
    store = WritableLocalStore(tmp_path / "store")
    plan = replace(toy_plan, model="long", sizes=(Size(2, SIDE, SIDE),), text_chunks=4)
    assert build(plan, store).draft.engines
    publish(store, "long")
    long, any_length = (
        load_release(store, deployed(name), detect_targets(), ColdStart()) for name in ("long/1", "toy-sdxl/1")
    )
    assert long.model.max_text_chunks == any_length.model.max_text_chunks == 4
    assert [spec.shape[1] for spec in long.model.engines[UNET].signature.inputs if spec.name == "keys_values"] == [308]
    for prompt in PROMPTS:
        request = GenerationRequest(
            prompt=prompt, negative_prompt="red", prompt_syntax="weighted", seed=1, width=SIDE, height=SIDE
        )
        images = [generate(one.model, [resolve(request, one.served)])[0][0].astype(int) for one in (long, any_length)]
        assert np.abs(images[0] - images[1]).max() <= 1

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # another number of chunks is another draft
        build(replace(plan, text_chunks=2), store, stop)


def test_default_of_static_engines_is_one_chunk(toy_plan: BuildPlan) -> None:
    """Their keys are those of builds from before prompts had chunks."""
    plan = replace(toy_plan, sizes=(Size(2, SIDE, SIDE),))
    assert plan.unet_chunks == 1 and toy_plan.unet_chunks is None
    [spec] = [spec for spec in load_network(toy_plan.base, UNET, FP32).signature.inputs if spec.name == "keys_values"]
    assert spec.shape[1] == 77


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-chunks", "3"], "3 is not one of 1, 2, 4"),
        (["--text-chunks", "4"], "needs --size; engines for any size"),
    ],
)
def test_refuses_chunks_by_number(options: list[str], message: str, toy_folder: Path, tmp_path: Path) -> None:
    arguments = ["build", str(toy_folder), "--store", str(tmp_path / "store"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())
