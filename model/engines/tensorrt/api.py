"""The only importer of the `tensorrt` module's version and flags: what is installed, and how 10.16 and 11.4 differ.

Code that uses TensorRT calls `require` first: on a machine without a GPU a Runtime can be made, and deserializing with
it ends the process. Other modules use only calls that both versions have. Imports neither torch nor tensorrt by itself.
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

# Supported versions: from the oldest that has every call used here to below the next, unknown major version.
OLDEST = (10, 16)
NEXT_MAJOR = 12
_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


class TensorRTUnavailable(EngineError):
    """TensorRT is not installed, is a version that is not supported, or has no GPU to run on."""

    remedy = "Install TensorRT (docs/tensorrt.md) on a machine with an NVIDIA GPU, or choose the runtime aot_inductor."


def installed_version() -> str | None:
    """The version of the installed TensorRT ("11.4.0.106"), None where it is missing. Does not load its libraries."""
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
            f"TensorRT {version[:40]} is not supported.",
            f"Install {OLDEST[0]}.{OLDEST[1]} or later, below {NEXT_MAJOR} (docs/tensorrt.md).",
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
    except Exception as error:  # the import finds and opens its libraries, which fails in many ways
        raise TensorRTUnavailable(
            f"TensorRT {version} is installed but cannot be imported ({error!s:.200})."
        ) from error
    return version


def make_logger() -> "tensorrt.ILogger":
    """Send TensorRT's messages to this process's log; `last_error` of the result is the newest error, "" before one.

    Errors are logged as warnings, because the caller raises what failed, with the message in it.
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
    """The first line of TensorRT's newest error, for a message."""
    reported = str(getattr(log, "last_error", "")).strip().partition("\n")[0][:300]
    return reported.rstrip(".") or "no reason given"


def data_type(dtype: str) -> "tensorrt.DataType":
    """TensorRT's type for a dtype name such as "float16"."""
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
    """Flags of a network whose tensors have the types of the ONNX graph. TensorRT 11 has no other kind of network."""
    import tensorrt as trt

    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def release_refit(refitter: "tensorrt.Refitter") -> None:
    """Free the resources of a refit. TensorRT 10 frees them with the refitter and has no such call."""
    release = getattr(refitter, "release_refit_resources", None)
    if release is not None:
        release()
