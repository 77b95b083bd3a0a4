"""`preheat bench multi-gpu`, with two processes on a CPU."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import measure
from benchmarks.multi_gpu import compare, load_ranked
from engine_builder.stores.store import WritableStore
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest
from preheat.main import app


def test_measures_the_speed_up(store: WritableStore, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU needs 20 ms a step, two 12."""

    def fake_work(loaded: Loaded, params: GenerationParams):  # type: ignore[no-untyped-def]
        return lambda: {"denoise": 4 * (12.0 if loaded.model.ranks.size == 2 else 20.0)}

    monkeypatch.setattr(measure, "release_work", fake_work)
    request = GenerationRequest(prompt="a red circle", width=64, height=96, num_inference_steps=4, seed=1)
    with load_ranked(store.url, release, 2) as (alone, divided):
        rows, speed_up = compare(alone, divided, 2, request, warm_ups=0, runs=2)
        with pytest.raises(RequestRefused, match="without guidance is not divided"):
            unguided = request.model_copy(update={"guidance_scale": 1.0})
            compare(alone, divided, 2, unguided, warm_ups=0, runs=1)
    assert speed_up == pytest.approx(20 / 12)
    assert [row.case for row in rows] == [f"{release} one GPU 64x96", f"{release} 2 GPUs 64x96"]


@pytest.mark.full
def test_command_prints_rows(store: WritableStore, release: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["bench", "multi-gpu", release, "--store", store.url, "--size", "64x64", "--steps", "2"]
    result = CliRunner().invoke(app, [*arguments, "--warm-ups", "0", "--runs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "times as fast." in result.output
    assert len(json.loads(out.read_text())) == 2
