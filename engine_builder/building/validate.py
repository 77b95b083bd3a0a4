"""Compare an engine with eager PyTorch, on random inputs and on inputs recorded in a denoising run.

The reference runs PyTorch's own operations with the same weights, not the Triton kernels in a GPU's engines.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs, sizes_of
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.kernels.rounding import unrounded_inputs
from engine_builder.networks.network import Network
from model.engines.engine import Engine
from model.errors import PreheatError
from model.store.manifest import Accuracy, Bucket

# Largest relative error (norm of the difference over norm of the reference), by the dtype of matrix products.
# In FP8 an input that differs in its last bit may be rounded to another number, an eighth away. Where many quantized
# layers follow each other, `RoundingErrors` decides.
_MAX_RELATIVE_ERROR = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2, "float8_e4m3fn": 5e-2, "int8": 5e-2}
_MAX_ROUNDING_RATIO = 1.1  # of an engine's distance to the network without rounded inputs, and eager PyTorch's


class InaccurateEngine(PreheatError):
    """An engine's outputs are too far from eager PyTorch's. It is not stored."""

    remedy = "Build with another --precision or --vae-precision, or in 8 bits with a --policy that keeps more in fp16."


def tolerance(network: Network, device: str) -> float:
    """Return the largest relative error that a published engine of `network` may have.

    On a GPU PyTorch computes fp32 convolutions in TF32, which has fp16's mantissa.
    """
    modules = network.module.modules()
    convolves = any(isinstance(module, nn.Conv2d) and module.weight is not None for module in modules)
    compute = network.precision.compute
    return _MAX_RELATIVE_ERROR["float16" if compute == "float32" and device == "cuda" and convolves else compute]


def validate(network: Network, engine: Engine, real_inputs: Iterable[Mapping[str, torch.Tensor]]) -> Accuracy:
    """Compare on random inputs of a few small sizes of the bucket, and on `real_inputs`. Raises InaccurateEngine.

    NaN or infinity in the reference or an output counts as inaccurate. An 8-bit engine may differ by more than the
    tolerance if its rounding errors are no larger than eager PyTorch's, though others: see `RoundingErrors`.
    """
    device = next(iter(network.tensors().values())).device.type
    allowed = tolerance(network, device)
    random_cases = _random_cases(network, engine.bucket, device)
    cases = [*random_cases, *real_inputs]
    worst = total = relative = 0.0
    elements = 0
    for number, case in enumerate(cases):
        with torch.inference_mode():
            with plain_operations():
                expected = network.module(*(case[spec.name] for spec in network.signature.inputs))
            outputs = tuple(engine.run(case).values())
        for index, (reference, output) in enumerate(zip(expected, outputs, strict=True)):
            difference = (output.double() - reference.double()).abs()
            error = relative_error(output, reference)
            if not error <= allowed:  # also for NaN
                rounding = rounding_errors(network, case, index, output, reference)
                if rounding is None or not rounding.engine_is_as_near:
                    of_inputs = "random inputs" if number < len(random_cases) else "inputs of a denoising run"
                    raise InaccurateEngine(
                        f"The {network.component} engine ({engine.bucket.label}) differs by {error:.2e} "
                        f"(relative, by norm) from eager PyTorch; {network.precision} allows {allowed:.0e}. That is on "
                        f"{of_inputs}, and entry {_worst_entry(output, reference)} of the batch is the worst. "
                        f"{rounding or ''}It was not stored."
                    )
            worst, relative = max(worst, float(difference.max())), max(relative, error)
            total += float(difference.sum())
            elements += difference.numel()
    return Accuracy(worst=worst, mean=total / elements, relative=relative, cases=len(cases))


@dataclass(frozen=True)
class RoundingErrors:
    """The distances of an engine and of eager PyTorch to the network without rounded inputs, relative by norm.

    See `networks.rounding` for why they are compared.
    """

    engine: float
    eager: float

    @property
    def engine_is_as_near(self) -> bool:
        """True if the engine is about as near as eager PyTorch. False for NaN."""
        limit = _MAX_ROUNDING_RATIO * self.eager
        return math.isfinite(limit) and self.engine <= limit

    def __str__(self) -> str:
        return (
            f"Its distance to the network without rounded inputs is {self.engine:.2e}, that of eager PyTorch "
            f"{self.eager:.2e}. "
        )


def rounding_errors(
    network: Network, case: Mapping[str, torch.Tensor], index: int, output: torch.Tensor, reference: torch.Tensor
) -> RoundingErrors | None:
    """Return the rounding errors of an 8-bit network, or None for another.

    case: the network's inputs by name. index: of the output, whose value in eager PyTorch is `reference`.
    """
    if not network.precision.is_quantized:
        return None
    with torch.inference_mode(), plain_operations(), unrounded_inputs():
        exact = network.module(*(case[spec.name] for spec in network.signature.inputs))[index]
    return RoundingErrors(relative_error(output, exact), relative_error(reference, exact))


def _worst_entry(output: torch.Tensor, reference: torch.Tensor) -> int:
    """Return the number of the batch entry with the largest relative error, from 1. One with NaN is the worst."""
    batch = reference.shape[0]
    errors = (output.double() - reference.double()).reshape(batch, -1).norm(dim=1)
    norms = reference.double().reshape(batch, -1).norm(dim=1)
    return 1 + int((errors / norms).nan_to_num(math.inf).argmax())


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, or the difference's alone if that is 0."""
    norm = float(reference.double().norm())
    return float((output.double() - reference.double()).norm()) / (norm or 1.0)


def _random_cases(network: Network, bucket: Bucket, device: str) -> list[dict[str, torch.Tensor]]:
    if bucket.batch.min == bucket.batch.max:
        shapes = [sizes_of(bucket, "min")] * 3
    else:
        low = bucket.height.min if bucket.height else 64
        step = network.multiple or 8
        shapes = [(1, low + 4 * step, low + 4 * step), (2, low, low + 2 * step), (5, low + 3 * step, low)]
    return [example_inputs(network.signature, *shape, device, seed) for seed, shape in enumerate(shapes, start=1)]
