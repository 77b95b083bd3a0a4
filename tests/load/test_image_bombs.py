"""Small files with as many pixels as the limits allow, from one key, do not delay the requests of another key.

PREHEAT_BOMB_SECONDS is the duration of the attack (30 in `make test-load`).
"""

import asyncio
import base64
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from engine_builder.local_server.server import Server
from tests.conftest import READY_SECONDS
from tests.support.images import file_of
from tests.support.predictions import PREDICT_PATH, SMALL, TIMEOUT_SECONDS
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("PREHEAT_BOMB_SECONDS", "8"))
BOMBS = 6  # in flight at each moment, of each kind
MAX_GROWTH_MIB = (450, 300)  # of server and gateway; the server decodes a large image and a small one at once
MAX_HEALTH_SECONDS, MAX_DELAY_SECONDS = 0.5, 1.5
SIZE = (8000, 4000)
KEYS = {"bomber": "bomber-0123456789abcdef", "other": "other-0123456789abcdef"}


def file(mode: str, color: Any, **options: Any) -> bytes:
    written = io.BytesIO()
    Image.new(mode, SIZE, color).save(written, **{"format": "PNG", **options})
    return written.getvalue()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def native_bombs() -> list[dict[str, Any]]:
    """Requests of 96 megapixels, and requests with the longest prompts."""
    mask = {"image": text(file("L", 255))}
    images = [file("RGB", 0), file("RGBA", (1, 2, 3, 99)), file("RGB", 9, format="JPEG", progressive=True)]
    fields = {"resize": "stretch", "strength": 1.0}
    bombs = [SMALL | fields | {"image": text(image), "masks": [mask, mask]} for image in images]
    long = {"prompt": "\U0001f600" * 4000, "negative_prompt": "\U0001f600" * 3999}
    small = {"image": file_of(np.full((64, 64), 255, np.uint8))}
    return [*bombs, SMALL | {"image": small["image"], "masks": [small | long] * 8}]


def memory_mib(pid: int, entry: str) -> float:
    [kilobytes] = re.findall(rf"^{entry}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 2**10


@contextmanager
def gateway_process(server: str, keys: Path) -> Iterator[tuple[str, int]]:
    """Run a gateway in a process of its own. Yields its URL and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engine_builder.commands.main", "gateway", "--backend", server]
    with subprocess.Popen([*command, "--key-file", str(keys), "--port", str(port)], cwd=REPOSITORY) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: is_up(url), "the gateway serves", READY_SECONDS)
            yield url, process.pid
        finally:
            process.terminate()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.ConnectError:
        return False


def test_image_bombs_delay_no_other_key(server: Server, tmp_path: Path, show_progress: Callable[[str], None]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    seconds: dict[str, list[float]] = {}
    answers: Counter[str] = Counter()
    bombs, hole = native_bombs(), file("RGBA", (0, 0, 0, 0))
    image = {"image": file_of(np.zeros((64, 64, 3), np.uint8)), "strength": 1.0}
    small = {"text": SMALL, "image": SMALL | image}

    async def measure(name: str, call: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        began = time.monotonic()
        answer = await call()
        seconds.setdefault(name, []).append(time.monotonic() - began)
        return answer

    async def attack(client: httpx.AsyncClient, url: str, number: int, end: float) -> None:
        headers = {"Authorization": f"Bearer {KEYS['bomber']}"}
        while time.monotonic() < end:
            if number < BOMBS:
                answer = await client.post(url + PREDICT_PATH, json=bombs[number % len(bombs)], headers=headers)
            else:
                parts: Any = {"image": ("a.png", hole, "image/png")}
                fields = {"prompt": "a", "size": "64x64", "resize": "pad", "num_inference_steps": "2"}
                answer = await client.post(f"{url}/v1/images/edits", files=parts, data=fields, headers=headers)
            answers[f"bomb {answer.status_code}"] += 1

    async def serve_other(client: httpx.AsyncClient, url: str, end: float) -> None:
        headers = {"Authorization": f"Bearer {KEYS['other']}"}
        while time.monotonic() < end:
            for name, request in small.items():
                answer = await measure(name, lambda r=request: client.post(url + PREDICT_PATH, json=r, headers=headers))  # type: ignore[misc]
                answers[f"{name} {answer.status_code}"] += 1

    async def poll(client: httpx.AsyncClient, name: str, url: str, end: float) -> None:
        while time.monotonic() < end:
            answer = await measure(name, lambda: client.get(url))
            answers[f"{name} {answer.status_code}"] += 1
            await asyncio.sleep(0.05)

    async def run(url: str, attackers: int, duration: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_SECONDS, limits=limits) as client:
            end = time.monotonic() + duration
            await asyncio.gather(
                *(attack(client, url, number, end) for number in range(attackers)),
                serve_other(client, url, end),
                poll(client, "gateway", f"{url}/health", end),
                poll(client, "server", f"{server.url}/v1/models/model", end),
            )

    with gateway_process(server.url, keys) as (url, gateway_pid):
        asyncio.run(run(url, 0, SECONDS / 4))
        quiet, seconds = {name: max(times) for name, times in seconds.items()}, {}
        before = {pid: memory_mib(pid, "VmRSS") for pid in (server.pid, gateway_pid)}
        for pid in before:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        asyncio.run(run(url, 2 * BOMBS, SECONDS))
        growth = [round(memory_mib(pid, "VmHWM") - idle) for pid, idle in before.items()]
    slowest = {name: max(times) for name, times in seconds.items()}
    show_progress(f"{dict(answers)}, slowest {slowest} (without bombs {quiet}), {growth} MiB above idle")
    assert all(found < most for found, most in zip(growth, MAX_GROWTH_MIB, strict=True))
    assert max(slowest["gateway"], slowest["server"]) < MAX_HEALTH_SECONDS
    assert max(slowest["text"] - quiet["text"], slowest["image"] - quiet["image"]) < MAX_DELAY_SECONDS
    assert answers["bomb 200"] and answers.keys() <= {
        "bomb 200", "bomb 400", "bomb 429", "text 200", "image 200", "gateway 200", "server 200"
    }  # fmt: skip
