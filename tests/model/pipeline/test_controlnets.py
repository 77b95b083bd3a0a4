"""Images with ControlNets are those of diffusers' pipelines, at most 2 of 255 apart, alone and in every batch."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine_builder.adapters.add import add_adapter
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.denoising.graph_loop import GraphLoop
from model.denoising.sampler_names import SAMPLERS
from model.images.encode import Pixels
from model.loading.adapters import ServedAdapters
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.pipeline.params import Control, GenerationParams, Mask
from model.pipeline.spec import UNET, UNET_CONTROLLED
from model.pipeline.text_to_image import generate
from tests.support.adapters import PACKABLE, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.control_reference import ControlReference
from tests.support.images import file_of, largest_difference, pixels
from tests.support.in_process import serve_in_process
from tests.support.predictions import post, predict
from tests.support.static_tokens import with_static_tokens

TOLERANCE = 2  # of 255: float32 rounding, in another order
CASES = 12
SIDE = 64


@pytest.fixture(scope="module", autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers logs a line for each scheduler setting that another sampler does not have."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def toy(control_store: WritableStore) -> Loaded:
    return load_release(control_store, "control/1", detect_targets(), [], ColdStart())


@pytest.fixture(scope="module")
def reference(toy_folder: Path, controlnet_folders: dict[str, Path]) -> ControlReference:
    return ControlReference(toy_folder, controlnet_folders)


@pytest.fixture(scope="module")
def client(toy: Loaded) -> Iterator[httpx.Client]:
    with serve_in_process(toy) as client:
        yield client


def picture(seed: int) -> Pixels:
    """Return a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return blocks.repeat(SIDE // 8, axis=0).repeat(SIDE // 8, axis=1)


def control(name: str, seed: int = 1, scale: float = 1.0, start: float = 0.0, end: float = 1.0) -> Control:
    return Control(name, picture(seed), scale, start, end, mode=1 if name == "union" else None)


def params_of(toy: Loaded, *controls: Control, **fields: object) -> GenerationParams:
    request = {"prompt": "a large red circle", "seed": 7, "width": SIDE, "height": SIDE, "num_inference_steps": 8}
    params = resolve(GenerationRequest.model_validate(request | fields), toy.served)
    return replace(params, controls=controls)


def box(left: int, top: int, right: int, bottom: int, **settings: object) -> Mask:
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[top:bottom, left:right] = 255
    defaults: dict[str, object] = {"prompt": "a green triangle", "negative_prompt": None, "strength": 0.9999}
    return Mask(levels, **defaults | settings)  # type: ignore[arg-type]


def request_of(params: GenerationParams) -> dict[str, Any]:
    """Return the JSON of a request that resolves to these parameters, for a PNG."""
    fields = (
        "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "end_cfg_frac", "scheduler", "seed",
        "num_images", "width", "height",
    )  # fmt: skip
    request: dict[str, Any] = {name: getattr(params, name) for name in fields} | {"output_format": "png"}
    own = ("name", "scale", "start", "end", "mode")
    request["controls"] = [
        {"image": file_of(one.levels)} | {name: getattr(one, name) for name in own} for one in params.controls
    ] or None
    if params.image is not None:
        request |= {"image": file_of(params.image), "strength": params.strength}
        own = ("prompt", "negative_prompt", "strength")
        request["masks"] = [
            {"image": file_of(mask.levels)} | {name: getattr(mask, name) for name in own} for mask in params.masks
        ] or None
    return request


def random_settings(number: int, toy: Loaded) -> GenerationParams:
    """Return a request of each kind in turn, with one or two ControlNets."""
    choose = random.Random(number)
    names = choose.choice([["edges"], ["depth", "edges"], ["small"], ["small", "edges"], ["union"]])
    controls = []
    for name in names:
        start, end = sorted(choose.sample([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0], 2))
        window = choose.choice([(0.0, 1.0), (start, end)])
        controls.append(control(name, choose.randrange(100), round(choose.uniform(0.3, 1.5), 2), *window))
    sampler = SAMPLERS[number % len(SAMPLERS)]
    params = params_of(
        toy,
        *controls,
        negative_prompt=choose.choice([None, "", "a blue square"]),
        scheduler=sampler,
        num_inference_steps=choose.randint(4, 14),
        # LCM adds new noise at every step; see test_pipeline_parity.
        guidance_scale=choose.choice([1.0, 2.0] if sampler == "LCM" else [1.0, 3.0, 7.5]),
        seed=choose.randrange(2**32),
    )
    if number % 3:
        params = replace(params, image=picture(100 + number), strength=choose.uniform(0.4, 1.0))
    if number % 3 == 2:
        own = {"strength": choose.choice([0.6, 0.9999, 1.0]), "negative_prompt": params.negative_prompt}
        params = replace(params, masks=(box(8, 16, 48, 56, **own),))
    return params


@pytest.mark.parametrize("number", range(CASES))
def test_images_are_those_of_diffusers(
    number: int, client: httpx.Client, toy: Loaded, reference: ControlReference
) -> None:
    params = random_settings(number, toy)
    image = pixels(predict(client, **request_of(params))["data"])
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE


def test_chains_masks_with_a_control(client: httpx.Client, toy: Loaded, reference: ControlReference) -> None:
    masks = (box(0, 0, 40, 40), box(24, 24, 64, 64, prompt="a red circle", strength=0.7))
    params = replace(params_of(toy, control("edges")), image=picture(5), masks=masks)
    image = pixels(predict(client, **request_of(params))["data"])
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE


@pytest.mark.parametrize("in_graphs", [False, True])
def test_requests_with_and_without_control_share_a_batch(
    in_graphs: bool, toy: Loaded, reference: ControlReference
) -> None:
    model = replace(toy.model, loops={})
    if in_graphs:
        model.loops[UNET, SIDE, SIDE] = GraphLoop(
            with_static_tokens(model.step_networks(UNET, SIDE, SIDE)), SIDE, SIDE, model.device
        )
    batch = [
        params_of(toy, seed=3),
        params_of(toy, control("edges", end=0.5), scheduler="Euler a", num_images=2),
        params_of(toy, control("edges", 2), control("small", 3, scale=0.5), guidance_scale=1.0),
        params_of(toy, control("union", start=0.5), negative_prompt="blue", num_inference_steps=5),
        replace(params_of(toy, control("depth", scale=0.8)), image=picture(4), masks=(box(0, 0, 32, 32),)),
    ]
    together = iter(generate(model, batch)[0])
    for params in batch:
        for seed in params.seeds:
            single = replace(params, seed=seed, num_images=1)
            [alone], *_ = generate(toy.model, [single])
            image = next(together)
            assert largest_difference(image, alone) <= 1
            assert largest_difference(image, reference.generate(single)) <= TOLERANCE


@pytest.mark.parametrize("in_graphs", [False, True])
def test_controls_read_prompts_of_several_chunks(in_graphs: bool, toy: Loaded, reference: ControlReference) -> None:
    """Two equal chunks give the image of one of them. In a batch with a shorter prompt, too."""
    model = replace(toy.model, loops={})
    if in_graphs:
        networks = with_static_tokens(model.step_networks(UNET, SIDE, SIDE), 154)
        model.loops[UNET, SIDE, SIDE] = GraphLoop(networks, SIDE, SIDE, model.device)
    words = "red circle " * 37 + "red "  # 75 tokens
    one_chunk = params_of(toy, control("edges"), prompt=words)
    two_chunks = replace(one_chunk, prompt=words * 2, prompt_syntax="weighted")
    short = params_of(toy, control("edges", 2), seed=3)
    images, _, warnings = generate(model, [two_chunks, short])
    assert not warnings
    for image, params in zip(images, (one_chunk, short), strict=True):
        assert largest_difference(image, reference.generate(params)) <= TOLERANCE


def test_each_setting_of_a_control_changes_the_image(toy: Loaded) -> None:
    """So the comparisons above can fail."""
    params = params_of(toy, control("edges"))
    changed = [
        (),
        (control("depth"),),
        (control("small"),),
        (control("union"),),
        (replace(control("union"), mode=2),),
        (control("edges", 2),),
        (control("edges", scale=0.5),),
        (control("edges", start=0.5),),
        (control("edges", end=0.5),),
        (control("edges"), control("depth")),
    ]
    images = [
        generate(toy.model, [replace(params, controls=controls)])[0][0] for controls in (params.controls, *changed)
    ]
    differences = {
        (one, other): largest_difference(images[one], images[other])
        for one in range(len(images))
        for other in range(one)
    }
    assert min(differences.values()) > TOLERANCE, differences


def test_warns_of_a_control_that_no_step_uses(client: httpx.Client, toy: Loaded) -> None:
    params = params_of(toy, control("edges", start=0.9, end=0.95))
    body = predict(client, **request_of(params))
    assert body["warnings"] == ["controls.0: no step of 8 lies between start 0.9 and end 0.95; edges was not used."]
    plain = predict(client, **request_of(replace(params, controls=())))
    assert largest_difference(pixels(body["data"]), pixels(plain["data"])) <= 1


def test_canny_replaces_the_control_image(client: httpx.Client, toy: Loaded) -> None:
    from model.images.canny import canny

    edges = canny(picture(1))
    request = request_of(params_of(toy, control("edges")))
    request["controls"][0]["preprocess"] = "canny"
    image = pixels(predict(client, **request)["data"])
    expected = replace(params_of(toy), controls=(replace(control("edges"), levels=edges),))
    assert largest_difference(image, generate(toy.model, [expected])[0][0]) <= TOLERANCE
    assert 0 < edges.mean() < 255


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another name": ({"name": "pose"}, 'controls.0.name: "pose" is not a ControlNet of release control/1. It has'),
    "no file": ({"image": "AAAA"}, "controls.0.image: the file"),
    "another size": ({"image": file_of(np.zeros((32, 32, 3), np.uint8))}, "controls.0.image: the image has 32 x 32"),
    "scale": ({"scale": 2.5}, "`controls.0.scale`: got 2.5, expected a number from 0 to 2"),
    "window": ({"start": 0.5, "end": 0.5}, "controls.0.start: 0.5 is not less than end, 0.5."),
    "mode of another network": ({"mode": 0}, "controls.0.mode: 0 is not accepted, because edges is not a Union"),
    "no mode": ({"name": "union"}, "controls.0.mode: is missing; union is a Union network: give 0 to 2."),
    "unknown mode": ({"name": "union", "mode": 3}, "controls.0.mode: 3 is not accepted; union is a Union network"),
    "preprocess": ({"preprocess": "depth"}, '`controls.0.preprocess`: got "depth", expected one of'),
    "unknown field": ({"guess_mode": True}, "`controls.0.guess_mode`: is not a known field"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_a_control_before_it_costs_anything(case: str, client: httpx.Client, toy: Loaded) -> None:
    request = request_of(params_of(toy, control("edges")))
    del request["controls"][0]["mode"]
    fields, message = REFUSED[case]
    request["controls"][0] |= fields
    response = post(client, **request)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"], response.text


def test_refuses_a_control_that_is_named_twice(client: httpx.Client, toy: Loaded) -> None:
    response = post(client, **request_of(params_of(toy, control("edges"), control("edges", 2))))
    assert response.status_code == 400
    assert 'controls.1.name: "edges" is named twice. Name each once.' in response.json()["error"]


def test_refuses_controls_without_a_controlnet_in_the_release(toy: Loaded) -> None:
    from model.errors import RequestRefused

    request = GenerationRequest.model_validate(request_of(params_of(toy, control("edges"))))
    with pytest.raises(RequestRefused, match="preheat build --controlnet"):
        resolve(request, replace(toy.served, controlnets={}))


def test_resizes_a_control_image(client: httpx.Client, toy: Loaded) -> None:
    large = picture(1).repeat(2, axis=0).repeat(2, axis=1)
    request = request_of(params_of(toy, control("edges"))) | {"resize": "stretch"}
    request["controls"][0]["image"] = file_of(large)
    assert predict(client, **request)["status"] == "success"


def test_adapters_change_the_controlled_unet_too(
    toy_folder: Path, controlnet_folders: dict[str, Path], control_store: WritableStore, tmp_path: Path
) -> None:
    """They are merged, because no UNet takes both adapters and the outputs of ControlNets as inputs."""
    deltas = random_deltas(module_shapes(toy_folder), PACKABLE, 4, 0, 0.25)
    file = write_adapter(tmp_path / "style.safetensors", deltas, "peft")
    store = open_writable_store(copy_store(control_store, tmp_path / "store"))
    add_adapter(store, "style", file)
    adapters = ServedAdapters(("style",))
    adapted = load_release(store, "control/1", detect_targets(), [], ColdStart(), adapters=adapters)
    reference = ControlReference(toy_folder, {"edges": controlnet_folders["edges"]})
    reference.load_lora("style", file)
    controlled = params_of(adapted, control("edges"))
    changed = replace(controlled, loras=(("style", 0.8),))
    images = [generate(adapted.model, [params])[0][0] for params in (controlled, changed, controlled)]
    assert largest_difference(images[1], reference.generate(changed)) <= TOLERANCE
    assert largest_difference(images[0], reference.generate(controlled)) <= TOLERANCE
    assert np.array_equal(images[2], images[0])
    assert largest_difference(images[1], images[0]) > TOLERANCE


def test_a_release_has_the_weights_of_the_unet_once(control_store: WritableStore) -> None:
    manifest = control_store.read_release("control/1")
    identities = {record.component: record.identity for record in manifest.weights}
    assert identities[UNET] == identities[UNET_CONTROLLED]
    keys = {engine.component: engine.key for engine in manifest.engines}
    assert keys["controlnet.edges"] == keys["controlnet.depth"]  # one architecture, compiled once
    assert identities["controlnet.edges"] != identities["controlnet.depth"]


def test_warm_up_runs_every_controlnet(control_store: WritableStore) -> None:
    loaded = load_release(control_store, "control/1", detect_targets(), [], ColdStart())
    ran = []
    for name, engine_set in loaded.model.engines.items():
        [engine] = engine_set.engines
        engine_set.engines = [_Spy(engine, lambda name=name: ran.append(name))]  # type: ignore[misc]
    warm_up(loaded)
    assert {*ran} == {*loaded.model.engines}


class _Spy:
    def __init__(self, engine: Any, called: Callable[[], None]) -> None:
        self._engine, self._called = engine, called

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, inputs: Any) -> Any:
        self._called()
        return self._engine.run(inputs)
