"""Find the installed TensorRT, and hide the differences between its versions 10.16 and 11.4.

Code that uses TensorRT calls `require` first. Without a GPU a Runtime can be made, but its deserialization ends the
process. Other modules use only calls that both versions have. Importing this module imports neither torch nor tensorrt.
"""

import importlib.metadata
import importlib.util
import logging
import re
from typing import TYPE_CHECKING

from model.errors import EngineError

if TYPE_CHECKING:
    import tensorrt

logger = logging.getLogger("preheat.tensorrt")

# Supported versions begin with the oldest that has every call in use, and end before an unknown major version.
_OLDEST_MAJOR, _OLDEST_MINOR = 10, 16
_UNSUPPORTED_MAJOR = 12
_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


class TensorRTUnavailable(EngineError):
    """TensorRT is not installed, is a version that is not supported, or has no GPU to run on."""

    remedy = "Install TensorRT (docs/tensorrt.md) on a machine with an NVIDIA GPU, or choose the runtime aot_inductor."


def installed_version() -> str | None:
    """Return the version of the installed TensorRT ("11.4.0.106"), or None. Does not load its libraries."""
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
    """Return the runtime's part of a target key: "11.4.0.106" -> "trt11.4".

    Raises TensorRTUnavailable for versions that are not supported.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    if numbers < (_OLDEST_MAJOR, _OLDEST_MINOR) or numbers[0] >= _UNSUPPORTED_MAJOR:
        raise TensorRTUnavailable(
            f"TensorRT {version[:40]} is not supported.",
            f"Install {_OLDEST_MAJOR}.{_OLDEST_MINOR} or later, below {_UNSUPPORTED_MAJOR} (docs/tensorrt.md).",
        )
    return f"trt{numbers[0]}.{numbers[1]}"


def require(device: str = "cuda") -> str:
    """Return TensorRT's version if it can be used on a device of that type. A Runtime is then safe.

    Raises TensorRTUnavailable.
    """
    import torch

    version = installed_version()
    if version is None:
        raise TensorRTUnavailable("TensorRT is not installed here.")
    version_tag(version)
    if device != "cuda" or not torch.cuda.is_available():
        raise TensorRTUnavailable("TensorRT needs an NVIDIA GPU, and PyTorch finds none here.")
    try:
        import tensorrt  # noqa: F401
    except Exception as error:  # the import opens its libraries, which can fail in many ways
        raise TensorRTUnavailable(
            f"TensorRT {version} is installed but cannot be imported ({error!s:.200})."
        ) from error
    return version


def make_logger() -> "tensorrt.ILogger":
    """Return a logger that sends TensorRT's messages to this process's log. Its `last_error` is the newest, or "".

    Errors are logged as warnings, because the caller raises an error with the same message.
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
    """Return the first line of TensorRT's newest error, for a message."""
    reported = str(getattr(log, "last_error", "")).strip().partition("\n")[0][:300]
    return reported.rstrip(".") or "no reason given"


def data_type(dtype: str) -> "tensorrt.DataType":
    """Return TensorRT's type for a dtype name such as "float16"."""
    import tensorrt as trt

    return {
        "float32": trt.DataType.FLOAT,
        "float16": trt.DataType.HALF,
        "bfloat16": trt.DataType.BF16,
        "int64": trt.DataType.INT64,
        "int32": trt.DataType.INT32,
        "uint8": trt.DataType.UINT8,
        "bool": trt.DataType.BOOL,
    }[dtype]


def network_flags() -> int:
    """Return the flags of a network with the tensor types of its ONNX graph. TensorRT 11 has no other kind."""
    import tensorrt as trt

    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def free_refit_resources(refitter: "tensorrt.Refitter") -> None:
    """Free the resources of a refit. TensorRT 10 has no call for it, and frees them with the refitter."""
    free = getattr(refitter, "release_refit_resources", None)
    if free is not None:
        free()
