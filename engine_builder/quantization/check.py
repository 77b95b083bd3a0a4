"""Compute a model's UNets in FP8 in eager PyTorch, and compare its pictures with those of the model itself.

No engine is built. So a policy can be tried in minutes, on a GPU or, for small models, on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine_builder.building.eager_model import eager_engines, load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.quantization.plan import plan_quantization
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import QuantizedLayer
from engine_builder.quantization.validation.compare import Comparison, LayerPair, Score, compare_models
from engine_builder.quantization.validation.stored import QUANTIZATION
from engine_builder.stores.store import WritableStore
from model.engines.engine import EngineSet
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.params import GenerationParams
from model.store.precision import Precision

_MIN_CAPABILITY = 89  # of a GPU: torch._scaled_mm multiplies E4M3 from compute capability 8.9 on


class Fp8Unsupported(PreheatError):
    """This machine's GPU does not multiply FP8 numbers."""

    remedy = "Use a GPU of compute capability 8.9 or newer, such as an L4, an H100 or an H200."


@dataclass(frozen=True)
class QuantizationCheck:
    """The quantized layers by UNet, and the comparison."""

    layers: dict[str, list[QuantizedLayer]]
    comparison: Comparison


def check_fp8_target(target: Target) -> None:
    """Raise Fp8Unsupported for a GPU that does not multiply FP8 numbers. A CPU emulates the product."""
    if target.device == "cuda" and int(target.capability.removeprefix("sm")) < _MIN_CAPABILITY:
        raise Fp8Unsupported(f"The GPU {target.product} ({target.capability}) does not multiply FP8 numbers.")


def check_quantization(
    base: Checkpoint,
    refiner: Checkpoint | None,
    precision: Precision,
    device: str,
    policy: Policy,
    requests: Sequence[GenerationParams],
    store: WritableStore,
    calibrated: Callable[[str, str], None] = lambda *_: None,
    report: Callable[[int, int], None] = lambda *_: None,
    score: Score | None = None,
) -> QuantizationCheck:
    """Generate the images of `requests` in `precision` and in FP8, and compare them.

    The ranges are those of the store's calibration of these weights with the most prompts. `calibrated` is called with
    each UNet and the key. `report`, `score`: see `compare_models`. Raises CalibrationError without one, BadPolicy,
    NotComparable or BrokenImage.
    """
    quantization = plan_quantization(base, refiner, policy, store, calibrated)
    networks, reference = load_eager_model(base, refiner, precision, device, store)
    quantized = dict(networks)
    layers = {}
    pairs = []
    for name in quantization.calibrations:
        quantized[name], layers[name] = quantization.apply(networks[name])
        names = [layer.name for layer in layers[name]]
        pairs.append(LayerPair(name, networks[name].module, quantized[name].module, names))
    engines = {name: EngineSet([engine]) for name, engine in eager_engines(quantized).items()}
    exact = {name: reference.engines[name] for name in quantization.calibrations} if quantization.fp16_steps else {}
    other = replace(reference, engines=engines, loops={}, fp16_unets=exact, fp16_steps=policy.fp16_steps)
    comparison = compare_models(
        reference,
        other,
        requests,
        names=(precision.name, "fp8"),
        layers=pairs,
        identity={
            **quantization.calibrations,
            QUANTIZATION: quantization.digest,
            "policy": policy.model_dump_json(),
        },
        report=report,
        score=score,
    )
    return QuantizationCheck(layers, comparison)
