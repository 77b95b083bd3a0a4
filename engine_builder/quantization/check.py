"""Compute a model's UNets in FP8 in eager PyTorch, and compare its pictures with those of the model itself.

No engine is built. So a policy can be tried in minutes, on a GPU or, for small models, on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine_builder.building.eager_model import eager_engines, load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.quantization.calibrate import digest_weights
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import QuantizedLayer, quantize_network
from engine_builder.quantization.record import find_calibration
from engine_builder.quantization.validation.compare import Comparison, LayerPair, compare_models
from engine_builder.stores.store import WritableStore
from model.engines.engine import EngineSet
from model.pipeline.params import GenerationParams
from model.pipeline.spec import SDXL, unets
from model.store.precision import Precision


@dataclass(frozen=True)
class QuantizationCheck:
    """The quantized layers by UNet, and the comparison."""

    layers: dict[str, list[QuantizedLayer]]
    comparison: Comparison


def check_quantization(
    base: Checkpoint,
    refiner: Checkpoint | None,
    precision: Precision,
    device: str,
    policy: Policy,
    requests: Sequence[GenerationParams],
    store: WritableStore,
    calibrated: Callable[[str], None] = lambda _: None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> QuantizationCheck:
    """Generate the images of `requests` in `precision` and in FP8, and compare them.

    The ranges are those of the store's calibration of these weights with the most prompts. `calibrated` is called with
    the key of each. `report`: see `compare_models`. Raises CalibrationError without one, BadPolicy, NotComparable or
    BrokenImage.
    """
    keys = {}
    ranges = {}
    for spec in unets():
        checkpoint = base if spec.part == "base" else refiner
        if checkpoint is not None:
            weights = digest_weights(checkpoint, SDXL[spec.name].checkpoint_folder)
            keys[spec.name], ranges[spec.name] = find_calibration(store, spec.name, weights)
            calibrated(keys[spec.name])
    networks, reference = load_eager_model(base, refiner, precision, device, store)
    quantized = dict(networks)
    layers = {}
    pairs = []
    for name, observed in ranges.items():
        quantized[name], layers[name] = quantize_network(networks[name], observed, policy)
        names = [layer.name for layer in layers[name]]
        pairs.append(LayerPair(name, networks[name].module, quantized[name].module, names))
    engines = {name: EngineSet([engine]) for name, engine in eager_engines(quantized).items()}
    other = replace(reference, engines=engines, loops={})
    comparison = compare_models(
        reference, other, requests, names=(precision.name, "fp8"), layers=pairs, identity=keys, report=report
    )
    return QuantizationCheck(layers, comparison)
