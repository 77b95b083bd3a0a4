"""Ranges of networks, distances, validation reports and drafts of 8-bit engines, for tests of FP8 and INT8."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from typer.testing import CliRunner

from engine_builder.networks.network import Network
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.validation.report import PromptResult, ValidationReport
from engine_builder.stores.store import WritableStore
from model.errors import PreheatError
from model.loading.target import Target
from model.store.manifest import EngineRecord, Manifest
from model.store.precision import FP8, Precision
from preheat.main import app
from tests.support import releases

GPU = Target("cuda", "h100", "sm90", "torch2.11-cu130")


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Return the ratio of the signal to the error in dB."""
    error = (exact.double() - found.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / error))


def observed(*inputs: torch.Tensor, axis: int = -1) -> InputRange:
    """Return the range of a layer's inputs, whose channels are on `axis`."""
    found = InputRange.empty(inputs[0].shape[axis], torch.device("cpu"))
    for values in inputs:
        found.observe(values, axis)
    return found


def unet_inputs(network: Network, batch: int = 2, side: int = 8) -> list[torch.Tensor]:
    """Return seeded random inputs of a UNet. side: of its latents."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[batch, *(int(size) for size in spec.shape[1:])] for spec in network.signature.inputs[1:]]
    return [torch.randn(shape, generator=generator) for shape in ([batch, 4, side, side], *shapes)]


def ranges_of(network: Network, inputs: Sequence[torch.Tensor]) -> dict[str, InputRange]:
    """Return the ranges of all layers in one run of a network."""
    found: dict[str, InputRange] = {}
    with observing(network.module, found), torch.inference_mode():
        network.module(*inputs)
    return found


def run(*arguments: object) -> tuple[int, str]:
    """Run a `preheat` command. Returns its exit status and its output or error, in one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, PreheatError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def prompt_result(number: int = 0, **changes: object) -> PromptResult:
    """Return the distances of a good prompt, with changes."""
    entries: dict[str, object] = {
        "number": number, "prompt": f"prompt {number}", "negative_prompt": None, "seed": number, "width": 64,
        "height": 64, "steps": 8, "guidance": 8.0, "sampler": "Euler", "unet_decibels": {"unet": (40.0, 30.0)},
        "latents_decibels": 30.0, "psnr_decibels": 35.0, "perceptual_distance": 0.01,
    }  # fmt: skip
    return PromptResult.model_validate(entries | changes)


def report_of(*prompts: PromptResult, **entries: object) -> ValidationReport:
    """Return the report of a GPU in FP8 against fp16. prompts: by default 32 good ones."""
    results = prompts or tuple(map(prompt_result, range(32)))
    defaults: dict[str, object] = {
        "reference": "fp16", "quantized": "fp8", "device": "a GPU", "torch": "2.11", "prompts": results,
    }  # fmt: skip
    return ValidationReport.model_validate(defaults | entries)


def write_draft(store: WritableStore, target: str, precision: Precision | None = None, **changes: Any) -> Manifest:
    """Write the draft of a toy's build for a target. Its UNet has the precision, or else the toy's own."""
    draft = releases.draft_release(store)

    def rebuilt(engine: EngineRecord) -> EngineRecord:
        key = hashlib.sha256(f"{engine.key} {target} {precision}".encode()).hexdigest()
        is_quantized = precision is not None and engine.component == "unet"
        return engine.model_copy(
            update={"target": target, "key": key} | ({"precision": precision} if is_quantized else {})
        )

    engines = tuple(map(rebuilt, draft.engines))
    draft = draft.model_copy(update={"builder": {"source": "1"}, "engines": engines} | changes)
    store.write_record("drafts", f"toy.{target}.{precision or 'fp16'}", draft.to_json())
    return draft


def write_fp8_draft(store: WritableStore, digest: str, target: str = GPU.key, **changes: Any) -> Manifest:
    """Write the draft of a build in FP8. digest: of its quantization."""
    return write_draft(store, target, FP8, **{"builder": {"source": "1", "quantization": digest}} | changes)
