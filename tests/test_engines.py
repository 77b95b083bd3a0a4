"""Engines: a real compiled one against PyTorch, everything that must not reach native code, and sets of buckets."""

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
    return releases.toy().engine


def opened(
    package: bytes,
    weights: Mapping[str, torch.Tensor] | None = None,
    constants: bytes | None = None,
    signature: Signature = SIGNATURE,
    device: torch.device = CPU,
) -> AotInductorEngine:
    weights = releases.tensors(0) if weights is None else weights
    return AotInductorEngine("unet", package, signature, BUCKET, constants or releases.toy_map(), weights, device)


def latents(rows: int = 2, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))


# -- a compiled engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_an_engine_computes_what_its_weights_say(package: bytes, seed: int) -> None:
    """One compiled package, two sets of weights, neither of them in it."""
    engine = opened(package, releases.tensors(seed))
    for rows, height, width in ((1, 64, 64), (4, 64, 512), (3, 200, 104)):
        x = latents(rows, height, width)
        torch.testing.assert_close(engine.run({"x": x})["y"], Toy(seed)(x)[0])


def test_weights_are_aliased_not_copied(package: bytes) -> None:
    weights = releases.tensors(0)
    engine, x = opened(package, weights), latents()
    before = engine.run({"x": x})["y"]
    weights["b.bias"].add_(1.0)
    torch.testing.assert_close(engine.run({"x": x})["y"], before + 1.0)


def test_inputs_that_are_not_contiguous_are_computed_right(package: bytes) -> None:
    x = latents(2, 64, 96).transpose(2, 3)
    assert not x.is_contiguous()
    torch.testing.assert_close(opened(package).run({"x": x})["y"], Toy(0)(x)[0])


@pytest.mark.parametrize(
    "x",
    [
        latents(5), latents(2, 32, 64), latents(2, 64, 520), latents().double(), latents()[0], latents()[:, :3],
        latents()[:0], torch.empty(2, 4, 8, 8, device="meta"),
    ],
    ids=["rows", "height", "width", "dtype", "dimensions", "channels", "no rows", "device"],
)  # fmt: skip
def test_inputs_outside_the_bucket_never_reach_native_code(package: bytes, x: torch.Tensor) -> None:
    with pytest.raises(EngineError, match="unet"):
        opened(package).run({"x": x})


def without(name: str) -> Callable[[Weights], None]:
    def remove(weights: Weights) -> None:
        del weights[name]

    return remove


def becomes(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], None]:
    def apply(weights: Weights) -> None:
        weights[name] = change(weights[name])

    return apply


UNFIT: dict[str, tuple[Callable[[Weights], None], str]] = {
    "missing": (without("a.weight"), "weights of unet lack a.weight"),
    "shape": (becomes("a.weight", lambda t: t[:7]), r"a.weight is float32 \[7, 4\], expected float32 \[8, 4\]"),
    "transposed": (becomes("a.weight", lambda t: t.T.contiguous()), r"\[4, 8\], expected float32 \[8, 4\]"),
    "flat": (becomes("a.weight", lambda t: t.flatten()), r"\[32\], expected float32 \[8, 4\]"),
    "dtype": (becomes("b.bias", lambda t: t.half()), r"b.bias is float16 \[4\], expected float32 \[4\]"),
    "strides": (becomes("a.weight", lambda t: t.T.contiguous().T), "a.weight must be contiguous"),
    "device": (becomes("a.weight", lambda t: t.to("meta")), "on cpu"),
}


@pytest.mark.parametrize(("change", "words"), UNFIT.values(), ids=UNFIT)
def test_weights_that_do_not_fit_are_refused(package: bytes, change: Callable[[Weights], None], words: str) -> None:
    weights = releases.tensors(0)
    change(weights)
    with pytest.raises(EngineError, match=f"{words}.*`preheat build`, `preheat publish`"):
        opened(package, weights)


BAD_MAPS = {
    "no JSON": b"\0",
    "a list": b"[]",
    "an entry without a dtype": b'{"a.weight": {"tensor": "a.weight", "shape": [8, 4]}}',
    "a dtype that is a list": releases.toy_map({"a.weight": {"dtype": ["float32"]}}),
    "a shape of text": releases.toy_map({"a.weight": {"shape": "84"}}),
    "a tensor that is a number": releases.toy_map({"a.weight": {"tensor": 7}}),
}


@pytest.mark.parametrize("constants", BAD_MAPS.values(), ids=BAD_MAPS)
def test_a_damaged_map_of_constants_is_refused(package: bytes, constants: bytes) -> None:
    with pytest.raises(EngineError, match="unet engine cannot be opened: .* damaged at .*`preheat build`"):
        opened(package, constants=constants)


def test_a_map_of_other_constants_is_refused(package: bytes) -> None:
    """One too few would be a segmentation fault at the first call."""
    entries: dict[str, Any] = json.loads(releases.toy_map())
    for wrong in (
        {name: entry for name, entry in entries.items() if name != "b.bias"},
        entries | {"c": entries["b.bias"]},
        {},
    ):
        with pytest.raises(EngineError, match="constant map disagree.*`preheat build`"):
            opened(package, constants=json.dumps(wrong).encode())


def test_refuses_bytes_that_are_no_engine(package: bytes) -> None:
    for data in (b"", b"this is no engine", package[: len(package) // 2], package[:-1000], package[1000:]):
        with pytest.raises(EngineError, match="unet engine cannot be opened .*`preheat build`") as caught:
            opened(data)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_refuses_another_number_of_inputs(package: bytes) -> None:
    """The native code would end the process."""
    two = SIGNATURE.inputs + (TensorSpec(name="z", dtype="float32", shape=("rows",)),)
    with pytest.raises(EngineError, match="unet engine takes 1 tensors and its record names 2.*`preheat build`"):
        opened(package, signature=Signature(inputs=two, outputs=SIGNATURE.outputs))


def test_names_the_component_whose_code_fails(package: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("failed; standard error has the reason\nwith a trace")

    engine = opened(package)
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


@pytest.mark.parametrize(("outputs", "words"), OTHER_OUTPUTS.values(), ids=OTHER_OUTPUTS)
def test_refuses_outputs_that_the_record_does_not_state(
    package: bytes, outputs: tuple[TensorSpec, ...], words: str
) -> None:
    engine = opened(package, signature=Signature(inputs=SIGNATURE.inputs, outputs=outputs))
    with pytest.raises(EngineError, match=f"unet engine returns .*{words}.*`preheat build`"):
        engine.run({"x": latents()})


# -- sets of buckets ----------------------------------------------------------------------------------------------


class Bucketed(EagerEngine):
    """An eager engine that holds its callers to a bucket, and counts rows, as compiled ones do."""

    def __init__(self, rows: Span, side: int | None = None, signature: Signature = SIGNATURE) -> None:
        super().__init__("unet", Toy(0), signature)
        span = Span(min=side, max=side) if side else Span(min=8, max=512, multiple=8)
        self.bucket = Bucket(batch=rows, height=span, width=span)
        self.ran: list[int] = []

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, _, height, width = inputs["x"].shape
        assert self.bucket.holds(rows, 8 * height, 8 * width), "a bucket was given what it does not hold"
        self.ran.append(rows)
        return super().run(inputs)


def static(*rows: int) -> list[Bucketed]:
    return [Bucketed(Span(min=count, max=count)) for count in rows]


@pytest.mark.parametrize(
    ("rows", "ran"),
    [
        (1, {1: [1], 2: [], 8: []}),
        (2, {1: [], 2: [2], 8: []}),
        (3, {1: [], 2: [], 8: [8]}),
        (8, {1: [], 2: [], 8: [8]}),
        (9, {1: [1], 2: [], 8: [8]}),
        (20, {1: [], 2: [], 8: [8, 8, 8]}),
    ],
)
def test_any_rows_run_in_the_smallest_bucket_that_holds_them(rows: int, ran: dict[int, list[int]]) -> None:
    engines = static(8, 1, 2)
    x = latents(rows, 64, 64)
    torch.testing.assert_close(EngineSet(engines).run({"x": x}, 64, 64)["y"], Toy(0)(x)[0])
    assert {engine.bucket.batch.max: engine.ran for engine in engines} == ran


def test_rows_in_steps_are_padded_to_a_step() -> None:
    engine = Bucketed(Span(min=2, max=6, multiple=2))
    for rows, ran in ((1, [2]), (3, [4]), (6, [6]), (7, [6, 2])):
        engine.ran.clear()
        x = latents(rows, 64, 64)
        torch.testing.assert_close(EngineSet([engine]).run({"x": x}, 64, 64)["y"], Toy(0)(x)[0])
        assert engine.ran == ran


def test_a_size_is_run_by_the_engine_of_that_size() -> None:
    small, large = Bucketed(Span(min=1, max=4), 64), Bucketed(Span(min=1, max=2), 128)
    engines = EngineSet([small, large])
    engines.run({"x": latents(2, 128, 128)}, 128, 128)
    assert (small.ran, large.ran) == ([], [2])
    with pytest.raises(EngineError, match="No loaded unet engine serves 96x96"):
        engines.run({"x": latents(2, 96, 96)}, 96, 96)


def test_inputs_of_unequal_rows_lose_none_silently() -> None:
    two = SIGNATURE.inputs + (TensorSpec(name="t", dtype="float32", shape=("rows",)),)
    engines = EngineSet([Bucketed(Span(min=1, max=2), signature=Signature(inputs=two, outputs=SIGNATURE.outputs))])
    with pytest.raises(EngineError, match="input t is"):
        engines.run({"x": latents(4, 64, 64), "t": torch.zeros(6)}, 64, 64)


def test_no_rows_and_no_inputs_are_refused() -> None:
    engines = EngineSet(static(1, 2))
    with pytest.raises(EngineError, match="empty batch"):
        engines.run({"x": latents(2, 64, 64)[:0]}, 64, 64)
    with pytest.raises(EngineError, match="received nothing"):
        engines.run({}, 64, 64)


def test_variants_serve_only_batches_of_their_layout() -> None:
    [one, two], [both] = static(1, 2), static(2)
    engines = EngineSet([two, one], {"both": [both]})
    assert engines.of_size(64, 64) == engines.serving(64, 64) == [one, two]
    assert engines.of_size(64, 64, "both") == [both] and engines.of_size(64, 64, "uncond") == []
    assert engines.of_size(1024, 64, "both") == []
    engines.run({"x": latents(2, 64, 64)}, 64, 64)
    assert (two.ran, both.ran) == ([2], [])


def test_engines_with_different_inputs_make_no_set() -> None:
    renamed = Signature(
        inputs=(TensorSpec(name="other", dtype="float32", shape=SIGNATURE.inputs[0].shape),), outputs=SIGNATURE.outputs
    )
    with pytest.raises(EngineError, match="differ in what they take and return.*`preheat build`"):
        EngineSet([Bucketed(Span(min=1, max=1)), Bucketed(Span(min=2, max=2), signature=renamed)])
    with pytest.raises(EngineError, match="differ in what they take and return"):
        EngineSet(static(2), {"both": [Bucketed(Span(min=2, max=2), signature=renamed)]})


# -- eager --------------------------------------------------------------------------------------------------------


def test_eager_runs_and_remembers_copies_while_recording() -> None:
    engine = EagerEngine("unet", Toy(3), SIGNATURE, recording=True)
    x = latents()
    torch.testing.assert_close(engine.run({"x": x})["y"], Toy(3)(x)[0])
    kept = x.clone()
    x.zero_()
    engine.recording = False
    engine.run({"x": x})
    assert len(engine.seen) == 1 and torch.equal(engine.seen[0]["x"], kept)
    with pytest.raises(EngineError, match="unet takes x"):
        engine.run({"y": x})
