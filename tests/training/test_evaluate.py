"""The evaluation command uses the model's own defaults unless it gets other values."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from training import evaluate


class FakeGenerator:
    """Generates black images and keeps its settings."""

    def __init__(self, folder: Path, device: str, **settings: Any) -> None:
        self.settings = settings

    def generate(self, prompts: list[str], seed: int, refined: bool, size: tuple[int, int]) -> list[Image.Image]:
        return [Image.new("RGB", size)] * len(prompts)


@pytest.mark.parametrize(
    ("options", "guidance", "denoising_frac"),
    [([], 2.0, 0.5), (["--guidance", "1", "--denoising-frac", "0.9"], 1.0, 0.9)],
    ids=["defaults of the model", "options"],
)
def test_generates_with_defaults_or_options(
    options: list[str], guidance: float, denoising_frac: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "defaults.json").write_text('{"guidance_scale": 2.0, "denoising_frac": 0.5}')
    generators = []

    def make_generator(*arguments: Any, **settings: Any) -> FakeGenerator:
        generators.append(FakeGenerator(*arguments, **settings))
        return generators[-1]

    evaluate.main([str(tmp_path), "--device", "cpu", "--count", "1", *options], make_generator)
    [settings] = [generator.settings for generator in generators]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    for values in (settings, summary):
        assert (values["guidance"], values["denoising_frac"]) == (guidance, denoising_frac)
