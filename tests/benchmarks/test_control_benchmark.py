"""The comparison of requests with a ControlNet to plain text to image."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_builder.benchmarks import control
from engine_builder.benchmarks.control import arithmetic_share, compare
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.random_controlnet import config
from engine_builder.checkpoints.random_sdxl import UNET
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from tests.support import controlnets
from tests.support.repository import MODEL_FOLDER


def test_measures_each_controlnet(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's time is the difference of two requests: here 2 ms, and with a ControlNet 3 ms. The rest takes 50 ms."""

    def fake_work(loaded: Loaded, params: GenerationParams):  # type: ignore[no-untyped-def]
        seen.append(([one.name for one in params.controls], params.num_inference_steps))
        assert all(np.ptp(one.levels) for one in params.controls)
        per_step = 3.0 if params.controls else 2.0

        def work() -> dict[str, float]:
            time.sleep(0.002)  # a request takes some time, to which the others are compared
            return {"denoise": 50.0 + per_step * params.num_inference_steps}

        return work

    seen: list[tuple[list[str], int]] = []
    monkeypatch.setattr(control, "release_work", fake_work)
    served = replace(loaded.served, controlnets={"edges": 0, "all": 3})
    rows, ratios = compare(replace(loaded, served=served), steps=6, runs=2, warm_ups=0, side=64)
    assert seen == [([], 6), ([], 2), (["edges"], 6), (["edges"], 2), (["all"], 6), (["all"], 2)]
    assert [row.runs for row in rows] == [2] * 6
    assert {name: of_network["step"] for name, of_network in ratios.items()} == {"edges": 1.5, "all": 1.5}


def test_refuses_what_cannot_be_compared(loaded: Loaded) -> None:
    served = replace(loaded.served, controlnets={"edges": 0})
    with pytest.raises(ValueError, match="5 steps are too few to compare; 6 are needed"):
        compare(replace(loaded, served=served), steps=5, runs=1)
    with pytest.raises(RequestRefused, match="has no ControlNets"):
        compare(loaded, steps=6, runs=1)


def test_counts_the_arithmetic(tmp_path: Path) -> None:
    """A ControlNet has the UNet's blocks but for those of the way up, which has one more layer in each level."""
    folders = {kind: controlnets.write(tmp_path / kind, MODEL_FOLDER, kind) for kind in ("full", "small")}
    checkpoint = Checkpoint(MODEL_FOLDER, controlnets=tuple(folders.items()))
    full, small = (arithmetic_share(checkpoint, kind, side=256) for kind in folders)
    assert 0 < small < full < 0.5


def test_random_controlnets_have_sdxls_levels() -> None:
    for kind in ("full", "mid", "small"):
        entries = config(kind)
        assert entries["block_out_channels"] == UNET["block_out_channels"]
        assert len(entries["down_block_types"]) == len(UNET["down_block_types"])
    assert not any("CrossAttn" in name for name in config("small")["down_block_types"])
