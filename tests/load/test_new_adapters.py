"""Clients of a server in front of a bucket name adapters, while adapters are added and removed.

The device has memory for a few of them. A picture must be the one of a server that had the adapter at its start.
PREHEAT_LOAD_SECONDS is the duration (120 in `make test-load`).
"""

import math
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_builder.adapters.add import add_adapter
from engine_builder.releases.mirror import copy_release
from engine_builder.stores.store import WritableStore
from model.api.adapter_catalog import MAX_EARLY_LISTS
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS, Opener
from tests.support.adapters import PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.images import Pixels, largest_difference
from tests.support.layouts import configured
from tests.support.object_store import ObjectStore
from tests.support.predictions import PREDICT_PATH, http_client, picture_of

LOAD_SECONDS = float(os.environ.get("PREHEAT_LOAD_SECONDS", "0"))
CLIENTS, ADAPTERS = (16, 50) if LOAD_SECONDS else (4, 6)
RELEASE = "toy-sdxl/1"
ON_DEVICE = 5 if LOAD_SECONDS else 3
MISSING = 1000 if LOAD_SECONDS else 100


@pytest.fixture(scope="module")
def files(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), module_shapes(toy_folder)
    names = [f"style-{number}" for number in range(ADAPTERS)]
    return {
        name: write_adapter(folder / f"{name}.safetensors", random_deltas(shapes, PACKABLE, 4, seed, 0.3), "peft")
        for seed, name in enumerate(names)
    }


@pytest.fixture
def bucket(compiled_toy_store: WritableStore, open_bucket: Opener) -> WritableStore:
    store = open_bucket("models")
    copy_release(compiled_toy_store, store, RELEASE)
    return store


def request(name: str) -> dict[str, Any]:
    loras = [{"name": name, "scale": 0.8}]
    seed = int(name.rpartition("-")[2])
    return {"prompt": "a red circle", "seed": seed, "num_inference_steps": 2, "output_format": "png", "loras": loras}


@contextmanager
def serving(
    layout: Layout, bucket: WritableStore, object_store: ObjectStore, folder: Path, **settings: Any
) -> Iterator[httpx.Client]:
    """Run a server of the bucket. Returns its client."""
    environment = object_store.environment | {
        "PREHEAT_STORE": bucket.url, "PREHEAT_RELEASE": RELEASE, "PREHEAT_CACHE_DIR": str(folder / "cache")
    }  # fmt: skip
    with Server(configured(layout, folder, **settings), environment=environment, log=folder / "server.log") as server:
        server.wait_ready(READY_SECONDS)
        with http_client(server) as client:
            yield client


def lookups(client: httpx.Client) -> float:
    """Return the requests that the server has sent to the store for lists and records of adapters."""
    lines = client.get("/metrics/").text.splitlines()
    counted = ("preheat_adapter_lists_total", 'preheat_adapter_lookups_total{outcome="read"')
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counted))


def test_adapters_change_under_load(
    layout: Layout,
    bucket: WritableStore,
    object_store: ObjectStore,
    files: Mapping[str, Path],
    tmp_path: Path,
    show_progress: Callable[[str], None],
) -> None:
    names = list(files)
    present, later = names[: ADAPTERS // 2], names[ADAPTERS // 2 :]
    for name in present:
        add_adapter(bucket, name, files[name])
    record = bucket.read_adapter(names[0])
    shapes = [shape for layer in record.layers.values() for shape in layer.part_shapes.values()]
    device_bytes = ON_DEVICE * 4 * sum(map(math.prod, shapes))
    generated: dict[str, list[Pixels]] = defaultdict(list)
    refused: list[str] = []
    waited: Counter[str] = Counter()
    lock = threading.Lock()
    (tmp_path / "dynamic").mkdir()
    limits = {"lora_turn_seconds": 0.2, "lora_fetches_per_minute": 200}
    dynamic = {"loras": ["style-*"], "lora_cache_bytes": device_bytes, "limits": limits}
    with serving(layout, bucket, object_store, tmp_path / "dynamic", **dynamic) as client:
        end = time.monotonic() + max(LOAD_SECONDS, 8)

        def ask(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                with lock:
                    name = rng.choice(present)
                answer = client.post(PREDICT_PATH, json=request(name))
                with lock:
                    if answer.status_code == 200:
                        generated[name].append(picture_of(answer))
                    else:
                        refused.append(f"{name}: {answer.text}")

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask, number) for number in range(CLIENTS)]
            for name in later:
                add_adapter(bucket, name, files[name])
                while (answer := client.post(PREDICT_PATH, json=request(name))).status_code == 400:
                    waited[name] += 1  # more names are new in a minute than the list is read again for
                    time.sleep(0.5)
                generated[name].append(picture_of(answer))
                with lock:
                    present.append(name)
            before = lookups(client)
            for number in range(MISSING):
                assert client.post(PREDICT_PATH, json=request(f"style-{ADAPTERS + number}")).status_code == 400
            assert lookups(client) - before <= 20
            for one in clients:
                one.result()
        assert refused == [] and generated.keys() == files.keys()
        assert not waited.keys() & set(later[:MAX_EARLY_LISTS])
        show_progress(
            f"{sum(map(len, generated.values()))} pictures of {len(generated)} adapters; waits: {dict(waited)}"
        )

        bucket.delete_adapter(names[0])
        deadline = time.monotonic() + 60
        while client.post(PREDICT_PATH, json=request(names[0])).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        picture_of(client.post(PREDICT_PATH, json=request(names[1])))

    (tmp_path / "fixed").mkdir()
    with serving(layout, bucket, object_store, tmp_path / "fixed", loras=names[1:]) as client:
        for name in names[1:]:
            expected = picture_of(client.post(PREDICT_PATH, json=request(name)))
            assert max(largest_difference(one, expected) for one in generated[name]) <= 1
    assert largest_difference(generated[names[1]][0], generated[names[2]][0]) > 1
