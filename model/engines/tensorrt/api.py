"""The one door to the `tensorrt` module: whether it can be used here, and what 10.16 and 11.4 do differently.

Whoever names TensorRT asks `require` first, because on a machine without a GPU a Runtime can be made and deserializing
with it ends the process. Elsewhere only calls are used that both versions have; the others stand in this file.
"""

import importlib.metadata
import importlib.util
import logging
import re
from typing import TYPE_CHECKING

import torch

from model.errors import EngineError

if TYPE_CHECKING:
    import tensorrt

logger = logging.getLogger("preheat.tensorrt")

# Versions that have every call used here: from the oldest to below the next major one, which nobody knows yet.
OLDEST = (10, 16)
NEXT_MAJOR = 12
_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


class TensorRTUnavailable(EngineError):
    """TensorRT is not installed, is a version that is not supported, or has no GPU to run on."""


def installed_version() -> str | None:
    """The version of the installed TensorRT, "11.4.0.106", without importing its libraries; None where it is not."""
    if importlib.util.find_spec("tensorrt") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import tensorrt

    return str(tensorrt.__version__)


def version_tag(version: str) -> str:
    """ "11.4.0.106" -> "trt11.4", the runtime's part of a target key. Raises TensorRTUnavailable for versions that are
    not supported."""
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if numbers < OLDEST or numbers[0] >= NEXT_MAJOR:
        raise TensorRTUnavailable(
            f"TensorRT {version[:40]} is not supported: install {OLDEST[0]}.{OLDEST[1]} or later, below {NEXT_MAJOR} "
            "(docs/tensorrt.md)."
        )
    return f"trt{numbers[0]}.{numbers[1]}"


def require(device: torch.device) -> str:
    """TensorRT's version, where it can be used on `device`. Raises TensorRTUnavailable; afterwards `import tensorrt`
    succeeds and a Runtime is safe to use."""
    otherwise = "or choose the runtime aot_inductor."
    version = installed_version()
    if version is None:
        raise TensorRTUnavailable(f"TensorRT is not installed here: install it (docs/tensorrt.md), {otherwise}")
    version_tag(version)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise TensorRTUnavailable(
            f"TensorRT needs an NVIDIA GPU and PyTorch finds none here: start on a machine with a GPU, {otherwise}"
        )
    try:
        import tensorrt  # noqa: F401
    except Exception as error:  # its libraries are found and opened by this import, which fails in many ways
        raise TensorRTUnavailable(
            f"TensorRT {version} is installed and does not import ({str(error)[:200]}): install it again "
            f"(docs/tensorrt.md), {otherwise}"
        ) from error
    return version


def make_logger() -> "tensorrt.ILogger":
    """TensorRT's messages in this process's log; `last_error` of the result is the newest error, "" before the first.

    Errors are logged as warnings: what fails is raised by whoever asked, with the message in it.
    """
    import tensorrt as trt

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last_error = msg
                logger.warning(msg)
            elif severity == trt.ILogger.WARNING:
                logger.info(msg)
            else:
                logger.debug(msg)

    return Log()


def last_error(log: "tensorrt.ILogger") -> str:
    """What TensorRT last complained of, for a message; cut to a line."""
    said = str(getattr(log, "last_error", "")).strip().partition("\n")[0][:300]
    return said or "it gives no reason"


def data_type(dtype: torch.dtype) -> "tensorrt.DataType":
    """TensorRT's name of a type that a tensor at a border, a weight or a literal has."""
    import tensorrt as trt

    return {
        torch.float32: trt.DataType.FLOAT,
        torch.float16: trt.DataType.HALF,
        torch.bfloat16: trt.DataType.BF16,
        torch.int64: trt.DataType.INT64,
        torch.int32: trt.DataType.INT32,
        torch.uint8: trt.DataType.UINT8,
        torch.bool: trt.DataType.BOOL,
    }[dtype]


def network_flags() -> int:
    """Flags of a network in which every tensor has the type that the ONNX graph gives it.

    TensorRT 11 knows no other kind of network; 10 must be told.
    """
    import tensorrt as trt

    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def release_refit(refitter: "tensorrt.Refitter") -> None:
    """Free what a refit took. TensorRT 10 frees it with the refitter and has no call for it."""
    release = getattr(refitter, "release_refit_resources", None)
    if release is not None:
        release()
