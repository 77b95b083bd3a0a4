"""`python -m training.score_forecast` on two captions."""

import json

import numpy as np
import pytest

from tests.support.repository import MODEL_FOLDER
from training import score_forecast


def test_scores_each_level_against_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--count", "2", "--first", "3", "--steps", "10", "--sampler", "DPM++ 2M", "--guided", "0.2:0.9"]
    score_forecast.main([str(MODEL_FOLDER), *options])
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["sampler"], result["captions"], len(table)) == ("DPM++ 2M", 2, 6)
    scores = result["scores"]
    assert {name: one["evaluations"] for name, one in scores.items()} == {
        "off": 10, "quality": 9, "quality, same": 9, "fast": 8, "fast, same": 8, "guided": 10,
    }  # fmt: skip
    quality, fast, same = (np.median(scores[name]["psnr"]) for name in ("quality", "fast", "fast, same"))
    assert quality > fast > same
