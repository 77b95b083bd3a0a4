"""Images with LoRA adapters, ControlNets and IP-Adapters, in any mixture, share a batch on one UNet that takes all."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_builder.adapters.add import add_adapter
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint, IpAdapterFiles
from engine_builder.stores.store import WritableStore
from model.denoising.sampler_specs import SPECS
from model.deployment import ServedAdapters
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.loading.load import Loaded
from model.loading.select import select
from model.loading.target import Target, detect_targets
from model.loading.warmup import warm_up
from model.pipeline.params import Control, GenerationParams, ImagePrompt
from model.pipeline.request_plan import plan_request
from model.settings import ServedBucket
from model.store.precision import FP32
from model.validation import Forecast
from tests.support import ip_adapters, parity
from tests.support.adapters import PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed
from tests.support.images import largest_difference, pixels
from tests.support.parity import image_of, load, params_of, picture
from tests.support.reference import Reference
from tests.support.scheduling import served_together
from tests.support.static_tokens import with_graph_loop
from tests.support.uncompiled import publish_uncompiled

SIDE, RANK = 64, 4
ALL = "unet.image_prompt.control.lora"
NAMES = ("bold", "faint")


@pytest.fixture(scope="module")
def files(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, which fit into the UNet's rank together."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), module_shapes(toy_folder)
    deltas = {name: random_deltas(shapes, PACKABLE, RANK // 2, seed, 0.3) for seed, name in enumerate(NAMES)}
    return {name: write_adapter(folder / f"{name}.safetensors", deltas[name], "peft") for name in NAMES}


@pytest.fixture(scope="module")
def checkpoint(
    toy_folder: Path, controlnet_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    root = tmp_path_factory.mktemp("ip-adapter")
    encoder = ip_adapters.write_encoder(root / "image_encoder")
    style = IpAdapterFiles("style", ip_adapters.write_adapter(root / "style.safetensors", toy_folder), encoder)
    controlnets = tuple((name, controlnet_folders[name]) for name in ("edges", "union"))
    return Checkpoint(toy_folder, controlnets=controlnets, ip_adapters=(style,), ip_images=2)


@pytest.fixture(scope="module")
def store(
    checkpoint: Checkpoint, files: dict[str, Path], target: Target, tmp_path_factory: pytest.TempPathFactory
) -> WritableStore:
    """A store with the toy, published as toy/1, and the adapters."""
    plan = BuildPlan("toy", checkpoint, None, target, FP32, lora_rank=RANK)
    store = publish_uncompiled(plan, tmp_path_factory.mktemp("combined") / "store")
    for name, path in files.items():
        add_adapter(store, name, path)
    return store


@pytest.fixture(scope="module")
def toy(store: WritableStore) -> Loaded:
    return load(store, "toy/1", adapters=ServedAdapters(NAMES))


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, files: dict[str, Path]) -> Reference:
    [style] = checkpoint.ip_adapters
    reference = Reference(checkpoint.root, dict(checkpoint.controlnets), {"style": style.path}, style.encoder)
    for name, path in files.items():
        reference.load_lora(name, path)
    return reference


EDGES = Control("edges", picture(1), 1.0, 0.0, 1.0, None)
LATE = Control("union", picture(2), 0.7, 0.5, 1.0, 1)
STYLE = ImagePrompt("style", np.stack([picture(seed, ip_adapters.SIDE) for seed in (3, 4)]), 0.8)
BOLD, FAINT = (("bold", 1.0),), (("faint", -0.7),)


def batch_of(toy: Loaded) -> list[GenerationParams]:
    """Return a plain request, some with each feature, and some with several."""
    return [
        params_of(toy, seed=1),
        params_of(toy, seed=2, controls=(EDGES,)),
        params_of(toy, seed=3, image_prompts=(STYLE,), num_inference_steps=5),
        params_of(toy, seed=4, loras=BOLD),
        params_of(toy, seed=5, loras=FAINT, negative_prompt="blue", scheduler="Euler a"),
        params_of(toy, seed=6, loras=BOLD + FAINT, controls=(EDGES,), image_prompts=(STYLE,)),
        params_of(toy, seed=7, loras=FAINT, controls=(LATE,), guidance_scale=1.0, num_inference_steps=6),
        params_of(toy, seed=8, loras=BOLD, image_prompts=(STYLE,), image=picture(5), strength=0.7),
    ]


def test_images_of_a_batch_are_those_of_diffusers(toy: Loaded, reference: Reference) -> None:
    """An image is the same with other images in its batch. Each of its adapters and conditions changes it."""
    batch = batch_of(toy)
    for params in batch:
        assert plan_request(toy.model, params).adapters.packed == params.loras
    parity.check_batch(reference, batch, toy.model, with_graph_loop(toy.model, SIDE))
    whole = batch[5]
    parity.check_all_differ(
        toy.model, whole, *(replace(whole, **{field: ()}) for field in ("loras", "controls", "image_prompts"))
    )
    assert toy.model.active_adapters == ()


@pytest.mark.parametrize("level", ["quality", "fast"])
def test_images_of_a_batch_with_forecasts(level: Forecast, toy: Loaded, reference: Reference) -> None:
    samplers = itertools.cycle(name for name, spec in SPECS.items() if level in spec.forecasts)
    batch = [
        replace(params, forecast=level, num_inference_steps=12, scheduler=sampler)
        for params, sampler in zip(batch_of(toy), samplers, strict=False)
    ]
    parity.check_batch(reference, batch, toy.model, with_graph_loop(toy.model, SIDE))
    late = plan_request(toy.model, replace(batch[6], num_inference_steps=20)).first.step_plan  # from step 10 on
    assert {10, 11} <= {*late.requested_step.tolist()} and len(late.requested_step) < 20


def test_scheduler_serves_all_features_without_a_merge(toy: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of one batch run on the UNet that takes all features, and no weights change between them."""
    with_adapters = [replace(params, output_format="png") for params in batch_of(toy) if params.loras]
    alone = [image_of(toy.model, params) for params in with_adapters]
    warm_up(toy)
    [engine] = toy.model.engines[ALL].engines
    run, entries = engine.run, list[int]()
    monkeypatch.setattr(engine, "run", lambda inputs: (entries.append(len(inputs["sample"])), run(inputs))[1])
    for image, result in zip(alone, served_together(toy.model, with_adapters), strict=True):
        assert largest_difference(image, pixels(result.images[0])) <= 1
    assert max(entries) > 2  # more than one image
    assert toy.model.active_adapters == ()


def test_merges_adapters_where_no_unet_takes_all(toy: Loaded) -> None:
    """As in a release that was built with `--combine none`: the images are the same."""
    engines = {name: one for name, one in toy.model.engines.items() if name != ALL}
    separate = replace(toy.model, engines=engines, loops={})
    for params in batch_of(toy)[5:]:
        assert plan_request(separate, params).adapters.merged == params.loras
        expected = image_of(toy.model, params)
        assert largest_difference(image_of(separate, params), expected) <= parity.TOLERANCE
        separate.use_adapters(())


def test_a_deployment_without_adapters_leaves_the_unet_out(store: WritableStore) -> None:
    manifest, served = store.read_release("toy/1"), []
    for names in ((), NAMES):
        selection = select(manifest, detect_targets(), deployed("toy/1", adapters=ServedAdapters(names)))
        served.append(set(selection.engines))
    assert served[1] - served[0] == {"unet_lora", ALL} and {"unet_controlled", "unet_ip"} < served[0]


def test_a_size_without_controlnets_keeps_the_other_features(store: WritableStore, toy: Loaded) -> None:
    """A release may have ControlNets for fewer sizes: other requests are served, and warmed up, as without them."""
    manifest = store.read_release("toy/1")
    of_controls = ("controlnet", "unet_controlled")
    engines = tuple(engine for engine in manifest.engines if not engine.component.startswith(of_controls))
    bucket = ServedBucket(height=SIDE, width=SIDE, rows=2)
    deployment = deployed("toy/1", adapters=ServedAdapters(NAMES), buckets=(bucket,))
    selection = select(manifest.model_copy(update={"engines": engines}), detect_targets(), deployment)
    model = replace(toy.model, engines={name: toy.model.engines[name] for name in selection.engines}, loops={})
    served = replace(toy.served, controlnets={}, control_sizes={})
    warm_up(replace(toy, model=model, served=served))
    params = params_of(toy, loras=BOLD, image_prompts=(STYLE,))
    assert plan_request(model, params).adapters.packed == BOLD
    assert largest_difference(image_of(model, params), image_of(toy.model, params)) <= 1


def test_refuses_unets_that_take_other_shapes(toy: Loaded) -> None:
    """Such as a UNet for fewer tokens of reference images than the networks before it make."""
    engines = toy.model.engines[ALL]
    [engine] = engines.engines
    inputs = [
        one.model_copy(update={"shape": (*one.shape[:2], 1, *one.shape[3:])}) if one.name.startswith("image_") else one
        for one in engine.signature.inputs
    ]
    changed = EngineSet([engine])
    changed.signature = engine.signature.model_copy(update={"inputs": tuple(inputs)})
    model = replace(toy.model, engines=toy.model.engines | {ALL: changed}, loops={})
    with pytest.raises(EngineError, match="engines cannot be used. Their image_keys has another shape"):
        warm_up(replace(toy, model=model))
