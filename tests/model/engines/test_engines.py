"""Engines: a compiled one against PyTorch, the checks before native code runs, and sets of buckets."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from engine_builder.building.eager_engine import EagerEngine
from model.engines.aot_inductor.compiled_engine import AotInductorEngine
from model.engines.aot_inductor.container import Container
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support import releases
from tests.support.releases import TOY_BUCKET, TOY_SIGNATURE, Toy

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def engine_bytes() -> bytes:
    """A `Toy` compiled with AOTInductor, without its weights."""
    return releases.compiled_toy().engine


def open_engine(
    engine_bytes: bytes,
    weights: Mapping[str, torch.Tensor] | None = None,
    constant_map: bytes | None = None,
    signature: Signature = TOY_SIGNATURE,
    device: torch.device = CPU,
) -> AotInductorEngine:
    """Open an engine as the UNet, and bind it. `constant_map`: JSON that maps the engine's constants to weights."""
    weights = releases.toy_tensors(0) if weights is None else weights
    constant_map = releases.toy_constants() if constant_map is None else constant_map
    engine = AotInductorEngine("unet", engine_bytes, signature, TOY_BUCKET, constant_map, device)
    engine.bind(weights)
    return engine


def latents(batch: int = 2, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))


# -- a compiled engine --------------------------------------------------------------------------------------------


def test_engine_computes_with_the_weights_it_is_given(engine_bytes: bytes) -> None:
    """The engine is compiled once. It contains neither of the two sets of weights, and aliases them."""
    for seed in (0, 1):
        weights = releases.toy_tensors(seed)
        engine = open_engine(engine_bytes, weights)
        for x in (latents(1, 64, 64), latents(4, 64, 512), latents(3, 200, 104), latents(2, 64, 96).transpose(2, 3)):
            before = engine.run({"x": x})["y"]
            torch.testing.assert_close(before, Toy(seed)(x)[0])
        weights["b.bias"].add_(1.0)
        torch.testing.assert_close(engine.run({"x": x})["y"], before + 1.0)


INPUTS_OUTSIDE_THE_BUCKET = [
    (latents(5), "no bucket for batch 5 at 96x64"),
    (latents(2, 32, 64), "no bucket for batch 2 at 64x32"),
    (latents(2, 64, 520), "no bucket for batch 2 at 520x64"),
    (latents()[:0], "no bucket for batch 0 at 96x64"),
    (latents().double(), "input x is float64 .* expected float32"),
    (latents()[0], r"input x is float32 \[4, 8, 12\], expected"),
    (torch.empty(2, 4, 8, 8, device="meta"), "input x is on meta, its engine on cpu"),
]


def test_refuses_inputs_outside_the_bucket(engine_bytes: bytes) -> None:
    for x, message in INPUTS_OUTSIDE_THE_BUCKET:
        with pytest.raises(EngineError, match=f"unet.*{message}"):
            open_engine(engine_bytes).run({"x": x})


UNFIT_WEIGHTS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("a.weight", None, "weights of unet lack a.weight"),
    ("a.weight", lambda t: t[:7], r"a.weight is float32 \[7, 4\], expected float32 \[8, 4\]"),
    ("a.weight", lambda t: t.T.contiguous(), r"\[4, 8\], expected float32 \[8, 4\]"),
    ("a.weight", lambda t: t.flatten(), r"\[32\], expected float32 \[8, 4\]"),
    ("b.bias", lambda t: t.half(), r"b.bias is float16 \[4\], expected float32 \[4\]"),
    ("a.weight", lambda t: t.T.contiguous().T, "a.weight must be contiguous and on cpu"),
    ("a.weight", lambda t: t.to("meta"), "a.weight must be contiguous and on cpu"),
]


def test_refuses_weights_that_do_not_fit(engine_bytes: bytes) -> None:
    for name, change, message in UNFIT_WEIGHTS:
        weights = releases.toy_tensors(0)
        tensor = weights.pop(name)
        with pytest.raises(EngineError, match=f"{message}.*`preheat build`, `preheat publish`"):
            open_engine(engine_bytes, weights | ({name: change(tensor)} if change else {}))


DAMAGED_CONSTANT_MAPS = (
    b"\0",
    b"[]",
    b'{"a.weight": {"tensor": "a.weight", "shape": [8, 4]}}',
    releases.toy_constants({"a.weight": {"dtype": ["float32"]}}),
    releases.toy_constants({"a.weight": {"shape": "84"}}),
    releases.toy_constants({"a.weight": {"tensor": 7}}),
)


def test_refuses_a_damaged_constant_map(engine_bytes: bytes) -> None:
    """If a constant were missing, the first call would end the process with a segmentation fault."""
    for constant_map in DAMAGED_CONSTANT_MAPS:
        with pytest.raises(EngineError, match="unet engine cannot be opened: .* damaged at .*`preheat build`"):
            open_engine(engine_bytes, constant_map=constant_map)
    entries: dict[str, Any] = json.loads(releases.toy_constants())
    without = {name: entry for name, entry in entries.items() if name != "b.bias"}
    for other_entries in (without, entries | {"c": entries["b.bias"]}, {}):
        with pytest.raises(EngineError, match="constant map disagree.*`preheat build`"):
            open_engine(engine_bytes, constant_map=json.dumps(other_entries).encode())


def test_refuses_bytes_that_are_not_an_engine(engine_bytes: bytes) -> None:
    for data in (
        b"",
        b"this is not an engine",
        engine_bytes[: len(engine_bytes) // 2],
        engine_bytes[:-1000],
        engine_bytes[1000:],
    ):
        with pytest.raises(EngineError, match="unet engine cannot be opened .*`preheat build`") as caught:
            open_engine(data)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_refuses_another_number_of_inputs(engine_bytes: bytes) -> None:
    """If the engine were called with another number of inputs, its native code would end the process."""
    two_inputs = TOY_SIGNATURE.inputs + (TensorSpec(name="z", dtype="float32", shape=("rows",)),)
    with pytest.raises(EngineError, match="unet engine .* number of inputs: 1 and 2.*`preheat build`"):
        open_engine(engine_bytes, signature=Signature(inputs=two_inputs, outputs=TOY_SIGNATURE.outputs))


def test_names_the_component_whose_code_fails(engine_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("failed; standard error has the reason\nwith a trace")

    engine = open_engine(engine_bytes)
    monkeypatch.setattr(Container, "run", fail)
    with pytest.raises(EngineError, match="unet engine failed .failed; standard error has the reason.. Its code"):
        engine.run({"x": latents()})


def test_refuses_outputs_that_contradict_the_manifest(engine_bytes: bytes) -> None:
    output = TOY_SIGNATURE.outputs[0]
    four = ("rows", 3, "height/8", "width/8")
    for outputs, message in (
        ((output, output.model_copy(update={"name": "z"})), "disagree on the number of outputs: 1 and 2"),
        ((output.model_copy(update={"dtype": "float16"}),), "as float32 .* manifest entry states float16"),
        ((output.model_copy(update={"shape": four}),), r"\[2, 4, 8, 12\], and its .* float32 \[2, 3, 8, 12\]"),
        ((output.model_copy(update={"shape": ("rows", 4)}),), r"\[2, 4, 8, 12\], and its .* float32 \[2, 4\]"),
    ):
        engine = open_engine(engine_bytes, signature=Signature(inputs=TOY_SIGNATURE.inputs, outputs=outputs))
        with pytest.raises(EngineError, match=f"unet engine .*{message}.*`preheat build`"):
            engine.run({"x": latents()})


# -- sets of buckets ----------------------------------------------------------------------------------------------


class BucketedEngine(EagerEngine):
    """An eager engine with a bucket. It refuses other batches and sizes, as a compiled engine does.

    `batches`: the batch of each call.
    """

    def __init__(self, batch: Span, side: int | None = None, signature: Signature = TOY_SIGNATURE) -> None:
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


def test_uses_the_smallest_sufficient_bucket_and_pads() -> None:
    several = static_engines(8, 1, 2)
    multiple = BucketedEngine(Span(min=2, max=6, multiple=2))
    for engines, batch, calls in (
        (several, 1, [1]), (several, 2, [2]), (several, 3, [8]), (several, 9, [8, 1]), (several, 20, [8, 8, 8]),
        ([multiple], 1, [2]), ([multiple], 3, [4]), ([multiple], 7, [6, 2]),
    ):  # fmt: skip
        for engine in engines:
            engine.batches.clear()
        x = latents(batch, 64, 64)
        torch.testing.assert_close(EngineSet(engines).run({"x": x}, 64, 64)["y"], Toy(0)(x)[0])
        assert sorted(sum((engine.batches for engine in engines), []), reverse=True) == calls, batch


def test_uses_the_engine_of_the_size() -> None:
    small, large = BucketedEngine(Span(min=1, max=4), 64), BucketedEngine(Span(min=1, max=2), 128)
    engines = EngineSet([small, large])
    engines.run({"x": latents(2, 128, 128)}, 128, 128)
    assert (small.batches, large.batches) == ([], [2])
    with pytest.raises(EngineError, match="No loaded unet engine serves 96x96"):
        engines.run({"x": latents(2, 96, 96)}, 96, 96)


def test_refuses_inputs_of_unequal_batches() -> None:
    """A batch of 4 is split into two calls of 2. The last two entries of an input of batch 6 would be lost."""
    two_inputs = TOY_SIGNATURE.inputs + (TensorSpec(name="t", dtype="float32", shape=("rows",)),)
    signature = Signature(inputs=two_inputs, outputs=TOY_SIGNATURE.outputs)
    engines = EngineSet([BucketedEngine(Span(min=1, max=2), signature=signature)])
    with pytest.raises(EngineError, match="input t is"):
        engines.run({"x": latents(4, 64, 64), "t": torch.zeros(6)}, 64, 64)


def test_refuses_an_empty_batch_and_missing_inputs() -> None:
    engines = EngineSet(static_engines(1, 2))
    with pytest.raises(EngineError, match="empty batch"):
        engines.run({"x": latents(2, 64, 64)[:0]}, 64, 64)
    with pytest.raises(EngineError, match="received nothing"):
        engines.run({}, 64, 64)


def test_refuses_a_set_of_engines_with_different_inputs() -> None:
    renamed = Signature(
        inputs=(TensorSpec(name="other", dtype="float32", shape=TOY_SIGNATURE.inputs[0].shape),),
        outputs=TOY_SIGNATURE.outputs,
    )
    with pytest.raises(EngineError, match="differ in what they take and return.*`preheat build`"):
        EngineSet([BucketedEngine(Span(min=1, max=1)), BucketedEngine(Span(min=2, max=2), signature=renamed)])


# -- eager --------------------------------------------------------------------------------------------------------


def test_eager_engine_records_copies_of_its_inputs() -> None:
    engine = EagerEngine("unet", Toy(3), TOY_SIGNATURE, recording=True)
    x = latents()
    torch.testing.assert_close(engine.run({"x": x})["y"], Toy(3)(x)[0])
    original = x.clone()
    x.zero_()
    engine.recording = False
    engine.run({"x": x})
    assert len(engine.recorded_inputs) == 1 and torch.equal(engine.recorded_inputs[0]["x"], original)
    with pytest.raises(EngineError, match="unet takes x"):
        engine.run({"y": x})
