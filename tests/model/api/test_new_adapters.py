"""A server whose `loras` is a pattern: adapters are added, removed and damaged while it generates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_builder.adapters.add import add_adapter
from engine_builder.building.build_plan import BuildPlan
from engine_builder.stores.store import WritableStore
from model.api.adapter_catalog import FAILURE_SECONDS, LIST_SECONDS, AdapterCatalog
from model.cold_start import ColdStart
from model.deployment import ServedAdapters
from model.loading.target import detect_targets
from model.settings import Limits
from model.store.keys import blob_key
from tests.engine_builder.helpers import folder_of
from tests.support.adapter_model import put_adapter
from tests.support.adapters import LINEARS, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed, load_release
from tests.support.images import Pixels, largest_difference
from tests.support.in_process import serve_in_process
from tests.support.predictions import PREDICT_PATH, picture_of
from tests.support.uncompiled import publish_uncompiled

REQUEST = {"prompt": "a red circle", "seed": 3, "num_inference_steps": 3, "output_format": "png"}
TOLERANCE = 1  # of 255


@dataclass
class Served:
    """A server, its store, and the clock of its catalog."""

    client: httpx.Client
    store: WritableStore
    now: float = 0.0

    def ask(self, *names: str, **fields: Any) -> httpx.Response:
        loras = [{"name": name, "scale": 1.0} for name in names]
        return self.client.post(PREDICT_PATH, json=REQUEST | {"loras": loras} | fields)

    def picture(self, *names: str) -> Pixels:
        return picture_of(self.ask(*names))


@pytest.fixture(scope="module")
def files(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), module_shapes(toy_folder)
    return {
        name: write_adapter(
            folder / f"{name}.safetensors", random_deltas(shapes, LINEARS, rank, rank, spread=0.3), "peft"
        )
        for name, rank in (("one", 1), ("two", 2), ("three", 3))
    }


@pytest.fixture(scope="module")
def served(toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = publish_uncompiled(replace(toy_plan, model="toy"), tmp_path_factory.mktemp("store") / "store")
    loaded = load_release(store, deployed(adapters=ServedAdapters(("*",))), detect_targets(), ColdStart())
    served = Served(None, store)  # type: ignore[arg-type]
    catalog = AdapterCatalog(store, ("*",), (), Limits(), lambda: served.now)
    with serve_in_process(loaded, catalog=catalog) as client:
        served.client = client
        yield served


@pytest.fixture
def alone(served: Served) -> Any:
    """Returns the picture of a server that had these adapters at its start."""

    def picture(*names: str) -> Pixels:
        deployment = deployed(adapters=ServedAdapters(names))
        with serve_in_process(load_release(served.store, deployment, detect_targets(), ColdStart())) as client:
            return Served(client, served.store).picture(*names)

    return picture


def described(served: Served) -> dict[str, Any]:
    adapters = served.client.post(PREDICT_PATH, json={"prompt": "x", "describe": True}).json()["adapters"]
    return {adapter["name"]: adapter for adapter in adapters}


def test_adds_and_removes_adapters(served: Served, files: Mapping[str, Path], alone: Any) -> None:
    plain = served.picture()
    assert described(served) == {}
    add_adapter(served.store, "one", files["one"])
    served.now += LIST_SECONDS
    assert described(served)["one"] == {"name": "one", "bytes": None, "used": None, "place": "store"}
    first = served.picture("one")
    assert largest_difference(first, alone("one")) <= TOLERANCE < largest_difference(first, plain)
    record = served.store.read_adapter("one")
    entry = described(served)["one"]
    assert entry["bytes"] == record.total_bytes and entry["place"] == "device" and entry["used"] > 0

    add_adapter(served.store, "two", files["two"])
    served.now += LIST_SECONDS
    assert largest_difference(served.picture("one", "two"), alone("one", "two")) <= TOLERANCE
    assert largest_difference(served.picture(), plain) <= TOLERANCE

    served.store.delete_adapter("one")
    served.now += LIST_SECONDS
    answer = served.ask("one")
    assert answer.status_code == 400 and answer.json()["field"] == "loras"
    assert '"one" is not offered now. Expected one of two.' in answer.json()["error"]
    assert served.ask("two").status_code == 200


def test_an_adapter_of_another_model_is_refused(served: Served) -> None:
    put_adapter(served.store, "other", 1.0)  # type: ignore[arg-type]
    served.now += LIST_SECONDS
    for _ in range(2):
        answer = served.ask("other")
        assert answer.status_code == 400 and "Adapter other does not fit this model" in answer.json()["error"]
    assert served.ask().status_code == 200


def test_damaged_tensors_fail_their_own_request(served: Served, files: Mapping[str, Path], alone: Any) -> None:
    record, _, _ = add_adapter(served.store, "three", files["three"])
    path = folder_of(served.store) / blob_key(record.blobs[0].sha256)
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    served.now += LIST_SECONDS
    answer = served.ask("three")
    assert answer.status_code == 500 and answer.json()["kind"] == "adapter"
    assert "damaged" in answer.json()["error"]
    assert served.ask().status_code == 200
    path.write_bytes(intact)
    served.now += FAILURE_SECONDS
    assert largest_difference(served.picture("three"), alone("three")) <= TOLERANCE
