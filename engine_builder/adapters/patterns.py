"""Match PEFT's options with the names of modules, in a process of its own.

The options are untrusted regular expressions. Some take years, and Python cannot interrupt them. So this file is also
the program of a process with limits on its time and memory. It imports only the standard library.
"""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import TypedDict

_CPU_SECONDS = 5  # 800 patterns and 800 names take less than one
_SECONDS = 120  # by the clock, on a busy machine
_MEMORY_BYTES = 2**30
_MAX_CHARACTERS = 1000  # of one expression


class Scope(TypedDict):
    """Options that apply to modules of these names. Patterns: regular expressions in the order of the file.

    target_modules, exclude_modules: the end of names, or one regular expression; None: all, or nothing.
    """

    names: list[str]
    rank_pattern: list[str]
    alpha_pattern: list[str]
    target_modules: list[str] | str | None
    exclude_modules: list[str] | str | None
    layers_to_transform: list[int] | int | None
    layers_pattern: list[str] | str | None


class Matches(TypedDict):
    """The first pattern that matches each of a scope's names, or None; and the names that the options leave out."""

    rank_pattern: list[str | None]
    alpha_pattern: list[str | None]
    left_out: list[str]


class BadPattern(ValueError):
    """A regular expression is invalid, too long, or takes too long."""


def match_scopes(scopes: Sequence[Scope]) -> list[Matches]:
    """Evaluate options as PEFT 0.21 does. Raises BadPattern."""
    for expression in (expression for scope in scopes for expression in _expressions(scope)):
        if len(expression) > _MAX_CHARACTERS:
            raise BadPattern(f"{expression[:40]!r}... has {len(expression)} characters, more than {_MAX_CHARACTERS}")
    try:
        process = subprocess.run(
            [sys.executable, "-I", __file__], input=json.dumps(scopes), capture_output=True, text=True, timeout=_SECONDS
        )
        answer = json.loads(process.stdout) if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        answer = None
    if answer is None:
        raise BadPattern(f"they take more than {_CPU_SECONDS} s or {_MEMORY_BYTES // 2**20} MiB")
    if isinstance(answer, str):
        raise BadPattern(answer)
    matches: list[Matches] = answer
    return matches


def _expressions(scope: Scope) -> list[str]:
    """Return all regular expressions of a scope, and what is inserted into one."""
    modules = [scope[option] for option in ("target_modules", "exclude_modules", "layers_pattern")]
    lists = [[value] if isinstance(value, str) else value or [] for value in modules]
    return [*scope["rank_pattern"], *scope["alpha_pattern"], *(value for values in lists for value in values)]


def _match(scope: Scope) -> Matches:
    return {
        "rank_pattern": _first_matches(scope["rank_pattern"], scope["names"]),
        "alpha_pattern": _first_matches(scope["alpha_pattern"], scope["names"]),
        "left_out": [name for name in scope["names"] if not _is_target(scope, name)],
    }


def _first_matches(patterns: Collection[str], names: Sequence[str]) -> list[str | None]:
    """Match like PEFT's `get_pattern_key`: a pattern matches the end of a name, from its start or from a dot."""
    compiled = {pattern: _compile(rf"(.*\.)?({pattern})$", pattern) for pattern in patterns}
    return [next((pattern for pattern, found in compiled.items() if found.match(name)), None) for name in names]


def _is_target(scope: Scope, name: str) -> bool:
    """Decide like PEFT's `check_target_module_exists`, for options that were checked."""
    targets, excluded = scope["target_modules"], scope["exclude_modules"]
    if excluded and _names_module(excluded, name):
        return False
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str) or name in targets:
        return _names_module(targets, name)
    return _names_module(targets, name) and _is_chosen_layer(scope, name)


def _names_module(modules: list[str] | str, name: str) -> bool:
    if isinstance(modules, str):
        return _compile(modules, modules).fullmatch(name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def _is_chosen_layer(scope: Scope, name: str) -> bool:
    layers, patterns = scope["layers_to_transform"], scope["layers_pattern"]
    if layers is None or layers == []:
        return True
    if isinstance(patterns, str):
        patterns = [patterns] if patterns else []
    expressions = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns or ()]
    for expression in expressions or [r".*?\.[^.]*\.(?P<idx>\d+)\."]:
        if match := _compile(expression, expression).match(name):
            return int(match["idx"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _compile(expression: str, shown: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise BadPattern(f"{shown[:80]!r} is not a regular expression ({error.msg})") from error
    except (OverflowError, RecursionError) as error:
        raise BadPattern(f"{shown[:80]!r} is not a regular expression that Python can evaluate ({error})") from error


def main() -> None:
    """Read scopes from standard input, and write their matches, or the text of an error."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    scopes = json.load(sys.stdin)
    answer: list[Matches] | str
    try:
        answer = [_match(scope) for scope in scopes]
    except BadPattern as error:
        answer = str(error)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
