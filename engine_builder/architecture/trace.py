"""Record which functions of a package run, in the order of their first calls, and which functions call them."""

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple


class FunctionId(NamedTuple):
    """Identifies a function.

    module: path in the package's folder, without ".py". name: qualified name.
    """

    module: str
    name: str


@dataclass
class Function:
    """A function that ran.

    thread: the name of the thread of its first call.
    caller: the function of the package that led to its first call, directly or through other packages.
    call_count: calls that were recorded. Each time a generator or coroutine continues counts as a call.
    is_entry: True if another module called it, or no function of the package did.
    """

    id: FunctionId
    thread: str
    caller: FunctionId | None
    call_count: int = 0
    is_entry: bool = False
    in_each_step: bool = False

    @property
    def module(self) -> str:
        return self.id.module


@dataclass
class Recording:
    """Functions and calls, each in the order of first calls.

    calls: pairs (caller, called function). The values are unused: the dict is an ordered set.
    """

    functions: dict[FunctionId, Function] = field(default_factory=dict)
    calls: dict[tuple[FunctionId, FunctionId], None] = field(default_factory=dict)


def mark_steps(recording: Recording, longer_recording: Recording, additional_steps: int) -> None:
    """Set `in_each_step` of the functions in a recording that each denoising step calls.

    longer_recording: of the same request, but with `additional_steps` more steps.
    """
    for function_id, function in recording.functions.items():
        longer = longer_recording.functions.get(function_id)
        function.in_each_step = longer is not None and longer.call_count - function.call_count >= additional_steps


def path_to_entry(function: Function, recording: Recording) -> list[Function]:
    """Return the function, its caller, the caller's caller and so on, up to the first that is an entry."""
    path = [function]
    while not path[-1].is_entry and path[-1].caller is not None:
        path.append(recording.functions[path[-1].caller])
    return path


def subtract(recording: Recording, other: Recording) -> Recording:
    """Return the functions of a recording that the other does not have, with the calls between them.

    Callers of these functions remain too, up to the entry, so that each function has its path.
    """
    only_here = [
        function for function_id, function in recording.functions.items() if function_id not in other.functions
    ]
    remaining = {on_path.id for function in only_here for on_path in path_to_entry(function, recording)}
    functions = {
        function_id: function for function_id, function in recording.functions.items() if function_id in remaining
    }
    calls = {call: None for call in recording.calls if call[0] in functions and call[1] in functions}
    return Recording(functions, calls)


class Tracer:
    """Traces the functions of the package in `folder`, on threads whose names begin with one of `threads`.

    A comprehension, lambda or nested function is part of its outer function. Properties, generated methods, and the
    bodies of modules and classes are left out.
    """

    def __init__(self, folder: Path, threads: Iterable[str]) -> None:
        self._package_prefix = f"{folder}/"
        self._thread_prefixes = tuple(threads)
        self._recording: Recording | None = None
        self._id_cache: dict[CodeType, FunctionId | None] = {}

    def install(self) -> None:
        """Trace this thread, and threads that start later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Yield a recording that is filled until the end of the block."""
        recording = self._recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        recording = self._recording
        if recording is None or event != "call":
            return
        thread = threading.current_thread().name
        if not thread.startswith(self._thread_prefixes):
            return
        if (called := self._identify(frame)) is None:
            return
        outer_frame, caller = frame.f_back, None
        while outer_frame is not None and (caller := self._identify(outer_frame)) is None:
            outer_frame = outer_frame.f_back
        if caller == called:  # a nested function, or a recursion
            return
        if caller is not None:
            recording.calls[caller, called] = None
            if caller not in recording.functions:  # the caller's own call began before the recording
                recording.functions[caller] = Function(caller, thread, caller=None, call_count=1, is_entry=True)
        function = recording.functions.setdefault(called, Function(called, thread, caller))
        function.call_count += 1
        function.is_entry |= caller is None or caller.module != called.module

    def _identify(self, frame: FrameType) -> FunctionId | None:
        """Return the function that a frame runs, or None for code that is not traced."""
        code = frame.f_code
        if code not in self._id_cache:
            self._id_cache[code] = self._make_id(frame)
        return self._id_cache[code]

    def _make_id(self, frame: FrameType) -> FunctionId | None:
        code = frame.f_code
        name = code.co_qualname.partition(".<locals>")[0]
        is_body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or class
        if not code.co_filename.startswith(self._package_prefix) or is_body or "<" in name or _is_property(frame, name):
            return None
        return FunctionId(code.co_filename.removeprefix(self._package_prefix).removesuffix(".py"), name)


def _is_property(frame: FrameType, name: str) -> bool:
    """True if the qualified name, in the frame's module, is that of a property or cached property."""
    first, *attributes = name.split(".")
    value = frame.f_globals.get(first)
    for attribute in attributes:
        value = inspect.getattr_static(value, attribute, None)
    return isinstance(value, (property, cached_property))
