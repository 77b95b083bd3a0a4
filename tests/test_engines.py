"""Engines: a compiled one against PyTorch, the checks before native code runs, and sets of buckets."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from engine_builder.building.eager_engine import EagerEngine
from model.engines.aot_inductor.cpu_container import Container
from model.engines.aot_inductor.engine import AotInductorEngine
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support import releases
from tests.support.releases import BUCKET, SIGNATURE, Toy

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def package() -> bytes:
    return releases.compiled_toy().engine


def open_engine(
    package: bytes,
    weights: Mapping[str, torch.Tensor] | None = None,
    constants: bytes | None = None,
    signature: Signature = SIGNATURE,
    device: torch.device = CPU,
) -> AotInductorEngine:
    weights = releases.toy_tensors(0) if weights is None else weights
    return AotInductorEngine("unet", package, signature, BUCKET, constants or releases.toy_constants(), weights, device)


def latents(batch: int = 2, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))


# -- a compiled engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_engine_computes_with_the_weights_it_is_given(package: bytes, seed: int) -> None:
    """The package holds neither of the two sets of weights."""
    engine = open_engine(package, releases.toy_tensors(seed))
    for batch, height, width in ((1, 64, 64), (4, 64, 512), (3, 200, 104)):
        x = latents(batch, height, width)
        torch.testing.assert_close(engine.run({"x": x})["y"], Toy(seed)(x)[0])


def test_engine_aliases_its_weights(package: bytes) -> None:
    weights = releases.toy_tensors(0)
    engine, x = open_engine(package, weights), latents()
    before = engine.run({"x": x})["y"]
    weights["b.bias"].add_(1.0)
    torch.testing.assert_close(engine.run({"x": x})["y"], before + 1.0)


def test_engine_accepts_inputs_that_are_not_contiguous(package: bytes) -> None:
    x = latents(2, 64, 96).transpose(2, 3)
    assert not x.is_contiguous()
    torch.testing.assert_close(open_engine(package).run({"x": x})["y"], Toy(0)(x)[0])


@pytest.mark.parametrize(
    "x",
    [
        latents(5), latents(2, 32, 64), latents(2, 64, 520), latents().double(), latents()[0], latents()[:, :3],
        latents()[:0], torch.empty(2, 4, 8, 8, device="meta"),
    ],
    ids=["batch", "height", "width", "dtype", "dimensions", "channels", "empty batch", "device"],
)  # fmt: skip
def test_refuses_inputs_outside_the_bucket(package: bytes, x: torch.Tensor) -> None:
    with pytest.raises(EngineError, match="unet"):
        open_engine(package).run({"x": x})


def without(name: str) -> Callable[[Weights], None]:
    def remove(weights: Weights) -> None:
        del weights[name]

    return remove


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], None]:
    def apply(weights: Weights) -> None:
        weights[name] = change(weights[name])

    return apply


UNFIT_WEIGHTS: dict[str, tuple[Callable[[Weights], None], str]] = {
    "missing": (without("a.weight"), "weights of unet lack a.weight"),
    "shape": (changed("a.weight", lambda t: t[:7]), r"a.weight is float32 \[7, 4\], expected float32 \[8, 4\]"),
    "transposed": (changed("a.weight", lambda t: t.T.contiguous()), r"\[4, 8\], expected float32 \[8, 4\]"),
    "flat": (changed("a.weight", lambda t: t.flatten()), r"\[32\], expected float32 \[8, 4\]"),
    "dtype": (changed("b.bias", lambda t: t.half()), r"b.bias is float16 \[4\], expected float32 \[4\]"),
    "strides": (changed("a.weight", lambda t: t.T.contiguous().T), "a.weight must be contiguous"),
    "device": (changed("a.weight", lambda t: t.to("meta")), "on cpu"),
}


@pytest.mark.parametrize(("change", "message"), UNFIT_WEIGHTS.values(), ids=UNFIT_WEIGHTS)
def test_refuses_weights_that_do_not_fit(package: bytes, change: Callable[[Weights], None], message: str) -> None:
    weights = releases.toy_tensors(0)
    change(weights)
    with pytest.raises(EngineError, match=f"{message}.*`preheat build`, `preheat publish`"):
        open_engine(package, weights)


DAMAGED_MAPS = {
    "not JSON": b"\0",
    "a list": b"[]",
    "an entry without a dtype": b'{"a.weight": {"tensor": "a.weight", "shape": [8, 4]}}',
    "a dtype that is a list": releases.toy_constants({"a.weight": {"dtype": ["float32"]}}),
    "a shape of text": releases.toy_constants({"a.weight": {"shape": "84"}}),
    "a tensor that is a number": releases.toy_constants({"a.weight": {"tensor": 7}}),
}


@pytest.mark.parametrize("constants", DAMAGED_MAPS.values(), ids=DAMAGED_MAPS)
def test_refuses_a_damaged_map_of_constants(package: bytes, constants: bytes) -> None:
    with pytest.raises(EngineError, match="unet engine cannot be opened: .* damaged at .*`preheat build`"):
        open_engine(package, constants=constants)


def test_refuses_a_map_of_other_constants(package: bytes) -> None:
    """With a constant too few, the first call would be a segmentation fault."""
    entries: dict[str, Any] = json.loads(releases.toy_constants())
    for wrong in (
        {name: entry for name, entry in entries.items() if name != "b.bias"},
        entries | {"c": entries["b.bias"]},
        {},
    ):
        with pytest.raises(EngineError, match="constant map disagree.*`preheat build`"):
            open_engine(package, constants=json.dumps(wrong).encode())


def test_refuses_bytes_that_are_not_an_engine(package: bytes) -> None:
    for data in (b"", b"this is not an engine", package[: len(package) // 2], package[:-1000], package[1000:]):
        with pytest.raises(EngineError, match="unet engine cannot be opened .*`preheat build`") as caught:
            open_engine(data)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_refuses_another_number_of_inputs(package: bytes) -> None:
    """The native code would end the process."""
    two_inputs = SIGNATURE.inputs + (TensorSpec(name="z", dtype="float32", shape=("rows",)),)
    with pytest.raises(EngineError, match="unet engine takes 1 tensors and its record names 2.*`preheat build`"):
        open_engine(package, signature=Signature(inputs=two_inputs, outputs=SIGNATURE.outputs))


def test_names_the_component_whose_code_fails(package: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("failed; standard error has the reason\nwith a trace")

    engine = open_engine(package)
    monkeypatch.setattr(Container, "run", fail)
    with pytest.raises(EngineError, match="unet engine failed .failed; standard error has the reason.. Its code"):
        engine.run({"x": latents()})


OUTPUT = SIGNATURE.outputs[0]
OTHER_OUTPUTS: dict[str, tuple[tuple[TensorSpec, ...], str]] = {
    "two": (
        (OUTPUT, TensorSpec(name="z", dtype="float32", shape=("rows",))),
        "1 tensors and its record names 2",
    ),
    "dtype": ((OUTPUT.model_copy(update={"dtype": "float16"}),), "as float32 .* record states float16"),
    "channels": (
        (OUTPUT.model_copy(update={"shape": ("rows", 3, "height/8", "width/8")}),),
        r"\[2, 4, 8, 12\], and its record states float32 \[2, 3, 8, 12\]",
    ),
    "dimensions": (
        (OUTPUT.model_copy(update={"shape": ("rows", 4)}),),
        r"\[2, 4, 8, 12\], and its record states float32 \[2, 4\]",
    ),
}


@pytest.mark.parametrize(("outputs", "message"), OTHER_OUTPUTS.values(), ids=OTHER_OUTPUTS)
def test_refuses_outputs_that_contradict_the_record(
    package: bytes, outputs: tuple[TensorSpec, ...], message: str
) -> None:
    engine = open_engine(package, signature=Signature(inputs=SIGNATURE.inputs, outputs=outputs))
    with pytest.raises(EngineError, match=f"unet engine returns .*{message}.*`preheat build`"):
        engine.run({"x": latents()})


# -- sets of buckets ----------------------------------------------------------------------------------------------


class BucketedEngine(EagerEngine):
    """An eager engine with a bucket. Like a compiled one, it takes no other batch and size. It records its batches."""

    def __init__(self, batch: Span, side: int | None = None, signature: Signature = SIGNATURE) -> None:
        super().__init__("unet", Toy(0), signature)
        span = Span(min=side, max=side) if side else Span(min=8, max=512, multiple=8)
        self.bucket = Bucket(batch=batch, height=span, width=span)
        self.batches: list[int] = []

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch, _, height, width = inputs["x"].shape
        assert self.bucket.holds(batch, 8 * height, 8 * width), "the bucket does not hold these inputs"
        self.batches.append(batch)
        return super().run(inputs)


def static_engines(*batches: int) -> list[BucketedEngine]:
    return [BucketedEngine(Span(min=batch, max=batch)) for batch in batches]


@pytest.mark.parametrize(
    ("batch", "calls"),
    [
        (1, {1: [1], 2: [], 8: []}),
        (2, {1: [], 2: [2], 8: []}),
        (3, {1: [], 2: [], 8: [8]}),
        (8, {1: [], 2: [], 8: [8]}),
        (9, {1: [1], 2: [], 8: [8]}),
        (20, {1: [], 2: [], 8: [8, 8, 8]}),
    ],
)
def test_batch_runs_in_the_smallest_bucket_that_holds_it(batch: int, calls: dict[int, list[int]]) -> None:
    engines = static_engines(8, 1, 2)
    x = latents(batch, 64, 64)
    torch.testing.assert_close(EngineSet(engines).run({"x": x}, 64, 64)["y"], Toy(0)(x)[0])
    assert {engine.bucket.batch.max: engine.batches for engine in engines} == calls


def test_batch_is_padded_to_a_multiple() -> None:
    engine = BucketedEngine(Span(min=2, max=6, multiple=2))
    for batch, calls in ((1, [2]), (3, [4]), (6, [6]), (7, [6, 2])):
        engine.batches.clear()
        x = latents(batch, 64, 64)
        torch.testing.assert_close(EngineSet([engine]).run({"x": x}, 64, 64)["y"], Toy(0)(x)[0])
        assert engine.batches == calls


def test_engine_of_the_size_runs() -> None:
    small, large = BucketedEngine(Span(min=1, max=4), 64), BucketedEngine(Span(min=1, max=2), 128)
    engines = EngineSet([small, large])
    engines.run({"x": latents(2, 128, 128)}, 128, 128)
    assert (small.batches, large.batches) == ([], [2])
    with pytest.raises(EngineError, match="No loaded unet engine serves 96x96"):
        engines.run({"x": latents(2, 96, 96)}, 96, 96)


def test_refuses_inputs_of_unequal_batches() -> None:
    """Split into calls, the longer one would lose its last entries."""
    two_inputs = SIGNATURE.inputs + (TensorSpec(name="t", dtype="float32", shape=("rows",)),)
    signature = Signature(inputs=two_inputs, outputs=SIGNATURE.outputs)
    engines = EngineSet([BucketedEngine(Span(min=1, max=2), signature=signature)])
    with pytest.raises(EngineError, match="input t is"):
        engines.run({"x": latents(4, 64, 64), "t": torch.zeros(6)}, 64, 64)


def test_refuses_an_empty_batch_and_missing_inputs() -> None:
    engines = EngineSet(static_engines(1, 2))
    with pytest.raises(EngineError, match="empty batch"):
        engines.run({"x": latents(2, 64, 64)[:0]}, 64, 64)
    with pytest.raises(EngineError, match="received nothing"):
        engines.run({}, 64, 64)


def test_variants_serve_only_their_cfg_layout() -> None:
    [one, two], [both] = static_engines(1, 2), static_engines(2)
    engines = EngineSet([two, one], {"both": [both]})
    assert engines.of_size(64, 64) == engines.serving(64, 64) == [one, two]
    assert engines.of_size(64, 64, "both") == [both] and engines.of_size(64, 64, "uncond") == []
    assert engines.of_size(1024, 64, "both") == []
    engines.run({"x": latents(2, 64, 64)}, 64, 64)
    assert (two.batches, both.batches) == ([2], [])


def test_refuses_a_set_of_engines_with_different_inputs() -> None:
    renamed = Signature(
        inputs=(TensorSpec(name="other", dtype="float32", shape=SIGNATURE.inputs[0].shape),), outputs=SIGNATURE.outputs
    )
    with pytest.raises(EngineError, match="differ in what they take and return.*`preheat build`"):
        EngineSet([BucketedEngine(Span(min=1, max=1)), BucketedEngine(Span(min=2, max=2), signature=renamed)])
    with pytest.raises(EngineError, match="differ in what they take and return"):
        EngineSet(static_engines(2), {"both": [BucketedEngine(Span(min=2, max=2), signature=renamed)]})


# -- eager --------------------------------------------------------------------------------------------------------


def test_eager_engine_records_copies_of_its_inputs() -> None:
    engine = EagerEngine("unet", Toy(3), SIGNATURE, recording=True)
    x = latents()
    torch.testing.assert_close(engine.run({"x": x})["y"], Toy(3)(x)[0])
    original = x.clone()
    x.zero_()
    engine.recording = False
    engine.run({"x": x})
    assert len(engine.recorded_inputs) == 1 and torch.equal(engine.recorded_inputs[0]["x"], original)
    with pytest.raises(EngineError, match="unet takes x"):
        engine.run({"y": x})
