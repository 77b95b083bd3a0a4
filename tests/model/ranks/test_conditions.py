"""ControlNets on two ranks: each rank runs them for its own entries of the batch."""

from dataclasses import replace

import numpy as np
import pytest

from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.loading.load import load_release
from model.loading.target import detect_targets
from model.pipeline.params import Control
from model.pipeline.text_to_image import generate
from tests.support.ranks import SIDE, assert_equal, params, ranked


@pytest.mark.full
def test_controlnets_run_for_the_entries_of_each_rank(compiled_control_store: WritableStore) -> None:
    alone = load_release(compiled_control_store, "control/1", detect_targets(), buckets=[], cold_start=ColdStart())
    levels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    controls = [Control(name, levels, 1.0, 0.0, 1.0, mode=None) for name in ("edges", "small")]
    plain = params(alone, guidance_scale=5.0)
    batch = [plain, replace(plain, seed=5, controls=tuple(controls)), replace(plain, seed=6, controls=(controls[1],))]
    with ranked(compiled_control_store, "control/1", 2) as (divided, _):
        assert_equal(generate(divided.model, batch)[0], generate(alone.model, batch)[0])
