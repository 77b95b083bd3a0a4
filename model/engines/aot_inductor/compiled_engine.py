"""Engines compiled by AOTInductor (`.pt2`): opened by torch's C++ loader, or by `cpu_container` on a CPU.

The public Python loader is not used. It compiles and runs probe programs to identify this machine's CPU, which takes
up to a minute, and its wrapper takes seconds to import. The target was checked before an engine is opened.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from model.engines.aot_inductor.cpu_container import Container
from model.engines.aot_inductor.package import check_package
from model.engines.constants import map_constants
from model.engines.shapes import bind_outputs, bind_shapes
from model.errors import EngineError
from model.store.manifest import Bucket, Signature


class AotInductorEngine:
    """One `.pt2` package without weights. `weights` are aliased, never copied, and must outlive the engine."""

    def __init__(
        self,
        component: str,
        package: bytes,
        signature: Signature,
        bucket: Bucket,
        constants: bytes,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        bands: int = 1,
    ) -> None:
        """`package` and `constants`: the contents of the engine record's blobs. `bands`: the ranks that run the engine
        together (`model.engines.row_exchange`). On a CPU such an engine holds Python's interpreter lock between its
        exchanges, because only torch's loader calls operators of other modules.

        The verified bytes themselves are opened, because another process could replace a file after it was verified.
        Raises EngineError if anything does not match.
        """
        self.component = component
        self.signature = signature
        self.bucket = bucket
        self._device = device.type
        self._bands = bands
        if bands > 1:
            import model.engines.row_exchange  # noqa: F401  # registers the operators of the code
        mapped = _map_constants(component, constants, weights, device)
        check_package(component, package)
        try:
            code = Container(package) if device.type == "cpu" and bands == 1 else _Loader(package, device)
            if code.constants != set(mapped):
                raise EngineError(f"The {component} engine and its constant map disagree.")
            if isinstance(code, Container) and code.input_count != len(signature.inputs):
                raise EngineError(
                    f"The {component} engine and its manifest entry disagree on the number of inputs: "
                    f"{code.input_count} and {len(signature.inputs)}."
                )
            # A call before constants are loaded, or with some missing, would be a segmentation fault.
            code.load_constants(mapped)
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"The {component} engine cannot be opened ({_first_line(error)}).",
                "Free space in the folder for temporary files, where the engine is unpacked, or build it again "
                "(`preheat build`).",
            ) from error
        self._code: _Loader | Container = code
        self._weights = mapped

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = bind_shapes(self.signature, inputs, self.component)
        batch, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(batch, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for batch {batch} at {width}x{height}.", "")
        for name, tensor in inputs.items():
            if tensor.device.type != self._device:
                raise EngineError(
                    f"{self.component}: input {name} is on {tensor.device}, its engine on {self._device}.", ""
                )
        # Kernels were compiled for contiguous inputs and ignore strides.
        ordered = [inputs[spec.name].contiguous() for spec in self.signature.inputs]
        try:
            outputs = self._code.run(ordered)
        except RuntimeError as error:
            if self._device != "cpu" or self._bands > 1:
                raise  # the cause may be a lack of memory or the end of a rank, which callers recognize
            raise EngineError(
                f"The {self.component} engine failed ({_first_line(error)}). Its code may belong to another component."
            ) from error
        return bind_outputs(self.signature, outputs, sizes, self.component)


class _Loader:
    """torch's own loader, with the interface of `Container`."""

    def __init__(self, package: bytes, device: torch.device) -> None:
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


def _map_constants(
    component: str, constants: bytes, weights: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in the compiled code, with names, shapes, dtypes and strides checked."""
    mapped = map_constants(component, constants, weights)
    for name, tensor in mapped.items():
        dense = tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        if tensor.device.type != device.type or not dense:
            raise EngineError(f"{component}: {name} must be contiguous and on {device.type}.")
    return mapped


def _first_line(error: RuntimeError | OSError) -> str:
    """Return the message without torch's C++ stack trace."""
    return str(error).strip().partition("\n")[0][:200]
