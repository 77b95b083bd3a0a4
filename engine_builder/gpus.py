"""The compute capabilities of GPUs by their short product names (`model.loading.target.gpu_product`)."""

from model.engines.tensorrt.libraries import TENSORRT_RTX, TensorRTUnavailable
from model.errors import PreheatError
from model.loading.target import gpu_product

# developer.nvidia.com/cuda-gpus
CAPABILITIES = {
    "t4": "sm75", "a100": "sm80", "a30": "sm80", "a10": "sm86", "a10g": "sm86", "a40": "sm86", "rtxa6000": "sm86",
    "rtx3090": "sm86", "l4": "sm89", "l40": "sm89", "l40s": "sm89", "rtx4090": "sm89", "h100": "sm90",
    "h100mig3g40gb": "sm90", "h200": "sm90", "b200": "sm100", "rtx5090": "sm120", "rtxpro6000blackwell": "sm120",
    "gb10": "sm121",
}  # fmt: skip

# Truss's names of accelerators whose product `gpu_product` cannot derive. H100_40GB is a MIG slice of a GPU.
_PRODUCTS = {"A100_40GB": "a100", "H100_40GB": "h100mig3g40gb", "RTX_PRO_6000": "rtxpro6000blackwell"}


class UnknownGpu(PreheatError):
    """A build names a GPU that is not known."""


def find_product(name: str) -> str:
    """Return the short product name of a GPU, or of an accelerator as Truss names it: "L4" -> "l4"."""
    return _PRODUCTS.get(name.upper(), gpu_product(name))


def find_capability(name: str) -> str:
    """Return the compute capability of a GPU that TensorRT-RTX supports, such as "sm86" for "A10G".

    Raises UnknownGpu or TensorRTUnavailable.
    """
    product = find_product(name)
    if product not in CAPABILITIES:
        known = [gpu for gpu, capability in CAPABILITIES.items() if capability in TENSORRT_RTX.capabilities]
        raise UnknownGpu(f"The GPU {name[:40]!r} is not known.", f"Choose from {', '.join(known)}.")
    try:
        TENSORRT_RTX.check_capability(CAPABILITIES[product], product)
    except TensorRTUnavailable as error:
        raise UnknownGpu(error.args[0], "Build on that GPU with --runtime aot_inductor or tensorrt.") from error
    return CAPABILITIES[product]
