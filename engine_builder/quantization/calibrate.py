"""Collect the input ranges of linears and convolutions of the UNets and the VAE decoder, during images of many prompts.

The networks run in eager PyTorch, in their plain form: every linear and convolution is a module with the names of its
weights. After each image the ranges are saved to a folder, so an interrupted calibration continues where it stopped.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from engine_builder.building.eager_model import generate_eagerly, load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import public_name
from engine_builder.networks.network_check import check_model
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.record import (
    CalibrationError,
    CalibrationRecord,
    Conditions,
    check_ranges,
    from_tensors,
    read_calibration,
    to_tensors,
    write_calibration,
)
from engine_builder.stores.store import WritableStore
from model.pipeline.components import COMPONENTS, unets
from model.pipeline.spec import VAE_DECODER
from model.request_fields import GenerationRequest
from model.store.precision import Precision

Ranges = dict[str, InputRange]
"""The ranges of a network's layers, by the names of their weights without ".weight"."""
_BASE_SHARE = 0.8  # of the steps of an image with a refiner
ReportPrompt = Callable[[int, int], None]
"""Called with the number of finished prompts and the number of all prompts."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What is calibrated, and how.

    prompts: one image is generated for each; its seed is the prompt's number.
    steps, guidance: of each request. A refiner runs the last fifth of the steps of every second image.
    width, height: pixels.
    """

    base: Checkpoint
    refiner: Checkpoint | None
    precision: Precision
    device: str
    prompts: tuple[str, ...]
    negative_prompt: str
    steps: int
    guidance: float
    width: int
    height: int

    def conditions(self, component: str) -> Conditions:
        """Return the conditions of one network's record."""
        checkpoint = self.base if COMPONENTS[component].part == "base" else self.refiner
        assert checkpoint is not None
        prompts = json.dumps([*self.prompts, self.negative_prompt]).encode()
        return Conditions(
            component=component,
            weights=digest_weights(checkpoint, COMPONENTS[component].checkpoint_folder),
            prompts=hashlib.sha256(prompts).hexdigest(),
            prompt_count=len(self.prompts),
            steps=self.steps,
            has_refiner=self.refiner is not None,
            guidance=self.guidance,
            width=self.width,
            height=self.height,
            precision=self.precision.name,
        )

    @property
    def components(self) -> tuple[str, ...]:
        """The UNets of the model, and the VAE decoder."""
        of_model = tuple(spec.name for spec in unets() if spec.part == "base" or self.refiner is not None)
        return (*of_model, VAE_DECODER)


@dataclass(frozen=True)
class CalibratedNetwork:
    """The record of one network. `is_new`: this call made it."""

    conditions: Conditions
    ranges: Ranges
    is_new: bool


def calibrate(
    plan: CalibrationPlan, store: WritableStore, partial: Path, report: ReportPrompt = lambda *_: None
) -> list[CalibratedNetwork]:
    """Return the calibration of each network, from the store or by generating the images.

    `partial`: a folder for the ranges of an unfinished calibration. Raises CheckpointError, CalibrationError, or
    BrokenImage if an image holds NaN.
    """
    check_model(plan.base, plan.refiner)
    conditions = {name: plan.conditions(name) for name in plan.components}
    stored = {
        name: CalibratedNetwork(wanted, read_calibration(store, wanted.key, wanted.weights), is_new=False)
        for name, wanted in conditions.items()
        if CalibrationRecord.find(store, wanted.key)
    }
    # A stored record keeps its ranges: validations name the record, and not what is in it.
    missing = {name: wanted for name, wanted in conditions.items() if name not in stored}
    if not missing:
        return list(stored.values())
    networks, model = load_eager_model(plan.base, plan.refiner, plan.precision, plan.device)
    key = hashlib.sha256("".join(wanted.key for wanted in missing.values()).encode()).hexdigest()
    saved = partial / f"{key}.safetensors"
    ranges, done = _read_partial(saved, tuple(missing), plan.device)
    with ExitStack() as stack:
        stack.enter_context(plain_operations())
        for name in missing:
            stack.enter_context(observing(networks[name].module, ranges[name]))
        for number in range(done, len(plan.prompts)):
            report(number, len(plan.prompts))
            for use_refiner in _runs(plan, number):
                generate_eagerly(model, _request(plan, number, use_refiner))
            if number == 0:
                _check(ranges)  # before minutes are spent
            _write_partial(saved, ranges, number + 1)
    report(len(plan.prompts), len(plan.prompts))
    try:
        _check(ranges)
    except CalibrationError:
        saved.unlink(missing_ok=True)  # the next calibration would end here, too
        raise
    for name, wanted in missing.items():
        write_calibration(store, wanted, ranges[name])
    saved.unlink(missing_ok=True)
    made = {name: CalibratedNetwork(wanted, ranges[name], is_new=True) for name, wanted in missing.items()}
    return [(stored | made)[name] for name in conditions]


def _check(ranges: dict[str, Ranges]) -> None:
    for name, of_network in ranges.items():
        check_ranges(name, of_network)


@contextmanager
def observing(network: nn.Module, ranges: Ranges) -> Iterator[None]:
    """Add the input of every linear and convolution of a network to `ranges`, in each of its calls."""
    handles = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight is not None:
            handles.append(module.register_forward_pre_hook(_observer(public_name(name), module, ranges)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observer(name: str, module: nn.Module, ranges: Ranges) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    axis = 1 if isinstance(module, nn.Conv2d) else -1

    def observe(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0]
        if name not in ranges:
            ranges[name] = InputRange.empty(values.shape[axis], values.device)
        ranges[name].observe(values, axis)

    return observe


def digest_weights(checkpoint: Checkpoint, subfolder: str) -> str:
    """Return the SHA-256 of a network's config and weight files."""
    digest = hashlib.sha256()
    folder = checkpoint.folder(subfolder)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            digest.update(f"{path.name}={hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def read_prompts(text: str) -> tuple[str, ...]:
    """Return the prompts of a file: one in each line that is not empty and does not begin with "#"."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _runs(plan: CalibrationPlan, number: int) -> tuple[bool, ...]:
    """Return whether a refiner runs the last fifth of a prompt's steps, for each image of the prompt.

    A model with a refiner alternates, so that the base runs all steps of half of the prompts, as it does in requests
    without a refiner. The first prompt runs both ways, so that a mistake is found early.
    """
    if plan.refiner is None:
        return (False,)
    return (False, True) if number == 0 else (number % 2 == 1,)


def _request(plan: CalibrationPlan, number: int, use_refiner: bool) -> GenerationRequest:
    return GenerationRequest(
        prompt=plan.prompts[number], negative_prompt=plan.negative_prompt, width=plan.width, height=plan.height,
        num_inference_steps=plan.steps, guidance_scale=plan.guidance, seed=number,
        use_refiner=use_refiner, denoising_frac=_BASE_SHARE,
    )  # fmt: skip


def _read_partial(path: Path, components: Sequence[str], device: str) -> tuple[dict[str, Ranges], int]:
    """Return the ranges of an unfinished calibration by component, and the number of its prompts.

    Without a usable file all are empty and 0.
    """
    empty: dict[str, Ranges] = {name: {} for name in components}
    try:
        tensors = load_file(path, device=device)
        done = int(tensors.pop("prompts"))
        by_component = {
            name: from_tensors({k.removeprefix(f"{name}/"): t for k, t in tensors.items() if k.startswith(f"{name}/")})
            for name in components
        }
    except (OSError, SafetensorError, KeyError, ValueError):
        return empty, 0
    return by_component, done


def _write_partial(path: Path, ranges: dict[str, Ranges], done: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}/{key}": t for name, of in ranges.items() for key, t in to_tensors(of).items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(tensors | {"prompts": torch.tensor(done)}, temporary)
    os.replace(temporary, path)
