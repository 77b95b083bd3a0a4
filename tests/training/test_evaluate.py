"""The evaluation command uses the model's own defaults unless it gets other values."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from training import evaluate

pytestmark = pytest.mark.full


class BlackImages:
    """Generates black images."""

    def generate(self, prompts: list[str], seed: int, refined: bool) -> list[Image.Image]:
        return [Image.new("RGB", (256, 256))] * len(prompts)


def test_generates_with_defaults_or_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "defaults.json").write_text('{"guidance_scale": 2.0, "denoising_frac": 0.5}')
    for options, expected in (([], (2.0, 0.5)), (["--guidance", "1", "--denoising-frac", "0.9"], (1.0, 0.9))):
        used: dict[str, Any] = {}

        def make(*_: Any, settings: dict[str, Any] = used, **given: Any) -> BlackImages:
            settings |= given
            return BlackImages()

        evaluate.main([str(tmp_path), "--device", "cpu", "--count", "1", *options], make)  # type: ignore[arg-type]
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        for values in (used, summary):
            assert (values["guidance"], values["denoising_frac"]) == expected
