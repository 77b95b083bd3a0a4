"""Intercept the Triton kernels that are launched through PyTorch's `wrap_triton`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, and the compiler's options, such as num_warps."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.kernel.fn.__name__
        return name

    @property
    def constants(self) -> set[str]:
        """Names of the arguments that are known when the kernel is compiled."""
        parameters = inspect.signature(self.kernel.fn).parameters
        return {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}


def intercept(run: Callable[[Launch], object]) -> Callable[[Any], Any]:
    """Return a replacement of wrap_triton that passes each launch to `run`."""

    class Wrapped:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*positional: Any, **named: Any) -> object:
                parameters = inspect.signature(self.kernel.fn).parameters
                arguments = dict(zip(parameters, positional, strict=False))
                arguments |= {name: value for name, value in named.items() if name in parameters}
                options = {name: value for name, value in named.items() if name not in parameters}
                return run(Launch(self.kernel, grid, arguments, options))

            return launch

    return Wrapped
