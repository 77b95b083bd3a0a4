"""A group of commands whose modules are imported when a command runs, so that the list of commands needs no torch."""

import ast
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(TyperCommand):
    """A command's function in a module, or a `typer.Typer` with commands of its own.

    title: its group in the list. renamed: older spellings of its options -> the ones of today.
    """

    def __init__(self, module: str, function: str, title: str, renamed: Mapping[str, str]) -> None:
        super().__init__(function.replace("_", "-"), rich_help_panel=title)
        self._module, self._function, self._renamed = module, function, renamed

    def load(self) -> Any:
        """Import the module. Return the command with its options."""
        found = getattr(importlib.import_module(self._module), self._function)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)  # `get_command` would add options of shell completion
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(found)
        return typer.main.get_command(alone)

    def read_help(self) -> str:
        """Return the text of the list: the function's docstring, or the Typer's help. Imports nothing."""
        spec = importlib.util.find_spec(self._module)
        assert spec is not None and spec.origin is not None
        for statement in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(statement, ast.FunctionDef) and statement.name == self._function:
                return ast.get_docstring(statement) or ""
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                if [ast.unparse(target) for target in statement.targets] == [self._function]:
                    keywords = {word.arg: word.value for word in statement.value.keywords}
                    return str(ast.literal_eval(keywords["help"]))
        raise LookupError(f"{self._module} has no {self._function}.")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments of the imported command, which the context then runs."""
        return self.load().make_context(info_name, [self._current(argument) for argument in args], parent, **extra)

    def _current(self, argument: str) -> str:
        """Return an argument with today's spelling of an option. Prints a note about an older one."""
        option, equals, value = argument.partition("=")
        if option not in self._renamed:
            return argument
        typer.echo(f"{option} is now {self._renamed[option]}", err=True)
        return self._renamed[option] + equals + value


class LazyGroup(TyperGroup):
    """A group of `LazyCommand`s. See `of`."""

    listed: Sequence[tuple[str, str, str, Mapping[str, str]]] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in (LazyCommand(*entry) for entry in self.listed):
            self.add_command(command)

    @classmethod
    def of(
        cls, package: str, commands: Mapping[str, Sequence[str]], renamed: Mapping[str, Mapping[str, str]]
    ) -> "type[LazyGroup]":
        """Return a group of commands: title -> "module.function" of each, below `package`. renamed: by function."""
        listed = [
            (f"{package}.{module}", function, title, renamed.get(function, {}))
            for title, entries in commands.items()
            for module, _, function in (entry.partition(".") for entry in entries)
        ]
        return type("Commands", (cls,), {"listed": listed})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            if isinstance(command, LazyCommand):
                command.help = command.read_help()
        super().format_help(ctx, formatter)
