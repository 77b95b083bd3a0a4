"""Record which functions of any package run, in the order of their first calls."""

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

Key = tuple[str, str]
"""Module (path below the package, without suffix) and qualified name of a function."""


@dataclass
class Function:
    """A function that ran. `caller`: the innermost function of the package that led to its first call."""

    key: Key
    thread: str
    caller: Key | None
    calls: int = 0
    is_entered: bool = False
    """True if another module called it, or no function of the package did."""
    in_each_step: bool = False

    @property
    def module(self) -> str:
        return self.key[0]


@dataclass
class Walk:
    """The functions that ran, and the pairs (caller, called), each in the order of first calls."""

    functions: dict[Key, Function] = field(default_factory=dict)
    calls: dict[tuple[Key, Key], None] = field(default_factory=dict)


def mark_steps(walk: Walk, longer: Walk, steps: int) -> None:
    """Mark the functions that each step calls. `longer`: a walk like `walk` with `steps` more steps."""
    for key, function in walk.functions.items():
        in_longer = longer.functions.get(key)
        function.in_each_step = in_longer is not None and in_longer.calls - function.calls >= steps


def callers_in_module(function: Function, walk: Walk) -> list[Function]:
    """Return the function, its caller, and so on, up to the one that is entered from another module."""
    path = [function]
    while not path[-1].is_entered and path[-1].caller is not None:
        path.append(walk.functions[path[-1].caller])
    return path


def without(walk: Walk, other: Walk) -> Walk:
    """Return a walk without the functions of another walk.

    A shared function remains if it leads, within its module, to one that is not shared.
    """
    unshared = [function for key, function in walk.functions.items() if key not in other.functions]
    remaining = {caller.key for function in unshared for caller in callers_in_module(function, walk)}
    functions = {key: function for key, function in walk.functions.items() if key in remaining}
    return Walk(functions, {call: None for call in walk.calls if call[0] in functions and call[1] in functions})


class Tracer:
    """Traces the package in `folder`. Comprehensions, lambdas and nested functions are part of their outer function.

    Properties, generated methods, and the bodies of modules and classes are left out. `threads`: the traced threads, by
    the beginning of their names.
    """

    def __init__(self, folder: Path, threads: Iterable[str]) -> None:
        self._root = f"{folder}/"
        self._threads = tuple(threads)
        self._walk: Walk | None = None
        self._keys: dict[CodeType, Key | None] = {}

    def install(self) -> None:
        """Trace this thread, and threads that start later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    @contextmanager
    def recording(self) -> Iterator[Walk]:
        """Yield a walk that is recorded until the end of the block."""
        walk = self._walk = Walk()
        try:
            yield walk
        finally:
            self._walk = None

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        walk = self._walk
        if walk is None or event != "call":
            return
        thread = threading.current_thread().name
        if not thread.startswith(self._threads):
            return
        if (key := self._key(frame)) is None:
            return
        outer, caller = frame.f_back, None
        while outer is not None and (caller := self._key(outer)) is None:
            outer = outer.f_back
        if caller == key:  # a nested function, or a recursion
            return
        if caller is not None:
            walk.calls[caller, key] = None
            if caller not in walk.functions:  # its call began before the recording
                walk.functions[caller] = Function(caller, thread, None, 1, True)
        function = walk.functions.setdefault(key, Function(key, thread, caller))
        function.calls += 1
        function.is_entered |= caller is None or caller[0] != key[0]

    def _key(self, frame: FrameType) -> Key | None:
        code = frame.f_code
        if code not in self._keys:
            self._keys[code] = self._key_of(frame)
        return self._keys[code]

    def _key_of(self, frame: FrameType) -> Key | None:
        code = frame.f_code
        name = code.co_qualname.partition(".<locals>")[0]
        is_body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or class
        if not code.co_filename.startswith(self._root) or is_body or "<" in name or _is_property(frame, name):
            return None
        return code.co_filename.removeprefix(self._root).removesuffix(".py"), name


def _is_property(frame: FrameType, name: str) -> bool:
    owner = frame.f_globals.get(name.partition(".")[0])
    return isinstance(getattr(owner, name.rpartition(".")[2], None), property) if "." in name else False
