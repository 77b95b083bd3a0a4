"""Bodies of the gateway's requests: malformed ones, ones that arrive in part, and what they may take."""

import base64
import json
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from gateway.apis.openai import parse_form as openai_form
from gateway.bodies import parse_form, parse_json_object
from gateway.errors import ApiError
from model.api import connections
from model.api.body_limit import MAX_BODY_BYTES
from model.api.body_scan import MAX_VALUES, JsonScan, MsgpackScan
from model.errors import RequestRefused
from tests.support.scripted_gateway import scripted_gateway

JSON, FORM = "application/json", "multipart/form-data; boundary=x"
PREDICT, EDITS = "/v1/models/model:predict", "/v1/images/edits"
KEY, OTHER = "sk-0123456789abcdef", "sk-other-0123456789"
BASE64 = base64.b64encode(bytes(range(256)) * 30).decode()


def scanned(body: bytes, part: int = 1000) -> list[tuple[int, int]]:
    scan = JsonScan()
    for start in range(0, len(body), part):
        scan.feed(body[start : start + part])
    return scan.finish()


TEXTS = {
    "base64": BASE64,
    "data URL": f"data:image/png;base64,{BASE64}",
    "quoted": f'"{BASE64}"\\',
    "digits": "1" * 3000,
    "short": "A" * 1023,
    "wide": "\U0001f600 \ud800",
    "brackets": '[{"' * 300,
    "backslashes": "\\[" * 300,
    "empty": "",
}


def test_parses_as_json_does() -> None:
    given = {name: [text, {name: text, "number": 1.5e3}, None, True] for name, text in TEXTS.items()}
    body = json.dumps(given).encode()
    for sent in (body, body.replace(b"/", b"\\/")):  # the second one as PHP writes it
        for part in (7, 1024, 10**6):
            assert parse_json_object(sent, scanned(sent, part)) == given


def deep(levels: int) -> bytes:
    return b'{"masks": ' + b"[" * levels + b"]" * levels + b"}"


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"prompt": "x"', "not valid JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
    "half a surrogate pair": (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
    "NaN": (b'{"strength": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"strength": -Infinity}', "-Infinity is not a JSON number"),
    "long number": (b'{"seed": %s}' % (b"1" * 5000), "not valid JSON"),
    "twice": (b'{"prompt": "x", "prompt": "y"}', "prompt: is given twice"),
    "twice, of many": (  # a search for each name would take minutes
        b"{%s}" % b",".join(b'"%x":1' % (number % 99_999) for number in range(100_000)),
        "0: is given twice",
    ),
    "twice, deeper": (b'{"masks": [{"image": "x", "image": "y"}]}', "image: is given twice"),
    "deep": (deep(20), "more than 16 deep"),
    "list": (b"[]", "not a JSON object"),
    "other characters in base64": (f'{{"image": "é{BASE64}"}}'.encode(), "other characters"),
    "base64 without quotes": (f"{{{BASE64}}}".encode(), "not valid JSON"),
}


def test_refuses_json() -> None:
    for case, (body, message) in BAD_JSON.items():
        with pytest.raises(ApiError, match=message) as caught:
            parse_json_object(body, scanned(body))
        assert caught.value.status == 400, case


COSTLY = {
    "values": b"[" + b"1," * 2**20,
    "members": b"{" + b'"a":1,' * 2**18,
    "arrays": b"[" * 2**21,
    "depth": b'{"prompt": "]]]", "masks": ' + b"[" * 1000,
    "depth between texts": b'{"\\\\\\"[": ' * 1000,
    "escapes": b'"' + b"\\n" * 2**21,
    "sparse escapes": b'"' + b"AAAAAA\\n" * 2**21,
    "spaces": b" " * 2**21,
    "whole numbers": b"[" + (b"1" * 4300 + b",") * 500,
    "one number": b"1" * 2**21,
    "short texts": b"[" + (b'"' + b"A" * 1000 + b'",') * 2200,
    "wide text": "é".encode() * 2**20,
}


def test_refuses_json_that_is_costly_to_parse() -> None:
    for case, body in COSTLY.items():
        try:
            scanned(body, 2**16)
        except RequestRefused as refusal:
            assert any(reason in str(refusal) for reason in ("besides base64", "escaped", "nested")), case
        else:
            pytest.fail(f"accepted: {case}")


def test_counts_the_values_of_msgpack() -> None:
    # An array of all types, with contents of the greatest fixed lengths.
    values = (
        b"\xc0\xc2\xc3\x7f\xff\x80\x90\xbf" + b"a" * 31 + b"\xc4\x02ab\xc5\x00\x01a\xc6\0\0\0\x01a\xc7\x01\x05a"
        b"\xc8\0\x01\x05a\xc9\0\0\0\x01\x05a\xca1234\xcb12345678\xcc1\xcd12\xce1234\xcf12345678\xd01\xd112\xd21234"
        b"\xd312345678\xd4t1\xd5t12\xd6t1234\xd7t12345678\xd8t1234567812345678\xd9\x01a\xda\0\x01a\xdb\0\0\0\x01a"
    )
    count = 32
    many = values * (MAX_VALUES // count) + b"\xc0" * (MAX_VALUES % count)
    for part in (1, 1000):
        scan = MsgpackScan()
        for start in range(0, len(many), part):
            scan.feed(many[start : start + part])
        with pytest.raises(RequestRefused, match="values"):
            scan.feed(b"\xc0")


def field(name: str, value: bytes, *headers: str, file: str | None = None) -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{file}"' if file else "")
    return "\r\n".join((disposition, *headers, "", "")).encode() + value


def form(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + end


IMAGE = field("image", b"\x89PNG--x\r\n-", file="a.png")
TEXT = field("prompt", "né\r\n--x?".encode())


def test_reads_a_form() -> None:
    body = form(TEXT, IMAGE, field("mask", b"m", file="m.png"), field("image[]", b"", file=" "), end=b"--x--")
    fields, files = parse_form(FORM, body + b"\r\nepilogue")
    assert fields == {"prompt": "né\r\n--x?"}
    assert files.images == (b"\x89PNG--x\r\n-", b"") and files.mask == b"m"


def test_reads_lists_and_unused_files_of_a_form() -> None:
    entries = [
        field(f"loras[][{key}]", value)
        for key, value in (("name", b"a"), ("name", b"b"), ("scale", b"1"), ("scale", b"2"))
    ]
    unused = field("mask", b"").replace(b'name="mask"', b'name="mask"; filename=""')
    fields, files = parse_form("Multipart/Form-Data; boundary=x", form(TEXT, IMAGE, *entries, unused))
    assert fields["loras"] == [{"name": "a", "scale": "1"}, {"name": "b", "scale": "2"}] and files.mask is None
    assert openai_form(fields)["loras"] == [{"name": "a", "scale": 1}, {"name": "b", "scale": 2}]
    with pytest.raises(ApiError, match="name: is given twice"):
        openai_form({"loras": '[{"name": "a", "name": "b"}]'})


BAD_FORMS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "was cut off"),
    "no last boundary": (form(TEXT, IMAGE, end=b""), "was cut off"),
    "half of the last boundary": (form(TEXT, IMAGE, end=b"--x"), "was cut off"),
    "next part without content": (form(TEXT, IMAGE, end=b"--x\r\n"), "was cut off"),
    "cut off in a text": (form(TEXT, IMAGE, field("seed", b"12"), end=b"")[:-3], "was cut off"),
    "cut off in a file": (form(TEXT, IMAGE)[:-15], "was cut off"),
    "cut off in a header": (form(TEXT, IMAGE)[:70], "was cut off"),
    "other boundary": (form(TEXT).replace(b"--x", b"--y"), "malformed"),
    "text is not UTF-8": (form(IMAGE, field("prompt", b"n\xe9")), "prompt is not UTF-8"),
    "name is not UTF-8": (form(IMAGE, field("p", b"n").replace(b'"p"', b'"\xe9"')), "name of a part is not UTF-8"),
    "other charset": (form(field("prompt", b"x", "Content-Type: text/plain; charset=utf-16")), "charset 'utf-16'"),
    "encoding": (form(field("prompt", b"eA==", "Content-Transfer-Encoding: base64")), "encoding 'base64'"),
    "no name": (form(TEXT, b"Content-Disposition: form-data\r\n\r\nx"), "has no name"),
    "empty name": (form(TEXT, field("", b"x")), "has no name"),
    "no disposition": (form(TEXT, b"Content-Type: text/plain\r\n\r\nx"), "has no name"),
    "no headers": (form(TEXT, b"\r\nx"), "has no name"),
    "text twice": (form(TEXT, TEXT), "prompt: is given twice"),
    "other keys": (form(*(field(f"loras[][{key}]", b"a") for key in ("name", "name", "scale"))), "different keys"),
    "list and text": (form(field("loras[][name]", b"a"), field("loras", b"[]")), "loras: is given twice"),
    "text and list": (form(field("loras", b"[]"), field("loras[][name]", b"a")), "loras: is given twice"),
    "mask twice": (form(field("mask", b"m", file="m"), field("mask", b"m", file="m")), "mask: is given twice"),
    "file as text": (form(field("image", b"x")), "image: got text, expected a file"),
    "text as file": (form(field("prompt", b"x", file="a.txt")), "Unknown file: 'prompt'"),
    "many parts": (form(*(field(str(number), b"x") for number in range(100))), "more than 64 parts"),
    "many files": (form(*[IMAGE] * 40), "more than 16 images"),
    "many headers": (form(field("prompt", b"x", *("a: b",) * 1000)), "malformed"),
    "long header": (form(field("prompt", b"x", "a: " + "b" * 10**5)), "malformed"),
    "long text": (form(field("prompt", b"x" * (2**20 + 1))), "more than 1 MiB"),
}


def test_refuses_a_form() -> None:
    for case, (body, message) in BAD_FORMS.items():
        with pytest.raises(ApiError, match=message) as caught:
            parse_form(FORM, body)
        assert caught.value.status == 400, case


# -- a running gateway ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a gateway with two keys."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"one {KEY}\nother {OTHER}\n")
    with scripted_gateway(key_file=file) as gateway:
        yield int(gateway.url.rpartition(":")[2])


def head(path: str, content_type: str, length: int | None, key: str = KEY) -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Authorization: Bearer {key}", size)
    return "\r\n".join((*lines, f"Content-Type: {content_type}", "", "")).encode()


def send_raw(port: int, content: bytes) -> bytes:
    """Send everything, then read until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, connection.makefile("rb") as answer:
        connection.sendall(content)
        return answer.read()


def test_answers_refused_bodies_over_http(port: int) -> None:
    form_body, message = BAD_FORMS["text is not UTF-8"]
    costly = COSTLY["values"]
    for path, content_type, body, *expected in (
        (EDITS, FORM, form_body, message),
        (PREDICT, JSON, costly, '"error":"request: it has', "besides base64"),
        ("/v1/images/generations", JSON, costly, '"code"', "besides base64"),
    ):
        received = send_raw(port, head(path, content_type, len(body)) + body)
        assert received.split(b" ", 2)[1] == b"400" and all(part.encode() in received for part in expected)
    received = send_raw(port, head(PREDICT, JSON, 2**23, key="wrong") + b"A" * 2**23)
    assert received.split(b" ", 2)[1] == b"401" and b"connection: close" in received.lower()


HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": JSON}
LARGE = b'{"prompt": "x", "image": "'.ljust(MAX_BODY_BYTES, b"A") + b'"}'


def with_httpx(url: str) -> tuple[int, str]:
    answer = httpx.post(url + PREDICT, content=LARGE, headers=HEADERS, trust_env=False, timeout=60)
    return answer.status_code, answer.text


def with_curl(url: str) -> tuple[int, str]:
    headers = [part for name, value in HEADERS.items() for part in ("-H", f"{name}: {value}")]
    command = ["curl", "--silent", "--noproxy", "*", "--write-out", "%{http_code}", "--data-binary", "@-"]
    made = subprocess.run([*command, *headers, url + PREDICT], input=LARGE, capture_output=True, check=True, timeout=60)
    return int(made.stdout[-3:]), made.stdout.decode()


def with_openai(url: str) -> tuple[int, str]:
    image = ("a.png", LARGE, "image/png")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.images.edit(image=image, prompt="x")
    return caught.value.status_code, str(caught.value)


def with_chunks(url: str) -> tuple[int, str]:
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE)
    received = send_raw(int(url.rpartition(":")[2]), head(PREDICT, JSON, None) + chunks)
    return int(received.split(b" ", 2)[1]), received.decode()


@pytest.mark.parametrize("send", [with_httpx, with_curl, with_openai, with_chunks])
def test_client_of_a_large_body_gets_the_answer(send: Callable[[str], tuple[int, str]], port: int) -> None:
    status, text = send(f"http://127.0.0.1:{port}")
    assert status == 413 and "64 MiB" in text


@pytest.mark.parametrize("is_chunked", [False, True], ids=["content-length", "chunked"])
def test_half_sent_bodies_leave_room(is_chunked: bool, port: int) -> None:
    url, image, held = f"http://127.0.0.1:{port}", base64.b64encode(random.Random(0).randbytes(2**21)).decode(), []
    size = 30 * 2**20
    sent = b'{"prompt": "x", "image": "'.ljust(2**20, b"A")
    try:
        for _ in range(20):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            start = head(PREDICT, JSON, None if is_chunked else size)
            held[-1].sendall(start + (b"%x\r\n" % size if is_chunked else b"") + sent)
        for key in (OTHER, KEY):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x", "image": image}
            made = httpx.post(url + PREDICT, json=body, headers=headers, trust_env=False, timeout=60)
            assert made.status_code == 200, made.text
    finally:
        for connection in held:
            connection.close()


def test_headers_have_a_deadline(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.1)
    for content in (b"", b"GET /health HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nX: " + b"a" * 9000):
        assert send_raw(port, content).split(b" ", 2)[1] == b"408"


def test_closes_the_oldest_of_many_waiting_connections(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_WAITING_CONNECTIONS", 5)
    monkeypatch.setattr(connections, "SPARED_SECONDS", 0)
    with ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(6)]
        assert b" 408 " in waiting[0].recv(100)
        waiting[5].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in waiting[5].recv(100)


def test_answers_many_requests_of_a_connection(port: int) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        statuses = {client.get(f"http://127.0.0.1:{port}/health").status_code for _ in range(300)}
    assert statuses == {200}
