"""The `preheat` command: builds, releases, benchmarks, a local server and its client."""

import errno
import io
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from model.child_process import exit_now, hangs_at_exit
from model.errors import OutOfDeviceMemory, PreheatError
from preheat.interrupts import handle_signals, last_signal
from preheat.lazy_group import LazyGroup

_INTERRUPTED = 130  # typer's exit code after KeyboardInterrupt
_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
PROGRAM = "preheat"  # also where it is started as a module
COMMANDS = {
    "Start": ("start.demo", "start.serve", "generate.generate", "gateway.playground", "generate.save",
              "image_request.request"),
    "Build": ("build.build", "calibrate.calibrate", "check_fp8.check_fp8", "export_onnx.export_onnx"),
    "Releases": (
        "releases.publish", "releases.releases", "releases.verify", "releases.copy", "releases.gc", "releases.keygen",
        "adapters.add_lora", "adapters.remove_lora", "adapters.add_embedding",
    ),
    "Deploy and operate": (
        "check_config.check_config", "check_config.weights", "gateway.gateway", "plan_replicas.plan_replicas",
        "kubernetes.kubernetes", "triton.export_triton", "triton.triton_client",
    ),
    "Measure": ("compare.compare", "bench.bench", "load_server.load", "bench.report"),
}  # fmt: skip
"""Title -> "module.function" of each command, whose name is that of the function with hyphens."""
RENAMED_OPTIONS = {
    "calibrate": {"--guidance": "--guidance-scale"},
    "check_fp8": {"--guidance": "--guidance-scale"},
    "triton_client": {"--model": "--triton-model"},
}
"""Function of a command -> older spellings of its options, which are still accepted."""
app = typer.Typer(
    cls=LazyGroup.of("preheat.commands", COMMANDS, RENAMED_OPTIONS),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        project = tomllib.loads(_PROJECT.read_text())["project"]
        print(PROGRAM, project["version"])
        raise typer.Exit


@app.callback()
def preheat(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Build, publish, serve and call engines of Stable Diffusion."""


@app.command(name="help", rich_help_panel="Start")
def help_page(command: Annotated[list[str] | None, typer.Argument(help="The command; default: all.")] = None) -> None:
    """Show the help of a command."""
    app([*(command or ()), "--help"], prog_name=PROGRAM)


def main() -> None:
    """Run the command. A PreheatError ends it with status 1 and no traceback, a signal with 128 and its number."""
    handle_signals()
    try:
        _run()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            _print_error(f"Stopped by {last_signal().name}.")
            end.code = 128 + last_signal()
        if hangs_at_exit():
            exit_now(end.code if isinstance(end.code, int) else 1)
        raise


def _run() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; see truss/configs/cpu-demo.yaml
    for stream in (sys.stdout, sys.stderr):
        # A name may hold bytes that are not UTF-8.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(prog_name=PROGRAM)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise the interpreter flushes at exit, and a full disk gives a traceback
    except PreheatError as error:
        _print_error(str(error))
        sys.exit(1)
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        _print_error(f"The output cannot be written: {error.strerror}. Free some disk space.")
        sys.exit(1)
    except RuntimeError as error:
        if not isinstance(error, _out_of_memory_errors()):
            raise
        numbers = str(error).partition(" Of the allocated memory")[0]  # what follows is about PyTorch's allocator
        remedy = "End other programs on the GPU, or give less work at once: fewer --jobs, smaller sizes or batches."
        _print_error(str(OutOfDeviceMemory(f"The GPU's memory is full. {numbers}", remedy)))
        sys.exit(1)


def _out_of_memory_errors() -> tuple[type[Exception], ...]:
    """Return PyTorch's error for memory of a GPU, without importing PyTorch for it."""
    torch = sys.modules.get("torch")
    return (torch.OutOfMemoryError,) if torch else ()


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    console.print(f"[bold red]preheat:[/] {escape(message)}")


def _discard_output() -> None:
    """Discard the buffered output, which would otherwise raise an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
