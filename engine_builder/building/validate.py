"""Compare an engine with eager PyTorch, on random inputs and on inputs recorded in a denoising run.

The reference runs PyTorch's own operations with the same weights, not the Triton kernels in a GPU's engines.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs, sizes_of
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import Network
from engine_builder.networks.rounding import unrounded_inputs
from model.engines.engine import Engine
from model.errors import PreheatError
from model.store.manifest import Accuracy, Bucket

# Largest relative error (norm of the difference over norm of the reference), by the dtype of matrix products.
# In FP8 an input that differs in its last bit may be rounded to another number, an eighth away. Where many quantized
# layers follow each other, `is_as_exact` decides.
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
    tolerance if its rounding errors are no larger than eager PyTorch's, though others: see `networks.rounding`.
    """
    device = next(iter(network.tensors().values())).device.type
    allowed = tolerance(network, device)
    cases = [*_random_cases(network, engine.bucket, device), *real_inputs]
    worst = total = relative = 0.0
    elements = 0
    for case in cases:
        with torch.inference_mode():
            with plain_operations():
                expected = network.module(*(case[spec.name] for spec in network.signature.inputs))
            outputs = tuple(engine.run(case).values())
        for index, (reference, output) in enumerate(zip(expected, outputs, strict=True)):
            difference = (output.double() - reference.double()).abs()
            error = _relative_error(output, reference)
            # Also for NaN.
            if not error <= allowed and not is_as_exact(network, case, index, output, reference):
                raise InaccurateEngine(
                    f"The {network.component} engine differs by {error:.2e} (relative, by norm) from eager PyTorch; "
                    f"{network.precision} allows {allowed:.0e}. It was not stored."
                )
            worst, relative = max(worst, float(difference.max())), max(relative, error)
            total += float(difference.sum())
            elements += difference.numel()
    return Accuracy(worst=worst, mean=total / elements, relative=relative, cases=len(cases))


def is_as_exact(
    network: Network, case: Mapping[str, torch.Tensor], index: int, output: torch.Tensor, reference: torch.Tensor
) -> bool:
    """True if an 8-bit engine's output is about as near to the network with unrounded inputs as eager PyTorch's is.

    case: the network's inputs by name. index: of the output, whose value in eager PyTorch is `reference`. False if any
    of the values is NaN or infinite.
    """
    if not network.precision.is_quantized:
        return False
    with torch.inference_mode(), plain_operations(), unrounded_inputs():
        exact = network.module(*(case[spec.name] for spec in network.signature.inputs))[index]
    limit = _MAX_ROUNDING_RATIO * _relative_error(reference, exact)
    return math.isfinite(limit) and _relative_error(output, exact) <= limit


def _relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over that of the reference, unless that is 0."""
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
