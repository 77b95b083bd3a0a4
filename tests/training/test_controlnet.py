"""The training of a ControlNet for the tiny model, in a few steps on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network_check import check_model
from tests.support.repository import MODEL_FOLDER
from training.pictures import scenes
from training.pictures.captions import parse_caption
from training.pictures.render import render_scene
from training.pictures.score import score_image
from training.train_controlnet import (
    SIDE,
    Examples,
    Score,
    caption_of,
    evaluate,
    export,
    held_out_scenes,
    is_placed,
    model_card,
    sample_example,
    train,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of diffusers
]
CPU = torch.device("cpu")
FACTS = {"examples": 4, "steps": 3, "batch": 2, "seconds": 1.0, "device": "CPU", "sampling_steps": 2}


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples([sample_example(number) for number in range(4)], MODEL_FOLDER, CPU)


@pytest.fixture(scope="module")
def trained(examples: Examples) -> ControlNetModel:
    network, steps, loss = train(MODEL_FOLDER, examples, 3, 2, 1e-3, 600, CPU)
    assert steps == 3 and np.isfinite(loss)
    assert all(projection.weight.any() for projection in network.controlnet_down_blocks)  # they begin as zeros
    return network


def test_the_exported_network_fits_the_model(trained: ControlNetModel, tmp_path: Path) -> None:
    score = Score(placed=0.9, true=0.8, both=0.75, chance=0.1, scenes=100)
    export(trained, tmp_path / "edges", model_card(score, FACTS))
    check_model(Checkpoint(MODEL_FOLDER, controlnets=(("edges", tmp_path / "edges"),)), None)
    card = " ".join((tmp_path / "edges" / "README.md").read_text().split())
    assert "| 90% |" in card and "| 10% |" in card and "3 steps of 2 images" in card
    loaded = ControlNetModel.from_pretrained(tmp_path / "edges")
    torch.testing.assert_close(loaded.conv_in.weight, trained.conv_in.weight, atol=1e-3, rtol=1e-2)


def test_training_ends_in_time_and_is_scored(examples: Examples) -> None:
    network, steps, _ = train(MODEL_FOLDER, examples, 50, 2, 1e-3, 0.0, CPU)
    assert steps == 1
    score = evaluate(MODEL_FOLDER, network, count=2, steps=2, device=CPU)
    assert score.scenes == 2 and 0 <= score.both <= min(score.placed, score.true) <= 1


def test_an_object_is_placed_only_where_the_scene_has_it() -> None:
    for scene in held_out_scenes(5):
        picture = render_scene(scene, SIDE, SIDE)
        assert is_placed(picture, scene)
        assert not is_placed(np.roll(picture, SIDE // 10, axis=1), scene)
        assert not is_placed(np.full_like(picture, 255), scene)
        assert score_image(picture, parse_caption(caption_of(scene))).ok
        assert scene.triples() & scenes.held_out_triples()


def test_the_trained_network_places_the_figure() -> None:
    network = ControlNetModel.from_pretrained(MODEL_FOLDER.parent / "tiny-sdxl-controlnet")
    score = evaluate(MODEL_FOLDER, network, 4, 12, CPU)
    assert score.placed == score.both == 1
    assert score.chance < 1, "the captions do not state the place"
