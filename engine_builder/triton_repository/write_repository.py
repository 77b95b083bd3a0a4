"""Write a Triton model repository from releases of one model.

    REPOSITORY/<model>/config.pbtxt
    REPOSITORY/<model>/<version>/model.py     imports the class that serves the model
    REPOSITORY/<model>/<version>/store/       a store with the release's manifest, and links to the blobs in use
    REPOSITORY/<model>/warmup/<input>         the content of the warm-up request

A Triton version is the version of a release. Each model opens its own store, so it verifies the signature and every
digest as a Truss server does.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine_builder.error_text import cause_of
from engine_builder.files import check_folder
from engine_builder.stores.writing import checked_json
from engine_builder.triton_repository.config import TritonModel, config_text
from model.errors import PreheatError
from model.store.keys import blob_key, release_key
from model.store.manifest import Blob, Manifest
from model.store.store import Store

STORE = "store"  # folder of a version
Versions = Mapping[int, tuple[TritonModel, Sequence[Blob]]]
"""Of one model: by version what it is, which is the same in all versions, and the blobs that it loads."""


class RepositoryError(PreheatError):
    """A Triton model repository cannot be written from these releases."""


def triton_version(manifest: Manifest) -> int:
    """Return the version of a release as Triton's: a whole number from 1. Raises RepositoryError."""
    if not (manifest.version.isascii() and manifest.version.isdecimal()) or int(manifest.version) < 1:
        raise RepositoryError(
            f"Triton's versions are whole numbers from 1, and release {manifest.name} has {manifest.version!r}.",
            "Publish it under a number (`preheat publish MODEL`).",
        )
    return int(manifest.version)


def read_releases(store: Store, names: Sequence[str]) -> dict[int, Manifest]:
    """Return the manifests of releases of one model by Triton's version, in ascending order.

    Raises RepositoryError, ReleaseNotFound, ManifestError or StoreError.
    """
    manifests = [store.read_release(name) for name in dict.fromkeys(names)]
    if len(models := sorted({manifest.model for manifest in manifests})) > 1:
        raise RepositoryError(
            f"A repository has the versions of one model, and these are of {', '.join(models)}.",
            "Write a repository for each, and give Triton both folders.",
        )
    return dict(sorted((triton_version(manifest), manifest) for manifest in manifests))


def write_repository(store: Store, releases: Mapping[int, Manifest], models: Iterable[Versions], out: Path) -> None:
    """Write a repository into the new folder `out`. A crash leaves no folder of that name.

    store: holds the blobs. releases: by version. Raises RepositoryError, NotWritable, CorruptBlob or StoreError.
    """
    if out.exists() or out.is_symlink():
        raise RepositoryError(f"{out} exists already.", "Choose a new folder.")
    check_folder(out)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except (OSError, ValueError) as error:
        raise RepositoryError(f"{out} cannot be written: {cause_of(error)}.", "Choose another folder.") from error
    try:
        for versions in models:
            _write_model(store, releases, versions, temporary)
        temporary.chmod(0o755)
        temporary.rename(out)
    except OSError as error:
        raise RepositoryError(f"{out} cannot be written: {cause_of(error)}.", "Choose another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model(store: Store, releases: Mapping[int, Manifest], versions: Versions, root: Path) -> None:
    model = next(iter(versions.values()))[0]
    folder = root / model.name
    for version, (_, blobs) in versions.items():
        version_folder = folder / str(version)
        version_folder.mkdir(parents=True)
        if not model.serving:
            continue  # an ensemble's version is an empty folder
        module, _, name = model.serving.rpartition(".")
        (version_folder / "model.py").write_text(
            f'"""Serves {model.name} of {releases[version].name}. Written by `preheat export-triton`."""\n\n'
            f"from {module} import {name} as TritonPythonModel  # noqa: F401\n"
        )
        _write_store(store, releases[version], blobs, version_folder / STORE)
    (folder / "config.pbtxt").write_text(config_text(model, list(versions)))
    if model.warmup:
        (folder / "warmup").mkdir()
        for tensor, content in model.warmup.items():
            (folder / "warmup" / tensor).write_bytes(content)


def _write_store(store: Store, manifest: Manifest, blobs: Iterable[Blob], folder: Path) -> None:
    """Write a local store with the manifest and links to these blobs, which are verified."""
    path = folder / release_key(manifest.name)
    path.parent.mkdir(parents=True)
    path.write_bytes(checked_json(manifest))
    for blob in {blob.sha256: blob for blob in blobs}.values():
        link = folder / blob_key(blob.sha256)
        link.parent.mkdir(parents=True, exist_ok=True)
        source = store.get(blob.sha256, blob.bytes).resolve()
        try:
            os.link(source, link)
        except OSError:  # another file system, or one without hard links
            link.symlink_to(source)
