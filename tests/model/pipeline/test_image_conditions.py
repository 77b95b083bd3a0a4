"""Images with ControlNets and IP-Adapters equal diffusers' pipelines, alone and in every batch."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engine_builder.adapters.add import add_adapter
from engine_builder.checkpoints.folder import Checkpoint, IpAdapterFiles
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.describe import describe
from model.api.resolve import resolve
from model.denoising.sampler_specs import SAMPLERS
from model.deployment import ServedAdapters
from model.engines.engine import EngineSet
from model.errors import RequestRefused
from model.images.canny import canny
from model.loading.load import Loaded
from model.loading.select import select
from model.loading.served import ServedModel, SizeList, served_model
from model.loading.target import Target, detect_targets
from model.loading.warmup import warm_up
from model.pipeline.params import Control, GenerationParams, ImagePrompt
from model.pipeline.spec import CONTROLLED_UNET, IP_UNET, UNET
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.settings import ServedBucket
from model.store.manifest import Bucket, Manifest, Span
from tests.support import ip_adapters, parity
from tests.support.adapters import PACKABLE, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed
from tests.support.images import file_of, largest_difference, pixels
from tests.support.in_process import serve_in_process
from tests.support.parity import TOLERANCE, box, check_images, image_of, load, params_of, picture, request_of
from tests.support.predictions import post, predict
from tests.support.reference import Reference
from tests.support.static_tokens import with_graph_loop

SIDE = 64
IMAGES = 3  # the most of an adapter with 6 tokens of an image
CASES = 12


@pytest.fixture(scope="module")
def checkpoint(
    toy_folder: Path, controlnet_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """The toy with a ControlNet and an IP-Adapter of each kind."""
    root = tmp_path_factory.mktemp("ip-adapters")
    encoder = ip_adapters.write_encoder(root / "image_encoder")
    kinds: list[ip_adapters.Kind] = ["plain", "plus"]
    files = [
        IpAdapterFiles(kind, ip_adapters.write_adapter(root / f"{kind}.safetensors", toy_folder, kind, seed), encoder)
        for seed, kind in enumerate(kinds, start=1)
    ]
    return Checkpoint(
        toy_folder, controlnets=tuple(controlnet_folders.items()), ip_adapters=tuple(files), ip_images=IMAGES
    )


@pytest.fixture(scope="module")
def store(checkpoint: Checkpoint, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with this toy, published as toy/1."""
    return parity.publish("toy", checkpoint, target, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def toy(store: WritableStore) -> Loaded:
    return load(store, "toy/1")


def make_reference(checkpoint: Checkpoint) -> Reference:
    adapters = {files.name: files.path for files in checkpoint.ip_adapters}
    return Reference(checkpoint.root, dict(checkpoint.controlnets), adapters, checkpoint.ip_adapters[0].encoder)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Reference:
    return make_reference(checkpoint)


@pytest.fixture(scope="module")
def client(toy: Loaded) -> Iterator[httpx.Client]:
    with serve_in_process(toy) as client:
        yield client


def control(name: str, seed: int = 1, scale: float = 1.0, start: float = 0.0, end: float = 1.0) -> Control:
    return Control(name, picture(seed), scale, start, end, mode=1 if name == "union" else None)


def prompt(name: str, *seeds: int, scale: float = 1.0) -> ImagePrompt:
    """Return the use of an adapter with the pictures of these seeds."""
    return ImagePrompt(name, np.stack([picture(seed, ip_adapters.SIDE) for seed in seeds or (1,)]), scale)


def random_controls(choose: random.Random) -> tuple[Control, ...]:
    """Return one or two ControlNets that run in some of the steps."""
    controls = []
    for name in choose.choice([["edges"], ["depth", "edges"], ["small"], ["small", "edges"], ["union"]]):
        start, end = sorted(choose.sample([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0], 2))
        window = choose.choice([(0.0, 1.0), (start, end)])
        controls.append(control(name, choose.randrange(100), round(choose.uniform(0.3, 1.5), 2), *window))
    return tuple(controls)


def random_prompts(choose: random.Random) -> tuple[ImagePrompt, ...]:
    """Return one or two IP-Adapters of one to three images."""
    return tuple(
        prompt(name, *choose.choices(range(100), k=choose.randint(1, IMAGES)), scale=round(choose.uniform(0.2, 1.5), 2))
        for name in choose.choice([["plain"], ["plus"], ["plain", "plus"], ["plus", "plain"]])
    )


def random_settings(number: int, toy: Loaded) -> GenerationParams:
    """Return a request of each task in turn, with ControlNets, with IP-Adapters, or with both."""
    choose = random.Random(number)
    sampler = SAMPLERS[number % len(SAMPLERS)]
    uses = ("controls", "image_prompts", "both", "controls")[number // 3]
    params = params_of(
        toy,
        controls=random_controls(choose) if uses != "image_prompts" else (),
        image_prompts=random_prompts(choose) if uses != "controls" else (),
        negative_prompt=choose.choice([None, "", "a blue square"]),
        scheduler=sampler,
        num_inference_steps=choose.randint(4, 12),
        # LCM adds new noise at every step; see test_pipeline_parity.
        guidance_scale=choose.choice([1.0, 2.0] if sampler == "LCM" else [1.0, 3.0, 7.5]),
        seed=choose.randrange(2**32),
    )
    if number % 3:
        params = replace(params, image=picture(100 + number), strength=choose.uniform(0.4, 1.0))
    if number % 3 == 2:
        strength = choose.choice([0.6, 0.9999, 1.0])
        mask = box(8, 16, 48, 56, SIDE, strength=strength, negative_prompt=params.negative_prompt)
        params = replace(params, masks=(mask,))
    return params


def test_images_are_those_of_diffusers(client: httpx.Client, toy: Loaded, reference: Reference) -> None:
    for number in range(CASES):
        params = random_settings(number, toy)
        image = pixels(predict(client, **request_of(params))["data"])
        assert largest_difference(image, reference.generate(params)) <= TOLERANCE, (number, params)


def test_chains_masks_with_conditions(toy: Loaded, reference: Reference) -> None:
    masks = (box(0, 0, 40, 40, SIDE), box(24, 24, 64, 64, SIDE, prompt="a red circle", strength=0.7))
    uses = {"controls": (control("edges"),), "image_prompts": (prompt("plain"),)}
    check_images(toy.model, reference, params_of(toy, image=picture(5), masks=masks, **uses))


def test_requests_with_and_without_conditions_share_a_batch(toy: Loaded, reference: Reference) -> None:
    """An image is the same with other images in its batch, which may use any networks and images."""
    batch = [
        params_of(toy, seed=3),
        params_of(toy, controls=(control("edges", end=0.5),), scheduler="Euler a", num_images=2),
        params_of(toy, controls=(control("edges", 2), control("small", 3, scale=0.5)), guidance_scale=1.0),
        params_of(toy, controls=(control("union", start=0.5),), negative_prompt="blue", num_inference_steps=5),
        params_of(toy, controls=(control("depth", scale=0.8),), image=picture(4), masks=(box(0, 0, 32, 32, SIDE),)),
        params_of(toy, image_prompts=(prompt("plain", 1),), scheduler="Euler a", num_images=2),
        params_of(toy, image_prompts=(prompt("plain", 2, 3), prompt("plus", 4, 5, 6, scale=0.5)), guidance_scale=1.0),
        params_of(toy, image_prompts=(prompt("plus", 7),), negative_prompt="blue", num_inference_steps=5),
        params_of(
            toy, image_prompts=(prompt("plus", 8, scale=0.4),), image=picture(4), masks=(box(0, 0, 32, 32, SIDE),)
        ),
        params_of(toy, image_prompts=(prompt("plain", 9),), controls=(control("edges", 5),)),
    ]
    parity.check_batch(reference, batch, toy.model, with_graph_loop(toy.model, SIDE))


@pytest.mark.parametrize("in_graphs", [False, True])
def test_controls_read_prompts_of_several_chunks(in_graphs: bool, toy: Loaded, reference: Reference) -> None:
    """Two equal chunks give the image of one of them. In a batch with a shorter prompt, too."""
    model = with_graph_loop(toy.model, SIDE, 154) if in_graphs else toy.model
    words = "red circle " * 37 + "red "  # 75 tokens
    one_chunk = params_of(toy, prompt=words, controls=(control("edges"),))
    two_chunks = replace(one_chunk, prompt=words * 2, prompt_syntax="weighted")
    short = params_of(toy, controls=(control("edges", 2),), seed=3)
    images, _, warnings = generate(model, [two_chunks, short])
    assert not warnings
    for image, params in zip(images, (one_chunk, short), strict=True):
        assert largest_difference(image, reference.generate(params)) <= TOLERANCE


def test_each_setting_changes_the_image(toy: Loaded) -> None:
    uses: list[dict[str, tuple[object, ...]]] = [
        {},
        {"controls": (control("edges"),)},
        {"controls": (control("depth"),)},
        {"controls": (control("small"),)},
        {"controls": (control("union"),)},
        {"controls": (replace(control("union"), mode=2),)},
        {"controls": (control("edges", 2),)},
        {"controls": (control("edges", scale=0.5),)},
        {"controls": (control("edges", start=0.5),)},
        {"controls": (control("edges", end=0.5),)},
        {"controls": (control("edges"), control("depth"))},
        {"image_prompts": (prompt("plain"),)},
        {"image_prompts": (prompt("plus"),)},
        {"image_prompts": (prompt("plain", 2),)},
        {"image_prompts": (prompt("plain", 1, 2),)},
        {"image_prompts": (prompt("plain", scale=0.5),)},
        {"image_prompts": (prompt("plain"), prompt("plus"))},
        {"image_prompts": (prompt("plain"), prompt("plus", scale=0.5))},
    ]
    parity.check_all_differ(toy.model, *(params_of(toy, **fields) for fields in uses))


def test_leaves_out_what_has_no_effect(client: httpx.Client, toy: Loaded) -> None:
    plain = pixels(predict(client, **request_of(params_of(toy)))["data"])
    body = predict(client, **request_of(params_of(toy, controls=(control("edges", start=0.9, end=0.95),))))
    assert body["warnings"] == ["controls.0: no step of 8 lies between start 0.9 and end 0.95; edges was not used."]
    assert largest_difference(pixels(body["data"]), plain) <= 1
    body = predict(client, **request_of(params_of(toy, image_prompts=(prompt("plus", scale=0.0),))))
    assert np.array_equal(pixels(body["data"]), plain)


def test_prepares_a_control_image(client: httpx.Client, toy: Loaded) -> None:
    request = request_of(params_of(toy, controls=(control("edges"),))) | {"resize": "stretch"}
    request["controls"][0] |= {"image": file_of(picture(1, 2 * SIDE)), "preprocess": "canny"}
    small = np.array(Image.fromarray(picture(1, 2 * SIDE)).resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    edges = canny(small)
    assert 0 < edges.mean() < 255
    expected = image_of(toy.model, params_of(toy, controls=(replace(control("edges"), levels=edges),)))
    assert largest_difference(pixels(predict(client, **request)["data"]), expected) <= TOLERANCE


CONTROL: dict[str, Any] = {"name": "edges", "image": file_of(picture(1))}
PROMPT: dict[str, Any] = {"name": "plain", "images": [file_of(picture(1))]}
SMALL = file_of(picture(1, 32))
REFUSED_CONTROLS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"name": "pose"}], 'controls.0.name: "pose" is not a ControlNet of release toy/1. It has'),
    ([{"image": "AAAA"}], "controls.0.image: the file"),
    ([{"image": SMALL}], "controls.0.image: the image has 32 x 32"),
    ([{"scale": 2.5}], "`controls.0.scale`: got 2.5, expected a number from 0 to 2"),
    ([{"start": 0.5, "end": 0.5}], "controls.0.start: 0.5 is not less than end, 0.5."),
    ([{"mode": 0}], "controls.0.mode: 0 is not accepted, because edges is not a Union"),
    ([{"name": "union"}], "controls.0.mode: is missing; union is a Union network: give 0 to 2."),
    ([{"name": "union", "mode": 3}], "controls.0.mode: 3 is not accepted; union is a Union network"),
    ([{}, {}], 'controls.1.name: "edges" is named twice. Name each once.'),
]
REFUSED_PROMPTS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"name": "face"}], 'ip_adapters.0.name: "face" is not an IP-Adapter of release toy/1. It has'),
    ([{"images": []}], "`ip_adapters.0.images`: got a list, expected a list of 1 to 16 entries"),
    ([{"images": [SMALL, "AAAA"]}], "ip_adapters.0.images.1: the file"),
    (
        [{"images": 5 * [SMALL]}],
        "ip_adapters.0.images: 5 images are not accepted; plain takes at most 4 in release toy/1.",
    ),
    ([{"scale": 2.5}], "`ip_adapters.0.scale`: got 2.5, expected a number from 0 to 2"),
    ([{}, {}], 'ip_adapters.1.name: "plain" is named twice. Name each once.'),
]


@pytest.mark.parametrize(
    ("field", "uses", "message"),
    [("controls", *case) for case in REFUSED_CONTROLS] + [("ip_adapters", *case) for case in REFUSED_PROMPTS],
)
def test_refuses_a_condition_before_it_costs_anything(
    field: str, uses: list[dict[str, Any]], message: str, client: httpx.Client, toy: Loaded
) -> None:
    plain = CONTROL if field == "controls" else PROMPT
    response = post(client, **request_of(params_of(toy)) | {field: [plain | changes for changes in uses]})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"], response.text


@pytest.mark.parametrize(
    ("fields", "lacking", "option"),
    [
        ({"controls": [CONTROL]}, "controlnets", "--controlnet"),
        ({"ip_adapters": [PROMPT]}, "ip_adapters", "--ip-adapter"),
    ],
)
def test_refuses_conditions_that_the_release_lacks(
    fields: dict[str, Any], lacking: str, option: str, toy: Loaded
) -> None:
    request = GenerationRequest.model_validate({"prompt": "a circle", **fields})
    with pytest.raises(RequestRefused, match=f"preheat build {option}"):
        resolve(request, replace(toy.served, **{lacking: {}}))


def test_a_release_has_shared_weights_once(store: WritableStore) -> None:
    manifest = store.read_release("toy/1")
    identities = {record.component: record.identity for record in manifest.weights}
    assert identities[UNET] == identities[CONTROLLED_UNET] == identities[IP_UNET]
    keys = {engine.component: engine.key for engine in manifest.engines}
    assert keys["controlnet.edges"] == keys["controlnet.depth"]  # one architecture, compiled once
    assert identities["controlnet.edges"] != identities["controlnet.depth"]


@pytest.mark.parametrize("uses", [{"controls": (control("edges"),)}, {"image_prompts": (prompt("plain"),)}])
def test_loras_change_the_conditioned_unets_too(
    uses: dict[str, Any], checkpoint: Checkpoint, store: WritableStore, tmp_path: Path
) -> None:
    """They are merged, because this release has no UNet that takes adapters as inputs."""
    deltas = random_deltas(module_shapes(checkpoint.root), PACKABLE, 4, 0, 0.25)
    file = write_adapter(tmp_path / "style.safetensors", deltas, "peft")
    copied = open_writable_store(copy_store(store, tmp_path / "store"))
    add_adapter(copied, "style", file)
    adapted, own = load(copied, "toy/1", adapters=ServedAdapters(("style",))), make_reference(checkpoint)
    own.load_lora("style", file)
    plain = params_of(adapted, **uses)
    changed = replace(plain, loras=(("style", 0.8),))
    before = image_of(adapted.model, plain)
    parity.check_all_differ(adapted.model, plain, changed)
    check_images(adapted.model, own, changed, plain)
    assert np.array_equal(image_of(adapted.model, plain), before)


def test_warm_up_runs_every_network(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ran = load(store, "toy/1"), set[str]()

    def record(name: str, run: Callable[..., object], *inputs: object) -> object:
        ran.add(name)
        return run(*inputs)

    for name, engines in loaded.model.engines.items():
        [engine] = engines.engines
        monkeypatch.setattr(engine, "run", partial(record, name, engine.run))
    warm_up(loaded)
    assert ran == {*loaded.model.engines}


MOST_PIXELS = {IP_UNET: 64, CONTROLLED_UNET: 128, "controlnet_image.edges": 128}  # by component, of a side


def smaller(component: str, bucket: Bucket) -> Bucket:
    if component not in MOST_PIXELS:
        return bucket
    span = Span(min=64, max=MOST_PIXELS[component], multiple=8)
    return bucket.model_copy(update={"height": span, "width": span})


@pytest.fixture(scope="module")
def fewer_sizes(store: WritableStore) -> Manifest:
    """The release with IP-Adapters only for 64x64, and ControlNets for sides up to 128."""
    manifest = store.read_release("toy/1")
    engines = [one.model_copy(update={"bucket": smaller(one.component, one.bucket)}) for one in manifest.engines]
    return manifest.model_copy(update={"engines": tuple(engines)})


def served_with(manifest: Manifest, *sides: int) -> ServedModel:
    deployment = deployed(buckets=tuple(ServedBucket(height=side, width=side, rows=2) for side in sides))
    return served_model(select(manifest, detect_targets(), deployment), deployment)


def limited(engines: EngineSet) -> EngineSet:
    copies = [copy.copy(engine) for engine in engines.engines]
    for engine in copies:
        engine.bucket = smaller(engine.component, engine.bucket)
    return EngineSet(copies)


def test_fewer_sizes_limit_only_requests_that_use_them(fewer_sizes: Manifest, toy: Loaded) -> None:
    engines = toy.model.engines
    model = replace(toy.model, engines={**engines, **{name: limited(engines[name]) for name in MOST_PIXELS}}, loops={})
    loaded = replace(toy, model=model, served=served_with(fewer_sizes))
    assert loaded.served.sizes == toy.served.sizes
    assert loaded.served.ip_adapter_sizes == SizeList(((64, 64),))
    warm_up(loaded)  # at a size that they have
    denoiser = model.denoiser(UNET, 256, 256)
    assert [variant.features for variant in denoiser.variants] == [frozenset()] and not denoiser.before
    described = describe(loaded.summary, [loaded.release], [])
    assert described["ip_adapter_sizes"] == {"sizes": [[64, 64]]}
    assert described["control_sizes"]["edges"]["max"] == 128
    for params in (
        params_of(toy, image_prompts=(prompt("plain"),)),
        params_of(toy, width=256, height=256, num_inference_steps=2),
    ):
        assert largest_difference(image_of(model, params), image_of(toy.model, params)) <= 1
    for message, fields in {
        'ip_adapters.0.name: "plain" .* 256x256, only at 64x64 ': {"ip_adapters": [PROMPT]},
        'controls.0.name: "edges" .* 256x256, only at sides from 64 to 128 ': {"controls": [CONTROL]},
    }.items():
        values = {"prompt": "a red circle", "width": 256, "height": 256, **fields}
        with pytest.raises(RequestRefused, match=message):
            resolve(GenerationRequest.model_validate(values), loaded.served)
        resolve(GenerationRequest.model_validate(values | {"width": 64, "height": 64}), loaded.served)


def test_configured_sizes_without_adapters_are_served(fewer_sizes: Manifest) -> None:
    served = served_with(fewer_sizes, 64, 256)
    assert served.sizes == SizeList(((64, 64), (256, 256)))
    assert served.ip_adapter_sizes == SizeList(((64, 64),)) and (64, 64) in served.control_sizes["edges"].sizes
    assert (256, 256) not in served.control_sizes["edges"].sizes
