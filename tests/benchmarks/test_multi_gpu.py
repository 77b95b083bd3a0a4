"""`preheat bench multi-gpu`, with two processes on a CPU."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_builder.benchmarks import multi_gpu
from engine_builder.benchmarks.multi_gpu import compare, load_ranked
from engine_builder.commands.main import app
from engine_builder.stores.store import WritableStore
from model.api.request import GenerationRequest
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams


def test_predicts_and_measures_the_speed_up(
    store: WritableStore, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU needs 20 ms a step, two 12, and one entry 10. The all-gather is measured."""

    def fake_work(loaded: Loaded, params: GenerationParams):  # type: ignore[no-untyped-def]
        guided, divided = params.guidance_scale > 1, loaded.model.ranks.size == 2
        return lambda: {"denoise": 4 * (10.0 if not guided else 12.0 if divided else 20.0)}

    monkeypatch.setattr(multi_gpu, "release_work", fake_work)
    request = GenerationRequest(prompt="a red circle", width=64, height=96, num_inference_steps=4, seed=1)
    with load_ranked(store.url, release, 2) as ranked:
        result = compare(ranked, request, warm_ups=0, runs=2)
        with pytest.raises(RequestRefused, match="without guidance is not divided"):
            compare(ranked, request.model_copy(update={"guidance_scale": 1.0}), warm_ups=0, runs=1)
    exchanged = result.communication
    assert (exchanged.calls, exchanged.bytes) == (1, 4 * 4 * 12 * 8)  # float32, 4 channels of 12x8
    assert exchanged.seconds > 0
    assert result.measured == pytest.approx(20 / 12)
    assert result.predicted == pytest.approx(20 / (10 + 1000 * exchanged.seconds))
    assert [row.case for row in result.rows] == [
        f"{release} one GPU 64x96", f"{release} 2 GPUs 64x96", f"{release} the share of one rank 64x96"
    ]  # fmt: skip


def test_command_prints_rows(store: WritableStore, release: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["bench", "multi-gpu", release, "--store", store.url, "--size", "64x64", "--steps", "2"]
    result = CliRunner().invoke(app, [*arguments, "--warm-ups", "0", "--runs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "times as fast; predicted:" in result.output
    assert len(json.loads(out.read_text())) == 3
