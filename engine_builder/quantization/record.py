"""Calibration records: the input ranges of one network's layers, in a store, by the weights and the conditions.

A record is found by a key of everything that decides it, so the same calibration is not run twice. Its ranges are one
blob of safetensors.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from engine_builder.backends.built import BuiltRecord, put_blob
from engine_builder.networks.network import digest_json
from engine_builder.quantization.ranges import BINS, InputRange
from engine_builder.stores.store import WritableStore
from model.errors import CorruptBlob, PreheatError
from model.store.manifest import Blob

CALIBRATION_VERSION = 3  # part of every key; raise it when the same conditions give other ranges
RERUN = "Run `preheat calibrate` again with this model."


class CalibrationError(PreheatError):
    """A calibration record is missing, of other weights, damaged, or does not describe what a network computes."""

    remedy = RERUN


@dataclass(frozen=True)
class Conditions:
    """Everything that decides the ranges of one network, except its code.

    weights: SHA-256 of the checkpoint files of the network.
    prompts: SHA-256 of the prompts and the negative prompt.
    has_refiner: a refiner runs the last steps of every second image.
    """

    component: str
    weights: str
    prompts: str
    prompt_count: int
    steps: int
    has_refiner: bool
    guidance: float
    width: int
    height: int
    precision: str

    @property
    def key(self) -> str:
        return digest_json(asdict(self) | {"calibration": CALIBRATION_VERSION})


class CalibrationRecord(BuiltRecord):
    """One network's ranges, stored in the record "calibrations/<key of the conditions>"."""

    kind: ClassVar[str] = "calibrations"

    conditions: Conditions
    ranges: Blob
    version: int


def write_calibration(store: WritableStore, conditions: Conditions, ranges: Mapping[str, InputRange]) -> None:
    """Store the ranges of all layers. Raises CalibrationError if one holds NaN or infinity, or saw only zeros."""
    check_ranges(conditions.component, ranges)
    record = CalibrationRecord(
        conditions=conditions, ranges=put_blob(store, save(to_tensors(ranges))), version=CALIBRATION_VERSION
    )
    record.write(store, conditions.key)


def read_calibration(store: WritableStore, key: str, weights: str) -> dict[str, InputRange]:
    """Return the ranges of a record by layer. `weights`: SHA-256 of the checkpoint files that they must belong to.

    Raises CalibrationError for a record that is missing, of other weights, truncated or not usable.
    """
    record = CalibrationRecord.find(store, key)
    if record is None:
        raise CalibrationError(f"The store has no intact calibration record {key[:12]}.")
    component = record.conditions.component
    if record.conditions.weights != weights:
        raise CalibrationError(
            f"The calibration record {key[:12]} is of other weights of {component} than this model's."
        )
    try:
        ranges = from_tensors(load(store.get(record.ranges.sha256, record.ranges.bytes).read_bytes()))
    except (CorruptBlob, SafetensorError, KeyError, ValueError) as error:
        raise CalibrationError(f"The calibration record {key[:12]} of {component} is damaged.") from error
    check_ranges(component, ranges)
    return ranges


def find_calibration(store: WritableStore, component: str, weights: str) -> tuple[str, dict[str, InputRange]]:
    """Return the key and the ranges of the calibration of these weights with the most prompts, then steps.

    `weights`: SHA-256 of the checkpoint files. Raises CalibrationError if the store has none.
    """
    found = []
    for key in store.records(CalibrationRecord.kind):
        record = CalibrationRecord.find(store, key)
        if record is None or record.version != CALIBRATION_VERSION:
            continue
        conditions = record.conditions
        if (conditions.component, conditions.weights) == (component, weights):
            found.append((conditions.prompt_count, conditions.steps, key))
    if not found:
        raise CalibrationError(f"{store.url} has no intact calibration of this model's {component}.")
    key = max(found)[2]
    return key, read_calibration(store, key, weights)


def check_ranges(component: str, ranges: Mapping[str, InputRange]) -> None:
    """Raise CalibrationError if there are no ranges, or if one holds NaN or infinity, or saw only zeros."""
    if not ranges:
        raise CalibrationError(f"The calibration of {component} has no layers.")
    for name, observed in ranges.items():
        maximum = observed.absolute_maximum
        if not maximum < float("inf"):
            raise CalibrationError(
                f"The input of {component}'s layer {name} held NaN or infinity.",
                "Calibrate in a precision in which the model does not overflow (--precision bf16 or fp32).",
            )
        if maximum == 0 or not int(observed.counts.sum()):
            raise CalibrationError(
                f"The input of {component}'s layer {name} was always zero.",
                "Calibrate with prompts and steps that use the whole network.",
            )


def to_tensors(ranges: Mapping[str, InputRange]) -> dict[str, torch.Tensor]:
    """Return ranges as named tensors, which safetensors can store."""
    tensors = {}
    for name, observed in ranges.items():
        tensors[f"{name}.counts"] = observed.counts.cpu()
        tensors[f"{name}.channel_maxima"] = observed.channel_maxima.cpu()
        tensors[f"{name}.calls"] = torch.tensor(observed.calls)
    return tensors


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, InputRange]:
    """Return the ranges that `to_tensors` was given. Raises KeyError or ValueError for other tensors."""
    ranges = {}
    for key in sorted(tensors):
        name, _, entry = key.rpartition(".")
        if entry != "counts":
            continue
        counts, maxima = tensors[key], tensors[f"{name}.channel_maxima"]
        if counts.shape != (BINS,) or counts.dtype != torch.int64 or maxima.ndim != 1:
            raise ValueError(f"{name} has no range")
        ranges[name] = InputRange(counts, maxima, int(tensors[f"{name}.calls"]))
    return ranges
