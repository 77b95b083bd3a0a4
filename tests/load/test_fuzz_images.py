"""Image files of untrusted clients: each gives an image or a refusal that names the field, in bounded memory.

PREHEAT_FUZZ_IMAGES is their number: 220 by default, 2,000 in `make test-load`. A tenth goes through a real server too.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx
import pytest

from preheat.local_server.server import Server
from tests.support import odd_images
from tests.support.load import memory_mib
from tests.support.predictions import PREDICT_PATH, http_client
from tests.support.repository import REPOSITORY

CASES = int(os.environ.get("PREHEAT_FUZZ_IMAGES", "220"))
# A request holds its text (43 MiB for a file of 32 MiB), the file, its pixel data, and then 31 megapixels: decoded in
# 4 bytes for each pixel (four times while Pillow decodes WebP), and channels before and after they are blended.
MAX_GROWTH_MIB = 700


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the process reported that resolved all cases."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.odd_images"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for case in odd_images.cases(CASES):
            process.stdin.write(odd_images.as_line(case))
        process.stdin.close()
        output = process.stdout.read()
    assert process.returncode == 0, "the process ended by itself"
    ended: dict[str, Any] = json.loads(output)
    assert sum(ended["kinds"].values()) == CASES
    return ended


def test_every_image_is_decoded_or_refused(report: dict[str, Any]) -> None:
    problems = report["problems"]
    assert not problems, f"{len(problems)} of {CASES}\n" + "\n".join(problems[:40])


def test_every_kind_is_among_them(report: dict[str, Any]) -> None:
    named = {"truncated", "large header", "exif", "mode RGBA PNG", "mode CMYK JPEG", "mode I;16", "animated",
             "mask: other size", "bomb", "31 megapixels", "more than 32 MiB"}  # fmt: skip
    assert named <= report["kinds"].keys()


def test_memory_is_bounded(report: dict[str, Any]) -> None:
    growth = report["peak_mib"] - report["before_mib"]
    print(f"\n{CASES} images: from {report['before_mib']:.0f} to {report['peak_mib']:.0f} MiB")
    assert 50 < growth < MAX_GROWTH_MIB


# -- the real server --------------------------------------------------------------------------------------------------

MAX_SERVER_GROWTH_MIB = 1000  # one request at a time; its body and the text in it are there as well


def send(client: httpx.Client, case: odd_images.Case, number: int) -> httpx.Response:
    """Send a case as a request of two steps. Every seventh is sent in chunks."""
    body = json.dumps({"prompt": "a cat", "num_inference_steps": 2, "strength": 0.9} | case.fields).encode()
    content = (body[start : start + 2**16] for start in range(0, len(body), 2**16)) if number % 7 == 0 else body
    return client.post(PREDICT_PATH, content=content, headers={"Content-Type": "application/json"})


def test_server_answers_every_image(server: Server) -> None:
    with http_client(server) as client:
        check_server(server, client)


def check_server(server: Server, client: httpx.Client) -> None:
    statuses, problems = Counter[int](), []
    before = memory_mib(server.pid, "VmHWM")
    large = [odd_images.Case("65 MiB", {"image": "A" * (65 * 2**20)}, "refused")] * 2
    for number, case in enumerate([*odd_images.cases(CASES // 10, seed=1), *large]):
        answer = send(client, case, number)
        status = answer.status_code
        statuses[status] += 1
        accepted = {"accepted": {200}, "refused": {400, 413}, "either": {200, 400}}[case.outcome]
        if status not in accepted or (status == 413) is not (case.kind == "65 MiB"):
            problems.append(f"{number}: {case.kind}: {status} {answer.text[:300]}")
        elif status == 400 and answer.json().get("field") != case.field:
            problems.append(f"{number}: {case.kind}: {answer.text[:300]} does not name {case.field}")
    growth = memory_mib(server.pid, "VmHWM") - before
    print(f"\n{statuses}; the server's memory: from {before:.0f} MiB by {growth:.0f} MiB")
    assert not problems, "\n".join(problems)
    assert statuses[200] > CASES / 50 and statuses[400] > CASES / 50 and statuses[413] == 2
    assert growth < MAX_SERVER_GROWTH_MIB
    assert client.get("/v1/models/model").status_code == 200
