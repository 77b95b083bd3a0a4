"""The training of an IP-Adapter for the tiny model, in a few steps on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.ip_adapter import parse_ip_adapters
from engine_builder.networks.network_check import check_model
from tests.support.repository import MODEL_FOLDER
from training.pictures import scenes
from training.pictures.render import render_scene
from training.pictures.score import score_image
from training.train_ip_adapter import (
    FILE,
    SIDE,
    Examples,
    IpAdapter,
    Score,
    evaluate,
    export,
    follows_caption,
    has_colour,
    held_out_cases,
    model_card,
    sample_example,
    train,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of diffusers
]
CPU = torch.device("cpu")
FACTS = {"examples": 4, "steps": 2, "batch": 2, "seconds": 1.0, "device": "CPU", "sampling_steps": 2}


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples([sample_example(number) for number in range(4)], MODEL_FOLDER, CPU)


@pytest.fixture(scope="module")
def trained(examples: Examples) -> IpAdapter:
    adapter = IpAdapter(MODEL_FOLDER, CPU)
    steps, loss = train(adapter, examples, 2, 2, 1e-3, 600, CPU)
    assert steps == 2 and np.isfinite(loss)
    return adapter


def test_a_reference_has_the_colour_of_its_target() -> None:
    assert sample_example(5) == sample_example(5) != sample_example(6)
    for number in range(20):
        example = sample_example(number)
        colour = np.array(list(scenes.COLOURS.values())[example.colour]) / 255
        for vector in (example.vector, example.reference):
            assert np.abs(np.array(vector[4:7]) - colour).max() <= 8 / 255 + 1e-9
        assert example.vector != example.reference


def test_the_exported_files_fit_the_model_and_are_scored(trained: IpAdapter, tmp_path: Path) -> None:
    export(trained, tmp_path)
    base = Checkpoint(MODEL_FOLDER)
    adapters = parse_ip_adapters([f"colour={tmp_path / FILE}"], [], base)
    check_model(Checkpoint(MODEL_FOLDER, ip_adapters=adapters), None)
    score = evaluate(MODEL_FOLDER, tmp_path, count=1, steps=2, device=CPU)
    assert score.references == 1 and 0 <= score.both <= min(score.colour, score.caption) <= 1
    card = model_card(Score(colour=0.9, caption=0.8, both=0.75, chance=0.1, references=100), FACTS)
    assert "| 90% |" in card and "| 10% |" in card and "2 steps of 2 images" in " ".join(card.split())


def test_a_picture_is_right_only_with_the_colour_of_the_reference() -> None:
    for case in held_out_cases(5):
        assert case.reference.triples() & scenes.held_out_triples()
        [item] = case.reference.objects
        picture = render_scene(case.reference, SIDE, SIDE)
        assert has_colour(picture, item.colour) and not has_colour(picture, case.reference.background)
        assert not has_colour(np.full_like(picture, 255), item.colour)
        as_stated = scenes.SceneObject(case.shape, item.colour, "large", 0.5, 0.5, 0.2)
        target = render_scene(scenes.Scene("single", case.background, (as_stated,)), SIDE, SIDE)
        assert follows_caption(target, case) and score_image(target, case.statement).ok


def test_the_trained_adapter_gives_the_figure_the_colour_of_the_reference() -> None:
    score = evaluate(MODEL_FOLDER, MODEL_FOLDER.parent / "tiny-sdxl-ip-adapter", 4, 12, CPU)
    assert score.colour == score.caption == 1
    assert score.chance < 1, "the captions do not state the colour"
