"""Policies and calibrations, which decide the weights and layers of a model in FP8 or INT8."""

from dataclasses import dataclass

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network, digest_json
from engine_builder.quantization.calibrate import digest_weights
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import QuantizedLayer, quantize_network
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.record import find_calibration
from engine_builder.stores.store import WritableStore
from model.engines.features import parse_name
from model.pipeline.components import COMPONENTS, find_component, unets
from model.pipeline.spec import VAE_DECODER
from model.store.manifest import Fp16Steps
from model.store.precision import FP8, Precision

QUANTIZATION_VERSION = 1  # part of every digest; raise it when the same policy and calibration give other weights


@dataclass(frozen=True)
class Quantization:
    """A policy, and the key and the ranges of each calibration, by the name of the UNet or VAE decoder."""

    policy: Policy
    calibrations: dict[str, str]
    ranges: dict[str, dict[str, InputRange]]
    precision: Precision = FP8

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that decides the quantized weights. The keys stand for weights and prompts."""
        entries = {
            "version": QUANTIZATION_VERSION,
            "policy": self.policy.entries,
            "calibrations": self.calibrations,
        }
        # Only of others than FP8, so that the digests of FP8 stay what they were.
        return digest_json(entries if self.precision == FP8 else entries | {"precision": self.precision.name})

    @property
    def fp16_steps(self) -> Fp16Steps | None:
        """The steps that run in fp16. None: all run in 8 bits."""
        steps = self.policy.fp16_steps
        return steps if steps.exist else None

    def covers(self, component: str) -> bool:
        """True for a component, or a variant of one, that is quantized."""
        return _calibrated_component(component) in self.ranges

    def apply(self, network: Network) -> tuple[Network, list[QuantizedLayer]]:
        """Return a network that is covered in 8 bits, and its quantized layers. The given network is not changed.

        Raises CalibrationError if a layer has no range.
        """
        ranges = self.ranges[_calibrated_component(network.component)]
        return quantize_network(network, ranges, self.policy, self.precision)


def _calibrated_component(component: str) -> str:
    """Return the component whose calibration a component, or a variant of one, uses."""
    return parse_name(component).component if find_component(component).is_quantizable else component


def plan_quantization(
    base: Checkpoint,
    refiner: Checkpoint | None,
    policy: Policy,
    store: WritableStore,
    precision: Precision = FP8,
) -> Quantization:
    """Return the quantization of a model by the store's calibrations of its weights with the most prompts.

    Raises CalibrationError if a network has none, and BadPolicy if a pattern matches no calibrated layer, or if the
    policy is not of this 8-bit precision.
    """
    policy.check_precision(precision)
    calibrations, ranges = {}, {}
    decoder = (COMPONENTS[VAE_DECODER],) if policy.vae_convolutions else ()
    for spec in (*unets(), *decoder):
        checkpoint = base if spec.part == "base" else refiner
        if checkpoint is None:
            continue
        weights = digest_weights(checkpoint, COMPONENTS[spec.name].checkpoint_folder)
        calibrations[spec.name], ranges[spec.name] = find_calibration(store, spec.name, weights)
    of_unets = [layer for name, of_one in ranges.items() if name != VAE_DECODER for layer in of_one]
    policy.check_patterns(of_unets, ranges.get(VAE_DECODER, {}))
    return Quantization(policy, calibrations, ranges, precision)
