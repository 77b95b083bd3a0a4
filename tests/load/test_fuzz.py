"""Bodies made from the published schema, and bodies nearly so: every answer is a picture or says what was wrong.

PREHEAT_FUZZ_BODIES says how many: 300 unless told, 5,000 in `make load`. What would be drawn is made small first.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine_builder.local_server.server import Server

BODIES = int(os.environ.get("PREHEAT_FUZZ_BODIES", "300"))
PREDICT = "/v1/models/model:predict"
SECONDS = 60  # without an answer by then it hangs
CHEAP = {"width": 64, "height": 64, "num_inference_steps": 2, "num_images": 1}
# Answers: a picture, a refusal with its reason, or come again later.
ALLOWED = {200, 400, 429}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def fields(client: httpx.Client) -> dict[str, Any]:
    """The published schema's properties."""
    published = client.get("/v1/models/model/schema").json()["input_schema"]
    assert published["required"] == ["prompt"] and published["additionalProperties"] is False
    return dict(published["properties"])


def conforming(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a property's schema takes."""
    if "anyOf" in schema:
        return st.one_of([conforming(choice) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "string":
            most = min(schema["maxLength"], 200)
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=most)
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            return st.floats(schema["minimum"], schema["maximum"]) | st.integers(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    raise AssertionError(f"the schema has a property of a kind that nobody thought of: {schema}")


def near(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values just outside, of another type, or of the right type in the wrong clothes."""
    choices = [anything, st.sampled_from(["", "0", "true", "null", "NaN", [], {}, [1], -1, 0, 1e308, 2**63, 2**70])]
    for part in schema.get("anyOf", [schema]):
        if "maximum" in part:
            choices.append(st.sampled_from([part["minimum"] - 1, part["maximum"] + 1, part["maximum"] + 0.5]))
        if "maxLength" in part:
            choices.append(st.sampled_from(["x" * (part["maxLength"] + 1), "\x00", "\ud800", " ", "\u202e" * 50]))
    return st.one_of(choices)


@st.composite
def bodies(draw: st.DrawFn, fields: dict[str, Any]) -> bytes:
    """A JSON text: schema-shaped, or with one to three fields nearly so, unknown, missing, or the text itself cut."""
    chosen = draw(st.sets(st.sampled_from(sorted(fields.keys() - {"prompt"}))))
    body = {name: draw(conforming(fields[name])) for name in sorted(chosen | {"prompt"})}
    wrong = draw(st.integers(0, 3))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=wrong, max_size=wrong)):
        body[name] = draw(near(fields[name]))
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=10))] = draw(anything)
    if draw(st.integers(0, 19)) == 0:
        del body["prompt"]
    # Whatever of it is drawn costs little: sizes and counts that are accepted become small ones.
    for name, cheap in CHEAP.items():
        value = body.get(name, fields[name].get("default"))
        if value is None or type(value) is int:
            accepted = next(part for part in fields[name].get("anyOf", [fields[name]]) if "minimum" in part)
            if value is None or accepted["minimum"] <= value <= accepted["maximum"]:
                body[name] = (
                    cheap if not (name in ("width", "height") and draw(st.integers(0, 4)) == 0) else value or 65
                )
    text = json.dumps(body).encode()
    if draw(st.integers(0, 19)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text


def test_no_body_breaks_the_server(client: httpx.Client, fields: dict[str, Any]) -> None:
    seen: dict[int, int] = {}

    @settings(
        max_examples=BODIES, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(body=bodies(fields))
    def send(body: bytes) -> None:
        answer = client.post(PREDICT, content=body, headers={"Content-Type": "application/json"})
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code in ALLOWED, f"{answer.status_code} {answer.text[:500]} for {body[:500]!r}"
        if answer.status_code == 200 and answer.headers["Content-Type"] == "application/x-ndjson":
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert lines[0]["event"] == "accepted" and lines[-1]["event"] == "done", lines[-1]
        elif answer.status_code == 200:
            assert answer.json()["images"]
        else:
            assert answer.json()["error"] and len(answer.text) < 4_000

    send()
    assert sum(seen.values()) >= BODIES * 0.9
    assert seen[200] > BODIES / 50 and seen[400] > BODIES / 5, f"one-sided bodies prove little: {seen}"
    assert client.get("/v1/models/model").status_code == 200
