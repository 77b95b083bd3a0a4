"""Images with IP-Adapters are those of diffusers' pipelines, at most 2 of 255 apart, alone and in every batch."""

import copy
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from engine_builder.adapters.add import add_adapter
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint, IpAdapterFiles
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.describe import describe
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.denoising.graph_loop import GraphLoop
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.errors import RequestRefused
from model.images.encode import Pixels
from model.images.fit import reference_square
from model.loading.adapters import ServedAdapters
from model.loading.load import Loaded, load_release
from model.loading.select import select
from model.loading.served import ServedModel, SizeList, served_model
from model.loading.target import Target, detect_targets
from model.loading.warmup import warm_up
from model.pipeline.image_prompt import to_encoder_input
from model.pipeline.params import Control, GenerationParams, ImagePrompt, Mask
from model.pipeline.spec import UNET, UNET_CONTROLLED, UNET_IP
from model.pipeline.text_to_image import generate
from model.settings import ServedBucket
from model.store.manifest import Bucket, Manifest, Span
from model.store.precision import FP32
from tests.support import controlnets, ip_adapters
from tests.support.adapters import PACKABLE, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.images import file_of, largest_difference, pixels
from tests.support.in_process import serve_in_process
from tests.support.ip_reference import IpReference
from tests.support.predictions import post, predict
from tests.support.static_tokens import with_static_tokens
from tests.support.uncompiled import publish_uncompiled

TOLERANCE = 2  # of 255: float32 rounding, in another order
CASES = 12
SIDE = 64
IMAGES = 3  # the most of an adapter with 6 tokens of an image
KINDS: dict[str, ip_adapters.Kind] = {"plain": "plain", "plus": "plus"}
MOST_IMAGES = {"plain": 4, "plus": IMAGES}  # of 18 tokens, 4 or 6 for each image


@pytest.fixture(scope="module", autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers logs a line for each scheduler setting that another sampler does not have."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def checkpoint(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The toy with an IP-Adapter of each kind, and a ControlNet."""
    root = tmp_path_factory.mktemp("ip-adapters")
    encoder = ip_adapters.write_encoder(root / "image_encoder")
    files = []
    for seed, (name, kind) in enumerate(KINDS.items(), start=1):
        path = ip_adapters.write_adapter(root / f"{name}.safetensors", toy_folder, kind, seed)
        files.append(IpAdapterFiles(name, path, encoder))
    edges = controlnets.write(root / "edges", toy_folder, "full", seed=1)
    return Checkpoint(toy_folder, controlnets=(("edges", edges),), ip_adapters=tuple(files), ip_images=IMAGES)


@pytest.fixture(scope="module")
def ip_store(checkpoint: Checkpoint, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy and its IP-Adapters, published as prompted/1."""
    plan = BuildPlan("prompted", checkpoint, None, target, FP32)
    return publish_uncompiled(plan, tmp_path_factory.mktemp("ip-store") / "store")


@pytest.fixture(scope="module")
def toy(ip_store: WritableStore) -> Loaded:
    return load_release(ip_store, "prompted/1", detect_targets(), [], ColdStart())


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> IpReference:
    adapters = {files.name: files.path for files in checkpoint.ip_adapters}
    return IpReference(checkpoint.root, dict(checkpoint.controlnets), adapters, checkpoint.ip_adapters[0].encoder)


@pytest.fixture(scope="module")
def client(toy: Loaded) -> Iterator[httpx.Client]:
    with serve_in_process(toy) as client:
        yield client


def picture(seed: int, side: int = SIDE) -> Pixels:
    """Return a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return blocks.repeat(side // 8, axis=0).repeat(side // 8, axis=1)


def prompt(name: str, *seeds: int, scale: float = 1.0) -> ImagePrompt:
    """Return the use of an adapter with the pictures of these seeds."""
    return ImagePrompt(name, np.stack([picture(seed, ip_adapters.SIDE) for seed in seeds or (1,)]), scale)


def params_of(toy: Loaded, *prompts: ImagePrompt, **fields: object) -> GenerationParams:
    request = {"prompt": "a large red circle", "seed": 7, "width": SIDE, "height": SIDE, "num_inference_steps": 8}
    params = resolve(GenerationRequest.model_validate(request | fields), toy.served)
    return replace(params, image_prompts=prompts)


def box(left: int, top: int, right: int, bottom: int) -> Mask:
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[top:bottom, left:right] = 255
    return Mask(levels, prompt="a green triangle", negative_prompt=None, strength=0.9999)


def request_of(params: GenerationParams) -> dict[str, Any]:
    """Return the JSON of a request that resolves to these parameters, for a PNG."""
    fields = (
        "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "scheduler", "seed", "num_images",
        "width", "height",
    )  # fmt: skip
    request: dict[str, Any] = {name: getattr(params, name) for name in fields} | {"output_format": "png"}
    request["ip_adapters"] = [
        {"name": one.name, "images": [file_of(levels) for levels in one.levels], "scale": one.scale}
        for one in params.image_prompts
    ] or None
    request["controls"] = [
        {"name": one.name, "image": file_of(one.levels), "scale": one.scale} for one in params.controls
    ] or None
    if params.image is not None:
        request |= {"image": file_of(params.image), "strength": params.strength}
        own = ("prompt", "negative_prompt", "strength")
        request["masks"] = [
            {"image": file_of(mask.levels)} | {name: getattr(mask, name) for name in own} for mask in params.masks
        ] or None
    return request


def random_settings(number: int, toy: Loaded) -> GenerationParams:
    """Return a request of each kind in turn, with one or two IP-Adapters of one to three images."""
    choose = random.Random(number)
    prompts = []
    for name in choose.choice([["plain"], ["plus"], ["plain", "plus"], ["plus", "plain"]]):
        seeds = [choose.randrange(100) for _ in range(choose.randint(1, IMAGES))]
        prompts.append(prompt(name, *seeds, scale=round(choose.uniform(0.2, 1.5), 2)))
    params = params_of(
        toy,
        *prompts,
        seed=choose.randrange(1000),
        num_inference_steps=choose.randint(3, 10),
        guidance_scale=choose.choice([1.0, 3.0, 7.5]),
        negative_prompt=choose.choice([None, "", "blue"]),
        scheduler=SAMPLERS[number % len(SAMPLERS)],
    )
    match number % 4:
        case 1:
            params = replace(params, image=picture(number), strength=choose.choice([0.5, 0.8]))
        case 2:
            mask = replace(box(16, 0, 64, 48), negative_prompt=params.negative_prompt)
            params = replace(params, image=picture(number), masks=(mask,))
        case 3:
            params = replace(params, controls=(Control("edges", picture(number), 0.7, 0.0, 1.0),))
    return params


@pytest.mark.parametrize("number", range(CASES))
def test_images_are_those_of_diffusers(number: int, client: httpx.Client, toy: Loaded, reference: IpReference) -> None:
    params = random_settings(number, toy)
    image = pixels(predict(client, **request_of(params))["data"])
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE


def make_graph_loop(toy: Loaded) -> GraphLoop:
    """A loop with the buffers of a GPU's, whose graphs run op by op."""
    return GraphLoop(with_static_tokens(toy.model.step_networks(UNET, SIDE, SIDE)), SIDE, SIDE, torch.device("cpu"))


@pytest.mark.parametrize("loop", ["eager", "graphs"])
def test_requests_with_and_without_image_prompts_share_a_batch(loop: str, toy: Loaded, reference: IpReference) -> None:
    """An image is the same with other images in its batch, whatever adapters and images those use."""
    model = replace(toy.model, loops={})
    batch = [
        params_of(toy, seed=3),
        params_of(toy, prompt("plain", 1), scheduler="Euler a", num_images=2),
        params_of(toy, prompt("plain", 2, 3), prompt("plus", 4, 5, 6, scale=0.5), guidance_scale=1.0),
        params_of(toy, prompt("plus", 7), negative_prompt="blue", num_inference_steps=5),
        replace(params_of(toy, prompt("plus", 8, scale=0.4)), image=picture(4), masks=(box(0, 0, 32, 32),)),
        replace(params_of(toy, prompt("plain", 9)), controls=(Control("edges", picture(5), 1.0, 0.0, 1.0),)),
        replace(params_of(toy, seed=9), controls=(Control("edges", picture(6), 1.0, 0.0, 1.0),)),
    ]
    if loop == "graphs":
        model.loops[UNET, SIDE, SIDE] = make_graph_loop(toy)
    together = iter(generate(model, batch)[0])
    for params in batch:
        for seed in params.seeds:
            single = replace(params, seed=seed, num_images=1)
            [alone], *_ = generate(toy.model, [single])
            image = next(together)
            assert largest_difference(image, alone) <= 1
            assert largest_difference(image, reference.generate(single)) <= TOLERANCE


def test_each_setting_of_an_image_prompt_changes_the_image(toy: Loaded) -> None:
    """So the comparisons above can fail."""
    params = params_of(toy, prompt("plain"))
    changed = [
        (),
        (prompt("plus"),),
        (prompt("plain", 2),),
        (prompt("plain", 1, 2),),
        (prompt("plain", scale=0.5),),
        (prompt("plain"), prompt("plus")),
        (prompt("plain"), prompt("plus", scale=0.5)),
    ]
    images = [
        generate(toy.model, [replace(params, image_prompts=prompts)])[0][0]
        for prompts in (params.image_prompts, *changed)
    ]
    differences = {
        (one, other): largest_difference(images[one], images[other])
        for one in range(len(images))
        for other in range(one)
    }
    assert min(differences.values()) > TOLERANCE, differences


def test_scale_zero_leaves_an_adapter_out(client: httpx.Client, toy: Loaded) -> None:
    params = params_of(toy)
    plain = predict(client, **request_of(params))
    without = predict(client, **request_of(replace(params, image_prompts=(prompt("plus", scale=0.0),))))
    assert without["data"] == plain["data"]


@pytest.mark.parametrize("size", [(32, 32), (100, 40), (37, 91), (300, 33), (33, 99)])
def test_encodes_the_pixels_of_clips_processor(size: tuple[int, int]) -> None:
    from transformers import CLIPImageProcessorPil

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    processor = CLIPImageProcessorPil(size=32, crop_size=32)
    expected = processor(Image.fromarray(noise), return_tensors="np")["pixel_values"]
    actual = to_encoder_input(torch.from_numpy(reference_square(Image.fromarray(noise), 32).copy())[None])
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another name": ({"name": "face"}, 'ip_adapters.0.name: "face" is not an IP-Adapter of release prompted/1. It has'),
    "no image": ({"images": []}, "`ip_adapters.0.images`: got a list, expected a list of 1 to 16 entries"),
    "no file": ({"images": [file_of(picture(1)), "AAAA"]}, "ip_adapters.0.images.1: the file"),
    "too many images": (
        {"images": 5 * [file_of(picture(1))]},
        "ip_adapters.0.images: 5 images are not accepted; plain takes at most 4 in release prompted/1.",
    ),
    "scale": ({"scale": 2.5}, "`ip_adapters.0.scale`: got 2.5, expected a number from 0 to 2"),
    "unknown field": ({"mask": "AAAA"}, "`ip_adapters.0.mask`: is not a known field"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_an_image_prompt_before_it_costs_anything(case: str, client: httpx.Client, toy: Loaded) -> None:
    request = request_of(params_of(toy, prompt("plain")))
    fields, message = REFUSED[case]
    request["ip_adapters"][0] |= fields
    response = post(client, **request)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"], response.text


def test_refuses_an_adapter_that_is_named_twice(client: httpx.Client, toy: Loaded) -> None:
    response = post(client, **request_of(params_of(toy, prompt("plus"), prompt("plus", 2))))
    assert response.status_code == 400
    assert 'ip_adapters.1.name: "plus" is named twice. Name each once.' in response.json()["error"]


def test_refuses_image_prompts_without_an_adapter_in_the_release(toy: Loaded) -> None:
    request = GenerationRequest.model_validate(request_of(params_of(toy, prompt("plain"))))
    with pytest.raises(RequestRefused, match="preheat build --ip-adapter"):
        resolve(request, replace(toy.served, ip_adapters={}))


def test_the_release_states_how_many_images_an_adapter_takes(toy: Loaded) -> None:
    served = toy.served.ip_adapters
    assert {name: adapter.images for name, adapter in served.items()} == MOST_IMAGES
    assert {adapter.side for adapter in served.values()} == {ip_adapters.SIDE}


def test_a_release_has_shared_weights_once(ip_store: WritableStore) -> None:
    manifest = ip_store.read_release("prompted/1")
    identities = {record.component: record.identity for record in manifest.weights}
    assert identities[UNET] == identities[UNET_IP]


def test_loras_change_the_prompted_unet_too(checkpoint: Checkpoint, ip_store: WritableStore, tmp_path: Path) -> None:
    """They are merged, because no UNet takes both adapters and reference images as inputs."""
    deltas = random_deltas(module_shapes(checkpoint.root), PACKABLE, 4, 0, 0.25)
    file = write_adapter(tmp_path / "style.safetensors", deltas, "peft")
    store = open_writable_store(copy_store(ip_store, tmp_path / "store"))
    add_adapter(store, "style", file)
    adapted = load_release(store, "prompted/1", detect_targets(), [], ColdStart(), adapters=ServedAdapters(("style",)))
    adapters = {files.name: files.path for files in checkpoint.ip_adapters}
    own = IpReference(checkpoint.root, {}, adapters, checkpoint.ip_adapters[0].encoder)
    own.load_lora("style", file)
    prompted = params_of(adapted, prompt("plain"))
    changed = replace(prompted, loras=(("style", 0.8),))
    images = [generate(adapted.model, [params])[0][0] for params in (prompted, changed, prompted)]
    assert largest_difference(images[1], images[0]) > TOLERANCE
    assert np.array_equal(images[2], images[0])
    for image, params in zip(images, (prompted, changed), strict=False):
        assert largest_difference(image, own.generate(params)) <= TOLERANCE


def test_warm_up_runs_every_adapter(ip_store: WritableStore) -> None:
    loaded = load_release(ip_store, "prompted/1", detect_targets(), [], ColdStart())
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


MOST_PIXELS = {UNET_IP: 64, UNET_CONTROLLED: 128, "controlnet_image.edges": 128}  # by component, of a side


def smaller(component: str, bucket: Bucket) -> Bucket:
    if component not in MOST_PIXELS:
        return bucket
    span = Span(min=64, max=MOST_PIXELS[component], multiple=8)
    return bucket.model_copy(update={"height": span, "width": span})


@pytest.fixture(scope="module")
def fewer_sizes(ip_store: WritableStore) -> Manifest:
    """The release with IP-Adapters only for 64x64, and the ControlNet for sides up to 128."""
    manifest = ip_store.read_release("prompted/1")
    engines = [one.model_copy(update={"bucket": smaller(one.component, one.bucket)}) for one in manifest.engines]
    return manifest.model_copy(update={"engines": tuple(engines)})


def served_with(manifest: Manifest, *sides: int) -> ServedModel:
    buckets = [ServedBucket(height=side, width=side, rows=2) for side in sides]
    return served_model(select(manifest, detect_targets(), buckets), buckets)


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
    warm_up(replace(loaded, served=replace(loaded.served, native_width=256, native_height=256)))
    networks = model.step_networks(UNET, 256, 256)
    assert networks.image_prompted is None and networks.controlled is None and not networks.controlnets
    described = describe(loaded.summary)
    assert described["ip_adapter_sizes"] == {"sizes": [[64, 64]]}
    assert described["control_sizes"]["edges"]["max"] == 128
    for params in (params_of(toy, prompt("plain")), params_of(toy, width=256, height=256)):
        [expected], [found] = (generate(one.model, [params])[0] for one in (toy, loaded))
        assert largest_difference(found, expected) <= 1
    image = file_of(picture(1))
    uses: dict[str, dict[str, Any]] = {
        'ip_adapters.0.name: "plain" .* 256x256, only at 64x64 ': {
            "ip_adapters": [{"name": "plain", "images": [image]}]
        },
        'controls.0.name: "edges" .* 256x256, only at sides from 64 to 128 ': {
            "controls": [{"name": "edges", "image": image}]
        },
    }
    for message, fields in uses.items():
        values = {"prompt": "a red circle", "width": 256, "height": 256, **fields}
        with pytest.raises(RequestRefused, match=message):
            resolve(GenerationRequest.model_validate(values), loaded.served)
        resolve(GenerationRequest.model_validate(values | {"width": 64, "height": 64}), loaded.served)


def test_configured_sizes_without_adapters_are_served(fewer_sizes: Manifest) -> None:
    native = fewer_sizes.settings.native_width
    served = served_with(fewer_sizes, 64, 256, native)
    assert served.sizes == SizeList(tuple(sorted({(side, side) for side in (64, 256, native)})))
    assert served.ip_adapter_sizes == SizeList(((64, 64),)) and (64, 64) in served.control_sizes["edges"].sizes
    assert (256, 256) not in served.control_sizes["edges"].sizes
    settings = fewer_sizes.settings.model_copy(update={"native_width": 256, "native_height": 256})
    served = served_with(fewer_sizes.model_copy(update={"settings": settings}), 256)
    assert served.sizes == SizeList(((256, 256),)) and not served.controlnets and not served.ip_adapters
