"""What is run before a replica is ready: each size, each bucket at its full rows, and memory that does not suffice."""

from dataclasses import replace

import pytest
import torch

from model import components, warmup
from model.engines import EngineSet
from model.errors import NoEngineForTarget
from model.loading import Loaded
from model.request import Defaults, ServedModel, SizeList
from model.store.manifest import Bucket, Span
from model.warmup import warm_up
from tests.stand_ins.line_networks import line_model, stub


@pytest.fixture
def loaded() -> Loaded:
    """Two sizes, with UNet engines for 2, 4 and 8 rows of each."""
    model = line_model()
    sizes = ((64, 64), (96, 64))
    for name in (components.UNET, components.REFINER_UNET):
        engines = []
        for width, height in sizes:
            for rows in (2, 4, 8):
                engines.append(replace(stub(model, name)))
                engines[-1].bucket = Bucket(
                    rows=Span(min=rows, max=rows), height=Span(min=height, max=height), width=Span(min=width, max=width)
                )
        model.engines[name] = EngineSet(engines)
    served = ServedModel(64, 64, SizeList(sizes), has_refiner=True, defaults=Defaults())
    return Loaded(model, served, "line/1", "cpu", "aot_inductor", 0)


def test_every_bucket_of_every_size_runs_at_its_full_rows(loaded: Loaded) -> None:
    with torch.inference_mode():
        preview_map = warm_up(loaded)
    assert preview_map.weight.shape == (4, 3)
    for name in (components.UNET, components.REFINER_UNET):
        for engine in loaded.model.engines[name].engines:
            assert engine.seen, f"{name} {engine.bucket} never ran"  # type: ignore[attr-defined]
            assert {len(inputs["sample"]) for inputs in engine.seen} == {engine.bucket.rows.max}  # type: ignore[attr-defined]
    assert {key[1:] for key in loaded.model.loops} == {(64, 64), (64, 96)}
    assert all(not loop.rows for loop in loaded.model.loops.values())


def test_a_gpu_that_is_too_small_is_said_at_load(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(warmup, "denoise", full)
    with pytest.raises(NoEngineForTarget, match="line/1 does not fit .* configure fewer rows or sizes"):
        warm_up(loaded)
