"""Random changes of a model's configurations: refused in a sentence, or the image of diffusers, or a warning.

PREHEAT_FUZZ_CONFIGS is their number, each of one entry: 2 by default, 200 in `make test-load`.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.compare_with_diffusers import compare_with_diffusers
from engine_builder.building.eager_model import load_eager_model, resolve_for
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_release_defaults
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.networks.network_check import check_model
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP32
from tests.support.images import largest_difference
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

CHANGES = int(os.environ.get("PREHEAT_FUZZ_CONFIGS", "2"))
TOLERANCE = 2  # of 255
FILES = (
    "unet/config.json", "vae/config.json", "text_encoder/config.json", "text_encoder_2/config.json",
    "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json", "tokenizer_2/tokenizer_config.json",
    "tokenizer/special_tokens_map.json", "model_index.json",
)  # fmt: skip
ADDED = {
    "unet": ("class_embed_type", "unknown_entry"),
    "vae": ("unknown_entry",),
    "scheduler": (
        "rescale_betas_zero_snr", "use_exponential_sigmas", "final_sigmas_type", "timestep_type", "thresholding",
        "solver_order", "algorithm_type", "variance_type", "use_lu_lambdas", "use_flow_sigmas",
    ),
    "tokenizer": ("padding_side", "truncation_side", "add_prefix_space", "do_lower_case", "pad_token"),
}  # fmt: skip
WORDS = (
    "x", "", "gelu", "quick_gelu", "silu", "swish", "linear", "scaled_linear", "v_prediction", "sample", "trailing",
    "linspace", "leading", "left", "<|endoftext|>", "!",
)  # fmt: skip
ODD = (None, True, False, 0, 1, -1, 3, 1.5, -0.5, 1e30, float("inf"), "x", [], {}, [1], [None], {"a": 1}, 10**12)


def other_value(value: Any, generator: random.Random) -> Any:
    """Return another value, in most cases of the same type."""
    if generator.random() < 0.3:
        return generator.choice(ODD)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return generator.choice([value + 1, value * 2, value / 2, max(0, value - 1), 0, 1, -1])
    if isinstance(value, str):
        return generator.choice(WORDS)
    if isinstance(value, list):
        return generator.choice([value[::-1], value[:-1], value + value[-1:], [], ["AttnDownBlock2D"] * len(value)])
    return generator.choice([1, 2.0, True, "silu", [1, 2], 0])


def change(folder: Path, generator: random.Random) -> str:
    """Change, add or remove an entry of a file. Returns what was changed."""
    path = folder / generator.choice(FILES)
    entries = json.loads(path.read_text())
    key = generator.choice([*entries, *ADDED.get(path.parent.name.removesuffix("_2"), ())])
    before = entries.get(key)
    if key in entries and generator.random() < 0.1:
        del entries[key]
    else:
        entries[key] = other_value(before, generator)
    path.write_text(json.dumps(entries))
    return f"{path.relative_to(folder)}: {key}: {before!r:.60} -> {entries.get(key)!r:.60}"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("seed", range(CHANGES))
def test_changed_config_is_refused_or_diffusers_image(seed: int, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("refiner"))
    what = change(folder, random.Random(seed))
    base = Checkpoint(folder)
    try:
        check_model(base, None)
        defaults = read_release_defaults(base, None)
        compare_with_diffusers(BuildPlan("changed", base, None, target, FP32))
        _, model = load_eager_model(base, None, FP32, "cpu")
    except PreheatError as refusal:
        assert str(refusal).endswith(".") and "\n" not in str(refusal), what
        return
    if read_scheduler(base).warnings:  # the build states that it uses another sampler than diffusers
        return
    sampler = str(defaults["scheduler"])
    request = GenerationRequest.model_validate(
        {
            "prompt": "a large red circle on a blue background", "width": 128, "height": 128, "seed": seed,
            "num_inference_steps": 5, "scheduler": sampler, "guidance_scale": 1.5 if sampler == "LCM" else 5.0,
        }
    )  # fmt: skip
    params = resolve_for(model, request)
    [image] = generate(model, [params])[0]
    assert largest_difference(image, Reference(folder).generate(params)) <= TOLERANCE, what
