"""A UNet that was trained for inpainting: it takes a mask and the masked image after the latents."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.eager_model import load_eager_model
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.networks.network_check import check_model
from engine_builder.releases.publish import publish
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.errors import ManifestError, RequestRefused
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP32
from tests.engine_builder.helpers import edit_json
from tests.support import toy_sdxl
from tests.support.deployments import deployed, load_release
from tests.support.images import largest_difference
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

pytestmark = pytest.mark.usefixtures("uncompiled_builds")

TOLERANCE = 2  # of 255
SIDE = 64
PHOTO = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


@pytest.fixture(autouse=True)
def quiet_diffusers() -> Iterator[None]:
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_sdxl.write(tmp_path_factory.mktemp("inpaint") / "toy", MODEL_FOLDER / "tokenizer", unet_channels=9)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    """The toy in eager PyTorch."""
    return load_eager_model(Checkpoint(folder), None, FP32, "cpu")[1]


def box(left: int, top: int, right: int, bottom: int, strength: float) -> Mask:
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[top:bottom, left:right] = 255
    return Mask(levels, "a dog", None, strength)


def params(*masks: Mask, **changes: object) -> GenerationParams:
    plain = GenerationParams(
        "a cat", None, SIDE, SIDE, 8, 3.0, 1.0, "Euler", use_refiner=False, denoising_frac=0.8, seed=5, image=PHOTO,
        masks=masks,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampler", "strength"), [("Euler", 0.6), ("Euler a", 0.9999), ("Euler", 1.0), ("DPM++ 2M SDE Karras", 1.0)]
)
def test_image_is_that_of_diffusers(sampler: str, strength: float, model: LoadedModel, folder: Path) -> None:
    """The mask and the image change the result, so the comparison can fail."""
    request = params(box(10, 10, 41, 50, strength), scheduler=sampler)
    [image] = generate(model, [request])[0]
    assert largest_difference(image, Reference(folder).generate(request)) <= TOLERANCE
    for other in (replace(request, image=PHOTO[::-1].copy()), replace(request, masks=(box(0, 0, 9, 9, strength),))):
        assert largest_difference(image, generate(model, [other])[0][0]) > TOLERANCE


def test_chained_masks_are_chained_calls(model: LoadedModel, folder: Path) -> None:
    request = params(box(0, 0, 40, 40, 1.0), box(20, 20, 64, 64, 0.7), num_images=2, scheduler="Euler a")
    images = generate(model, [request])[0]
    for seed, image in zip(request.seeds, images, strict=True):
        expected = Reference(folder).generate(replace(request, seed=seed, num_images=1))
        assert largest_difference(image, expected) <= TOLERANCE


def test_builds_loads_and_refuses_requests_without_masks(
    folder: Path, toy_plan: BuildPlan, toy_store: WritableStore, tmp_path: Path, model: LoadedModel
) -> None:
    """Only the UNet itself is compiled: its other networks are those of a UNet for text to image."""

    shutil.copytree(toy_store.url.removeprefix("file:"), tmp_path / "store")
    store = WritableLocalStore(tmp_path / "store")
    result = build(replace(toy_plan, model="inpaint", base=Checkpoint(folder)), store)
    assert result.compiled == ("unet",)
    manifest, _ = publish(store, "inpaint")
    # Servers of before refuse it by that number.
    assert [engine.required_schema for engine in manifest.engines if engine.component == "unet"] == [3]
    assert manifest.schema_version >= 3
    loaded = load_release(store, deployed(manifest.name), detect_targets(), ColdStart())
    warm_up(loaded)
    request = params(box(10, 10, 41, 50, 0.8))
    [image], [expected] = (generate(one, [request])[0] for one in (loaded.model, model))
    assert largest_difference(image, expected) <= TOLERANCE
    with pytest.raises(RequestRefused, match="the UNet of release inpaint/1 was trained for inpainting") as refused:
        resolve(GenerationRequest(prompt="a cat"), loaded.served)
    assert refused.value.field == "masks"

    record = tmp_path / "store" / "releases" / "inpaint" / "1.json"
    entries = json.loads(record.read_text())
    for engine in entries["engines"]:
        if engine["component"] == "unet":
            engine["signature"]["inputs"][0]["shape"][1] = 7
    record.write_text(json.dumps(entries))
    with pytest.raises(ManifestError, match="takes 3 channels after the latents. This server knows 0, and 5"):
        load_release(store, deployed(manifest.name), detect_targets(), ColdStart())


def test_refuses_a_refiner_for_inpainting(folder: Path, tmp_path: Path) -> None:

    refiner = tmp_path / "refiner"
    shutil.copytree(folder, refiner)
    edit_json(refiner / "model_index.json", requires_aesthetics_score=False)
    with pytest.raises(CheckpointError, match="unet is for inpainting, and a refiner of this kind is not supported"):
        check_model(Checkpoint(folder), Checkpoint(refiner))
