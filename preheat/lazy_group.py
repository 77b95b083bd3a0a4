"""A group of commands whose modules are imported when a command runs, so that the list of commands needs no torch."""

import ast
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Source(NamedTuple):
    """A command's module and the name in it: the command's function, or a `typer.Typer` with commands of its own."""

    module: str
    name: str
    title: str
    """The group of commands in the list."""

    def load(self) -> Any:
        """Import the module. Return the command."""
        found = getattr(importlib.import_module(self.module), self.name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name.replace("_", "-"))(found)
        return typer.main.get_command(alone)

    def help(self) -> str:
        """Return the text of the list: the function's docstring, or the Typer's help. Imports nothing."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None and spec.origin is not None
        for statement in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(statement, ast.FunctionDef) and statement.name == self.name:
                return ast.get_docstring(statement) or ""
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                if [ast.unparse(target) for target in statement.targets] == [self.name]:
                    keywords = {word.arg: word.value for word in statement.value.keywords}
                    return str(ast.literal_eval(keywords["help"]))
        raise LookupError(f"{self.module} has no {self.name}.")


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is looked up, but not for the list of commands. See `of`."""

    sources: Mapping[str, Source] = {}
    _lists = False

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # The names that typing errors are compared with.
        self.commands = {name: TyperCommand(name) for name in self.sources} | dict(self.commands)

    @classmethod
    def of(cls, package: str, commands: Mapping[str, Sequence[str]]) -> "type[LazyGroup]":
        """Return a group of commands: title -> "module.name" of each, below `package`."""
        sources = {}
        for title, entries in commands.items():
            for entry in entries:
                module, _, name = entry.partition(".")
                sources[name.replace("_", "-")] = Source(f"{package}.{module}", name, title)
        return type("Commands", (cls,), {"sources": sources})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or only its name and its text while the group is listed. None: there is no such one."""
        source = self.sources.get(cmd_name)
        if source is None:
            return super().get_command(ctx, cmd_name)
        return (
            TyperCommand(cmd_name, help=source.help(), rich_help_panel=source.title) if self._lists else source.load()
        )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists = True
        super().format_help(ctx, formatter)
