"""The official `openai` client and the gateway, in front of a real server."""

import base64
import hashlib
import io
import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from engine_builder.gateway import openai_requests
from engine_builder.gateway.backend import parse_backend
from engine_builder.gateway.errors import ApiError, GatewayConfigError
from engine_builder.gateway.keys import read_keys
from engine_builder.gateway.openai_requests import Files
from engine_builder.local_server.server import Server
from model.api.body_limit import MAX_BODY_BYTES
from model.api.fair_queue import CLIENT_HEADER
from model.images.inputs import decode_mask, read_image, read_mask
from tests.support.gateway import running_gateway
from tests.support.images import largest_difference, pixels
from tests.support.odd_images import chunk, png_of
from tests.support.predictions import PROMPT, SMALL, TIMEOUT_SECONDS, http_client, predict
from tests.support.scripted_server import Answer, ScriptedServer
from tests.support.waiting import eventually

KEY = "sk-0123456789abcdef"
ORIENTATION = 0x0112  # the EXIF tag
EXTRA = {"seed": 3, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with running_gateway([server.url]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0) as client:
        yield client


def png(width: int = 64, height: int = 64, *, hole: bool = False, alpha: bool = True) -> bytes:
    """A PNG with a gradient. `hole`: its left half is transparent."""
    levels = np.full((height, width, 4), 255, np.uint8)
    levels[..., 0] = np.linspace(0, 255, width, dtype=np.uint8)
    if hole:
        levels[:, : width // 2, 3] = 0
    file = io.BytesIO()
    Image.fromarray(levels if alpha else levels[..., :3]).save(file, "png")
    return file.getvalue()


def test_generates_the_servers_own_images(client: openai.OpenAI, server: Server) -> None:
    made = client.images.generate(prompt=PROMPT, n=2, size="64x64", extra_body=EXTRA)
    with http_client(server) as direct:
        expected = predict(direct, **SMALL | EXTRA, num_images=2)
    assert made.data is not None and made.size == "64x64" and made.output_format == "png"
    for image, own in zip(made.data, expected["images"], strict=True):
        assert image.b64_json is not None
        assert largest_difference(pixels(image.b64_json), pixels(own["data"])) <= 1
    assert made.model_dump()["preheat"]["seeds"] == [3, 4]


def test_streams_partial_images(client: openai.OpenAI) -> None:
    with client.images.generate(
        prompt=PROMPT, size="64x64", stream=True, partial_images=2, extra_body={**EXTRA, "num_inference_steps": 12}
    ) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events if event.type.endswith("partial_image")] == [0, 1]  # type: ignore[union-attr]
    assert pixels(events[-1].b64_json).shape == (64, 64, 3)


def test_edit_changes_only_transparent_parts_of_the_mask(client: openai.OpenAI) -> None:
    made = client.images.edit(image=png(), mask=png(hole=True), prompt=PROMPT, extra_body=EXTRA)
    assert made.data is not None and made.data[0].b64_json is not None
    result, original = pixels(made.data[0].b64_json), np.asarray(Image.open(io.BytesIO(png())).convert("RGB"))
    assert (result[:, 32:] == original[:, 32:]).all()
    assert (result[:, :32] != original[:, :32]).any()


def file_with_alpha(alpha: np.ndarray[Any, Any], kind: str = "png", **options: Any) -> bytes:
    """A red image with the given alpha, uint8 [height, width]."""
    levels = np.full((*alpha.shape, 4), (200, 30, 30, 0), np.uint8)
    levels[..., 3] = alpha
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind, **options)
    return file.getvalue()


def left_alpha(transparent: int, rest: int = 255) -> np.ndarray[Any, Any]:
    """Alpha of a 96 x 64 image, whose left third is `transparent`."""
    alpha = np.full((64, 96), rest, np.uint8)
    alpha[:, :32] = transparent
    return alpha


UPRIGHT_TOP = Image.Exif()
UPRIGHT_TOP[ORIENTATION] = 6  # the stored left is the upright top
# An image's file -> the part of the 64 x 96 or 96 x 64 image that is repainted; None: no mask.
OWN_ALPHA: dict[str, tuple[bytes, tuple[slice, slice] | None]] = {
    "png": (file_with_alpha(left_alpha(0)), np.s_[:, :32]),
    "webp": (file_with_alpha(left_alpha(0), "webp", lossless=True), np.s_[:, :32]),
    "rotated": (file_with_alpha(left_alpha(0), exif=UPRIGHT_TOP), np.s_[:32, :]),
    "grey level": (png_of(left_alpha(0) // 255, 4, chunk(b"tRNS", struct.pack(">H", 0))), np.s_[:, :32]),
    "all transparent": (file_with_alpha(left_alpha(0, 0)), np.s_[:, :]),
    "partly transparent rest": (file_with_alpha(left_alpha(0, 1)), np.s_[:, :32]),
    "nothing of alpha 0": (file_with_alpha(left_alpha(1, 254)), None),
    "opaque": (file_with_alpha(left_alpha(255)), None),
    "no alpha": (png(96, 64, alpha=False), None),
}


@pytest.mark.parametrize("case", OWN_ALPHA)
def test_transparent_part_of_an_image_is_its_mask(case: str) -> None:
    file, repainted = OWN_ALPHA[case]
    native = openai_requests.edit({"prompt": PROMPT}, Files((file,))).native
    assert native["image"] == base64.b64encode(file).decode()
    if repainted is None:
        assert native.keys() & {"masks", "composite"} == set()
        return
    image = read_image(native["image"], "image")
    expected = np.zeros((image.height, image.width), np.uint8)
    expected[repainted] = 255
    np.testing.assert_array_equal(decode_mask(read_mask(native["masks"][0]["image"], "masks.0.image", image)), expected)
    assert native["composite"] is True
    if image.container.format == "png":  # as a mask file must be
        assert openai_requests.edit({"prompt": PROMPT}, Files((file,), file)).native == native


def test_mask_file_is_used_before_the_images_alpha() -> None:
    image, mask = file_with_alpha(left_alpha(0)), file_with_alpha(left_alpha(255, 0))
    native = openai_requests.edit({"prompt": PROMPT}, Files((image,), mask)).native
    [levels] = [np.asarray(decode_mask(read_image(one["image"], "mask"))) for one in native["masks"]]
    assert (levels[:, 32:] == 255).all() and (levels[:, :32] == 0).all()


def test_variation_has_no_mask() -> None:
    assert "masks" not in openai_requests.variation({}, Files((file_with_alpha(left_alpha(0)),))).native


def test_edit_changes_only_transparent_parts_of_the_image(client: openai.OpenAI) -> None:
    image = png(hole=True)
    made = client.images.edit(image=image, prompt=PROMPT, extra_body=EXTRA)
    masked = client.images.edit(image=image, mask=image, prompt=PROMPT, extra_body=EXTRA)
    assert made.data is not None and masked.data is not None
    [result, other] = [pixels(one.data[0].b64_json or "") for one in (made, masked) if one.data]
    original = np.asarray(Image.open(io.BytesIO(png())).convert("RGB"))
    assert (result[:, 32:] == original[:, 32:]).all() and (result[:, :32] != 255).any()
    assert largest_difference(result, other) <= 1


def test_turns_a_mask_upright() -> None:
    stored = Image.open(io.BytesIO(png(96, 64, hole=True)))  # transparent at its left
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the stored left is the upright top
    file = io.BytesIO()
    stored.save(file, "png", exif=exif)
    native = openai_requests.edit({"prompt": PROMPT}, Files((file.getvalue(),), file.getvalue())).native
    image = read_image(native["image"], "image")
    levels = np.asarray(decode_mask(read_mask(native["masks"][0]["image"], "masks.0.image", image)))
    assert levels.shape == (96, 64)
    assert (levels[:48] == 255).all() and (levels[48:] == 0).all()


@pytest.mark.parametrize(("depth", "key"), [(2, 1), (4, 15), (8, 15), (16, 0x0A07)])
def test_mask_may_have_a_transparent_grey_level(depth: int, key: int) -> None:
    """As optimizers of PNG files write it."""
    levels = np.zeros((64, 64), np.int64)
    levels[:, :16] = key
    file = png_of(levels, depth, chunk(b"tRNS", struct.pack(">H", key)))
    native = openai_requests.edit({"prompt": PROMPT}, Files((png(64, 64),), file)).native
    image = read_image(native["image"], "image")
    repainted = np.asarray(decode_mask(read_mask(native["masks"][0]["image"], "masks.0.image", image)))
    assert (repainted[:, :16] == 255).all() and (repainted[:, 16:] == 0).all()


def test_edit_is_streamed(client: openai.OpenAI) -> None:
    with client.images.edit(
        image=png(), prompt=PROMPT, stream=True, partial_images=1, extra_body={**EXTRA, "strength": 1.0}
    ) as stream:
        assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_variation_and_data_url(client: openai.OpenAI) -> None:
    with pytest.warns(DeprecationWarning):  # OpenAI has retired it
        made = client.images.create_variation(
            image=png(), n=2, response_format="url", extra_body={"num_inference_steps": 4}
        )
    assert made.data is not None and len(made.data) == 2
    assert all(image.url is not None and image.url.startswith("data:image/png;base64,") for image in made.data)


def test_lists_the_release(client: openai.OpenAI, release: str) -> None:
    assert [model.id for model in client.models.list()] == [release]
    assert client.images.generate(model=release, prompt=PROMPT, size="64x64", extra_body=EXTRA).data


def test_passes_native_requests_on(url: str, server: Server) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_SECONDS) as through, http_client(server) as direct:
        assert predict(through, **SMALL, seed=5)["images"] == predict(direct, **SMALL, seed=5)["images"]
        nulls = {"num_images": None, "stream": None, "describe": None}
        assert predict(through, **SMALL | nulls, seed=5)["images"] == predict(direct, **SMALL | nulls, seed=5)["images"]
        refused = through.post("/v1/models/model:predict", json=SMALL | {"width": 80})
        assert refused.status_code == 400 and refused.json()["field"] == "width"
        refused = through.post("/v1/models/model:predict", json=dict.fromkeys(map(str, range(1000)), 1))
        assert refused.status_code == 400 and "request: got an object of 1000 fields" in refused.json()["error"]
        described = predict(through, prompt="x", describe=True)
        assert described["samplers"] and described["sizes"]["multiple"] == 32


# JSON of a generation -> status, param and code of the refusal.
REFUSED: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({}, 400, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, 400, "prompt", "invalid_value"),
    ({"prompt": 7}, 400, "prompt", "invalid_value"),
    ({"prompt": "a" * 4001}, 400, "prompt", "string_above_max_length"),
    ({"n": 0}, 400, "n", "integer_below_min_value"),
    ({"n": 11}, 400, "n", "integer_above_max_value"),
    ({"n": "2"}, 400, "n", "invalid_type"),
    ({"size": "big"}, 400, "size", "invalid_value"),
    ({"size": "1x1"}, 400, "size", "invalid_value"),
    ({"size": "80x80"}, 400, "size", "refused"),
    ({"quality": "best"}, 400, "quality", "invalid_value"),
    ({"background": "red"}, 400, "background", "invalid_value"),
    ({"moderation": "none"}, 400, "moderation", "invalid_value"),
    ({"output_format": "bmp"}, 400, "output_format", "invalid_value"),
    ({"output_compression": 101}, 400, "output_compression", "integer_above_max_value"),
    ({"output_compression": 50, "output_format": "png"}, 400, "output_compression", "invalid_value"),
    ({"partial_images": 4, "stream": True}, 400, "partial_images", "integer_above_max_value"),
    ({"partial_images": 1}, 400, "partial_images", "invalid_value"),
    ({"stream": "yes"}, 400, "stream", "invalid_type"),
    ({"response_format": "file"}, 400, "response_format", "invalid_value"),
    ({"model": "dall-e-2"}, 404, "model", "model_not_found"),
    ({"model": 3}, 400, "model", "invalid_type"),
    ({"style": "vivid"}, 400, "style", "unsupported_parameter"),
    ({"frame_count": 4}, 400, "frame_count", "unsupported_parameter"),
    ({"colour": "red"}, 400, "colour", "unknown_parameter"),
    ({"user": 1}, 400, "user", "invalid_type"),
    ({"loras": [dict.fromkeys(map(str, range(1000)), 1)]}, 400, "loras.0", "invalid_value"),
]


@pytest.mark.parametrize(("values", "status", "param", "code"), REFUSED, ids=lambda value: str(value)[:30])
def test_refuses_in_the_shape_of_openai(
    values: dict[str, Any], status: int, param: str | None, code: str, url: str
) -> None:
    body = values if values in ({},) or "prompt" in values else {"prompt": PROMPT, **values}
    answer = httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and answer.json().keys() == {"error"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert len(error["message"]) > 10


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({}, "image"),
        ({"image": b"not an image"}, "image"),
        ({"image": png(), "mask": png(32, 32, hole=True)}, "mask"),
        ({"image": png(), "mask": png(alpha=False)}, "mask"),
        ({"image": png(), "mask": png()}, "mask"),
        ({"image": png(), "file": png()}, "file"),
        ({"image": png()[:100]}, "image"),
        ({"image": png(hole=True).replace(b"IDAT", b"IDAT\0\0")}, "image"),
    ],
    ids=["missing", "text", "size", "no alpha", "opaque", "unknown", "truncated", "damaged"],
)
def test_refuses_files_in_the_shape_of_openai(files: dict[str, bytes], param: str, url: str) -> None:
    parts: Any = {name: (f"{name}.png", data, "image/png") for name, data in files.items()}
    parts |= {"prompt": (None, PROMPT)}
    answer = httpx.post(f"{url}/v1/images/edits", files=parts, trust_env=False, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


FORM, JSON = {"Content-Type": "multipart/form-data; boundary=x"}, {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/images/generations", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
        ("POST", "/v1/images/generations", {"content": b"[]", "headers": {"Content-Type": "application/json"}}, 400),
        ("POST", "/v1/images/generations", {"content": b'{"prompt": "x"}'}, 400),
        ("POST", "/v1/images/edits", {"json": {"prompt": "x"}}, 400),
        ("GET", "/v1/images/generations", {}, 405),
        ("GET", "/v1/chat/completions", {}, 404),
        ("POST", "/v1/images/generations", {"json": {}, "headers": {"Origin": "https://example.com"}}, 403),
        ("GET", "/v1/models", {"headers": {"Host": "example.com"}}, 403),
        ("GET", "/v1/models", {"headers": {"Origin": "http://["}}, 403),
        ("POST", "/v1/images/edits", {"content": b"garbage", "headers": FORM}, 400),
        ("POST", "/v1/images/edits", {"content": b"--x\r\nbad header\r\n\r\n--x--", "headers": FORM}, 400),
        ("POST", "/v1/images/generations", {"content": b'{"\\ud800": 1, "prompt": "a"}', "headers": JSON}, 400),
        ("POST", "/v1/images/generations", {"content": b'{"prompt": "\\ud800"}', "headers": JSON}, 400),
    ],
)
def test_refuses_wrong_calls(method: str, path: str, options: dict[str, Any], status: int, url: str) -> None:
    answer = httpx.request(method, url + path, trust_env=False, **options)
    assert answer.status_code == status and answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_seed_may_be_random() -> None:
    values = {"prompt": PROMPT, "seed": -1}
    assert openai_requests.generation(values).native["seed"] == -1
    with pytest.raises(ApiError, match="got -2, expected an integer from -1 to 4294967295"):
        openai_requests.generation(values | {"seed": -2})


def test_keys_and_their_rates(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# name key rate\nslow {KEY} 2\nfast {KEY}-other\n")
    body = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 1, "n": 2}
    with running_gateway([server.url], file) as url:

        def send(key: str | None, **values: Any) -> httpx.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return httpx.post(
                f"{url}/v1/images/generations", json=body | values, headers=headers, trust_env=False, timeout=60
            )

        assert [send(key).status_code for key in (None, "wrong", KEY[:-1])] == [401] * 3
        assert send(KEY, size="80x80").status_code == 400  # does not count
        assert send(KEY).status_code == 200
        limited = send(KEY)
        assert limited.status_code == 429 and limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(limited.headers["Retry-After"]) <= 60
        assert send(f"{KEY}-other").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def scripted(release: str, predict: Answer) -> ScriptedServer:
    """A server that describes itself and answers all requests for images alike."""
    description = b'{"release": "%s", "defaults": {"num_inference_steps": 2}}' % release.encode()
    return ScriptedServer(lambda _, request: Answer(200, description) if request.get("describe") else predict)


@pytest.mark.parametrize(
    "answer",
    [Answer(429, b'{"error": "full", "kind": "overloaded"}', {"Retry-After": "7"}), Answer(503, b"{}")],
    ids=["busy", "unavailable"],
)
def test_repeats_only_what_was_not_started(answer: Answer, server: Server, release: str) -> None:
    body = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 1}
    with scripted(release, answer) as other, running_gateway([other.url, server.url]) as url:
        for _ in range(4):  # by turns, so at least one is sent to the other server first
            assert httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60).status_code == 200
    with scripted(release, answer) as other, running_gateway([other.url]) as url:
        refused = httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60)
        assert refused.status_code == answer.status and int(refused.headers["Retry-After"]) > 0
    started = Answer(200, b'{"event": "accepted", "seed": 1, "steps": 1}\n')
    with scripted(release, started) as broken, running_gateway([broken.url]) as url:
        failed = httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60)
        assert (
            failed.status_code == 502 and "ended before the images were finished" in failed.json()["error"]["message"]
        )
        assert sum("content-length" in headers for headers in broken.headers) == 2  # the description, one request


def lines(*events: dict[str, Any]) -> Answer:
    return Answer(200, b"".join(json.dumps(event).encode() + b"\n" for event in events))


ACCEPTED = {"event": "accepted", "seed": 1, "steps": 1}


@pytest.mark.parametrize(
    ("answer", "options", "status", "kind"),
    [
        (lines(ACCEPTED), {"headers": {"Origin": "https://example.com"}}, 403, "forbidden"),
        (lines(ACCEPTED), {"content": b"x" * (MAX_BODY_BYTES + 1)}, 413, "too_large"),
        (lines(ACCEPTED), {"json": {"prompt": PROMPT}}, 502, "backend_failed"),
    ],
    ids=["origin", "large body", "broken backend"],
)
def test_native_errors_have_the_form_of_servers(
    answer: Answer, options: dict[str, Any], status: int, kind: str
) -> None:
    headers = {"X-Request-Id": "mine"} | options.get("headers", {})
    with scripted("toy/1", answer) as backend, running_gateway([backend.url]) as url:
        path = f"{url}/v1/models/model:predict"
        failed = httpx.post(path, **options | {"headers": headers}, trust_env=False, timeout=60)
        assert failed.status_code == status and failed.json().keys() == {"error", "kind"}, failed.text
        assert failed.json()["kind"] == kind and failed.headers["X-Request-Id"] == "mine"


def test_error_in_a_native_stream_names_its_field() -> None:
    error = {"event": "error", "status": 400, "kind": "refused", "error": "width: no", "field": "width"}
    with scripted("toy/1", lines(ACCEPTED, error)) as backend, running_gateway([backend.url]) as url:
        body = {"prompt": PROMPT, "stream": True}
        answer = httpx.post(f"{url}/v1/models/model:predict", json=body, trust_env=False, timeout=60)
        assert [json.loads(line) for line in answer.text.splitlines()] == [ACCEPTED, error]


def test_notices_another_release_of_a_server() -> None:
    served = ["toy/1"]
    image = {"event": "image", "index": 0, "data": "eA==", "seed": 1, "format": "png", "width": 64, "height": 64}

    def answer(_: int, request: dict[str, Any]) -> Answer:
        if request.get("describe"):
            return Answer(200, json.dumps({"release": served[-1], "defaults": {"num_inference_steps": 2}}).encode())
        done = {"event": "done", "engine": {"release": served[-1]}}
        return lines(ACCEPTED | {"release": served[-1]}, image, done)

    with ScriptedServer(answer) as backend, running_gateway([backend.url]) as url:

        def send(**values: str) -> httpx.Response:
            body = {"prompt": PROMPT} | values
            return httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60)

        assert send(model="toy/1").json()["preheat"]["engine"] == {"release": "toy/1"}
        served.append("toy/2")
        changed = send(model="toy/1")
        assert changed.status_code == 503 and changed.json()["error"]["code"] == "release_changed"
        assert changed.headers["Retry-After"] == "1"
        assert send(model="toy/1").status_code == 404
        assert send().json()["preheat"]["engine"] == {"release": "toy/2"}


def answering(release: str, described: Callable[[], object] = lambda: None) -> ScriptedServer:
    """A deployed model that makes images at once, and describes itself after `described` has returned."""
    image = {"event": "image", "index": 0, "data": "eA==", "seed": 1, "format": "png", "width": 64, "height": 64}
    done = {"event": "done", "engine": {"release": release}}

    def answer(_: int, request: dict[str, Any]) -> Answer:
        if not request.get("describe"):
            return lines(ACCEPTED | {"release": release}, image, done)
        described()
        return Answer(200, json.dumps({"release": release, "defaults": {"num_inference_steps": 2}}).encode())

    return ScriptedServer(answer)


def test_decodes_one_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, second, active, decoded = threading.Lock(), threading.Event(), [0], openai_requests.to_8_bits

    def decode(*args: Any) -> Image.Image:
        with guard:
            active[0] += 1
            if active[0] > 1:
                second.set()
        second.wait(0.2)  # so that others may begin
        with guard:
            active[0] -= 1
        return decoded(*args)

    monkeypatch.setattr(openai_requests, "to_8_bits", decode)
    with answering("toy/1") as backend, running_gateway([backend.url]) as url, ThreadPoolExecutor() as clients:

        def send(_: int) -> int:
            parts: Any = {"image": ("a.png", png(hole=True), "image/png"), "prompt": (None, PROMPT)}
            return httpx.post(f"{url}/v1/images/edits", files=parts, trust_env=False, timeout=60).status_code

        assert list(clients.map(send, range(5))) == [200] * 5
    assert not second.is_set()


@pytest.mark.parametrize("with_keys", [False, True])
def test_names_a_keys_requests_to_servers(with_keys: bool, tmp_path: Path) -> None:
    """The server's queues are fair between keys. They get a digest of the key's name."""
    keys = tmp_path / "keys"
    keys.write_text(f"website {KEY}\n")
    body, headers = {"prompt": PROMPT}, {"Authorization": f"Bearer {KEY}"}
    with answering("toy/1") as backend, running_gateway([backend.url], keys if with_keys else None) as url:
        httpx.post(f"{url}/v1/images/generations", json=body, headers=headers, trust_env=False)
        digest = hashlib.sha256(b"website").hexdigest()[:16]
        assert backend.headers[-1][CLIENT_HEADER.lower()] == (digest if with_keys else "")


def served_release(url: str, **values: str) -> str:
    """Generate an image. Return the release that made it."""
    body = {"prompt": PROMPT} | values
    answer = httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    release: str = answer.json()["preheat"]["engine"]["release"]
    return release


@pytest.mark.parametrize("is_first", [False, True])
def test_backend_that_is_starting_delays_no_other(is_first: bool) -> None:
    started = threading.Event()
    with answering("toy/1") as ready, answering("toy/2", started.wait) as starting:
        urls = [starting.url, ready.url] if is_first else [ready.url, starting.url]
        with running_gateway(urls) as url:
            try:
                assert served_release(url, model="toy/1") == "toy/1"
                assert served_release(url) == "toy/1"
                listed = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"]
                assert [model["id"] for model in listed] == ["toy/1"]
                described = httpx.get(f"{url}/v1/description", trust_env=False, timeout=60).json()["models"]
                assert [model["release"] for model in described] == ["toy/1"]
                assert len(starting.headers) == 1  # all requests share its description
            finally:
                started.set()


def test_request_waits_for_the_backend_that_it_wakes() -> None:
    started = threading.Event()
    with answering("toy/1") as ready, answering("toy/2", started.wait) as starting:
        with running_gateway([ready.url, starting.url]) as url, ThreadPoolExecutor(3) as pool:
            try:
                waiting = [pool.submit(served_release, url, model="toy/2") for _ in range(2)]
                unknown = pool.submit(httpx.get, f"{url}/v1/models/toy/3", trust_env=False, timeout=60)
                eventually(lambda: bool(starting.headers), "the model is woken")
                assert served_release(url, model="toy/1") == "toy/1"
                httpx.get(f"{url}/v1/models", trust_env=False, timeout=60)  # as long as requests for others wait
                assert not any(future.done() for future in (*waiting, unknown))
            finally:
                started.set()
            assert [future.result() for future in waiting] == ["toy/2"] * 2
            assert unknown.result().status_code == 404
            assert len(starting.headers) == 3  # one description, two images


def test_default_is_first_backend_in_any_order_of_answers() -> None:
    second_is_described = threading.Event()
    with (
        answering("toy/1", second_is_described.wait) as first,
        answering("toy/2", second_is_described.set) as second,
        running_gateway([first.url, second.url]) as url,
    ):
        assert served_release(url) == "toy/1"


def test_stops_the_work_when_the_client_leaves(url: str, server: Server) -> None:
    long = {"prompt": PROMPT, "width": 512, "height": 512, "num_inference_steps": 100, "stream": True}
    with http_client(server) as direct:
        with httpx.stream("POST", f"{url}/v1/models/model:predict", json=long, trust_env=False) as answer:
            next(answer.iter_lines())
        # The next request would wait for the rest of 100 steps.
        assert predict(direct, **SMALL)
        assert httpx.get(f"{url}/health", trust_env=False).json()["backends"][0]["images"] == 0


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "127.0.0.1:80", "http://a:0", "http://a b", "http://u@a", "x" * 9]
)
def test_refuses_urls_of_backends(url: str) -> None:
    with pytest.raises(GatewayConfigError, match="is not the URL of a server"):
        parse_backend(url)


def test_deployed_model_gets_the_key_over_https_only() -> None:
    variables = {"PREHEAT_BACKEND_API_KEY": "secret"}
    backend = parse_backend("https://model-1.example.com/production/predict", variables)
    assert backend.headers == {"Authorization": "Api-Key secret"} and backend.health_url is None
    assert parse_backend("http://127.0.0.1:1", variables).headers == {}
    assert "secret" not in repr(backend)
    with pytest.raises(GatewayConfigError, match="unencrypted"):
        parse_backend("http://model-1.example.com/production/predict", variables)


@pytest.mark.parametrize(
    "text",
    ["", "name", f"a {KEY} 0", f"a {KEY} x", "a short", f"a {KEY} 1 2", f"a {KEY}\nb {KEY}", f"a {KEY}\na {KEY}1"],
)
def test_refuses_key_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(GatewayConfigError) as caught:
        read_keys(tmp_path / "keys")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\x7f", "\0", "\u200b"])
def test_refuses_keys_that_no_header_can_hold(character: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"a {KEY}\n\nb {KEY}{character}\n", encoding="utf-8")
    with pytest.raises(GatewayConfigError, match="Line 3 .* not printable ASCII") as caught:
        read_keys(tmp_path / "keys")
    assert KEY not in str(caught.value)


def test_image_of_an_answer_is_a_file_of_the_format(client: openai.OpenAI) -> None:
    made = client.images.generate(
        prompt=PROMPT, size="64x64", output_format="webp", output_compression=60, extra_body=EXTRA
    )
    assert made.data is not None and made.data[0].b64_json is not None
    assert base64.b64decode(made.data[0].b64_json)[8:12] == b"WEBP"
