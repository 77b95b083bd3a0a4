"""Finding a model by its Hub id: only the files that a build reads are downloaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub import hub
from tests.support.repository import REPOSITORY

FP16_WEIGHTS, WEIGHTS = "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"


def find(url: str, home: Path, name: str = "owner/model") -> subprocess.CompletedProcess[str]:
    """Find a model's folder in a process that uses the Hub at `url`, and print the folder.

    The Hub's client reads the URL when the client is imported.
    """
    code = (
        "from engine_builder.checkpoints.find import find_checkpoints\n"
        f"base, _ = find_checkpoints({name!r}, None)\n"
        "print(base.root)"
    )
    hub_settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment = os.environ | hub_settings | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(variable, None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def repository(toy_folder: Path, tmp_path: Path) -> Path:
    """The toy as a repository, with additional files that a build does not read."""
    folder = Path(shutil.copytree(toy_folder, tmp_path / "repository"))
    (folder / "toy_1.0.safetensors").write_bytes(b"all networks in one file")
    (folder / "vae_1_0").mkdir()
    (folder / "vae_1_0" / FP16_WEIGHTS).write_bytes(b"another VAE")
    return folder


def weight_files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))


def test_downloads_fp16_weights_where_they_exist(repository: Path, tmp_path: Path) -> None:
    shutil.copy(repository / "unet" / WEIGHTS, repository / "unet" / FP16_WEIGHTS)
    shard = "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"
    (repository / "vae" / WEIGHTS).rename(repository / "vae" / shard)
    with hub("owner/model", repository) as running:
        result = find(running.url, tmp_path / "home")
        assert result.returncode == 0, result.stderr
        found = Path(result.stdout.strip())
        assert weight_files(found) == [
            "text_encoder/model.safetensors",
            "text_encoder_2/model.safetensors",
            f"unet/{FP16_WEIGHTS}",
            f"vae/{shard}",
        ]
        assert (found / "model_index.json").is_file() and (found / "tokenizer" / "merges.txt").is_file()
        assert sorted(path for path in running.downloaded if path.endswith(".safetensors")) == weight_files(found)
    again = find(running.url, tmp_path / "home")  # the Hub is offline
    assert again.stdout == result.stdout, again.stderr


def test_continues_an_interrupted_download(repository: Path, tmp_path: Path) -> None:
    names = [f"diffusion_pytorch_model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (repository / "unet" / WEIGHTS).rename(repository / "unet" / names[0])
    (repository / "unet" / names[1]).write_bytes(b"the other half")
    with hub("owner/model", repository) as running:
        running.interrupted.add(f"unet/{names[1]}")
        result = find(running.url, tmp_path / "home")
        assert result.returncode == 1
        assert "owner/model is not a folder, and could not be downloaded from the Hub: " in result.stderr
        running.interrupted.clear()
        result = find(running.url, tmp_path / "home")
        assert result.returncode == 0, result.stderr
        assert {f"unet/{name}" for name in names} <= {*weight_files(Path(result.stdout.strip()))}
        assert running.downloaded.count(f"unet/{names[0]}") == 1


def test_downloads_only_the_named_file(repository: Path, tmp_path: Path) -> None:
    """The file is not a checkpoint, which is said after its download. A pickle is not downloaded."""
    (repository / "old.ckpt").write_bytes(b"\x80\x02pickled")
    with hub("owner/model", repository) as running:
        result = find(running.url, tmp_path / "home", "owner/model/toy_1.0.safetensors")
        assert "toy_1.0.safetensors is not a complete safetensors file" in result.stderr
        missing = find(running.url, tmp_path / "home", "owner/model/other.safetensors")
        assert "CheckpointError: owner/model has no other.safetensors." in missing.stderr
        pickled = find(running.url, tmp_path / "home", "owner/model/old.ckpt")
        assert "old.ckpt may hold a pickle" in pickled.stderr
        assert running.downloaded == ["toy_1.0.safetensors"]


def test_reports_a_missing_repository(repository: Path, tmp_path: Path) -> None:
    (repository / "model_index.json").unlink()
    with hub("owner/model", repository) as running:
        missing = find(running.url, tmp_path / "home", "owner/other")
        incomplete = find(running.url, tmp_path / "home")
    assert missing.returncode == 1 and incomplete.returncode == 1
    text = "CheckpointError: owner/other is not a folder, and could not be downloaded from the Hub: 404 Client Error"
    assert text in missing.stderr and "CheckpointError: owner/model has no model_index.json." in incomplete.stderr
