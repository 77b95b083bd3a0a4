"""Engine keys, selections and pictures of fixtures are those in tests/recorded: see tests/support/recorded.py."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_builder.adapters.add import add_adapter
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint, IpAdapterFiles
from engine_builder.checkpoints.safety_checker import find_safety_checker
from engine_builder.stores.store import WritableStore
from model.deployment import ServedAdapters, ServedPrecision
from model.errors import PreheatError
from model.loading.load import Loaded
from model.loading.select import select
from model.loading.target import Target
from model.pipeline.params import Control, ImagePrompt, Mask
from model.pipeline.text_to_image import generate
from model.settings import ServedBucket
from model.store.manifest import Fp16Steps
from model.store.precision import BF16, FP8, FP16, FP32, INT8
from tests.support import ip_adapters, recorded, toy_safety_checker, toy_sd, toy_sdxl
from tests.support.adapters import CONVOLUTIONS, PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed
from tests.support.parity import load, params_of, picture
from tests.support.recorded import CPU, H100, SIZES, PlannedEngine, compare_with_recorded
from tests.support.repository import MODEL_FOLDER
from tests.support.uncompiled import publish_uncompiled

SIDE = 64
COLOUR_TOLERANCE = 2  # of 255: other CPUs round in another order


@pytest.fixture(scope="module")
def checkpoints(
    toy_folder: Path, controlnet_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Checkpoint]:
    """A checkpoint of each family and kind."""
    root, tokenizer = tmp_path_factory.mktemp("recorded"), MODEL_FOLDER / "tokenizer"
    encoder = ip_adapters.write_encoder(root / "image_encoder")
    kinds: list[ip_adapters.Kind] = ["plain", "plus"]
    files = tuple(
        IpAdapterFiles(kind, ip_adapters.write_adapter(root / f"{kind}.safetensors", toy_folder, kind, seed), encoder)
        for seed, kind in enumerate(kinds, start=1)
    )
    checker = toy_safety_checker.write(root / "checker", [picture(seed) for seed in range(6)])
    conditions = Checkpoint(
        toy_folder, controlnets=tuple(controlnet_folders.items()), ip_adapters=files, ip_images=2, embedding_rows=4
    )
    return {
        "tiny": Checkpoint(MODEL_FOLDER),
        "toy": conditions,
        "sd": Checkpoint(toy_sd.write(root / "sd", tokenizer, "1.5"), safety_checker=find_safety_checker(str(checker))),
        "inpainting": Checkpoint(toy_sdxl.write(root / "inpainting", tokenizer, unet_channels=9)),
        "lcm": Checkpoint(toy_sdxl.write(root / "lcm", tokenizer, timestep_cond=8)),
    }


@pytest.fixture(scope="module")
def planned(checkpoints: dict[str, Checkpoint]) -> dict[str, list[PlannedEngine]]:
    """The engines of plans of each checkpoint: for a CPU, for a GPU in both 16-bit precisions, and in 8 bits."""
    found = {}
    for name, checkpoint in checkpoints.items():
        refiner = Checkpoint(MODEL_FOLDER / "refiner") if name == "tiny" else None
        plan = BuildPlan(name, checkpoint, refiner, CPU, FP32)
        gpu = replace(plan, target=H100, precision=FP16, sizes=SIZES)
        found |= {f"{name} CPU": plan, f"{name} fp16": gpu, f"{name} bf16": replace(gpu, precision=BF16)}
    for name in ("tiny", "toy"):
        for kind in ("CPU", "fp16"):
            plan = found[f"{name} {kind}"]
            found[f"{name} {kind} LoRA"] = replace(plan, lora_rank=4)
            found[f"{name} {kind} bands"] = replace(plan, bands=(2,))
    found |= {f"toy {one}": recorded.quantized(found["toy fp16 LoRA"], one) for one in (FP8, INT8)}
    return {name: recorded.planned_engines(plan) for name, plan in found.items()}


def test_engine_keys_are_the_recorded_ones(planned: dict[str, list[PlannedEngine]]) -> None:
    keys = {name: {one.label: one.key for one in engines} for name, engines in planned.items()}
    assert keys == compare_with_recorded("engine_keys", keys)


ADAPTERS = ServedAdapters(("style",))
SELECTIONS: dict[str, tuple[Target, dict[str, Any]]] = {
    "CPU": (CPU, {}),
    "CPU, adapters": (CPU, {"adapters": ADAPTERS}),
    "CPU, bands": (CPU, {"bands": 2}),
    "GPU": (H100, {"precision": ServedPrecision()}),
    "GPU, adapters": (H100, {"adapters": ADAPTERS}),
    "GPU, one size": (H100, {"buckets": (ServedBucket(height=64, width=64, rows=2),)}),
    "GPU, another size": (H100, {"buckets": (ServedBucket(height=128, width=64, rows=4),), "adapters": ADAPTERS}),
    "GPU, a missing size": (H100, {"buckets": (ServedBucket(height=96, width=96, rows=2),)}),
    "GPU, bands": (H100, {"bands": 2}),
    "GPU, FP8": (H100, {"precision": ServedPrecision(FP8), "adapters": ADAPTERS}),
    "GPU, FP8, steps in fp16": (H100, {"precision": ServedPrecision(FP8, Fp16Steps(first=1, last=1))}),
    "GPU, FP8, compared": (H100, {"precision": ServedPrecision(FP8, compares=True), "adapters": ADAPTERS}),
    "GPU, INT8": (H100, {"precision": ServedPrecision(INT8)}),
    "GPU, fp32": (H100, {"precision": ServedPrecision(FP32)}),
    "safety checker": (CPU, {"safety": "flag"}),
}


def test_selections_are_the_recorded_ones(
    releases: dict[str, tuple[WritableStore, str]], planned: dict[str, list[PlannedEngine]]
) -> None:
    found = {}
    for name, (store, release) in sorted(releases.items()):
        # The version of the tiny model's release is another one in each store.
        manifest = store.read_release(release).model_copy(update={"version": 1})
        engines = [one for title, of_plan in planned.items() if title.split()[0] == name for one in of_plan]
        manifest = recorded.with_engines(manifest, {(one.component, one.key): one for one in engines}.values())
        for title, (target, options) in SELECTIONS.items():
            try:
                selection = select(manifest, [target], deployed(release, **options))
                found[f"{name}: {title}"] = recorded.describe_selection(selection)
            except PreheatError as error:
                found[f"{name}: {title}"] = {"refused": str(error)}
    assert found == compare_with_recorded("selections", found)


@pytest.fixture(scope="module")
def releases(
    checkpoints: dict[str, Checkpoint],
    published: tuple[WritableStore, str],
    target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[WritableStore, str]]:
    """A store and a release of each checkpoint. All but the first are without compiled code."""
    found = {"tiny": published}
    for name in checkpoints.keys() - found.keys():
        plan = BuildPlan(name, checkpoints[name], None, target, FP32, lora_rank=4 if name == "toy" else 0)
        found[name] = (publish_uncompiled(plan, tmp_path_factory.mktemp(name) / "store"), f"{name}/1")
    return found


def _requests(loaded: Loaded, name: str) -> dict[str, dict[str, Any]]:
    """Return the fields of requests, for `params_of`."""
    source = {"image": picture(1, SIDE), "strength": 0.6}
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[16:48, 8:56] = 255
    masks = {"masks": (Mask(levels=mask, prompt="a square", negative_prompt="", strength=0.6),)}
    found: dict[str, dict[str, Any]] = {sampler: {"scheduler": sampler} for sampler in loaded.summary.samplers}
    found |= {
        "image": source,
        "mask": source | masks,
        "two images": {"num_images": 2, "negative_prompt": "blue"},
        "weighted": {"prompt": "a (large:1.4) red circle", "prompt_syntax": "weighted"},
        "end_cfg_frac": {"end_cfg_frac": 0.5, "scheduler": "Heun"},
        "guidance_rescale": {"guidance_rescale": 0.7},
        "strength 1": source | masks | {"strength": 1.0},
        "no guidance": {"guidance_scale": 1.0},
    }
    if name == "tiny":
        found |= {
            "refiner": {"use_refiner": True, "denoising_frac": 0.6},
            "timesteps": {"timesteps": [900, 500, 100], "num_inference_steps": 3},
        }
        found |= {"sizes": {"original_size": [512, 512], "crop": [8, 16], "target_size": [64, 64]}}
    if name == "toy":
        edges = Control("edges", picture(2, SIDE), 0.8, 0.0, 0.5, None)
        union = Control("union", picture(3, SIDE), 0.5, 0.25, 1.0, 1)
        style = ImagePrompt("plain", np.stack([picture(4, 32)]), 0.6)
        found |= {"control": {"controls": (edges,)}, "two controls": {"controls": (edges, union)}}
        found |= {"image prompt": {"image_prompts": (style,)}}
        found |= {"control and image prompt": {"controls": (edges,), "image_prompts": (style,)} | source}
        found |= {"packed": {"loras": (("packed", 0.8),)}, "merged": {"loras": (("merged", 0.8), ("packed", 0.5))}}
        found |= {"lora and control": {"loras": (("packed", 0.8),), "controls": (edges,)}}
    return found


@pytest.mark.parametrize("name", ["tiny", "toy", "sd", "inpainting", "lcm"])
def test_pictures_are_the_recorded_ones(
    name: str, releases: dict[str, tuple[WritableStore, str]], toy_folder: Path, tmp_path: Path
) -> None:
    """The colours are those of any CPU, the digests those of the CPU that recorded them."""
    (store, release), adapters = releases[name], ()
    if name == "toy":
        adapters = ("packed", "merged")
        shapes = module_shapes(toy_folder)
        for seed, (adapter, layers) in enumerate(zip(adapters, (PACKABLE, CONVOLUTIONS), strict=True)):
            deltas = random_deltas(shapes, layers, 4, seed, 0.25)
            add_adapter(store, adapter, write_adapter(tmp_path / f"{adapter}.safetensors", deltas, "peft"))
    loaded = load(store, release, adapters=ServedAdapters(adapters))
    # The masks are set in the parameters, not in the request.
    loaded = replace(loaded, served=replace(loaded.served, requires_masks=False))
    found: dict[str, Any] = {}
    for title, fields in _requests(loaded, name).items():
        params = params_of(loaded, **{"width": SIDE, "height": SIDE, "num_inference_steps": 4} | fields)
        found[title] = recorded.describe(np.concatenate(generate(loaded.model, [params])[0]))
    expected = compare_with_recorded(f"pictures_{name}", found)
    assert found.keys() == expected.keys()
    for title, one in found.items():
        difference = np.abs(np.subtract(one["colours"], expected[title]["colours"])).max()
        assert difference <= COLOUR_TOLERANCE, title
    if os.environ.get("PREHEAT_EXACT_PICTURES"):
        assert found == expected
