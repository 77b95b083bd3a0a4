"""The command that scores the trained model's images in FP8: verdicts, the stored validation, the exit status."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_builder.quantization.record import CalibrationError
from engine_builder.quantization.validation.stored import StoredValidation, read_report
from engine_builder.quantization.validation.thresholds import Thresholds, violations
from engine_builder.stores.store import open_writable_store
from preheat.main import app
from tests.support.repository import MODEL_FOLDER
from training import score_fp8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a calibration of the trained model's base."""
    folder = tmp_path_factory.mktemp("score-fp8")
    (folder / "prompts.txt").write_text("a large red circle on a blue background\n")
    arguments = ["calibrate", str(MODEL_FOLDER), "--prompts", f"{folder}/prompts.txt", "--steps", "2",
                 "--guidance", "3", "--no-refiner", "--store", f"{folder}/store"]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return f"{folder}/store"


@pytest.mark.parametrize(("steps", "true_images"), [pytest.param(10, 2, marks=pytest.mark.full), (1, 0)])
def test_scores_both_models(steps: int, true_images: int, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One step gives no image of the caption, ten do."""
    status = score_fp8.main([str(MODEL_FOLDER), "--store", store, "--count", "1", "--steps", str(steps)])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["reference_true"], summary["quantized_true"]) == (true_images, true_images)
    assert (summary["captions"], summary["guidance"], summary["refiner"]) == (2, 3.0, False)
    opened = open_writable_store(store)
    [digest] = opened.records("validations")
    record = StoredValidation.find(opened, digest)
    assert record is not None
    report = read_report(opened, record.report)
    assert [prompt.reference_true for prompt in report.prompts] == [bool(true_images)] * 2
    assert {prompt.steps for prompt in report.prompts} == {steps}
    assert status == bool(violations(report, Thresholds(min_prompts=2, min_steps=steps)))


def test_needs_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="Run `preheat calibrate`"):
        score_fp8.main([str(MODEL_FOLDER), "--store", str(tmp_path)])
