"""The client: sends requests, reads the output of `truss predict`, and saves images."""

import base64
import io
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from PIL import Image

from gateway.endpoint import BadEndpoint, parse_endpoint
from preheat.local_server.client import CallFailed, generate, save_images, save_predicted
from tests.support.scripted_server import Answer, ScriptedServer

SHELL_SCRIPT_BASE64 = base64.b64encode(b"#!/bin/sh").decode()
DEPLOYED = "https://model-x.api.baseten.co"
UNUSED_URL = "http://127.0.0.1:9"  # the port of the discard service, which does not run


REFUSED_URLS = [
    ("http://localhost:80a", "is not the URL of a server: Port"),
    ("http://[x", "is not the URL of a server: Invalid IPv6 URL. Give"),
    ("ftp://127.0.0.1", "is not the URL of a server. Give a URL like"),
    ("http://127.0.0.1/?x=1", "it has a query"),
    ("http://name:geheim@127.0.0.1", "The URL of 127.0.0.1 has a user name or a password"),
    ("https://model-x.api.baseten.co", "is not the https URL of a deployment's predict. Give one like"),
    ("http://model-x.api.baseten.co/production/predict", "is not the https URL of a deployment's predict"),
    (f"{DEPLOYED}/production/predict", "needs an API key. Set the variable BASETEN_API_KEY"),
]


def test_refuses_an_address_that_cannot_be_called() -> None:
    for url, message in REFUSED_URLS:
        with pytest.raises(BadEndpoint, match=re.escape(message)) as refusal:
            generate(url, {"prompt": "x"}, timeout=5)
        assert "geheim" not in str(refusal.value)


ENDPOINTS = [
    ("127.0.0.1:8080", "http://127.0.0.1:8080/v1/models/model:predict", "Bearer gateway-key"),
    ("http://gpu-box:8090/v1/", "http://gpu-box:8090/v1/models/model:predict", "Bearer gateway-key"),
    ("https://x/sdxl", "https://x/sdxl/v1/models/model:predict", "Bearer gateway-key"),
    ("http://x/v1/models/model:predict?model=a", "http://x/v1/models/model:predict?model=a", "Bearer gateway-key"),
    (f"{DEPLOYED}/production/predict", f"{DEPLOYED}/production/predict", "Api-Key baseten-key"),
    ("https://x/environments/a/predict", "https://x/environments/a/predict", "Api-Key gateway-key"),
    ("model-x.api.baseten.co/production/predict", f"{DEPLOYED}/production/predict", "Api-Key baseten-key"),
]


def test_endpoint_of_a_url() -> None:
    variables = {"PREHEAT_API_KEY": "gateway-key\n", "BASETEN_API_KEY": "baseten-key"}
    for url, predict_url, authorization in ENDPOINTS:
        endpoint, named = (parse_endpoint(url, key, variables) for key in (None, "named-key"))
        assert endpoint.predict_url == predict_url and endpoint.headers["Authorization"] == authorization
        assert endpoint.exposes_key == (predict_url.startswith("http:") and "127.0.0.1" not in url)
        assert named.headers["Authorization"] == authorization.split()[0] + " named-key"
        assert "key" not in repr(named).replace("exposes_key", "")


def test_refuses_a_key_without_showing_it() -> None:
    for key in ("Bearer geheim", "geheim\n1", "geh\u00e9im"):
        with pytest.raises(BadEndpoint, match="The key in PREHEAT_API_KEY has characters") as refusal:
            parse_endpoint("http://127.0.0.1", variables={"PREHEAT_API_KEY": key})
        assert "geh" not in str(refusal.value)


REFUSALS: list[tuple[int, str, dict[str, str], str]] = [
    (401, '{"error": "No key."}', {}, "401: No key. Check the key in"),
    (404, '{"detail": "Not Found"}', {}, "is not the `predict` of a model: check the URL"),
    (404, '{"error": "model not found"}', {}, "404: model not found. Check the URL, and which deployment"),
    (429, '{"error": "Busy."}', {"Retry-After": "7"}, "429: Busy. Try again in 7 s."),
    (301, "", {"Location": "https://y/predict"}, "redirects to https://y/predict. Give that URL."),
    (500, "<h1>broken: geheim</h1>", {}, "500: <h1>broken: ***</h1>."),
    (503, '{"error": "Ended.", "kind": "unavailable"}', {}, "503: Ended."),
    (503, "", {"Retry-After": "999"}, "503: Service Unavailable. The model was not ready in time."),
]


def test_refusals_of_a_deployed_model() -> None:
    answers = [Answer(status, body.encode(), headers) for status, body, headers, _ in REFUSALS]
    with ScriptedServer(lambda number, request: answers[number]) as server:
        for number, (status, _, _, message) in enumerate(REFUSALS, 1):
            with pytest.raises(CallFailed) as failure:
                generate(parse_endpoint(server.url, "geheim"), {"prompt": "x"}, timeout=60)
            assert message in str(failure.value) and failure.value.status == status
            assert "geheim" not in str(failure.value) and len(server.headers) == number


def test_waits_for_a_model_that_is_starting() -> None:
    lines = b'{"event": "image", "index": 0, "data": ""}\n{"event": "done"}\n'
    answers = [Answer(status, b"upstream is starting", {"Retry-After": "0"}) for status in (502, 504)]
    answers.append(Answer(200, lines))
    events: list[dict[str, object]] = []
    with ScriptedServer(lambda number, request: answers[number]) as server:
        generate(parse_endpoint(server.url, "geheim"), {"prompt": "x"}, 60, events.append)
    assert [event["event"] for event in events] == ["starting", "starting", "image"]
    assert [headers["authorization"] for headers in server.headers] == ["Api-Key geheim"] * 3


def test_generate_reports_that_no_server_answers() -> None:
    with pytest.raises(CallFailed, match=r"cannot be reached: Connection refused\. Start.*`preheat serve`") as failure:
        generate(UNUSED_URL, {"prompt": "x"}, timeout=5)
    assert failure.value.status is None


def test_generate_reports_an_invalid_stream() -> None:
    for body, message in {
        b"": "ended its answer before the images were finished",
        b'{"event": "accepted", "ahead": 0}\n': "ended its answer before the images were finished",
        b'{"event": "done"}\n': "an invalid event: .*done",
        b"<html>\n": "an invalid event: '<html>'",
        b"[1]\n": "an invalid event",
        b'{"event": "error", "status": 500, "error": "it broke"}\n': "500: it broke",
    }.items():
        with ScriptedServer(lambda *_, body=body: Answer(200, body)) as server:
            with pytest.raises(CallFailed, match=message):
                generate(f"http://127.0.0.1:{server.port}", {"prompt": "x"}, timeout=60, progress=lambda event: None)


def test_save_predicted_reads_answers_of_openais_api(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n"
    answer = {"created": 1, "data": [{"b64_json": base64.b64encode(png).decode()}] * 2}
    paths = save_predicted(io.BytesIO(json.dumps(answer).encode()), tmp_path / "out.png")
    assert [path.name for path in paths] == ["out-1.png", "out-2.png"] and paths[1].read_bytes() == png


def test_save_predicted_refuses_output_without_an_image(tmp_path: Path) -> None:
    for output, message in {
        "": "no response to save",
        "Calling predict on deployment ID v1...\n": "no response to save in 'Calling predict",
        'Calling...\n{"data": "abc': "cut off",
        '{"data": "not base64!"}': "not base64",
        '{"data": "é"}': "not base64",
        f'{{"data": "{SHELL_SCRIPT_BASE64}"}}': "not a PNG, JPEG or WebP",
        '{"data": null}': "returned no image",
        '{"data": []}': "returned no image",
        '{"data":' + "[" * 200_000: "not JSON",
        '[[1, "{"]]': "cut off or not JSON",  # the response is read from the first brace on
        '{"images": 3}': "returned no image",
        '{"images": {"data": "x"}}': "returned no image",
        '{"images": [3]}': "returned no image",
        '{"images": [{"data": [1]}]}': "returned no image",
        '{"images": [], "error": {"message": "seed: -1 is too small"}}': "seed: -1 is too small",
    }.items():
        with pytest.raises(CallFailed, match=message):
            save_predicted(io.BytesIO(output.encode()), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_saves_what_truss_predict_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command and its client, without a deployment. It ends with status 0 also after a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from truss.cli import cli
        from truss.remote.baseten.core import ModelVersionHandle
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "JPEG")  # its base64 has more columns than a terminal
    bodies = {"data": base64.b64encode(file.getvalue()).decode()}, {"error": "prompt: is missing"}
    answers = [Answer(status, json.dumps(body).encode()) for status, body in zip((200, 400), bodies, strict=True)]
    with ScriptedServer(lambda number, _: answers[number]) as server:
        handle = ModelVersionHandle("v1", "m", f"http://127.0.0.1:{server.port}")
        service = cli.BasetenService(handle, True, dict, "", None)
        monkeypatch.setattr(cli.RemoteFactory, "create", lambda **_: SimpleNamespace(get_service=lambda **_: service))
        environment = {"HOME": str(tmp_path), "TRUSS_NO_UPDATE_CHECK": "1", "NO_PROXY": "*"}
        command = ["predict", "--remote", "r", "--model", "m", "-d", '{"prompt": "a lighthouse"}']
        saved, refused = [CliRunner().invoke(cli.truss_cli, command, env=environment) for _ in answers]
    assert (saved.exit_code, refused.exit_code) == (0, 0), saved.output
    assert saved.stdout.startswith("Calling predict on development deployment"), "save_predicted skips this line"
    [path] = save_predicted(io.BytesIO(saved.stdout_bytes), tmp_path / "out.png")
    assert path == tmp_path / "out.jpg" and path.read_bytes() == file.getvalue()
    with pytest.raises(CallFailed, match="prompt: is missing"):
        save_predicted(io.BytesIO(refused.stdout_bytes), tmp_path / "refused.png")


def test_save_images_names_files_by_number_and_format(tmp_path: Path) -> None:
    def encoded(image_format: str) -> dict[str, str]:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, image_format)
        return {"data": base64.b64encode(file.getvalue()).decode()}

    for name, image_format, saved_name in (
        *(("out.png", "PNG", "out.png"), ("out", "WEBP", "out.webp"), ("out.JPG", "PNG", "out.png")),
        ("release-1.0", "PNG", "release-1.0.png"),
    ):
        assert save_images(encoded(image_format), tmp_path / name) == [tmp_path / saved_name]
    paths = save_images({"images": [encoded("JPEG"), encoded("JPEG")]}, tmp_path / "two.jpeg")
    assert [path.name for path in paths] == ["two-1.jpeg", "two-2.jpeg"]
    assert [path.read_bytes() for path in paths] == 2 * [base64.b64decode(encoded("JPEG")["data"])]
