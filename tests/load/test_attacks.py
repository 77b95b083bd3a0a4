"""Attacks on a real `preheat gateway`: health answers, memory is bounded, the requests of others succeed.

The attackers are clients with a key, backends, and a program that locks the history. PREHEAT_ATTACK_SECONDS is the
duration of each attack (15 in `make test-load`). Without it the tests are skipped.
"""

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from preheat.local_server.server import Server
from tests.support import attacks, backend_attacks
from tests.support.images import file_of
from tests.support.load import HealthProbe, gateway_process, memory_mib, send_repeatedly
from tests.support.predictions import PREDICT_PATH
from tests.support.scripted_gateway import ACCEPTED, DESCRIPTION, DONE, IMAGE, lines
from tests.support.scripted_server import ScriptedServer
from tests.support.sqlite_lock import locked

SECONDS = float(os.environ.get("PREHEAT_ATTACK_SECONDS", "0"))
KEYS = {"attacker": "sk-attacker-0123456789", "other": "sk-other-0123456789abc"}
VICTIMS = 16  # requests at once that the attacking backend answers
MAX_HEALTH_SECONDS = 0.5
MAX_REQUEST_SECONDS = 10
MAX_MEMORY_MIB = 300  # above the idle gateway
MAX_SERVER_MIB = 450  # above the idle server, which decodes a large image and a small one at once
RECOVERY_SECONDS = 5  # after the attack
FIELDS: dict[str, Any] = {"prompt": "x", "num_inference_steps": 2}

pytestmark = pytest.mark.skipif(
    not SECONDS, reason="takes minutes: set PREHEAT_ATTACK_SECONDS=15, or run `make test-load`"
)


@contextmanager
def good_backend() -> Iterator[ScriptedServer]:
    def script(_: int, request: dict[str, Any]) -> Any:
        return lines(DESCRIPTION) if request.get("describe") else lines(ACCEPTED, IMAGE, DONE)

    with ScriptedServer(script) as backend:
        yield backend


def requests_of_others(url: str, model: str) -> dict[str, Callable[[], str]]:
    """Return requests with and without an image of about 2 MiB, by a name."""
    image = file_of(np.random.default_rng(0).integers(0, 256, (896, 832, 3), np.uint8))
    options: Any = {"timeout": 60, "trust_env": False, "headers": {"Authorization": f"Bearer {KEYS['other']}"}}
    fitted = FIELDS | {"resize": "crop", "strength": 1.0}
    parts: Any = {"image": ("a.png", base64.b64decode(image), "image/png")}

    def post(path: str, **content: Any) -> str:
        answer = httpx.post(url + path, **options, **content)
        return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"

    native = fitted | {"image": image, "width": 64, "height": 64}
    return {
        "text": lambda: post("/v1/images/generations", json=FIELDS | {"size": "64x64", "model": model}),
        "image": lambda: post(f"{PREDICT_PATH}?model={model}", json=native),
        "form": lambda: post("/v1/images/edits", files=parts, data=fitted | {"size": "64x64", "model": model}),
    }


@contextmanager
def others_are_served(
    url: str, model: str, pids: dict[int, int], show_progress: Callable[[str], None]
) -> Iterator[None]:
    """Begin an attack in the block. Check others, and the growth in MiB of the processes `pids`, until it is over."""
    others = requests_of_others(url, model)
    assert [send() for send in others.values()] == ["", "", ""]
    idle = {pid: memory_mib(pid, "VmRSS") for pid in pids}
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    with HealthProbe(f"{url}/health") as probe:
        yield
        durations = send_repeatedly(others, SECONDS + RECOVERY_SECONDS)
    slowest = {name: round(max(found), 2) for name, found in durations.items()}
    growth = {pid: round(memory_mib(pid, "VmHWM") - before) for pid, before in idle.items()}
    show_progress(f"health at most {probe.seconds[-1]:.2f} s; requests of others {slowest}; growth {growth} MiB")
    assert probe.failed == 0 and probe.seconds[-1] <= MAX_HEALTH_SECONDS
    assert max(slowest.values()) <= MAX_REQUEST_SECONDS
    assert all(growth[pid] <= most for pid, most in pids.items())


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_client_harms_no_other(
    attack: str, server: Server, tmp_path: Path, show_progress: Callable[[str], None]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with good_backend() as backend:
        is_real = attack == "image bombs"
        backend_url = server.url if is_real else backend.url
        with gateway_process(tmp_path, "--key-file", str(keys), "--backend", backend_url) as (url, pid):
            headers = {"Authorization": f"Bearer {KEYS['other']}"}
            [model] = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()["data"]
            pids = {pid: MAX_MEMORY_MIB} | ({server.pid: MAX_SERVER_MIB} if is_real else {})
            command = [sys.executable, "-m", "tests.support.attacks", attack, url, KEYS["attacker"], str(SECONDS)]
            with ExitStack() as stack, others_are_served(url, model["id"], pids, show_progress):
                stack.enter_context(subprocess.Popen(command))  # waits for its end, also after a failed check


@pytest.mark.parametrize("attack", [*backend_attacks.ATTACKS, "locked history"])
def test_backend_harms_no_other(attack: str, tmp_path: Path, show_progress: Callable[[str], None]) -> None:
    name = attack if attack in backend_attacks.ATTACKS else "endless health"
    command = [sys.executable, "-m", "tests.support.backend_attacks", name, str(VICTIMS), str(SECONDS)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with good_backend() as good, subprocess.Popen(command, **pipes) as attacker, ExitStack() as stack:
        assert attacker.stdin is not None and attacker.stdout is not None
        backends = ["--backend", good.url, "--backend", f"http://127.0.0.1:{int(attacker.stdout.readline())}"]
        history = tmp_path / "history"
        url, pid = stack.enter_context(gateway_process(tmp_path, *backends, "--history", str(history)))
        with others_are_served(url, "toy/1", {pid: MAX_MEMORY_MIB}, show_progress):
            if attack == "locked history":
                stack.enter_context(locked(history, "DELETE FROM history"))
            attacker.stdin.write(f"{url}\n")  # it sends the requests that it attacks
            attacker.stdin.flush()
        with suppress(ProcessLookupError):
            attacker.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()
