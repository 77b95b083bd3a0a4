"""Corrections of the code that torch's compiler generates, while an engine is compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MAX_PROGRAMS = 1024  # of a kernel with tensor descriptors; at least the number of a GPU's multiprocessors


@contextmanager
def descriptor_memory() -> Iterator[None]:
    """Allocate memory for the tensor descriptors of all programs of a kernel.

    The code that torch 2.11 generates allocates memory for one program, and Triton writes the descriptors of each
    program after the previous program's. Since torch 2.13 the generated code allocates enough.
    """
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    generator: Any = CUDADeviceOpOverrides
    original = generator.cpp_scratch

    def cpp_scratch(self: Any, index: int, workspace: Any, prefix: str | None = None) -> Any:
        code = original(self, index, workspace, prefix)
        if workspace.size > 0 and not any("grid_0" in line for line in code[0]):
            workspace.size *= MAX_PROGRAMS
            code = original(self, index, workspace, prefix)
        return code

    generator.cpp_scratch = cpp_scratch
    try:
        yield
    finally:
        generator.cpp_scratch = original


@contextmanager
def declared_int_arrays() -> Iterator[None]:
    """Declare each array of sizes and strides in the generated C++ before it is used.

    The generator remembers the name of an array by the id of the function that writes its declaration: in torch 2.11 of
    a bound method, which exists during the call only, later of the object that it is bound to, or of a closure. Python
    gives the ids of deleted objects to new ones. Then code uses a name that was declared in other code, and the C++
    compiler refuses it: "int_array_259 was not declared". Here one function is kept for each of these objects while the
    engine is compiled, so no id repeats. Sources: github.com/pytorch/pytorch/pull/178147 and 193628.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    generator: Any = CppWrapperCpu
    original = generator.codegen_int_array_var
    kept: dict[int, Callable[..., None]] = {}

    def codegen_int_array_var(
        self: Any, int_array: str, writeline: Callable[..., None], *rest: Any, **named: Any
    ) -> Any:
        owner = getattr(writeline, "__self__", writeline)
        stable = kept.setdefault(id(owner), writeline)  # keeps the owner, too
        return original(self, int_array, stable, *rest, **named)

    generator.codegen_int_array_var = codegen_int_array_var
    try:
        yield
    finally:
        generator.codegen_int_array_var = original
