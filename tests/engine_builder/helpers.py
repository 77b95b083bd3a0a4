"""Changes of a model's folder and of a store, and what two builds are compared by."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine_builder.building.build_plan import BuildPlan
from engine_builder.stores.store import WritableStore
from model.store.manifest import Manifest
from tests.support.repository import REPOSITORY

KEPT_GRAPHS = REPOSITORY / ".preheat" / "test-graphs"  # reused by their keys, as engines are
Tensors = dict[str, torch.Tensor]
PlanOf = Callable[[Path, str], BuildPlan]
"""Returns the toy's build plan for another folder and model name."""


def edit_json(file: Path, **entries: object) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def drop_json_key(file: Path, key: str) -> None:
    """Remove an entry of a JSON file."""
    entries = json.loads(file.read_text())
    del entries[key]
    file.write_text(json.dumps(entries))


def edit_weights(subfolder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a subfolder such as folder / "unet" in place."""
    [file] = subfolder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def perturb(tensors: Tensors) -> None:
    """Add seeded noise to every tensor."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))


def folder_of(store: WritableStore) -> Path:
    """Return the folder of a local store."""
    return Path(store.url.removeprefix("file://"))


def forget_engine(store: WritableStore, manifest: Manifest, component: str) -> None:
    """Delete an engine of the manifest from a store."""
    [engine] = [engine for engine in manifest.engines if engine.component == component]
    (folder_of(store) / "records" / "engines" / f"{engine.key}.json").unlink()
    (folder_of(store) / "blobs" / "sha256" / engine.blob.sha256).unlink()


def forget_drafts(store: WritableStore) -> None:
    """Delete all drafts from a store."""
    shutil.rmtree(folder_of(store) / "records" / "drafts")


def engine_keys(manifest: Manifest) -> dict[str, str]:
    """Return the engine key of each component."""
    return {engine.component: engine.key for engine in manifest.engines}


def engine_blobs(manifest: Manifest) -> dict[str, tuple[str, str, str]]:
    """Return the engine key of each component, with the digests of its package and of its map of constants."""
    return {e.component: (e.key, e.blob.sha256, e.constants.sha256) for e in manifest.engines}


def install_metadata(folder: Path, name: str, version: str) -> None:
    """Make a version of a distribution appear installed wherever `folder` comes first in sys.path."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
