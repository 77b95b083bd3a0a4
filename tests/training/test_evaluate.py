"""The exam's command: whose defaults it draws with."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from training import architecture, evaluate, export

TINY = Path(__file__).parents[2] / "data" / "tiny-sdxl"


class Blank:
    """Draws nothing, and says what it was made with."""

    def __init__(self, *made_with: Any) -> None:
        self.made_with = made_with
        made.append(self)

    def paint(self, prompts: list[str], seed: int, refined: bool, size: tuple[int, int]) -> list[Image.Image]:
        return [Image.new("RGB", size)] * len(prompts)


made: list[Blank] = []


def test_a_model_is_drawn_with_its_own_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export.export(export.random_networks(), tmp_path)
    own = tmp_path / "defaults.json"
    assert json.loads(own.read_text()) == architecture.DEFAULTS == json.loads((TINY / "defaults.json").read_text())
    own.write_text('{"guidance_scale": 2.0, "denoising_frac": 0.5}')
    monkeypatch.setattr(evaluate, "Painter", Blank)

    def settings(*more: str) -> tuple[float, float]:
        monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path), "--device", "cpu", "--count", "1", *more])
        evaluate.main()
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert said["guidance"] in made[-1].made_with and said["denoising_frac"] in made[-1].made_with
        return said["guidance"], said["denoising_frac"]

    assert settings() == (2.0, 0.5)
    assert settings("--guidance", "1", "--denoising-frac", "0.9") == (1.0, 0.9)
