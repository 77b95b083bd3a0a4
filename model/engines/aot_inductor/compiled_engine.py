"""Engines compiled by AOTInductor (`.pt2`): opened through `container`, or by torch's C++ loader.

The public Python loader is not used. It compiles and runs probe programs to identify this machine's CPU, which takes
up to a minute, and its wrapper takes seconds to import. The target was checked before an engine is opened.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from model.engines.aot_inductor.container import Container
from model.engines.aot_inductor.package import calls_operators, check_package
from model.engines.constants import map_constants, read_constants
from model.engines.shapes import bind_outputs, bind_shapes
from model.errors import EngineError
from model.store.manifest import Bucket, Constant, Signature


class AotInductorEngine:
    """One `.pt2` package without weights. It is opened, at the latest by its first run, and bound to weights."""

    def __init__(
        self,
        component: str,
        package: bytes | Callable[[], bytes],
        signature: Signature,
        bucket: Bucket,
        constants: bytes,
        device: torch.device,
    ) -> None:
        """Open a package. `package` and `constants`: the contents of the engine record's blobs.

        `package` may be a function that returns the verified contents. The first run calls it and opens them, and
        raises what it raises.

        Only torch's loader calls operators of other modules (`model.engines.row_exchange`). It holds Python's
        interpreter lock, on a CPU between these operators.

        The verified bytes themselves are opened, because another process could replace a file after it was verified.
        Raises EngineError if anything does not match.
        """
        self.component = component
        self.signature = signature
        self.bucket = bucket
        self.constants: Mapping[str, Constant] = read_constants(component, constants)
        self._device = device
        self._weights: dict[str, torch.Tensor] | None = None
        self._read_package = package if callable(package) else None
        self._code = None if callable(package) else self._open(package)

    def _open(self, package: bytes) -> "Container | _Loader":
        component = self.component
        check_package(component, package)
        try:
            code = (_Loader if calls_operators(package) else Container)(package, self._device)
        except (RuntimeError, OSError) as error:
            raise _unusable(component, error) from error
        if code.constants != self.constants.keys():
            raise EngineError(f"The {component} engine and its constant map disagree.")
        if isinstance(code, Container) and code.input_count != len(self.signature.inputs):
            raise EngineError(
                f"The {component} engine and its manifest entry disagree on the number of inputs: "
                f"{code.input_count} and {len(self.signature.inputs)}."
            )
        return code

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Alias `weights`. They are never copied, and the engine keeps them. Raises EngineError if they do not fit."""
        mapped = map_constants(self.component, self.constants, weights)
        for name, tensor in mapped.items():
            dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            if tensor.device.type != self._device.type or not dense:
                raise EngineError(f"{self.component}: {name} must be contiguous and on {self._device.type}.")
        if self._code is not None:
            self._load_constants(self._code, mapped)
        self._weights = mapped

    def _load_constants(self, code: "Container | _Loader", weights: dict[str, torch.Tensor]) -> None:
        try:
            code.load_constants(weights)
        except RuntimeError as error:
            raise _unusable(self.component, error) from error

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run named tensors on the current stream. Raises EngineError, and RuntimeError if the code fails on a GPU."""
        assert self._weights is not None, "an engine that is not bound would end the process"
        sizes = bind_shapes(self.signature, inputs, self.component)
        batch, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(batch, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for batch {batch} at {width}x{height}.", "")
        for name, tensor in inputs.items():
            if tensor.device.type != self._device.type:
                raise EngineError(
                    f"{self.component}: input {name} is on {tensor.device}, its engine on {self._device.type}.", ""
                )
        if self._code is None:
            assert self._read_package is not None
            code = self._open(self._read_package())
            self._load_constants(code, self._weights)
            self._code, self._read_package = code, None
        # Kernels were compiled for contiguous inputs and ignore strides.
        ordered = [inputs[spec.name].contiguous() for spec in self.signature.inputs]
        try:
            outputs = self._code.run(ordered)
        except RuntimeError as error:
            if self._device.type != "cpu" or isinstance(self._code, _Loader):
                raise  # the cause may be a lack of memory or the end of a rank, which callers recognize
            raise EngineError(
                f"The {self.component} engine failed ({_first_line(error)}). Its code may belong to another component."
            ) from error
        return bind_outputs(self.signature, outputs, sizes, self.component)


class _Loader:
    """torch's own loader, with the interface of `Container`. Constants are loaded once."""

    def __init__(self, package: bytes, device: torch.device) -> None:
        import model.engines.row_exchange  # noqa: F401  # registers the operators of the code

        index = -1 if device.type == "cpu" else device.index or 0
        with tempfile.TemporaryDirectory(prefix="preheat-engine-") as folder:
            path = Path(folder) / "engine.pt2"
            path.write_bytes(package)
            # One runner, single-threaded: it has its own lock, and it is the only mode that a CUDA graph can capture.
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
        self.constants = set(self._loader.get_constant_fqns())

    def load_constants(self, tensors: dict[str, torch.Tensor]) -> None:
        self._loader.load_constants(tensors, False, True, True)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = self._loader.run(inputs)
        return outputs


def _unusable(component: str, error: RuntimeError | OSError) -> EngineError:
    return EngineError(
        f"The {component} engine cannot be opened ({_first_line(error)}).",
        "Free space in the folder for temporary files, where the engine is unpacked, mount that folder without noexec, "
        "or build the engine again (`preheat build`).",
    )


def _first_line(error: RuntimeError | OSError) -> str:
    """Return the message without torch's C++ stack trace."""
    return str(error).strip().partition("\n")[0][:200]
