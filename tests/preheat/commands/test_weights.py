"""`preheat weights`: the entries of a config that mount a release, and what `check-config` says of them.

The platform's mount is simulated by a folder that nobody may write, with the files of the bucket that the patterns
name.
"""

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from engine_builder.adapters.add import add_adapter
from engine_builder.releases.mirror import copy_release
from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.deployment import ServedAdapters
from model.loading.target import detect_targets
from model.store.store import open_store
from preheat.main import app
from tests.conftest import Opener
from tests.support import object_store as ceph
from tests.support.adapters import PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed, load_release
from tests.support.object_store import ObjectStore
from tests.support.parity import image_of, params_of
from tests.support.repository import REPOSITORY

MOUNT = "/srv/models"
RELEASE = "toy-sdxl/1"
CPU_DEMO = REPOSITORY / "truss" / "configs" / "cpu-demo.yaml"


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def machine(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that may read the bucket."""
    variables = {
        "AWS_ACCESS_KEY_ID": ceph.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": ceph.SECRET_KEY,
        "AWS_ENDPOINT_URL_S3": object_store.url, "PREHEAT_CACHE_DIR": str(tmp_path / "machine"),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def in_bucket(toy_store: WritableStore, toy_folder: Path, open_bucket: Opener, tmp_path: Path) -> WritableStore:
    """A bucket with the toy, an adapter, and files that no server reads."""
    store = open_bucket("models")
    copy_release(toy_store, store, RELEASE)
    deltas = random_deltas(module_shapes(toy_folder), PACKABLE, 2, 0, 0.3)
    add_adapter(store, "bold", write_adapter(tmp_path / "bold.safetensors", deltas, "peft"))
    (tmp_path / "other").write_bytes(b"of another release")
    store.put(tmp_path / "other")
    return store


def config_file(folder: Path, object_store: ObjectStore, entries: dict[str, Any] | None = None) -> Path:
    """Return a config that serves the toy and the adapter, with the entries that were printed."""
    config = yaml.safe_load(CPU_DEMO.read_text())
    preheat = {"endpoint": object_store.url, "loras": ["bold"]}
    if entries is not None:
        config["weights"] = entries["weights"]
        preheat |= entries["model_metadata"]["preheat"]
    config["model_metadata"]["preheat"] |= preheat
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def mount(s3: Any, bucket: str, entry: dict[str, Any], folder: Path) -> Path:
    """Copy the files that the platform would mount into a read-only folder."""
    for found in s3.list_objects_v2(Bucket=bucket, Prefix="models/")["Contents"]:
        path = found["Key"].removeprefix("models/")
        if any(fnmatchcase(path, pattern) for pattern in entry["allow_patterns"]):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, found["Key"], str(folder / path))
            (folder / path).chmod(0o444)
    return folder


@pytest.mark.usefixtures("machine")
def test_a_server_reads_everything_from_the_mount(
    in_bucket: WritableStore, object_store: ObjectStore, s3: Any, bucket: str, tmp_path: Path
) -> None:
    printed = run(
        "weights", RELEASE, "--store", in_bucket.url, "--mount", MOUNT, "--config",
        str(config_file(tmp_path, object_store)),
    )  # fmt: skip
    assert printed.exit_code == 0, printed.output
    entries = yaml.safe_load(printed.stdout)
    [entry] = entries["weights"]
    assert (entry["source"], entry["mount_location"]) == (in_bucket.url, MOUNT)
    assert entries["model_metadata"]["preheat"] == {"store": f"file://{MOUNT}", "release": RELEASE}
    checked = run("check-config", str(config_file(tmp_path, object_store, entries)))
    assert checked.exit_code == 0 and f"release  {RELEASE}" in checked.stdout, checked.output

    folder = mount(s3, bucket, entry, tmp_path / "mounted")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(entry["allow_patterns"])  # and not the blob of another release
    options = {"adapters": ServedAdapters(("bold",))}
    images = []
    for url in (folder.as_uri(), in_bucket.url):
        store = in_bucket if url == in_bucket.url else open_store(url)
        loaded = load_release(store, deployed(RELEASE, **options), detect_targets(), ColdStart())
        images.append(image_of(loaded.model, params_of(loaded, loras=(("bold", 1.0),))))
    assert np.array_equal(*images)


@pytest.mark.usefixtures("machine")
def test_mounts_several_releases(in_bucket: WritableStore, object_store: ObjectStore, tmp_path: Path) -> None:
    in_bucket.write_release(in_bucket.read_release(RELEASE).model_copy(update={"version": "2"}))
    for option in ([], ["--config", str(config_file(tmp_path, object_store))]):
        names = [RELEASE, "toy-sdxl/2"]
        printed = run("weights", *names, "--store", in_bucket.url, "--mount", MOUNT, *option)
        assert printed.exit_code == 0, printed.output
        entries = yaml.safe_load(printed.stdout)
        assert entries["model_metadata"]["preheat"] == {"store": f"file://{MOUNT}", "releases": names}
        [entry] = entries["weights"]
        assert {f"releases/{name}.json" for name in names} <= {*entry["allow_patterns"]}
    entries["model_metadata"]["preheat"]["release"] = None  # the config had one
    checked = run("check-config", str(config_file(tmp_path, object_store, entries)))
    assert checked.exit_code == 0 and "release  toy-sdxl/2" in checked.stdout, checked.output
    entry["allow_patterns"].remove("releases/toy-sdxl/2.json")
    assert run("check-config", str(config_file(tmp_path, object_store, entries))).exit_code == 1


LACKING: list[Callable[[dict[str, Any]], object]] = [
    lambda entry: entry["allow_patterns"].pop(),
    lambda entry: entry["allow_patterns"].pop(0),
    lambda entry: entry.update(ignore_patterns=["blobs/*"]),
    lambda entry: entry.update(allow_patterns=["releases/*"]),
]


@pytest.mark.usefixtures("machine")
def test_check_config_refuses_a_mount_that_lacks_files(
    in_bucket: WritableStore, object_store: ObjectStore, tmp_path: Path
) -> None:
    entries = yaml.safe_load(run("weights", RELEASE, "--store", in_bucket.url, "--mount", MOUNT).stdout)
    entries["weights"][0]["allow_patterns"].append("adapters/*")  # the release alone has none
    entries["weights"][0]["allow_patterns"] += [
        f"blobs/sha256/{blob.sha256}" for blob in in_bucket.read_adapter("bold").blobs
    ]
    assert run("check-config", str(config_file(tmp_path, object_store, entries))).exit_code == 0
    for change in LACKING:
        changed = copy.deepcopy(entries)
        change(changed["weights"][0])
        refused = run("check-config", str(config_file(tmp_path, object_store, changed)))
        assert refused.exit_code == 1
        text = " ".join(refused.output.split())
        assert f"The weights entry for {MOUNT} leaves out" in text and "`preheat weights`" in text


def test_refuses_what_cannot_be_mounted(toy_store: WritableStore, object_store: ObjectStore, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["weights", RELEASE, "--store", toy_store.url])
    assert "is a folder, and the platform mounts buckets" in str(refused.exception)
    source = {"source": "gs://bucket/models", "mount_location": MOUNT}
    entries = {"weights": [source], "model_metadata": {"preheat": {"store": f"file://{MOUNT}", "release": RELEASE}}}
    checked = run("check-config", str(config_file(tmp_path, object_store, entries)))
    assert checked.exit_code == 1 and "which this command cannot read" in " ".join(checked.output.split())
    config = config_file(tmp_path, object_store, entries)
    config.write_text(config.read_text().replace("- bold", ""))
    checked = run("check-config", str(config), "--store", toy_store.url)
    assert checked.exit_code == 0, checked.output
