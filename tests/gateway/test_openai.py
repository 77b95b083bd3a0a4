"""The official `openai` client and the gateway, in front of a real server."""

import base64
import hashlib
import io
import json
import re
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

from gateway.apis import openai as images_api
from gateway.apis.openai import Files
from gateway.backend import parse_backend
from gateway.errors import GatewayConfigError
from gateway.keys import read_keys
from model.api.body_limit import MAX_BODY_BYTES
from model.api.fair_queue import CLIENT_HEADER, SMALL_PRICE
from model.images.inputs import decode_mask, read_image, read_mask
from preheat.local_server.server import Server
from tests.support.gateway import running_gateway
from tests.support.images import largest_difference, pixels
from tests.support.odd_images import chunk, png_of
from tests.support.predictions import PREDICT_PATH, PROMPT, SMALL, TIMEOUT_SECONDS, http_client, predict
from tests.support.scripted_gateway import ACCEPTED, DESCRIPTION, DONE, IMAGE, OPENAI, lines, scripted_gateway
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
    original = np.asarray(Image.open(io.BytesIO(png())).convert("RGB"))
    made = [
        client.images.edit(image=image, mask=mask, prompt=PROMPT, extra_body=EXTRA)
        for image, mask in ((png(), png(hole=True)), (png(hole=True), png(hole=True)), (png(hole=True), openai.omit))
    ]
    masked, both, own = (pixels(one.data[0].b64_json or "") for one in made if one.data)
    assert (masked[:, 32:] == original[:, 32:]).all() and (masked[:, :32] != original[:, :32]).any()
    assert (own[:, 32:] == original[:, 32:]).all() and (own[:, :32] != 255).any()
    assert largest_difference(own, both) <= 1
    with client.images.edit(
        image=png(), prompt=PROMPT, stream=True, partial_images=1, extra_body={**EXTRA, "strength": 1.0}
    ) as stream:
        assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_errors_name_the_parameters_of_openai(client: openai.OpenAI) -> None:
    """Not the fields of Preheat's requests, which this API refuses."""
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "size": (lambda: client.images.generate(prompt=PROMPT, size="1792x1024"), "size: 1792 is not"),  # type: ignore[call-overload]
        "image": (lambda: client.images.edit(image=png(100, 70), prompt=PROMPT), "`size` is missing"),
        "mask": (lambda: client.images.edit(image=png(), mask=png(32, 32), prompt=PROMPT), "mask: "),
    }
    for param, (call, message) in calls.items():
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == param and message in caught.value.message, caught.value.message
        assert not re.search("width|masks", caught.value.message)


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


def mask_of(native: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the levels of a native request's mask."""
    image = read_image(native["image"], "image")
    return np.asarray(decode_mask(read_mask(native["masks"][0]["image"], "masks.0.image", image)))


def test_transparent_part_of_an_image_is_its_mask() -> None:
    for case, (file, repainted) in OWN_ALPHA.items():
        native = images_api.edit({"prompt": PROMPT}, Files((file,))).native
        assert native["image"] == base64.b64encode(file).decode()
        if repainted is None:
            assert native.keys() & {"masks", "composite"} == set(), case
            continue
        image = read_image(native["image"], "image")
        expected = np.zeros((image.height, image.width), np.uint8)
        expected[repainted] = 255
        np.testing.assert_array_equal(mask_of(native), expected, case)
        assert native["composite"] is True
        if image.container.format == "png":  # as a mask file must be
            assert images_api.edit({"prompt": PROMPT}, Files((file,), file)).native == native, case
    assert "masks" not in images_api.variation({}, Files((file_with_alpha(left_alpha(0)),))).native


def test_mask_file_is_used_before_the_images_alpha() -> None:
    image, mask = file_with_alpha(left_alpha(0)), file_with_alpha(left_alpha(255, 0))
    levels = mask_of(images_api.edit({"prompt": PROMPT}, Files((image,), mask)).native)
    assert (levels[:, 32:] == 255).all() and (levels[:, :32] == 0).all()
    for depth, key in ((2, 1), (4, 15), (8, 15), (16, 0x0A07)):  # a transparent grey level, as optimizers write it
        stored = np.zeros((64, 64), np.int64)
        stored[:, :16] = key
        mask = png_of(stored, depth, chunk(b"tRNS", struct.pack(">H", key)))
        levels = mask_of(images_api.edit({"prompt": PROMPT}, Files((png(64, 64),), mask)).native)
        assert (levels[:, :16] == 255).all() and (levels[:, 16:] == 0).all(), depth


def test_variation_and_data_url(client: openai.OpenAI) -> None:
    with pytest.warns(DeprecationWarning):  # OpenAI has retired it
        made = client.images.create_variation(
            image=png(), n=2, response_format="url", extra_body={"num_inference_steps": 4}
        )
    assert made.data is not None and len(made.data) == 2
    webp = client.images.generate(prompt=PROMPT, size="64x64", output_format="webp", extra_body=EXTRA).data or []
    assert base64.b64decode(webp[0].b64_json or "")[8:12] == b"WEBP"
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
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing_required_parameter"),
    ({"prompt": 7}, "prompt", "invalid_value"),
    ({"prompt": "a" * 4001}, "prompt", "string_above_max_length"),
    ({"n": 11}, "n", "integer_above_max_value"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"size": "big"}, "size", "invalid_value"),
    ({"size": "80x80"}, "size", "refused"),
    ({"quality": "best"}, "quality", "invalid_value"),
    ({"background": "red"}, "background", "invalid_value"),
    ({"output_format": "bmp"}, "output_format", "invalid_value"),
    ({"output_compression": 101}, "output_compression", "integer_above_max_value"),
    ({"output_compression": 50, "output_format": "png"}, "output_compression", "invalid_value"),
    ({"partial_images": 1}, "partial_images", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"response_format": "file"}, "response_format", "invalid_value"),
    ({"style": "vivid"}, "style", "unsupported_parameter"),
    ({"colour": "red"}, "colour", "unknown_parameter"),
    ({"crop": [0, 0]}, "crop", "unknown_parameter"),
    ({"clip_skip": 99}, "clip_skip", "invalid_value"),
    ({"seed": -2}, "seed", "invalid_value"),
    ({"user": 1}, "user", "invalid_type"),
    ({"loras": [dict.fromkeys(map(str, range(1000)), 1)]}, "loras.0", "invalid_value"),
]


def test_refuses_in_the_shape_of_openai(url: str) -> None:
    unknown = httpx.post(f"{url}/v1/images/generations", json={"prompt": "x", "model": "dall-e-2"}, trust_env=False)
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    for values, param, code in REFUSED:
        body = values if values in ({},) or "prompt" in values else {"prompt": PROMPT, **values}
        answer = httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and answer.json().keys() == {"error"}
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert ("model:predict` takes it" in error["message"]) == ("crop" in values)
        assert len(error["message"]) > 10
    assert images_api.generation({"prompt": PROMPT, "seed": -1}).native["seed"] == -1


def test_refuses_files_in_the_shape_of_openai(url: str) -> None:
    for param, files in (
        ("image", {}),
        ("image", {"image": b"not an image"}),
        ("mask", {"image": png(), "mask": png(32, 32, hole=True)}),
        ("mask", {"image": png(), "mask": png(alpha=False)}),
        ("mask", {"image": png(), "mask": png()}),
        ("file", {"image": png(), "file": png()}),
        ("image", {"image": png(hole=True).replace(b"IDAT", b"IDAT\0\0")}),
    ):
        parts: Any = {name: (f"{name}.png", data, "image/png") for name, data in files.items()}
        parts |= {"prompt": (None, PROMPT)}
        answer = httpx.post(f"{url}/v1/images/edits", files=parts, trust_env=False, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


FORM, JSON = {"Content-Type": "multipart/form-data; boundary=x"}, {"Content-Type": "application/json"}


def test_refuses_wrong_calls(url: str) -> None:
    generations, edits, models = "/v1/images/generations", "/v1/images/edits", "/v1/models"
    for status, method, path, options in (
        (400, "POST", generations, {"content": b"{", "headers": JSON}),
        (400, "POST", generations, {"content": b'{"prompt": "x"}'}),
        (400, "POST", generations, {"content": b'{"\\ud800": 1, "prompt": "a"}', "headers": JSON}),
        (400, "POST", generations, {"content": b'{"prompt": "\\ud800"}', "headers": JSON}),
        (400, "POST", edits, {"json": {"prompt": "x"}}),
        (400, "POST", edits, {"content": b"garbage", "headers": FORM}),
        (405, "GET", generations, {}),
        (404, "GET", "/v1/chat/completions", {}),
        (403, "POST", generations, {"json": {}, "headers": {"Origin": "https://example.com"}}),
        (403, "GET", models, {"headers": {"Host": "example.com"}}),
        (403, "GET", models, {"headers": {"Origin": "http://["}}),
    ):
        answer = httpx.request(method, url + path, trust_env=False, **options)  # type: ignore[arg-type]
        assert answer.status_code == status and answer.json()["error"].keys() == {"message", "type", "param", "code"}


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


def test_images_that_a_backend_did_not_make_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"slow {KEY} 2\n")
    broken = lines(ACCEPTED, IMAGE | {"index": 1})  # one of two, then the connection ends
    with answering("toy/1", broken) as backend, running_gateway([backend.url], file) as url:

        def send(images: int) -> int:
            headers = {"Authorization": f"Bearer {KEY}"}
            body = {"prompt": PROMPT, "n": images}
            return httpx.post(
                f"{url}/v1/images/generations", json=body, headers=headers, trust_env=False, timeout=60
            ).status_code

        assert [send(2), send(2), send(1)] == [502, 429, 502], "one of the first two was given back"


def test_a_form_has_adapters_as_the_package_writes_them(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:  # by the server, which has no adapters
        client.images.edit(
            image=png(), prompt=PROMPT, extra_body={"loras": [{"name": "1", "scale": 0.5}, {"name": "b", "scale": 2}]}
        )
    assert caught.value.param == "loras.0.name" and 'got "1", expected no adapter' in str(caught.value)


def generate(url: str, **values: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 1} | values
    return httpx.post(f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60)


def answering(
    release: str, answer: Answer | None = None, described: Callable[[], object] = lambda: None
) -> ScriptedServer:
    """A deployed model that makes an image at once, or answers else. It describes itself after `described` returned."""
    made = lines(ACCEPTED | {"release": release}, IMAGE, DONE | {"engine": {"release": release}})

    def script(_: int, request: dict[str, Any]) -> Answer:
        if not request.get("describe"):
            return answer or made
        described()
        return lines(DESCRIPTION | {"release": release})

    return ScriptedServer(script)


def test_decodes_one_large_file_at_once_beside_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, small_passed, decoding, most = images_api.to_8_bits, threading.Event(), [0], [0]

    def decode(image: Image.Image, depth: int) -> Image.Image:
        if image.width > 64:
            decoding[0] += 1
            most[0] = max(most[0], decoding[0])
            small_passed.wait(5)
            decoding[0] -= 1
        return decoded(image, depth)

    monkeypatch.setattr(images_api, "to_8_bits", decode)
    side = 1 + int(SMALL_PRICE**0.5)
    with answering("toy/1") as backend, running_gateway([backend.url]) as url, ThreadPoolExecutor() as clients:

        def send(file: bytes) -> int:
            parts: Any = {"image": ("a.png", file, "image/png"), "prompt": (None, PROMPT)}
            return httpx.post(f"{url}/v1/images/edits", files=parts, trust_env=False, timeout=60).status_code

        large = [clients.submit(send, png(side, side, hole=True)) for _ in range(3)]
        eventually(lambda: decoding[0] == 1, "a large file is decoded")
        assert send(png(hole=True)) == 200 and decoding[0] == 1, "the small file has waited"
        small_passed.set()
        assert [answer.result() for answer in large] == [200] * 3 and most == [1]


def test_repeats_only_what_was_not_started(server: Server, release: str) -> None:
    for answer in (Answer(429, b'{"error": "full", "kind": "overloaded"}', {"Retry-After": "7"}), Answer(503, b"{}")):
        with answering(release, answer) as other, running_gateway([other.url, server.url]) as url:
            for _ in range(4):  # by turns, so at least one is sent to the other server first
                assert generate(url).status_code == 200
        with answering(release, answer) as other, running_gateway([other.url]) as url:
            refused = generate(url)
            assert refused.status_code == answer.status and int(refused.headers["Retry-After"]) > 0
    with answering(release, lines(ACCEPTED | {"release": release})) as broken, running_gateway([broken.url]) as url:
        failed = generate(url)
        assert failed.status_code == 502
        assert "ended before the images were finished" in failed.json()["error"]["message"]
        assert sum("content-length" in headers for headers in broken.headers) == 2  # the description, one request


@pytest.mark.parametrize("kind", ["adapter_not_ready", "release"])
def test_what_a_request_names_does_not_mark_its_server_down(server: Server, release: str, kind: str) -> None:
    answer = Answer(503, json.dumps({"error": "Not loaded.", "kind": kind}).encode(), {"Retry-After": "7"})
    with answering(release, answer) as other, running_gateway([other.url]) as url:
        refused = generate(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, kind)
        assert refused.json()["error"]["message"] == "Not loaded." and refused.headers["Retry-After"] == "7"
        assert httpx.get(f"{url}/health", trust_env=False).json()["backends"][0]["up"]
    with answering(release, answer) as other, running_gateway([other.url, server.url]) as url:
        for _ in range(4):  # by turns
            assert generate(url).status_code == 200


def test_native_errors_have_the_form_of_servers() -> None:
    error = {"event": "error", "status": 400, "kind": "refused", "error": "width: no", "field": "width"}
    with answering("toy/1", lines(ACCEPTED, error)) as backend, running_gateway([backend.url]) as url:
        path, headers = url + PREDICT_PATH, {"X-Request-Id": "mine"}
        for options, status, kind in (
            ({"headers": headers | {"Origin": "https://example.com"}}, 403, "forbidden"),
            ({"headers": headers, "content": b"x" * (MAX_BODY_BYTES + 1)}, 413, "too_large"),
            ({"headers": headers, "json": {"prompt": PROMPT, "width": 1}}, 400, "refused"),
        ):
            failed = httpx.post(path, **options, trust_env=False, timeout=60)  # type: ignore[arg-type]
            assert failed.status_code == status and failed.json().keys() <= {"error", "kind", "field"}, failed.text
            assert failed.json()["kind"] == kind and failed.headers["X-Request-Id"] == "mine"
        streamed = httpx.post(path, json={"prompt": PROMPT, "stream": True}, trust_env=False, timeout=60)
        assert [json.loads(line) for line in streamed.text.splitlines()] == [ACCEPTED, error]


def test_notices_another_release_of_a_server() -> None:
    with scripted_gateway() as gateway:

        def send(**values: str) -> httpx.Response:
            return gateway.post(OPENAI, **values)

        assert send(model="toy/1").json()["preheat"]["engine"]["release"] == "toy/1"
        gateway.description = lines(DESCRIPTION | {"release": "toy/2"})
        gateway.answer = lines(ACCEPTED | {"release": "toy/2"}, IMAGE, DONE | {"engine": {"release": "toy/2"}})
        changed = send(model="toy/1")
        assert changed.status_code == 503 and changed.json()["error"]["code"] == "release_changed"
        assert changed.headers["Retry-After"] == "1"
        assert send(model="toy/1").status_code == 404
        assert send().json()["preheat"]["engine"] == {"release": "toy/2"}


def test_names_a_keys_requests_to_servers(tmp_path: Path) -> None:
    """The server's queues are fair between keys. They get a digest of the key's name."""
    keys = tmp_path / "keys"
    keys.write_text(f"website {KEY}\n")
    headers = {"Authorization": f"Bearer {KEY}"}
    with answering("toy/1") as backend:
        for key_file, client_id in ((keys, hashlib.sha256(b"website").hexdigest()[:16]), (None, "")):
            with running_gateway([backend.url], key_file) as url:
                httpx.post(f"{url}{OPENAI}", json={"prompt": PROMPT}, headers=headers, trust_env=False)
            assert backend.headers[-1][CLIENT_HEADER.lower()] == client_id


def served_release(url: str, **values: str) -> str:
    """Generate an image. Return the release that made it."""
    answer = generate(url, **values)
    assert answer.status_code == 200, answer.text
    release: str = answer.json()["preheat"]["engine"]["release"]
    return release


@pytest.mark.parametrize("is_first", [False, True])
def test_backend_that_is_starting_delays_no_other(is_first: bool) -> None:
    started = threading.Event()
    with answering("toy/1") as ready, answering("toy/2", described=started.wait) as starting:
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
    with answering("toy/1") as ready, answering("toy/2", described=started.wait) as starting:
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
        answering("toy/1", described=second_is_described.wait) as first,
        answering("toy/2", described=second_is_described.set) as second,
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


def test_refuses_urls_of_backends() -> None:
    for url in ("", "ftp://a", "http://", "127.0.0.1:80", "http://a:0", "http://a b", "http://u@a", "x" * 9):
        with pytest.raises(GatewayConfigError, match="is not the URL of a server|The URL of a has a user name"):
            parse_backend(url)


def test_deployed_model_gets_the_key_over_https_only() -> None:
    variables = {"PREHEAT_BACKEND_API_KEY": "secret"}
    backend = parse_backend("https://model-1.example.com/production/predict", variables)
    assert backend.headers == {"Authorization": "Api-Key secret"} and backend.health_url is None
    assert parse_backend("http://127.0.0.1:1", variables).headers == {}
    assert "secret" not in repr(backend)
    with pytest.raises(GatewayConfigError, match="unencrypted"):
        parse_backend("http://model-1.example.com/production/predict", variables)


def test_refuses_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    repeated = f"a {KEY}\nb {KEY}", f"a {KEY}\na {KEY}1"
    for text in ("", "name", f"a {KEY} 0", f"a {KEY} x", "a short", f"a {KEY} 1 2", *repeated):
        path.write_text(text)
        with pytest.raises(GatewayConfigError) as caught:
            read_keys(path)
        assert KEY not in str(caught.value)
    for character in ("\u00e9", "\u20ac", "\x7f", "\0", "\u200b"):  # no header can hold them
        path.write_text(f"a {KEY}\n\nb {KEY}{character}\n", encoding="utf-8")
        with pytest.raises(GatewayConfigError, match="Line 3 .* not printable ASCII") as caught:
            read_keys(path)
        assert KEY not in str(caught.value)
