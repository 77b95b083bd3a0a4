"""Compare an engine with eager PyTorch, on random inputs and on inputs recorded in a denoising run.

The reference runs PyTorch's own operations with the same weights, not the Triton kernels in a GPU's engines.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs, sizes_of
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import Network
from model.engines.engine import Engine
from model.errors import PreheatError
from model.store.manifest import Accuracy, Bucket

# Largest relative error (norm of the difference over norm of the reference), by the dtype of matrix products.
# In FP8 an input that differs in its last bit may be rounded to another number, an eighth away.
_MAX_RELATIVE_ERROR = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2, "float8_e4m3fn": 5e-2, "int8": 5e-2}


class InaccurateEngine(PreheatError):
    """An engine's outputs are too far from eager PyTorch's. It is not stored."""

    remedy = "Build with another --precision or --vae-precision."


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

    NaN or infinity in the reference or an output counts as inaccurate.
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
            outputs = engine.run(case).values()
        for reference, output in zip(expected, outputs, strict=True):
            difference = (output.double() - reference.double()).abs()
            norm = float(reference.double().norm())
            error = float(difference.norm()) / norm if norm else float(difference.norm())
            if not error <= allowed:  # also for NaN
                raise InaccurateEngine(
                    f"The {network.component} engine differs by {error:.2e} (relative, by norm) from eager PyTorch; "
                    f"{network.precision} allows {allowed:.0e}. It was not stored."
                )
            worst, relative = max(worst, float(difference.max())), max(relative, error)
            total += float(difference.sum())
            elements += difference.numel()
    return Accuracy(worst=worst, mean=total / elements, relative=relative, cases=len(cases))


def _random_cases(network: Network, bucket: Bucket, device: str) -> list[dict[str, torch.Tensor]]:
    if bucket.batch.min == bucket.batch.max:
        shapes = [sizes_of(bucket, "min")] * 3
    else:
        low = bucket.height.min if bucket.height else 64
        step = network.multiple or 8
        shapes = [(1, low + 4 * step, low + 4 * step), (2, low, low + 2 * step), (5, low + 3 * step, low)]
    return [example_inputs(network.signature, *shape, device, seed) for seed, shape in enumerate(shapes, start=1)]
