"""Images with different LoRA adapters share a batch, on a UNet that takes the adapters as inputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_builder.adapters.add import add_adapter
from engine_builder.adapters.offline import read_merge
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore
from model import metrics
from model.adapters.changes import Change
from model.adapters.packing import make_packing, pack
from model.cold_start import ColdStart
from model.deployment import ServedAdapters
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.request_plan import plan_request
from model.pipeline.text_to_image import generate
from tests.support.adapters import PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed, load_release
from tests.support.images import largest_difference, pixels
from tests.support.linear_networks import PLAIN
from tests.support.lycoris_adapters import LycorisAdapter
from tests.support.reference import Reference
from tests.support.scheduling import served_together
from tests.support.uncompiled import publish_uncompiled

RANK = 8
TOLERANCE = 2  # of 255: float32 rounding, in another order
RANKS = {"four": 4, "three": 3, "one": 1, "nine": 9}
"""The ranks of the adapters. The last is larger than the UNet's."""


@pytest.fixture(scope="module")
def lora_store(toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy, built with a UNet that takes adapters as inputs, as toy-lora/1."""
    plan = replace(toy_plan, model="toy-lora", lora_rank=RANK)
    return publish_uncompiled(plan, tmp_path_factory.mktemp("lora-store") / "store")


@pytest.fixture(scope="module")
def files(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), module_shapes(toy_folder)
    files = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        deltas = random_deltas(shapes, PACKABLE, rank, seed, spread=0.3)
        files[name] = write_adapter(folder / f"{name}.safetensors", deltas, "peft")
    return files


@pytest.fixture(scope="module")
def adapted(lora_store: WritableStore, files: Mapping[str, Path]) -> Loaded:
    for name, path in files.items():
        add_adapter(lora_store, name, path)
    deployment = deployed("toy-lora/1", adapters=ServedAdapters(tuple(files)))
    return load_release(lora_store, deployment, detect_targets(), ColdStart())


@pytest.fixture(scope="module")
def reference(toy_folder: Path, files: Mapping[str, Path]) -> Reference:
    reference = Reference(toy_folder)
    for name, path in files.items():
        reference.load_lora(name, path)
    return reference


def params(*loras: tuple[str, float], seed: int = 7) -> GenerationParams:
    return replace(PLAIN, width=64, height=64, guidance_scale=3.0, seed=seed, loras=tuple(sorted(loras)))


@contextmanager
def merging(adapted: Loaded) -> Iterator[None]:
    """Merge all adapters in the block, as a release without a UNet for adapters does."""
    assert adapted.model.adapters is not None
    packing, adapted.model.adapters.packing = adapted.model.adapters.packing, None
    try:
        yield
    finally:
        adapted.model.adapters.packing = packing


REQUESTS = [
    params(("four", 1.0), seed=1),
    params(("three", -0.7), seed=2),
    params(("four", 0.5), ("three", 1.0), ("one", 1.5), seed=3),
    replace(params(("one", 1.0), seed=4), negative_prompt="two"),
    replace(params(("four", 0.3), seed=5), guidance_scale=1.0),
]


def test_images_of_a_batch_are_those_of_diffusers(adapted: Loaded, reference: Reference) -> None:
    images, _, _ = generate(adapted.model, REQUESTS)
    for request, image in zip(REQUESTS, images, strict=True):
        assert plan_request(adapted.model, request).adapters.packed == request.loras
        assert largest_difference(image, reference.generate(request)) <= TOLERANCE
        [[without]] = [generate(adapted.model, [replace(request, loras=())])[0]]
        assert largest_difference(image, without) > 5 * TOLERANCE
    assert adapted.model.active_adapters == ()


def test_low_rank_algorithms_share_a_batch(lora_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    """A LoCon and an rsLoRA of linears are inputs. A LoKr, a DoRA and a bias are merged."""
    names = {"locon": True, "rslora": True, "lokr": False, "dora": False, "full": False}
    reference = Reference(toy_folder)
    adapters = {name: LycorisAdapter(reference.networks, PACKABLE, name, seed=3) for name in names}
    for name, adapter in adapters.items():
        add_adapter(lora_store, name, adapter.write(tmp_path / f"{name}.safetensors"))
    deployment = deployed("toy-lora/1", adapters=ServedAdapters(tuple(names)))
    loaded = load_release(lora_store, deployment, detect_targets(), ColdStart())
    requests = [params((name, 1.0), seed=seed) for seed, name in enumerate(names)]
    packed = [plan_request(loaded.model, request).adapters.packed != () for request in requests]
    assert packed == list(names.values())
    count = sum(names.values())
    images = generate(loaded.model, requests[:count])[0]
    images += [generate(loaded.model, [request])[0][0] for request in requests[count:]]
    for request, image in zip(requests, images, strict=True):
        [(name, scale)] = request.loras
        with adapters[name].applied(scale):
            assert largest_difference(image, reference.generate(replace(request, loras=()))) <= TOLERANCE, name


def test_image_does_not_depend_on_the_batch(adapted: Loaded) -> None:
    images, _, _ = generate(adapted.model, REQUESTS)
    for request, image in zip(REQUESTS, images, strict=True):
        [[alone]] = [generate(adapted.model, [request])[0]]
        assert largest_difference(image, alone) <= 1


@pytest.mark.parametrize("with_mask", [False, True], ids=["image", "mask"])
def test_adapters_change_requests_with_an_image(with_mask: bool, adapted: Loaded) -> None:
    """The image equals the one with merged adapters."""
    image = np.full((64, 64, 3), (200, 60, 20), np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 32:] = 255
    request = replace(REQUESTS[0], image=image, strength=0.75)
    if with_mask:
        request = replace(request, masks=(Mask(mask, request.prompt, request.negative_prompt, strength=0.75),))
    assert plan_request(adapted.model, request).adapters.packed == request.loras
    [packed] = generate(adapted.model, [request])[0]
    with merging(adapted):
        [merged] = generate(adapted.model, [request])[0]
        assert adapted.model.active_adapters == request.loras
    assert largest_difference(packed, merged) <= TOLERANCE


def test_adapters_change_prompts_of_several_chunks(adapted: Loaded, reference: Reference) -> None:
    """Two equal chunks give the image of one of them. In a batch with a shorter prompt, too."""
    words = "red circle " * 37 + "red "  # 75 tokens
    one_chunk = replace(REQUESTS[0], prompt=words)
    two_chunks = replace(one_chunk, prompt=words * 2, prompt_syntax="weighted")
    images, _, warnings = generate(adapted.model, [two_chunks, REQUESTS[1]])
    assert not warnings
    for image, request in zip(images, (one_chunk, REQUESTS[1]), strict=True):
        assert largest_difference(image, reference.generate(request)) <= TOLERANCE


def test_sum_of_ranks_decides_the_way(adapted: Loaded) -> None:
    for names, is_packed in {
        ("four",): True,
        ("four", "one", "three"): True,
        ("nine",): False,
        ("nine", "one"): False,
        (): False,
    }.items():
        loras = tuple((name, 1.0) for name in names)
        plan = plan_request(adapted.model, params(*loras))
        assert (plan.adapters.packed, plan.adapters.merged) == ((loras, ()) if is_packed else ((), loras))


def test_offline_merge_gives_the_same_image(
    adapted: Loaded, toy_plan: BuildPlan, lora_store: WritableStore, files: Mapping[str, Path]
) -> None:
    merge = read_merge(toy_plan.base, [(files["four"], 1.0), (files["nine"], -0.5)])
    result = build(replace(toy_plan, model="toy-merged", merge=merge), lora_store)
    assert result.compiled == ()
    publish(lora_store, "toy-merged")
    merged = load_release(lora_store, deployed("toy-merged/1"), detect_targets(), ColdStart())
    [expected] = generate(adapted.model, [params(("four", 1.0), ("nine", -0.5))])[0]
    [image] = generate(merged.model, [params()])[0]
    assert largest_difference(image, expected) <= TOLERANCE
    assert largest_difference(image, generate(adapted.model, [params()])[0][0]) > 5 * TOLERANCE


def test_scheduler_runs_different_adapters_together(adapted: Loaded) -> None:
    """The results equal the results of each request alone, and only the adapter that does not fit is merged."""
    assert adapted.model.adapters is not None
    warm_up(adapted)
    requests = [*REQUESTS, params(seed=6), params(("nine", 1.0), seed=7)]
    alone = [generate(adapted.model, [request])[0][0] for request in requests]
    for image, result in zip(alone, served_together(adapted.model, requests), strict=True):
        assert largest_difference(image, pixels(result.images[0])) <= 1
    [cached] = metrics.ADAPTERS_CACHED.collect()[0].samples
    assert cached.value == len(adapted.model.adapters.on_device) > 0


def test_packed_factors_keep_small_scales() -> None:
    """In fp16 a factor of 1e-7 would be lost. Balanced with the other one it is exact to fp16's rounding."""
    from model.adapters.layers import find_layers

    layers = find_layers({"unet": {"mid_block.attentions.0.proj_in.weight": (32, 16)}})
    down, up = torch.randn(2, 16), 1e-6 * torch.randn(32, 2)
    packing = make_packing(layers, 4)
    factors = {"unet.mid_block.attentions.0.proj_in": Change("matrix", {"down": down, "up": up}, 0.1)}
    packed = pack(packing, [(factors, 0.5)], torch.float16)
    product = packed["lora_up"].view(4, 32).float().T @ packed["lora_down"].view(4, 16).float()
    torch.testing.assert_close(product, 0.05 * up @ down, rtol=0.01, atol=1e-10)
