"""The public request, parsed by the calls that Truss makes: parse_raw for JSON, parse_obj for msgpack."""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.adapters.changes import scale_of
from model.api.resolve import resolve
from model.denoising.sampler_specs import SPECS
from model.errors import ManifestError, RequestRefused
from model.loading.served import ServedModel, SizeList, SizeRange, read_defaults
from model.pipeline.params import GenerationParams
from model.request_fields import Defaults, GenerationRequest

# Truss calls older functions of pydantic, which warn. The server process does not turn warnings into errors.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

FIELDS = (
    "prompt, negative_prompt, prompt_syntax, image, strength, masks, resize, composite, color_match, loras, controls, "
    "ip_adapters, width, height, num_inference_steps, guidance_scale, guidance_start, guidance_end, end_cfg_frac, "
    "scheduler, forecast, use_refiner, denoising_frac, seed, guidance_rescale, clip_skip, original_size, crop, "
    "target_size, timesteps, sigmas, num_images, upscale, output_format, quality, stream, preview_every, metadata, "
    "model, describe"
)
SIZES = SizeList(((1024, 1024), (832, 1216), (1216, 832)))
SERVED = ServedModel(1024, 1024, SIZES, has_refiner=True, defaults=Defaults())


def load_truss_formatter() -> Callable[[pydantic.ValidationError], str]:
    """Return the function that writes the error of a 400, from the server's files in truss."""
    truss = importlib.util.find_spec("truss")
    assert truss is not None and truss.origin is not None
    path = Path(truss.origin).parent / "templates/server/_truss_common/errors.py"
    spec = importlib.util.spec_from_file_location("truss_errors", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    formatter: Callable[[pydantic.ValidationError], str] = module.format_pydantic_validation_error
    return formatter


format_error = load_truss_formatter()


def problems(body: str) -> list[str]:
    """The lines of Truss's 400 for a body, without its heading. Empty if the body is accepted."""
    try:
        GenerationRequest.parse_raw(body.encode())
    except pydantic.ValidationError as error:
        text = format_error(error)
        text.encode()  # Truss would answer text that cannot be encoded with a 500
        return [line.strip() for line in text.splitlines()[1:]]
    return []


def make_request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": "a cat", **fields})


# -- what is accepted -------------------------------------------------------------------------------------------------


def test_accepts_a_prompt_alone() -> None:
    request = GenerationRequest.parse_raw(b'{"prompt": "a cat", "guidance_scale": 7}')
    assert isinstance(request.guidance_scale, float)
    assert request.model_dump(exclude_none=True) == {
        "prompt": "a cat", "num_images": 1, "output_format": "jpeg", "quality": 95, "stream": False, "metadata": False,
        "preview_every": 5, "describe": False, "resize": "refuse", "composite": False, "color_match": False,
        "upscale": 1, "guidance_scale": 7.0,
    }  # fmt: skip
    assert problems(r'{"prompt": "a\tb\ncd\u0007"}') == []


LOWEST = {
    "prompt": "a", "negative_prompt": "", "prompt_syntax": "plain", "image": "", "strength": 0,
    "masks": [{"image": "", "prompt": "a", "negative_prompt": "", "strength": 0, "feather": 0}], "resize": "refuse",
    "composite": False, "color_match": False, "loras": [],
    "controls": [{"name": "a", "image": "", "preprocess": "none", "scale": 0, "start": 0, "end": 0, "mode": 0}],
    "ip_adapters": [{"name": "a", "images": [""], "scale": 0}], "width": 64, "height": 64, "num_inference_steps": 1,
    "guidance_scale": 0, "guidance_start": 0, "guidance_end": 0, "end_cfg_frac": 0, "scheduler": "E", "forecast": "off",
    "use_refiner": False, "denoising_frac": 0, "seed": 0,
    "guidance_rescale": 0, "clip_skip": 0, "original_size": [1, 1], "crop": [0, 0], "target_size": [1, 1],
    "timesteps": [0], "sigmas": [1, 0],
    "num_images": 1, "upscale": 1, "output_format": "png", "quality": 1, "stream": False, "preview_every": 0,
    "metadata": False, "model": "a", "describe": False,
}  # fmt: skip
HIGHEST = {
    "prompt": "é" * 4000, "negative_prompt": "é" * 4000, "prompt_syntax": "weighted",
    "image": "A" * 4, "strength": 1.0, "masks": 8 * [
        {"image": "A", "prompt": "é" * 4000, "negative_prompt": "é" * 4000, "strength": 1.0, "feather": 256.0}
    ], "resize": "pad", "composite": True, "color_match": True,
    "loras": 8 * [{"name": "a" * 128, "scale": 10.0}], "controls": 4 * [
        {"name": "a" * 64, "image": "A", "preprocess": "canny", "scale": 2.0, "start": 1, "end": 1.0, "mode": 63}
    ], "ip_adapters": 4 * [{"name": "a" * 64, "images": 16 * ["A"], "scale": 2.0}], "width": 4096, "height": 4096,
    "num_inference_steps": 100, "guidance_scale": 30.0, "guidance_start": 1, "guidance_end": 1.0, "end_cfg_frac": 1,
    "scheduler": "E" * 64, "forecast": "fast",
    "use_refiner": True, "denoising_frac": 1.0, "seed": 2**32 - 1,
    "guidance_rescale": 1.0, "clip_skip": 31, "original_size": [16384, 16384], "crop": [16384, 16384],
    "target_size": [16384, 16384], "timesteps": [*range(99, -1, -1)],
    "sigmas": [10_000.0, *map(float, range(99, -1, -1))],
    "num_images": 8, "upscale": 2,
    "output_format": "webp", "quality": 100, "stream": True, "preview_every": 100,
    "metadata": True, "model": "a" * 257, "describe": True,
}  # fmt: skip


@pytest.mark.parametrize("fields", [LOWEST, HIGHEST], ids=["lowest", "highest"])
def test_accepts_the_limits_of_every_field(fields: dict[str, Any]) -> None:
    assert ", ".join(fields) == FIELDS
    assert GenerationRequest.parse_raw(json.dumps(fields)).model_dump() == fields
    assert GenerationRequest.parse_obj(fields).model_dump() == fields


def test_null_is_the_default_of_every_field() -> None:
    entries = {"masks": "image", "loras": "name", "controls": "name, image", "ip_adapters": "name, images"}
    short: dict[str, Any] = {"prompt": "a"}
    for field, required in entries.items():
        short[field] = [{name: HIGHEST[field][0][name] for name in required.split(", ")}]
    full: dict[str, Any] = dict.fromkeys(FIELDS.split(", ")) | short
    for field in entries:
        full[field] = [dict.fromkeys(HIGHEST[field][0]) | short[field][0]]
    assert GenerationRequest.parse_raw(json.dumps(full)) == GenerationRequest.parse_obj(short)
    nothing = dict.fromkeys(FIELDS.split(", ")) | {"prompt": "a"}
    assert GenerationRequest.parse_raw(json.dumps(nothing)) == GenerationRequest.parse_obj({"prompt": "a"})


def test_refuses_null_for_a_required_field() -> None:
    for field in ("masks.0.image", "loras.0.name", "controls.0.image", "ip_adapters.0.images"):
        parent, _, name = field.split(".")
        [line] = problems(json.dumps({"prompt": "a", parent: [HIGHEST[parent][0] | {name: None}]}))
        assert line.startswith(f"`{field}`: got null, expected a ")


# -- what is refused --------------------------------------------------------------------------------------------------


# A field, JSON of its value, and what the refusal says.
REFUSED = [
    ("prompt", '""', 'got "", expected a string of 1 to 4000 characters'),
    ("prompt", "null", "got null, expected a string of 1 to 4000 characters"),
    ("prompt", '" \\n\\u3000"', 'got " \\n\\u3000", nothing but whitespace: describe the image'),
    ("prompt", r'"ab\u0000{c}"', "character 3 is NUL (U+0000), which no text needs: remove it"),
    ("prompt", r'"ab\ud83d"', "character 3 is half of a surrogate pair, which is not Unicode text: send both halves"),
    (
        "prompt", '"' + "x{}é" * 1001 + '"',
        'got "' + "x{}é" * 15 + '… (4004 characters)", expected a string of 1 to 4000 characters',
    ),
    ("negative_prompt", "{}", "got an object, expected a string of 0 to 4000 characters, or null"),
    ("prompt_syntax", '"a1111"', 'got "a1111", expected one of "plain", "weighted"'),
    ("timesteps", "[]", "got a list, expected a list of 1 to 100 entries"),
    ("timesteps", "[5, 7]", "entry 2 is 7 after 5: each must be less than the one before"),
    ("timesteps.0", f"[{10**400}]", "got 1000"),
    ("timesteps.0", "[1.5]", "got 1.5, expected an integer from 0 to 99999"),
    ("sigmas", "[3, 2, 2]", "entry 3 is 2.0 after 2.0: each must be less than the one before"),
    ("sigmas.0", "[NaN, 0]", "got NaN, expected a number from 0 to 10000"),
    ("original_size", "[64]", "got a list, expected a list of 2 to 2 entries"),
    ("crop.0", "[-1, 0]", "got -1, expected an integer from 0 to 16384"),
    ("target_size", "64", "got 64, expected a list of 2 to 2 entries"),
    ("clip_skip", "-1", "got -1, expected an integer from 0 to 31"),
    ("guidance_rescale", "1.5", "got 1.5, expected a number from 0 to 1"),
    ("width", "63", "got 63, expected an integer from 64 to 4096, or null"),
    ("height", "1024.0", "got 1024.0, expected an integer from 64 to 4096, or null"),
    ("num_inference_steps", '"30"', 'got "30", expected an integer from 1 to 100, or null'),
    ("guidance_scale", "1e999", "got Infinity, expected a number from 0 to 30, or null"),
    ("guidance_scale", "true", "got true, expected a number from 0 to 30, or null"),
    ("guidance_scale", "1" + "0" * 400, "got 1" + "0" * 59 + "… (401 characters), expected a number from"),
    ("end_cfg_frac", "-0.1", "got -0.1, expected a number from 0 to 1, or null"),
    ("guidance_start", "1.5", "got 1.5, expected a number from 0 to 1, or null"),
    ("forecast", '"faster"', 'got "faster", expected one of "off", "quality", "fast", or null'),
    ("denoising_frac", "1.1", "got 1.1, expected a number from 0 to 1, or null"),
    ("scheduler", "[1]", "got a list, expected a string of 1 to 64 characters, or null"),
    ("use_refiner", "1", "got 1, expected true or false, or null"),
    ("seed", "-2", "got -2, expected an integer from -1 to 4294967295, or null"),
    ("seed", "-1.0", "got -1.0, expected an integer from -1 to 4294967295, or null"),
    ("num_images", "9", "got 9, expected an integer from 1 to 8"),
    ("output_format", '["png"]', 'got a list, expected one of "png", "jpeg", "webp"'),
    ("quality", "0", "got 0, expected an integer from 1 to 100, or null"),
    ("stream", "1", "got 1, expected true or false"),
    ("preview_every", "101", "got 101, expected an integer from 0 to 100"),
    ("loras.0.scale", '[{"name": "a", "scale": 11}]', "got 11, expected a number from -10 to 10"),
    ("loras.0.name", '[{"name": ""}]', 'got "", expected a string of 1 to 128 characters'),
    ("loras.0.name", '[{"scale": 1}]', "is required"),
    ("loras.0.path", '[{"name": "a", "path": "b"}]', "is not a known field"),
    ("loras", json.dumps([{"name": "a"}] * 9), "got a list, expected a list of 0 to 8 entries"),
    ("promt", "null", "is not a known field; the fields are " + FIELDS),
]  # fmt: skip


def test_refusal_has_field_value_and_what_is_accepted() -> None:
    for field, value, message in REFUSED:
        name = field.partition(".")[0]
        body = f'{{"{name}": {value}}}' if name == "prompt" else f'{{"prompt": "a", "{name}": {value}}}'
        [line] = problems(body)
        assert line.startswith(f"`{field}`: {message}")
        assert line.endswith(".") and not line.endswith("..")
    for body, *lines in (
        ("{}", "`prompt`: is required: a string of 1 to 4000 characters."),
        ("[]", f"`request`: got a list, expected a JSON object with the fields {FIELDS}."),
        (r'{"prompt": "a", "\ud800": 1}', "`request`: the name of a field is not Unicode text (it holds half of a "
         "surrogate pair)."),
    ):  # fmt: skip
        assert problems(body) == lines
    assert [line.split(":")[0] for line in problems('{"width": 1, "seed": -2}')] == ["`prompt`", "`width`", "`seed`"]
    with pytest.raises(pydantic.ValidationError, match="the name of a field is not text"):
        GenerationRequest.model_validate({b"prompt": "x"})  # as a map of MessagePack may have it


def test_refusal_of_many_problems_is_short() -> None:
    body = json.dumps({"prompt": "a" * 100_000, **{"k" * 1000 + str(i): i for i in range(150)}})
    assert len(problems(body)) == 20
    assert sum("the fields are" in line for line in problems(body)) == 1
    assert len("\n".join(problems(body))) < 10_000


MANY_FIELDS = {f"k{number}": 1 for number in range(50_000)}


def test_refuses_an_object_of_very_many_fields() -> None:
    for body, path, fields in (
        (MANY_FIELDS, "request", FIELDS),
        ({"prompt": "a", "loras": [MANY_FIELDS]}, "loras.0", "name, scale"),
        (
            {"prompt": "a", "masks": [{"image": ""}, MANY_FIELDS]},
            "masks.1",
            "image, prompt, negative_prompt, strength, feather",
        ),
    ):
        expected = f"`{path}`: got an object of 50000 fields, expected a JSON object with the fields {fields}."
        assert problems(json.dumps(body)) == [expected]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(FIELDS.split(", ")) | st.text(st.characters(exclude_categories=()), max_size=5)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(names, values, max_size=6) | values)
def test_any_json_is_accepted_or_refused_in_sentences(body: Any) -> None:
    for line in problems(json.dumps(body)):
        assert line.startswith("`") and line.endswith(".") and "Input should" not in line


def test_schema_describes_every_field() -> None:
    schema = GenerationRequest.schema()  # what Truss publishes
    assert ", ".join(schema["properties"]) == FIELDS
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False
    assert all(len(field["description"]) > 20 for field in schema["properties"].values())
    for model in (schema, *schema["$defs"].values()):
        for name, field in model["properties"].items():
            assert ({"type": "null"} in field.get("anyOf", [])) == (name not in model["required"])
    assert "DPM++ 2M SDE Karras" in schema["properties"]["scheduler"]["description"]


# -- defaults of a release --------------------------------------------------------------------------------------------


def test_release_changes_only_the_defaults_it_names() -> None:
    defaults = read_defaults({"num_inference_steps": 4, "guidance_scale": 0, "scheduler": "LCM"})
    assert defaults == Defaults(num_inference_steps=4, guidance_scale=0.0, scheduler="LCM")
    assert (defaults.guidance_end, defaults.denoising_frac, defaults.use_refiner) == (1.0, 0.8, False)


def test_defaults_accept_what_a_request_accepts() -> None:
    asked = GenerationRequest.model_json_schema()["properties"]
    for name, field in Defaults.model_json_schema()["properties"].items():
        accepted = {key: value for key, value in field.items() if key not in ("title", "default")}
        assert asked[name]["anyOf"] == [accepted, {"type": "null"}] and asked[name]["default"] is None


def test_refuses_a_wrong_default_of_a_release() -> None:
    for entries, message in (
        ({"num_inference_steps": 101}, "default for num_inference_steps: got 101, expected an integer from 1 to 100"),
        ({"guidance_scale": math.nan}, "default for guidance_scale: got NaN, expected a number from 0 to 30"),
        ({"steps": 3}, "default for steps: is not a known field"),
        ({"scheduler": "UniPC"}, "default for scheduler: 'UniPC' is not one of"),
        ({"scheduler": "LCM", "num_inference_steps": 51}, "default for num_inference_steps: 51 is too many for LCM"),
        ({"scheduler": "Euler a", "forecast": "fast"}, "default for forecast: Euler a does not offer 'fast'. Set off"),
        (
            {"guidance_start": 0.5, "guidance_end": 0.5},
            "default for guidance_start: guidance would start at 0.5",
        ),
        ({"scheduler": "Heun", "use_refiner": True}, "default for scheduler: Heun cannot be used with the refiner"),
    ):
        with pytest.raises(ManifestError, match=message):
            read_defaults(entries)


# -- resolving --------------------------------------------------------------------------------------------------------


def test_given_values_replace_the_defaults_of_the_release() -> None:
    defaults: dict[str, Any] = {
        "num_inference_steps": 4, "guidance_scale": 0.5, "guidance_end": 0.5, "scheduler": "Euler a",
        "use_refiner": True, "denoising_frac": 0.7,
    }  # fmt: skip
    served = ServedModel(1216, 832, SIZES, has_refiner=True, defaults=read_defaults(defaults))
    expected = defaults | {"prompt": "a cat", "negative_prompt": None, "width": 1216, "height": 832, "seed": 7}
    expected |= {"num_images": 1, "output_format": "jpeg", "quality": 95}
    assert resolve(make_request(seed=7), served) == GenerationParams(**expected)
    given: dict[str, Any] = {
        "prompt": "a dog", "negative_prompt": "", "width": 832, "height": 1216, "num_inference_steps": 1,
        "guidance_scale": 0.0, "guidance_start": 0.0, "guidance_end": 0.0, "scheduler": "DDIM", "use_refiner": False,
        "denoising_frac": 0.0, "seed": 0, "forecast": "quality", "num_images": 2, "output_format": "png", "quality": 1,
    }  # fmt: skip
    assert resolve(GenerationRequest(**given), served) == GenerationParams(**given)
    wide, tall = resolve(make_request(width=832, height=1216), served), resolve(make_request(height=832), served)
    assert ((wide.width, wide.height), (tall.width, tall.height)) == ((832, 1216), (1216, 832))


def test_end_cfg_frac_is_the_older_name_of_guidance_end() -> None:
    assert read_defaults({"end_cfg_frac": 0.4}) == Defaults(guidance_end=0.4)
    for fields in ({"end_cfg_frac": 0.4}, {"end_cfg_frac": 0.4, "guidance_end": 0.4}):
        assert resolve(make_request(**fields), SERVED).guidance_end == 0.4
    with pytest.raises(RequestRefused, match="end_cfg_frac: is the older name of `guidance_end`. Leave one of the two"):
        resolve(make_request(end_cfg_frac=0.4, guidance_end=0.5), SERVED)


def test_guidance_begins_before_it_ends() -> None:
    served = dataclasses.replace(SERVED, defaults=Defaults(guidance_end=0.5))
    for accepted in ({"guidance_start": 0.4}, {"guidance_end": 0}, {"guidance_start": 0.5, "guidance_end": 0.6}):
        resolve(make_request(**accepted), served)
    with pytest.raises(RequestRefused, match="guidance_start: guidance would start at 0.5 of the steps and end at 0.5"):
        resolve(make_request(guidance_start=0.5), served)
    resolve(make_request(guidance_start=0.5, guidance_scale=1.0), served)
    served = dataclasses.replace(SERVED, defaults=Defaults(guidance_start=0.3))
    resolve(make_request(end_cfg_frac=0), served)
    with pytest.raises(RequestRefused, match="guidance_end: guidance would start at 0.3 of the steps and end at 0.2"):
        resolve(make_request(end_cfg_frac=0.2), served)


def test_refuses_forecasts_that_the_sampler_does_not_offer() -> None:
    """Only if the request asks for them. What a release's default cannot follow is a warning."""
    served = dataclasses.replace(SERVED, defaults=Defaults(forecast="fast"))
    for spec in SPECS.values():
        assert resolve(make_request(scheduler=spec.name, forecast="off"), served).forecast == "off"
        params = resolve(make_request(scheduler=spec.name, metadata=True), served)
        assert params.forecast == "fast" and params.metadata is not None
        again = resolve(GenerationRequest.model_validate(params.metadata["request"]), served)
        assert again.used_forecast == params.used_forecast
        for level in ("quality", "fast"):
            if level in spec.forecasts:
                assert resolve(make_request(scheduler=spec.name, forecast=level), served).forecast == level
                continue
            with pytest.raises(RequestRefused, match=f"forecast: {re.escape(spec.name)} does not offer '{level}'. Set"):
                resolve(make_request(scheduler=spec.name, forecast=level), served)
    assert not any(spec.forecasts for spec in SPECS.values() if spec.order > 1 or spec.distilled or spec.draws_noise)


def test_seed_is_random_in_all_bits() -> None:
    for fields in ({}, {"seed": None}, {"seed": -1}):
        seeds = [resolve(make_request(**fields), SERVED).seed for _ in range(100)]
        assert len(set(seeds)) > 90
        for bit in range(32):
            assert {seed >> bit & 1 for seed in seeds} == {0, 1}
        assert all(0 <= seed < 2**32 for seed in seeds)
    params = resolve(make_request(seed=-1, metadata=True, num_images=2), SERVED)
    assert params.metadata is not None and params.metadata["request"]["seed"] == params.seeds[0] == params.seed


def test_refuses_a_size_that_is_not_served() -> None:
    in_range = ServedModel(256, 256, SizeRange(128, 512, 8), has_refiner=False, defaults=Defaults())
    listed = "{0[0]}x{0[1]} is not a size served here; the sizes (width x height) are 832x1216, 1024x1024, 1216x832."
    ranged = "is not served here; give a multiple of 8 from 128 to 512."
    for served, size, field, message in (
        (SERVED, (1000, 1000), "width", listed),
        (SERVED, (1024, 1000), "height", listed),
        (SERVED, (832, 832), "height", listed),
        (in_range, (64, 256), "width", f"64 {ranged}"),
        (in_range, (256, 520), "height", f"520 {ranged}"),
        (in_range, (258, 256), "width", f"258 {ranged}"),
    ):
        with pytest.raises(RequestRefused) as refusal:
            resolve(make_request(width=size[0], height=size[1]), served)
        assert refusal.value.field == field and str(refusal.value) == f"{field}: {message.format(size)}"
    for edge in (128, 512):
        assert resolve(make_request(width=edge, height=edge), in_range).width == edge


def test_resolves_conditioning() -> None:
    served = dataclasses.replace(SERVED, max_clip_skip=11)
    params = resolve(
        make_request(
            original_size=[512, 256], crop=[8, 16], target_size=[1024, 768], clip_skip=11, guidance_rescale=0.7,
            timesteps=[900, 500, 3],
        ),
        served,
    )  # fmt: skip
    assert (params.original_size, params.crop, params.target_size) == ((512, 256), (8, 16), (1024, 768))
    assert (params.clip_skip, params.guidance_rescale) == (11, 0.7)
    assert (params.timesteps, params.sigmas, params.num_inference_steps) == ((900, 500, 3), None, 3)
    assert resolve(make_request(sigmas=[9.0, 2.0, 0.0]), served).num_inference_steps == 2
    rescaling = dataclasses.replace(SERVED, defaults=Defaults(guidance_rescale=0.5))
    assert resolve(make_request(), rescaling).guidance_rescale == 0.5
    assert resolve(make_request(guidance_rescale=0), rescaling).guidance_rescale == 0.0
    skipping = dataclasses.replace(served, defaults=Defaults(clip_skip=1))
    assert [resolve(make_request(clip_skip=n), skipping).clip_skip for n in (None, 0, 2)] == [1, 0, 2]


BLOCKS = {"down.block_0": 2, "down.block_1": 2, "up.block_0": 3}


def test_resolves_scales_by_block() -> None:
    served = dataclasses.replace(SERVED, loras=("a", "b"), unet_blocks=BLOCKS)
    scales = {"text_encoder": 0.5, "unet": {"up": {"block_0": [1, 2, 3]}, "mid": 0, "down": -1}}
    request = make_request(loras=[{"name": "b", "scale": scales}, {"name": "a", "scale": 0}])
    [(name, scale)] = resolve(request, served).loras
    numbers = {
        "unet.down_blocks.1.attentions.0.proj_in": -1, "unet.mid_block.resnets.0.conv1": 0, "unet.conv_in": 1,
        "unet.up_blocks.0.attentions.2.proj_in": 3, "unet.up_blocks.0.resnets.1.conv1": 2,
        "unet.up_blocks.0.upsamplers.0.conv": 1, "unet.up_blocks.1.resnets.0.conv1": 1,
        "text_encoder.text_model.encoder.layers.0.mlp.fc1": 0.5, "text_encoder_2.text_projection": 1,
    }  # fmt: skip
    assert name == "b" and {layer: scale_of(scale, layer) for layer in numbers} == numbers
    assert resolve(make_request(loras=[{"name": "a", "scale": None}]), served).loras == (("a", 1.0),)


@pytest.mark.parametrize("scale, message", [
    ("0.5", 'got "0.5", expected a number from -10 to 10, or scales by block'),
    (True, "got true, expected a number from -10 to 10, or scales by block"),
    ({}, "the scale is empty: name some of unet, text_encoder, text_encoder_2"),
    ({"vae": 1}, "vae is unknown: name some of unet, text_encoder, text_encoder_2"),
    ({"unet": {}}, "unet is empty: name some of down, mid, up"),
    ({"unet": {"left": 1}}, "unet.left is unknown: name some of down, mid, up"),
    ({"unet": 11}, "unet expects a number from -10 to 10, or scales by block"),
    ({"text_encoder": {"up": 1}}, "text_encoder expects a number from -10 to 10"),
    ({"unet": {"mid": [1]}}, "unet.mid expects a number from -10 to 10"),
    ({"unet": {"up": {"0": 1}}}, "unet.up has no block '0': name one of block_0, block_1 and so on"),
    ({"unet": {"down": {}}}, "unet.down is empty: name a block, or leave it out"),
    ({"unet": 10**400}, "unet expects a number from -10 to 10, or scales by block"),
    (10**400, "got 1000"),
    ({"unet": {"up": {"block_0": []}}}, "unet.up.block_0 expects a number from -10 to 10, or a list of such numbers"),
    ({"unet": {"up": {"block_0": [1, "x"]}}}, "unet.up.block_0 expects a number from -10 to 10, or a list of such"),
    ({"unet": {"up": {"block_3": 1}}}, "unet.up has no block 'block_3': name one of block_0."),
    ({"unet": {"up": {"block_0": [1, 2]}}}, "unet.up.block_0 has 2 numbers, and the block has 3 layers."),
])  # fmt: skip
def test_refuses_scales_by_name(scale: Any, message: str) -> None:
    body = {"prompt": "a", "loras": [{"name": "a", "scale": scale}]}
    if lines := problems(json.dumps(body)):
        assert lines[0].startswith(f"`loras.0.scale`: {message}") and len(lines) == 1
        return
    with pytest.raises(RequestRefused) as refused:
        resolve(GenerationRequest(**body), dataclasses.replace(SERVED, loras=("a",), unet_blocks=BLOCKS))
    assert str(refused.value) == f"loras.0.scale: {message}"


def test_refuses_conditioning_by_name() -> None:
    of_sdxl = dataclasses.replace(SERVED, max_clip_skip=11)
    without_sizes = dataclasses.replace(SERVED, takes_sizes=False)
    without_refiner = dataclasses.replace(SERVED, has_refiner=False)
    contradiction = "3 contradicts `timesteps`, which has 2 entries for 2 steps. Set 2, or leave it out."
    for served, fields, message in (
        (of_sdxl, {"clip_skip": 12}, "clip_skip: 12 is more than the layers of this release's text encoders. Set 0"),
        (SERVED, {"clip_skip": 1}, "clip_skip: were built without it. Build the model again"),
        (SERVED, {"timesteps": [5, 1], "sigmas": [5.0, 0.0]}, "sigmas: cannot be used together with `timesteps`."),
        (SERVED, {"timesteps": [5, 1], "num_inference_steps": 3}, f"num_inference_steps: {contradiction}"),
        (SERVED, {"sigmas": [5.0, 1.0], "num_inference_steps": 2}, "num_inference_steps: 2 contradicts `sigmas`"),
        (SERVED, {"timesteps": [5], "scheduler": "DDIM"}, "timesteps: DDIM takes none. Set scheduler to one of Euler"),
        (SERVED, {"sigmas": [5.0, 0.0], "scheduler": "Heun"}, "sigmas: Heun takes none. Set scheduler to one of Euler"),
        (SERVED, {"timesteps": [*range(60, 0, -1)], "scheduler": "Heun"}, "num_inference_steps: 60 is too many for"),
        (SERVED, {"scheduler": "LCM", "num_inference_steps": 51}, "num_inference_steps: 51 is too many for LCM. Set 1"),
        (SERVED, {"use_refiner": True, "scheduler": "Heun"}, "scheduler: Heun cannot be used with the refiner."),
        (SERVED, {"scheduler": "UniPC"}, "scheduler: 'UniPC' is not one of Euler"),
        (without_sizes, {"original_size": [64, 64]}, "original_size: is not conditioned on sizes"),
        (without_sizes, {"crop": [64, 64]}, "crop: is not conditioned on sizes"),
        (without_sizes, {"target_size": [64, 64]}, "target_size: is not conditioned on sizes"),
        (without_refiner, {"use_refiner": True}, "use_refiner: true is not accepted, because this release"),
    ):
        field, _, reason = message.partition(": ")
        with pytest.raises(RequestRefused, match=re.escape(reason)) as refusal:
            resolve(make_request(**fields), served)
        assert refusal.value.field == field and str(refusal.value).startswith(f"{field}: ")
    for fields in ({"clip_skip": 0}, {"scheduler": "LCMScheduler", "num_inference_steps": 50}):
        resolve(make_request(**fields), SERVED)


WITH_ADAPTERS = dataclasses.replace(SERVED, loras=("style", "figure"))


def test_adapters_are_in_the_order_of_names() -> None:
    loras = [{"name": "style"}, {"name": "figure", "scale": -0.5}]
    assert resolve(make_request(loras=loras), WITH_ADAPTERS).loras == (("figure", -0.5), ("style", 1.0))
    assert resolve(make_request(loras=loras[::-1]), WITH_ADAPTERS).loras == (("figure", -0.5), ("style", 1.0))
    assert resolve(make_request(loras=[{"name": "style", "scale": 0}]), WITH_ADAPTERS).loras == ()
    assert resolve(make_request(loras=None), WITH_ADAPTERS).loras == ()


def test_refuses_adapters() -> None:
    for fields, served, field, message in (
        ({"loras": [{"name": "x"}]}, WITH_ADAPTERS, "loras.0.name", 'got "x", expected one of style, figure'),
        ({"loras": [{"name": "x"}]}, SERVED, "loras.0.name", "this deployment offers none"),
        ({"loras": [{"name": "style"}] * 2}, WITH_ADAPTERS, "loras.1.name", '"style" is named twice'),
        ({"loras": [{"name": "style"}], "use_refiner": True}, WITH_ADAPTERS, "use_refiner", "only the base model"),
    ):
        with pytest.raises(RequestRefused, match=message) as refused:
            resolve(make_request(**fields), served)
        assert refused.value.field == field
