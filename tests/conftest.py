"""Fixtures that several test files share: stores (a folder, an object store), a loaded release, a server, a toy SDXL.

Engines are kept in `.preheat` between runs and found by their keys, so only the first run of a clean clone compiles
(some five minutes on two cores). Slow fixtures print their progress.

The object store is Ceph's gateway, started once a run. Each test has its own S3 bucket. Without Ceph the tests with an
object store are skipped, or fail if PREHEAT_REQUIRE_OBJECT_STORE is set.
"""

import fcntl
import gc
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile_jobs import default_processes
from engine_builder.backends.built import ReportProgress
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.releases.publish import publish
from engine_builder.stores.s3 import WritableS3Store
from engine_builder.stores.store import WritableStore, open_writable_store
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.target import Target, detect_targets
from model.store.options import StoreOptions
from model.store.precision import FP32
from preheat.local_server.server import Layout, Server, build_context, lay_out
from tests.support import controlnets, toy_sdxl
from tests.support import object_store as ceph
from tests.support.deployments import deployed, load_release
from tests.support.faulty_proxy import FaultyProxy
from tests.support.object_store import ObjectStore
from tests.support.optional_tools import skip_without
from tests.support.repository import MODEL_FOLDER, REPOSITORY
from tests.support.selection import (  # noqa: F401  hooks of pytest
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_terminal_summary,
)
from tests.support.uncompiled import builds_without_compiling, open_uncompiled_engines, publish_uncompiled

DEMO_STORE = REPOSITORY / ".preheat" / "store"
KEPT_STORE = REPOSITORY / ".preheat" / "test-store"
CONTROLNETS: dict[str, controlnets.Kind] = {"edges": "full", "depth": "full", "small": "small", "union": "union"}
KEPT_TOYS = REPOSITORY / ".preheat" / "toy-engines"
# A test fails if a server takes longer to become ready. Enough for any machine.
READY_SECONDS = 180
Opener = Callable[..., WritableS3Store]

open_uncompiled_engines()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs like this. Programs that the tests start would ignore interrupts, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection. With them a full collection takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make torch's random numbers independent of earlier tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def show_progress(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that prints a line past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def print_line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(text, flush=True)

    return print_line


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes, so that only one of two concurrent test runs compiles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_build_report(show_progress: Callable[[str], None], store_name: str) -> ReportProgress:
    """Return a function that prints the progress of a build into the store of this name."""

    def report(component: str, activity: str, finished_steps: int, steps: int) -> None:
        show_progress(f"{store_name} {finished_steps}/{steps}: {component}: {activity}")

    return report


@pytest.fixture(scope="session")
def target() -> Target:
    """The CPU target that this machine builds for. Tests that use this fixture are skipped on a machine with a GPU."""
    if all(detected.device != "cpu" for detected in detect_targets()):
        pytest.skip("The fixtures build engines for the CPU, and this machine uses its GPU: set CUDA_VISIBLE_DEVICES=")
    return compiler.build_target()


@pytest.fixture(scope="session")
def published(target: Target, show_progress: Callable[[str], None]) -> tuple[WritableStore, str]:
    """A local store with a release of data/tiny-sdxl and its refiner, and the name of this release.

    The store is kept between runs, and may have releases of older versions of data/tiny-sdxl. It begins as a copy of
    the store of `make demo`, whose engines are those of the base.
    """
    store = open_writable_store(KEPT_STORE)
    plan = BuildPlan("tiny-sdxl", Checkpoint(MODEL_FOLDER), Checkpoint(MODEL_FOLDER / "refiner"), target, FP32)
    report = make_build_report(show_progress, "test store")
    with file_lock(KEPT_STORE.with_suffix(".lock")):
        if DEMO_STORE.is_dir() and not KEPT_STORE.is_dir():
            shutil.copytree(DEMO_STORE, KEPT_STORE, ignore=shutil.ignore_patterns("drafts"))
        build(plan, store, report, processes=default_processes(target))
        manifest, _ = publish(store, "tiny-sdxl")
    return store, manifest.name


@pytest.fixture(scope="session")
def store(published: tuple[WritableStore, str]) -> WritableStore:
    """A local store that has `release`."""
    return published[0]


@pytest.fixture(scope="session")
def release(published: tuple[WritableStore, str]) -> str:
    """The name of the release of data/tiny-sdxl with its refiner in `store`."""
    return published[1]


@pytest.fixture(scope="session")
def loaded(store: WritableStore, release: str) -> Loaded:
    """`release`, loaded in this process on the CPU."""
    return load_release(store, deployed(release), detect_targets(), ColdStart())


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]) -> Layout:
    """The files of the server image of this repository, laid out as the image's Dockerfile does."""
    show_progress("laying out the server image")
    folder = tmp_path_factory.mktemp("image")
    config = REPOSITORY / "truss" / "configs" / "cpu-demo.yaml"
    return lay_out(build_context(REPOSITORY, config, folder / "build"), folder / "root")


@pytest.fixture(scope="session")
def server(
    layout: Layout,
    store: WritableStore,
    release: str,
    tmp_path_factory: pytest.TempPathFactory,
    show_progress: Callable[[str], None],
) -> Iterator[Server]:
    """A real Truss server process that serves `release`."""
    show_progress("starting a server")
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(layout, environment={"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}, log=log) as running:
        running.wait_ready(READY_SECONDS)
        yield running


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of the toy: the smallest SDXL, which compiles in under a minute and generates noise."""
    return toy_sdxl.write(tmp_path_factory.mktemp("toy") / "toy-sdxl", MODEL_FOLDER / "tokenizer")


@pytest.fixture(scope="session")
def toy_plan(toy_folder: Path, target: Target) -> BuildPlan:
    """The build plan of the toy, without a refiner."""
    return BuildPlan("toy-sdxl", Checkpoint(toy_folder), None, target, FP32)


@pytest.fixture(scope="session")
def toy_store(toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A local store with the toy, published as toy-sdxl/1, without compiled code: see `tests.support.uncompiled`.

    Tests that write copy the store first.
    """
    return publish_uncompiled(toy_plan, tmp_path_factory.mktemp("toy-store") / "store")


@pytest.fixture(scope="module")
def uncompiled_builds() -> Iterator[None]:
    """Builds of a test module leave their networks uncompiled, see `tests.support.uncompiled`."""
    with builds_without_compiling():
        yield


@pytest.fixture(scope="session")
def compiled_toy_store(
    toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]
) -> WritableStore:
    """As `toy_store`, with compiled engines, for tests of engines and of other processes."""
    folder = tmp_path_factory.mktemp("compiled-toy") / "store"
    report = make_build_report(show_progress, "toy store")
    with file_lock(KEPT_TOYS.with_suffix(".lock")):
        build(toy_plan, open_writable_store(KEPT_TOYS), report, processes=default_processes(toy_plan.target))
        # The kept drafts may be those of other toys.
        shutil.copytree(KEPT_TOYS, folder, ignore=shutil.ignore_patterns("drafts"))
    store = open_writable_store(folder)
    build(toy_plan, store)  # writes the draft, and finds the compiled engines by their keys
    publish(store, "toy-sdxl")
    return store


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A running object store with the S3 protocol."""
    if missing := ceph.missing_programs():
        skip_without("OBJECT_STORE", f"no object store ({', '.join(missing)} not installed): {ceph.INSTALL}")
    with ObjectStore(tmp_path_factory.mktemp("ceph")) as running:
        yield running


@pytest.fixture(scope="session")
def s3(object_store: ObjectStore) -> Iterator[Any]:
    """A boto3 client of the object store, for tests that inspect or damage stored objects."""
    client = boto3.client(
        "s3",
        endpoint_url=object_store.url,
        aws_access_key_id=ceph.ACCESS_KEY,
        aws_secret_access_key=ceph.SECRET_KEY,
        region_name="us-east-1",
    )
    yield client
    client.close()


@pytest.fixture
def bucket(s3: Any) -> str:
    """The name of a new, empty S3 bucket."""
    name = f"preheat-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[FaultyProxy]:
    """A proxy in front of the object store, which injects faults."""
    with FaultyProxy(object_store.url) as running:
        yield running


@pytest.fixture
def open_bucket(object_store: ObjectStore, bucket: str, tmp_path: Path) -> Iterator[Opener]:
    """Return a function that opens an S3 bucket, by default `bucket`, as a store with the given StoreOptions.

    All opened stores are closed at the end of the test.
    """
    opened: list[WritableS3Store] = []

    def open_store(prefix: str = "", name: str = bucket, **options: Any) -> WritableS3Store:
        defaults = {
            "cache_dir": tmp_path / "cache",
            "endpoint": object_store.url,
            "access_key_id": ceph.ACCESS_KEY,
            "secret_access_key": ceph.SECRET_KEY,
            "timeout": 20.0,
        }
        opened.append(WritableS3Store(f"s3://{name}/{prefix}", StoreOptions(**defaults | options)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture(scope="session")
def controlnet_folders(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A ControlNet of each kind for the toy, and two full ones."""
    root = tmp_path_factory.mktemp("controlnets")
    return {
        name: controlnets.write(root / name, toy_folder, kind, seed)
        for seed, (name, kind) in enumerate(CONTROLNETS.items(), start=1)
    }


@pytest.fixture(scope="session")
def control_store(
    toy_folder: Path,
    controlnet_folders: dict[str, Path],
    target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> WritableStore:
    """A store with the toy and its ControlNets, published as control/1, without compiled code."""
    base = Checkpoint(toy_folder, controlnets=tuple(controlnet_folders.items()))
    plan = BuildPlan("control", base, None, target, FP32)
    return publish_uncompiled(plan, tmp_path_factory.mktemp("control-store") / "store")


@pytest.fixture(scope="session")
def compiled_control_store(
    toy_folder: Path,
    controlnet_folders: dict[str, Path],
    target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> WritableStore:
    """As `control_store`, with compiled engines, for tests marked `full` with processes of their own."""
    base = Checkpoint(toy_folder, controlnets=tuple(controlnet_folders.items()))
    store = open_writable_store(tmp_path_factory.mktemp("compiled-control") / "store")
    build(BuildPlan("control", base, None, target, FP32), store, processes=default_processes(target))
    publish(store, "control")
    return store
