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
from gateway.errors import GatewayConfigError
from gateway.history import History
from preheat.local_server.server import Server
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


def test_each_key_has_its_own_finished_requests(
    clients: list[httpx.Client], server: Server, release: str, tmp_path: Path
) -> None:
    one, two = clients
    image = file_of(np.full((64, 64, 3), 90, np.uint8))
    made = predict(one, **SMALL | {"num_inference_steps": 4}, image=image, num_images=2, masks=None)
    body = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 1, "seed": 9, "stream": True}
    assert one.post("/v1/images/generations", json=body).status_code == 200
    assert one.post("/v1/images/generations", json=body | {"size": "80x80"}).status_code == 400
    newest, oldest = entries(one)
    assert "masks" not in oldest["request"], "null is not kept"
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
    assert one.get("/metrics").status_code == 200
    assert one.get("/metrics", headers={"Authorization": ""}).status_code == 401


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_makes_its_file_private_and_refuses_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, old, text, folder = (tmp_path / name for name in ("empty", "old", "text", "folder"))
    empty.touch()
    History(old).close()
    text.write_text("not a database" * 50)
    folder.mkdir()
    for path in (empty, old, text):
        path.chmod(0o644)
    for path in (empty, old):
        History(path).close()
        assert mode(path) == 0o600
    for path in (text, folder):
        with pytest.raises((GatewayConfigError, NotWritable), match="cannot be"):
            History(path)
    assert mode(text) == 0o644
    old.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: old.stat().st_uid + 1)
    with pytest.raises(GatewayConfigError, match="another user owns it"):
        History(old)
    assert mode(old) == 0o666


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


# What happens to the path of the history, while the gateway runs.
LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("moved")),
    "replaced": lambda path: (path.unlink(), History(path).close()),
    "folder moved": lambda path: (path.parent.rename(path.parent.with_name("moved")), path.parent.mkdir()),
}
UNUSABLE: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("not a database" * 50),
    "folder": Path.mkdir,
    "no folder": lambda path: path.parent.rmdir(),
}


@pytest.mark.parametrize("case", LOSSES)
def test_makes_a_new_file_for_one_that_is_gone(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "history"
    path.parent.mkdir()
    with scripted_gateway(path) as gateway:
        generate(gateway, 1)
        assert seeds(gateway) == [1]
        LOSSES[case](path)
        generate(gateway, 2)
        assert seeds(gateway) == [2] and mode(path) == 0o600
        assert caplog.text.count("was deleted or replaced") == 1 and metric(gateway, "history_lost_total") == 0


@pytest.mark.parametrize("case", UNUSABLE)
def test_entries_wait_until_the_file_can_be_used(case: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history"
    path.parent.mkdir()
    with scripted_gateway(path) as gateway:
        path.unlink()
        UNUSABLE[case](path)
        generate(gateway, 1)
        assert seeds(gateway) is None
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        eventually(lambda: seeds(gateway) == [1], "the entry is written")
        assert gateway.post(NATIVE, image="abc").status_code == 200  # it has no digest
        assert metric(gateway, "history_lost_total") == 1


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


def test_every_metric_is_in_the_docs(tmp_path: Path) -> None:
    with scripted_gateway(tmp_path / "history") as gateway:
        text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    shown = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    rows = re.findall(
        r"^\| `(preheat_gateway_\w+)` \| (\w+) \|", (REPOSITORY / "docs/gateway.md").read_text(), re.MULTILINE
    )
    assert rows == shown and "127.0.0.1" not in text
    assert 'preheat_gateway_backend_up{backend="0"} 1.0' in text
