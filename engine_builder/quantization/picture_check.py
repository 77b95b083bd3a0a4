"""Compute a model in FP8 or INT8 in eager PyTorch, and compare its pictures with those of the model itself.

No engine is built. So a policy can be tried in minutes, on a GPU or, for small models, on a CPU.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine_builder.building.eager_model import eager_engines, load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantization_plan import plan_quantization
from engine_builder.quantization.quantize import QuantizedLayer
from engine_builder.quantization.validation.compare import Comparison, LayerPair, Score, compare_models
from engine_builder.quantization.validation.stored import QUANTIZATION
from engine_builder.stores.store import WritableStore
from model.engines.engine import EngineSet
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.components import unets
from model.pipeline.params import GenerationParams
from model.store.precision import FP8, INT8, Precision

# Of a GPU: torch._scaled_mm multiplies E4M3 from compute capability 8.9 on, and torch._int_mm int8 from 8.0 on.
_MIN_CAPABILITIES = {FP8: 89, INT8: 80}


class Fp8Unsupported(PreheatError):
    """This machine's GPU does not multiply FP8 numbers."""

    remedy = "Use a GPU of compute capability 8.9 or newer, such as an L4, an H100 or an H200."


class Int8Unsupported(PreheatError):
    """This machine's GPU does not multiply INT8 numbers with torch._int_mm."""

    remedy = "Use a GPU of compute capability 8.0 or newer, such as an A100, an A10G or an L4."


@dataclass(frozen=True)
class QuantizationCheck:
    """The quantized layers by component, and the comparison."""

    layers: dict[str, list[QuantizedLayer]]
    comparison: Comparison


def check_target(target: Target, precision: Precision) -> None:
    """Raise Fp8Unsupported or Int8Unsupported for a GPU that does not multiply these numbers. A CPU emulates it."""
    if target.device != "cuda" or int(target.capability.removeprefix("sm")) >= _MIN_CAPABILITIES[precision]:
        return
    if precision == FP8:
        raise Fp8Unsupported(f"The GPU {target.product} ({target.capability}) does not multiply FP8 numbers.")
    raise Int8Unsupported(f"The GPU {target.product} ({target.capability}) does not multiply INT8 numbers.")


def check_quantization(
    base: Checkpoint,
    refiner: Checkpoint | None,
    precision: Precision,
    device: str,
    policy: Policy,
    requests: Sequence[GenerationParams],
    store: WritableStore,
    report: Callable[[int, int], None] = lambda *_: None,
    score: Score | None = None,
    quantized_precision: Precision = FP8,
) -> QuantizationCheck:
    """Generate the images of `requests` in `precision` and in `quantized_precision`, and compare them.

    The ranges are those of the store's calibration of these weights with the most prompts. `report`, `score`: see
    `compare_models`. Raises CalibrationError without one, BadPolicy, NotComparable or BrokenImage.
    """
    quantization = plan_quantization(base, refiner, policy, store, quantized_precision)
    networks, reference = load_eager_model(base, refiner, precision, device)
    quantized = dict(networks)
    layers = {}
    pairs = []
    for name in quantization.calibrations:
        quantized[name], layers[name] = quantization.apply(networks[name])
        names = [layer.name for layer in layers[name]]
        pairs.append(LayerPair(name, networks[name].module, quantized[name].module, names))
    engines = {name: EngineSet([engine]) for name, engine in eager_engines(quantized).items()}
    exact = {}
    if quantization.fp16_steps:
        exact = {spec.name: reference.engines[spec.name] for spec in unets() if quantization.covers(spec.name)}
    other = replace(reference, engines=engines, loops={}, fp16_engines=exact, fp16_steps=policy.fp16_steps)
    comparison = compare_models(
        reference,
        other,
        requests,
        names=(precision.name, quantized_precision.name),
        layers=pairs,
        identity={
            **quantization.calibrations,
            QUANTIZATION: quantization.digest,
            "policy": json.dumps(policy.entries),
        },
        report=report,
        score=score,
    )
    return QuantizationCheck(layers, comparison)
