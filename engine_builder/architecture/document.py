"""Write docs/architecture.md: the functions that a request and a load run, traced with a real release.

`python -m engine_builder.architecture.document STORE RELEASE [--out FILE]`
"""

import argparse
import asyncio
import base64
import importlib
import io
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.requests import Request

from engine_builder.architecture.promises import CAPABILITIES, CHECKS, list_promises
from engine_builder.architecture.trace import (
    Function,
    FunctionId,
    Recording,
    Tracer,
    mark_steps,
    path_to_entry,
    subtract,
)
from model.api.request import GenerationRequest
from model.model import Model

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SIDE = 256  # pixels, of the input image
SETTLE_SECONDS = 0.5  # enough for all threads to finish the work of a load or request
_THREADS = {  # the beginning of a thread's name -> its title
    "MainThread": "Main thread (the server's event loop)",
    "preheat-worker": "Scheduler",
    "preheat-encode": "Output workers",
    "asyncio": "A worker thread that decodes images",
}
_INTRODUCTION = """# Architecture

This page lists the functions of `model/` that a request runs, from `Model.predict` to the response, and those that a
load runs, `Model.load`. A tool writes the page from traces of the tiny model on a CPU:

    python -m engine_builder.architecture.document STORE RELEASE

A numbered function is called from another module. The line below names the functions of the same module that it leads
to. A function is listed once, at its first call. "(step)" marks the functions that run in every denoising step. Nested
functions are part of their outer function. Properties are left out.

The diagrams show the modules that call other modules. If two modules call each other, only the first call has an arrow.
Arrows are numbered in the order of first calls, one thread after the other.

Stages, components and their facts are data: [model/pipeline/stages.py](../model/pipeline/stages.py) has the stages,
[model/pipeline/spec.py](../model/pipeline/spec.py) the components. To add a feature, add a component, a stage or both;
[tests/test_extension.py](../tests/test_extension.py) is an example.
"""
_REQUEST = f"""## A request

One guided image of the native size in {STEPS} steps. An earlier request with another prompt and seed has filled the
caches.
"""
_REFINED = """### With the refiner

With the refiner the same request also runs these functions. A function from the list above is repeated if it leads to
a new function of its module.
"""
_INPAINTED = """### With an image and a mask

With an image and a mask the request also runs these functions. A function from the first list is repeated if it leads
to a new function of its module.
"""
_LOAD = """## A load

The release is in a local store. The warm-up generates an image, so a load also runs the functions of a request. These
are repeated only if they lead to a new function of their module. Threads that read ahead and hash files are not traced,
because their order varies.
"""
_PROMISES = """## Promises and their tests

Each promise of the [README](../README.md) has tests that fail when the promise is broken. The first list has the things
that Preheat can do, the second its checks.
[engine_builder/architecture/promises.py](../engine_builder/architecture/promises.py) has both lists.
"""


def record_runs(store: str, release: str) -> tuple[Recording, Recording, Recording, Recording]:
    """Load a release and answer requests.

    Returns recordings of a load, and of requests: a plain one, one with the refiner, one with an image and a mask.
    """
    tracer = Tracer(ROOT / "model", _THREADS)
    tracer.install()
    model = Model(config={"model_metadata": {"preheat": {"store": store, "release": release}}})
    with tracer.recording() as load:
        model.load()
        time.sleep(SETTLE_SECONDS)
    # The measurement of batches belongs to no request, also on a machine that needs a minute for the recordings.
    importlib.import_module("model.scheduling.scheduler").OVERDUE_SECONDS = math.inf  # type: ignore[attr-defined]

    async def receive_nothing() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def answer(request: GenerationRequest) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await model.predict(request, Request(scope, receive_nothing))
        await asyncio.sleep(SETTLE_SECONDS)

    async def record(prompt: str, seed: int, steps: int, **fields: Any) -> Recording:
        request = GenerationRequest(prompt=prompt, seed=seed, num_inference_steps=steps, **fields)
        with tracer.recording() as recording:
            await answer(request)
        return recording

    async def record_requests() -> list[Recording]:
        recordings = []
        for fields in ({"use_refiner": False}, {"use_refiner": True}, _inputs()):
            await record("a red circle", 1, STEPS, **fields)  # fills caches
            recording = await record("a blue square", 2, STEPS, **fields)
            longer_recording = await record("a blue square", 2, 2 * STEPS, **fields)
            mark_steps(recording, longer_recording, additional_steps=STEPS)
            recordings.append(recording)
        return recordings

    request, refined_request, inpainted_request = asyncio.run(record_requests())
    return load, request, refined_request, inpainted_request


def _inputs() -> dict[str, Any]:
    """Return the fields of a request with an image and a mask of it, all of whose steps run."""

    def png(levels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
        file = io.BytesIO()
        Image.fromarray(levels).save(file, "png")
        return base64.b64encode(file.getvalue()).decode()

    image, mask = np.zeros((SIDE, SIDE, 3), np.uint8), np.full((SIDE, SIDE), 255, np.uint8)
    return {"image": png(image), "masks": [{"image": png(mask), "strength": 1.0}], "composite": True}


def render_page(load: Recording, request: Recording, refined_request: Recording, inpainted_request: Recording) -> str:
    """Return the text of the page."""
    only_refined, only_load = subtract(refined_request, request), subtract(load, request)
    only_inpainted = subtract(inpainted_request, request)
    parts = [
        _INTRODUCTION, _REQUEST, draw_diagram(request), "", *list_functions(request),
        _REFINED, *list_functions(only_refined, refined_request),
        _INPAINTED, *list_functions(only_inpainted, inpainted_request),
        _LOAD, draw_diagram(only_load), "", *list_functions(only_load, load),
        _PROMISES, *list_promises(CAPABILITIES), "", *list_promises(CHECKS),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def list_functions(recording: Recording, complete: Recording | None = None) -> list[str]:
    """Return the lines of a numbered list for each thread, and a line with the counts of functions.

    `complete`: the recording that `recording` is a part of. Its counts get a second line.
    """

    def step_mark(function: Function) -> str:
        return " (step)" if function.in_each_step else ""

    functions_by_entry: dict[FunctionId, list[Function]] = {}
    for function in recording.functions.values():
        functions_by_entry.setdefault(path_to_entry(function, recording)[-1].id, []).append(function)
    lines, number = [], 0
    for thread, title in _THREADS.items():
        in_thread = [function for function in recording.functions.values() if function.thread.startswith(thread)]
        entries = [function for function in in_thread if function.is_entry]
        if not entries:
            continue
        lines += [f"**{title}**", ""]
        for entry in entries:
            number += 1
            lines.append(f"{number}. `{entry.module}.py` **{_name(entry)}**{step_mark(entry)}{_summary(entry)}")
            helpers = [function for function in functions_by_entry.get(entry.id, []) if function is not entry]
            if helpers:
                lines.append(f"    - {', '.join(f'`{_name(helper)}`{step_mark(helper)}' for helper in helpers)}")
        lines.append("")
    lines.append(f"{number} functions called from another module, {len(recording.functions)} in all.")
    if complete is not None:
        entry_count = sum(function.is_entry for function in complete.functions.values())
        lines.append(
            f"Including functions that are listed above: {entry_count} called from another module, "
            f"{len(complete.functions)} in all."
        )
    return [*lines, ""]


def draw_diagram(recording: Recording) -> str:
    """Return a Mermaid flowchart of the modules that call other modules."""

    def thread_index(function: Function) -> int:
        return next(index for index, thread in enumerate(_THREADS) if function.thread.startswith(thread))

    calls = sorted(recording.calls, key=lambda call: thread_index(recording.functions[call[0]]))
    pairs: dict[tuple[str, str], None] = {}
    for (source, _), (target, _) in calls:
        if source != target and (target, source) not in pairs:
            pairs[source, target] = None
    callers = {source for source, _ in pairs}
    arrows = [(source, target) for source, target in pairs if target in callers]
    folders: dict[str, list[str]] = {}
    for module in dict.fromkeys(module for arrow in arrows for module in arrow):
        folders.setdefault(_folder(module), []).append(module)
    lines = ["```mermaid", "flowchart TB"]
    for folder, modules in folders.items():
        nodes = [f"    {_node(module)}[{module.rpartition('/')[2]}]" for module in modules]
        lines += [f"  subgraph {folder}", *nodes, "  end"] if folder else nodes
    for number, (source, target) in enumerate(arrows, start=1):
        # Arrows between folders are longer, so that they do not cross other folders' modules.
        arrow = "-->" if _folder(source) == _folder(target) else "---->"
        lines.append(f"  {_node(source)} {arrow}|{number}| {_node(target)}")
    return "\n".join([*lines, "```"])


def _name(function: Function) -> str:
    """Return the function's name. A constructor has the name of its class."""
    return function.id.name.removesuffix(".__init__")


def _summary(function: Function) -> str:
    """Return the first sentence of the function's docstring, after a colon."""
    value = importlib.import_module(f"model.{function.module.replace('/', '.')}")
    for part in _name(function).split("."):
        value = getattr(value, part)
    sentence = " ".join((value.__doc__ or "").split()).partition(". ")[0].rstrip(".")
    return f": {sentence}" if sentence else ""


def _folder(module: str) -> str:
    return module.rpartition("/")[0]


def _node(module: str) -> str:
    return module.replace("/", "_")


def main(command_line: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("release")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "architecture.md")
    arguments = parser.parse_args(command_line)
    logging.disable(logging.INFO)
    arguments.out.write_text(render_page(*record_runs(arguments.store, arguments.release)), encoding="utf-8")
    print(f"wrote {arguments.out}", flush=True)
    os._exit(0)  # without waiting for the model's threads


if __name__ == "__main__":
    main(sys.argv[1:])
