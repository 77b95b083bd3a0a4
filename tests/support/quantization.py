"""Ranges of networks, distances and validation reports, for tests of FP8 and INT8."""

from collections.abc import Sequence

import torch

from engine_builder.networks.network import Network
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.validation.report import PromptResult, ValidationReport


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
