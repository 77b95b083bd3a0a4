"""The comparison of image to image and inpainting with text to image."""

from dataclasses import replace

import pytest

from engine_builder.benchmarks import image_tasks
from engine_builder.benchmarks.image_tasks import Comparison, compare, report
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams


def test_measures_each_task(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's time is the difference of two requests. Here each step takes 2 ms, with a mask 3 ms, and the rest 50."""

    def fake_work(loaded: Loaded, params: GenerationParams):  # type: ignore[no-untyped-def]
        seen.append((params.task, params.num_inference_steps, params.strength))
        per_step = 3.0 if params.masks else 2.0
        return lambda: {"denoise": 50.0 + per_step * params.num_inference_steps}

    seen: list[tuple[str, int, float]] = []
    monkeypatch.setattr(image_tasks, "release_work", fake_work)
    rows, comparison = compare(loaded, steps=6, runs=2, warm_ups=0, side=64)
    assert seen == [
        ("text_to_image", 6, 1.0),
        ("text_to_image", 2, 1.0),
        ("inpaint", 6, 1.0),
        ("inpaint", 2, 1.0),
        ("image_to_image", 6, 0.5),
    ]
    assert [row.runs for row in rows] == [2] * 5
    assert (comparison.plain_step, comparison.inpaint_step, comparison.step_ratio) == (2.0, 3.0, 1.5)
    assert comparison.bound == pytest.approx(0.55 * rows[0].p50 + 30)


def test_runs_on_a_release(loaded: Loaded) -> None:
    rows, comparison = compare(loaded, steps=6, runs=1, warm_ups=0, side=64)
    assert len(rows) == 5 and comparison.image_to_image > 0
    lines: list[str] = []
    report(Comparison(10.0, 20.0, 2.0, 2.1), lines.append)
    assert lines == [
        "image to image at strength 0.5: 10.0 ms, bound 20.0 ms",
        "step: 2.000 ms, with a mask 2.100 ms, ratio 1.050",
    ]


def test_refuses_what_cannot_be_compared(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="5 steps are too few to compare; 6 are needed"):
        compare(loaded, steps=5, runs=1)
    without = replace(loaded, served=replace(loaded.served, image_sizes=None))
    with pytest.raises(RequestRefused, match="has no VAE encoder"):
        compare(without, steps=6, runs=1)
