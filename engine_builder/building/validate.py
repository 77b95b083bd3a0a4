"""Hold an engine against eager PyTorch, on random inputs and on those of a real denoising run.

Our kernels are part of a GPU's engines and not of what these are held against: PyTorch's own operations with the same
weights.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.networks.blocks import plain_operations
from engine_builder.networks.network import Network
from model.engines.engine import Engine
from model.errors import PreheatError
from model.store.manifest import Accuracy, Bucket

_TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}


class InaccurateEngine(PreheatError):
    """An engine's outputs are too far from eager PyTorch's; it is not kept."""


def tolerance(network: Network, device: str) -> float:
    """Largest relative error (norm of the difference over the norm of the reference) of an engine of `network` that may
    be published. A GPU's convolutions take fp32 in TF32, as PyTorch lets them, which has fp16's mantissa."""
    modules = network.module.modules()
    convolves = any(isinstance(module, nn.Conv2d) and module.weight is not None for module in modules)
    if network.precision == "fp32" and device == "cuda" and convolves:
        return _TOLERANCE["fp16"]
    return _TOLERANCE[network.precision]


def validate(network: Network, engine: Engine, real: Iterable[Mapping[str, torch.Tensor]]) -> Accuracy:
    """Compare on random inputs of a few small sizes of the bucket and on `real` inputs. Raises InaccurateEngine.

    A reference or an output that holds no finite number fails, too: NaN is never within a tolerance.
    """
    device = next(iter(network.tensors().values())).device.type
    allowed = tolerance(network, device)
    cases = [*_random_cases(network, engine.bucket, device), *real]
    worst = total = relative = 0.0
    count = 0
    for case in cases:
        with torch.inference_mode():
            with plain_operations():
                expected = network.module(*(case[spec.name] for spec in network.signature.inputs))
            got = engine.run(case).values()
        for reference, output in zip(expected, got, strict=True):
            difference = (output.double() - reference.double()).abs()
            norm = float(reference.double().norm())
            error = float(difference.norm()) / norm if norm else float(difference.norm())
            if not error <= allowed:
                raise InaccurateEngine(
                    f"The {network.component} engine is off by {error:.2e} (relative, by norm) from eager PyTorch, "
                    f"more than {allowed:.0e} for {network.precision}: it was not kept. Build with another --precision "
                    "or --vae-precision."
                )
            worst, relative = max(worst, float(difference.max())), max(relative, error)
            total += float(difference.sum())
            count += difference.numel()
    return Accuracy(worst=worst, mean=total / count, relative=relative, cases=len(cases))


def _random_cases(network: Network, bucket: Bucket, device: str) -> list[dict[str, torch.Tensor]]:
    if bucket.rows.min == bucket.rows.max:
        height = bucket.height.min if bucket.height else 0
        width = bucket.width.min if bucket.width else 0
        shapes = [(bucket.rows.min, height, width)] * 3
    else:
        low = bucket.height.min if bucket.height else 64
        step = network.multiple or 8
        shapes = [(1, low + 4 * step, low + 4 * step), (2, low, low + 2 * step), (5, low + 3 * step, low)]
    return [
        example_inputs(network.signature, rows, height, width, device, seed)
        for seed, (rows, height, width) in enumerate(shapes, start=1)
    ]
