"""Request bodies generated from the published schema, valid and almost valid: each gets images or a clear refusal.

PREHEAT_FUZZ_BODIES is their number: 100 by default, 5,000 in `make test-load`. Accepted sizes and counts are small.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from preheat.local_server.server import Server
from tests.support.images import file_of
from tests.support.predictions import PREDICT_PATH

BODIES = int(os.environ.get("PREHEAT_FUZZ_BODIES", "100"))
TIMEOUT_SECONDS = 60  # enough for any machine: a slower answer means that the server hangs
SMALL_VALUES = {"width": 64, "height": 64, "num_inference_steps": 2, "num_images": 1}
EXPECTED_STATUSES = {200, 400, 429}
PHOTO, MASK = file_of(np.full((64, 64, 3), 90, np.uint8)), file_of(np.eye(64, dtype=np.uint8) * 255)
IMAGES = [PHOTO, MASK, "", "AAAA"]
NEED_IMAGE = {"strength", "masks", "resize", "composite", "color_match"}

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def properties(client: httpx.Client) -> dict[str, Any]:
    """The properties of the published schema of a request, with the definitions that they refer to."""
    schema = client.get("/v1/models/model/schema").json()["input_schema"]
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    properties: dict[str, Any] = with_definitions(schema["properties"], schema["$defs"])
    return properties


def with_definitions(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with each reference replaced by its definition."""
    if isinstance(schema, list):
        return [with_definitions(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return with_definitions(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {key: with_definitions(part, definitions) for key, part in schema.items()}


def valid_values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a property's schema accepts."""
    if "anyOf" in schema:
        return st.one_of([valid_values(choice) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "string" if "maxLength" not in schema:
            return st.sampled_from(IMAGES)
        case "array":
            return st.lists(valid_values(schema["items"]), min_size=schema.get("minItems", 0), max_size=2)
        case "object" if "properties" not in schema:
            return st.dictionaries(st.text(max_size=8), any_json, max_size=3)
        case "object":
            optional = {name: valid_values(part) for name, part in schema["properties"].items()}
            required = {name: optional.pop(name) for name in schema["required"]}
            return st.fixed_dictionaries(required, optional=optional)
        case "string":
            max_size = min(schema["maxLength"], 200)
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=max_size)
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            return st.floats(schema["minimum"], schema["maximum"]) | st.integers(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    raise AssertionError(f"no strategy for this schema: {schema}")


def invalid_values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values just outside the limits, of another type, or with unusual characters."""
    choices = [any_json, st.sampled_from(["", "0", "true", "null", "NaN", [], {}, [1], -1, 0, 1e308, 2**63, 2**70])]
    for part in schema.get("anyOf", [schema]):
        if part.get("type") == "array":
            choices.append(st.lists(any_json, max_size=10))
        if "maximum" in part:
            choices.append(st.sampled_from([part["minimum"] - 1, part["maximum"] + 1, part["maximum"] + 0.5]))
        if "maxLength" in part:
            choices.append(st.sampled_from(["x" * (part["maxLength"] + 1), "\x00", "\ud800", " ", "\u202e" * 50]))
    return st.one_of(choices)


def make_guidance_and_sampler_valid(body: dict[str, Any]) -> None:
    """Make the fields about guidance and the sampler fit together: each pair of them seldom does."""
    for name in ("end_cfg_frac", "guidance_start", "scheduler"):
        body.pop(name, None)


def make_images_valid(body: dict[str, Any]) -> None:
    """Make the fields about images fit together, as far as other fields allow it.

    The release has no ControlNets and no IP-Adapters, and the deployment offers no adapters.
    """
    for name in ("controls", "ip_adapters", "loras"):
        body.pop(name, None)
    if body.get("image") is None:
        for name in NEED_IMAGE & body.keys():
            del body[name]
        return
    body["image"] = PHOTO
    body["strength"] = 0.9  # of two steps, a smaller share may leave none
    for mask in body.get("masks") or ():
        mask["image"], mask["strength"] = MASK, None
    if not body.get("masks"):
        body["composite"] = body["color_match"] = False


@st.composite
def bodies(draw: st.DrawFn, properties: dict[str, Any]) -> bytes:
    """Generate a JSON body of valid values, up to three of them replaced by others, often invalid.

    Some bodies have an unknown field, lack the prompt, or are truncated.
    """
    names = draw(st.sets(st.sampled_from(sorted(properties.keys() - {"prompt"}))))
    body = {name: draw(valid_values(properties[name])) for name in sorted(names | {"prompt"})}
    if draw(st.integers(0, 3)):
        make_images_valid(body)
    if draw(st.integers(0, 3)):
        make_guidance_and_sampler_valid(body)
    invalid_count = draw(st.integers(0, 3))
    for name in draw(st.lists(st.sampled_from(sorted(properties)), min_size=invalid_count, max_size=invalid_count)):
        body[name] = draw(invalid_values(properties[name]))
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=10))] = draw(any_json)
    if draw(st.integers(0, 19)) == 0:
        del body["prompt"]
    # Replace sizes and counts that the server may accept by small ones, so that each image takes little time. One side
    # in five is kept. If it is missing or null, which means the native size, it becomes 65, which no server serves.
    for name, small in SMALL_VALUES.items():
        value = body.get(name, properties[name].get("default"))
        if value is None or type(value) is int:
            limits = next(part for part in properties[name].get("anyOf", [properties[name]]) if "minimum" in part)
            if value is None or limits["minimum"] <= value <= limits["maximum"]:
                allows_any_side = name in ("width", "height") and draw(st.integers(0, 4)) == 0
                body[name] = (value or 65) if allows_any_side else small
    text = json.dumps(body).encode()
    if draw(st.integers(0, 19)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text


def test_no_body_breaks_the_server(client: httpx.Client, properties: dict[str, Any]) -> None:
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=BODIES, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(body=bodies(properties))
    def send(body: bytes) -> None:
        answer = client.post(PREDICT_PATH, content=body, headers={"Content-Type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code in EXPECTED_STATUSES, f"{answer.status_code} {answer.text[:500]} for {body[:500]!r}"
        if answer.status_code == 200 and answer.headers["Content-Type"] == "application/x-ndjson":
            events = [json.loads(line) for line in answer.text.splitlines()]
            assert events[0]["event"] == "accepted" and events[-1]["event"] == "done", events[-1]
        elif answer.status_code == 200:
            described = json.loads(body).get("describe") is True
            assert answer.json()["release" if described else "images"]
        else:
            assert answer.json()["error"] and len(answer.text) < 4_000

    send()
    assert statuses.total() >= BODIES * 0.9
    assert statuses[200] > BODIES / 50 and statuses[400] > BODIES / 5, f"too few of one kind: {statuses}"
    assert client.get("/v1/models/model").status_code == 200
