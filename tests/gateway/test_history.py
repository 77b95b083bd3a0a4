"""The history of a gateway."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine_builder.files import NotWritable
from engine_builder.gateway.errors import GatewayConfigError
from engine_builder.gateway.history import History
from engine_builder.local_server.server import Server
from tests.support.gateway import running_gateway
from tests.support.images import file_of
from tests.support.predictions import SMALL, TIMEOUT_SECONDS, http_client, predict
from tests.support.repository import REPOSITORY
from tests.support.scripted_gateway import ACCEPTED, DONE, IMAGE, NATIVE, ScriptedGateway, lines, scripted_gateway
from tests.support.sqlite_lock import locked
from tests.support.waiting import eventually

KEYS = {"one": "sk-0123456789abcdef", "two": "sk-fedcba9876543210"}


@pytest.fixture
def clients(server: Server, tmp_path: Path) -> Iterator[list[httpx.Client]]:
    """A client of each key of a gateway with a history."""
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with running_gateway([server.url], tmp_path / "keys", tmp_path / "history.sqlite") as url:
        options: Any = {"base_url": url, "trust_env": False, "timeout": TIMEOUT_SECONDS}
        clients = [httpx.Client(headers={"Authorization": f"Bearer {key}"}, **options) for key in KEYS.values()]
        yield clients
        for client in clients:
            client.close()


def entries(client: httpx.Client, query: str = "") -> list[dict[str, Any]]:
    answer = client.get(f"/v1/history{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


def test_a_field_that_is_null_is_not_kept(clients: list[httpx.Client]) -> None:
    predict(clients[0], **SMALL, image=None, num_images=None)
    [entry] = entries(clients[0])
    assert entry["request"] == SMALL


def test_each_key_has_its_own_finished_requests(
    clients: list[httpx.Client], server: Server, release: str, tmp_path: Path
) -> None:
    one, two = clients
    image = file_of(np.full((64, 64, 3), 90, np.uint8))
    made = predict(one, **SMALL | {"num_inference_steps": 4}, image=image, num_images=2)
    body = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 1, "seed": 9, "stream": True}
    assert one.post("/v1/images/generations", json=body).status_code == 200
    assert one.post("/v1/images/generations", json=body | {"size": "80x80"}).status_code == 400
    newest, oldest = entries(one)
    assert newest["request"]["prompt"] == "a red circle" and newest["seeds"] == [9]
    assert oldest["seeds"] == [image["seed"] for image in made["images"]]
    assert oldest["request"]["image"].startswith("sha256:") and oldest["engine"]["release"] == release
    assert entries(one, "?limit=1") == [newest] and entries(one, f"?before={newest['id']}") == [oldest]
    assert entries(two) == []
    with http_client(server) as direct:
        again = predict(direct, **newest["request"] | {"seed": newest["seeds"][0]})
    assert again["images"][0]["seed"] == 9
    assert two.delete("/v1/history").json() == {"deleted": 0}
    assert one.delete("/v1/history").json() == {"deleted": 2} and entries(one) == []
    assert image.encode() not in (tmp_path / "history.sqlite").read_bytes()
    assert stat.S_IMODE((tmp_path / "history.sqlite").stat().st_mode) == 0o600
    assert one.get("/v1/history?limit=0").json()["error"]["param"] == "limit"


def test_no_history_by_default(server: Server) -> None:
    with running_gateway([server.url]) as url:
        answer = httpx.get(f"{url}/v1/history", trust_env=False)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "history_off"


def test_keeps_the_newest_entries_also_after_a_restart(tmp_path: Path) -> None:
    history = History(tmp_path / "history", max_entries=3)
    for number in range(5):
        history.add("a", {"number": number})
    history.close()
    history = History(tmp_path / "history", max_entries=3)
    assert [entry["number"] for entry in history.list("a", 10).result()] == [4, 3, 2]
    history.close()


@pytest.mark.parametrize("content", [None, b"not a database, but a text of some length" * 50], ids=["folder", "text"])
def test_refuses_a_file_that_is_no_history(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "history"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises((GatewayConfigError, NotWritable), match="cannot be"):
        History(path)


@pytest.mark.parametrize("kind", ["empty", "history"])
def test_makes_an_existing_file_private(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    if kind == "history":
        History(path).close()
    else:
        path.touch()
    path.chmod(0o644)
    History(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keeps_the_permissions_of_a_file_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database" * 50)
    path.chmod(0o644)
    with pytest.raises(GatewayConfigError):
        History(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_refuses_a_file_of_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    History(path).close()
    path.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(GatewayConfigError, match="another user owns it"):
        History(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


# The locks of a program that writes, and of one that makes a copy.
LOCKS = {"exclusive": "DELETE FROM history WHERE id < 0", "shared": "SELECT * FROM history"}


def metric(gateway: ScriptedGateway, name: str) -> float:
    text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    return float(re.findall(rf"^preheat_gateway_{name} (.+)$", text, re.MULTILINE)[0])


def seeds(gateway: ScriptedGateway) -> list[int] | None:
    """The seeds of the entries, oldest first; None: the history cannot be used."""
    answer = httpx.get(f"{gateway.url}/v1/history", trust_env=False, timeout=60)
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] == "history_unavailable" and answer.headers["Retry-After"] == "1"
        return None
    return [seed for entry in reversed(answer.json()["data"]) for seed in entry["seeds"]]


def generate(gateway: ScriptedGateway, seed: int) -> None:
    gateway.answer = lines(ACCEPTED, IMAGE | {"seed": seed}, DONE)
    assert gateway.post(NATIVE).json()["data"] == IMAGE["data"]


@pytest.mark.parametrize("statement", LOCKS.values(), ids=LOCKS)
def test_entries_wait_while_the_file_is_locked(
    statement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history"
    with scripted_gateway(path) as gateway:
        generate(gateway, 1)
        assert seeds(gateway) == [1]
        with locked(path, statement):
            for seed in (2, 3):
                generate(gateway, seed)  # finishes although the lock lasts
            assert seeds(gateway) is None and metric(gateway, "history_waiting") == 2
            assert httpx.delete(f"{gateway.url}/v1/history", trust_env=False).status_code == 503
            eventually(lambda: "cannot be used: database is locked" in caplog.text, "the lock is logged")
        eventually(lambda: seeds(gateway) == [1, 2, 3], "the entries are written")
        assert metric(gateway, "history_lost_total") == 0
        assert caplog.text.count("cannot be used") == caplog.text.count("can be used again") == 1


def delete(path: Path) -> None:
    path.unlink()


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace(path: Path) -> None:
    path.unlink()
    History(path).close()


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.mkdir()


@pytest.mark.parametrize("lose", [delete, move, replace, move_folder], ids=lambda function: function.__name__)
def test_makes_a_new_file_for_one_that_is_gone(
    lose: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "history"
    path.parent.mkdir()
    with scripted_gateway(path) as gateway:
        generate(gateway, 1)
        assert seeds(gateway) == [1]
        lose(path)
        generate(gateway, 2)
        assert seeds(gateway) == [2] and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert caplog.text.count("was deleted or replaced") == 1 and metric(gateway, "history_lost_total") == 0


def put_text(path: Path) -> None:
    path.write_text("not a database" * 50)


def put_folder(path: Path) -> None:
    path.mkdir()


def remove_parent(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("put", [put_text, put_folder, remove_parent], ids=lambda function: function.__name__)
def test_entries_wait_until_the_file_can_be_used(put: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history"
    path.parent.mkdir()
    with scripted_gateway(path) as gateway:
        path.unlink()
        put(path)
        generate(gateway, 1)
        assert seeds(gateway) is None
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        eventually(lambda: seeds(gateway) == [1], "the entry is written")


def test_starts_while_the_file_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "history"
    History(path).close()
    with ExitStack() as stack:
        with locked(path, "DELETE FROM history"):
            gateway = stack.enter_context(scripted_gateway(path))
            generate(gateway, 1)
            assert seeds(gateway) is None
        eventually(lambda: seeds(gateway) == [1], "the entry is written")


def test_counts_what_exceeds_the_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history"
    history = History(path)
    with locked(path, "DELETE FROM history"):
        for _ in range(20):
            history.add("a", {"prompt": "a" * 2**20})
        assert history.waiting == 15 and history.lost == 5
        assert caplog.text.count("are being lost") == 1
    eventually(lambda: history.waiting == 0, "the entries are written")
    assert len(history.list("a", 100).result()) == 15
    eventually(lambda: "Entries lost meanwhile: 5" in caplog.text, "the loss is logged")
    history.close()


def test_images_that_are_not_base64_delay_no_answer(tmp_path: Path) -> None:
    with scripted_gateway(tmp_path / "history") as gateway:
        assert gateway.post(NATIVE, image="abc").status_code == 200
        assert metric(gateway, "history_lost_total") == 1


def test_every_metric_is_in_the_docs(tmp_path: Path) -> None:
    with scripted_gateway(tmp_path / "history") as gateway:
        text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    shown = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    rows = re.findall(
        r"^\| `(preheat_gateway_\w+)` \| (\w+) \|", (REPOSITORY / "docs/gateway.md").read_text(), re.MULTILINE
    )
    assert rows == shown and "127.0.0.1" not in text
    assert 'preheat_gateway_backend_up{backend="0"} 1.0' in text


def test_metrics_need_a_key_if_requests_do(clients: list[httpx.Client]) -> None:
    assert clients[0].get("/metrics").status_code == 200
    assert clients[0].get("/metrics", headers={"Authorization": ""}).status_code == 401
