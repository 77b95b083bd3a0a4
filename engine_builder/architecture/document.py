"""Write docs/architecture.md: the walks of a request and of a load, traced with a real release.

`python -m engine_builder.architecture.document STORE RELEASE [--out FILE]`
"""

import argparse
import asyncio
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

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
SETTLE_SECONDS = 0.5  # the scheduler then waits for the next request
_THREADS = {
    "MainThread": "Main thread (the server's event loop)",
    "preheat-worker": "Scheduler",
    "preheat-encode": "Output workers",
}
_INTRODUCTION = """# Architecture

Two walks lead through `model/`: a request, from `Model.predict` to the response, and a load, `Model.load`. A tool
writes this page. It traces both walks with the tiny model on a CPU:

    python -m engine_builder.architecture.document STORE RELEASE

A numbered function is called from another module. Below it are the functions of its own module that it calls. A
function is listed once, at its first call; (step) marks those that run in every denoising step. Nested functions are
part of their outer function. Properties are left out. The diagrams show the modules that call other modules. Calls back
into a calling module have no arrow. Arrows are numbered in the order of first calls, one thread after the other.

Stages, components and their facts are data: [model/pipeline/stages.py](../model/pipeline/stages.py) has the stages,
[model/pipeline/spec.py](../model/pipeline/spec.py) the components. To add a feature, add a component, a stage or both;
[tests/test_extension.py](../tests/test_extension.py) is an example.
"""
_REQUEST = f"""## A request

One guided image of the native size in {STEPS} steps. Caches are filled by an earlier request with another prompt and
seed.
"""
_REFINED = """### With the refiner

With the refiner the same request also runs these functions. A function above is repeated if it calls one of them.
"""
_LOAD = """## A load

The release is in a local store. The warm-up generates an image. So a function of the request is repeated only if it
calls further functions. Threads that read ahead and hash files are not traced, because their order varies.
"""
_PROMISES = """## Promises and their tests

Each promise of the [README](../README.md) has tests that fail when it is broken: first what Preheat can do, then what
is checked. [engine_builder/architecture/promises.py](../engine_builder/architecture/promises.py) has the lists.
"""


def trace(store: str, release: str) -> tuple[Recording, Recording, Recording]:
    """Load a release and answer requests. Returns the walks of a load, a request and a request with the refiner."""
    tracer = Tracer(ROOT / "model", _THREADS)
    tracer.install()
    model = Model(config={"model_metadata": {"preheat": {"store": store, "release": release}}})
    with tracer.recording() as load:
        model.load()
        time.sleep(SETTLE_SECONDS)

    async def receive_nothing() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def answer(request: GenerationRequest) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await model.predict(request, Request(scope, receive_nothing))
        await asyncio.sleep(SETTLE_SECONDS)

    async def record(prompt: str, seed: int, steps: int, use_refiner: bool) -> Recording:
        request = GenerationRequest(prompt=prompt, seed=seed, num_inference_steps=steps, use_refiner=use_refiner)
        with tracer.recording() as walk:
            await answer(request)
        return walk

    async def record_all() -> list[Recording]:
        walks = []
        for use_refiner in (False, True):
            await record("a red circle", 1, STEPS, use_refiner)  # fills caches
            walk = await record("a blue square", 2, STEPS, use_refiner)
            mark_steps(walk, await record("a blue square", 2, 2 * STEPS, use_refiner), STEPS)
            walks.append(walk)
        return walks

    request, refined = asyncio.run(record_all())
    return load, request, refined


def document(load: Recording, request: Recording, refined: Recording) -> str:
    """Return the text of the page."""
    added, loading = subtract(refined, request), subtract(load, request)
    parts = [
        _INTRODUCTION, _REQUEST, diagram(request), "", *listing(request),
        _REFINED, *listing(added, refined), _LOAD, diagram(loading), "", *listing(loading, load),
        _PROMISES, *list_promises(CAPABILITIES), "", *list_promises(CHECKS),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def listing(walk: Recording, whole: Recording | None = None) -> list[str]:
    """Return the lines of a numbered list for each thread. `whole`: the walk that contains `walk`."""

    def mark(function: Function) -> str:
        return " (step)" if function.in_each_step else ""

    helpers_of: dict[FunctionId, list[Function]] = {}
    for function in walk.functions.values():
        helpers_of.setdefault(path_to_entry(function, walk)[-1].id, []).append(function)
    lines, number = [], 0
    for thread, title in _THREADS.items():
        in_thread = [function for function in walk.functions.values() if function.thread.startswith(thread)]
        entered = [function for function in in_thread if function.is_entry]
        lines += [f"**{title}**", ""] if entered else []
        for function in entered:
            number += 1
            lines.append(f"{number}. `{function.module}.py` **{_name(function)}**{mark(function)}{_summary(function)}")
            helpers = [other for other in helpers_of.get(function.id, []) if other is not function]
            lines += [f"    - {', '.join(f'`{_name(other)}`{mark(other)}' for other in helpers)}"] if helpers else []
        lines += [""] if entered else []
    lines.append(f"{number} functions called from another module, {len(walk.functions)} in all.")
    if whole is not None:
        entered = [function for function in whole.functions.values() if function.is_entry]
        lines.append(f"The whole walk: {len(entered)} and {len(whole.functions)}.")
    return [*lines, ""]


def diagram(walk: Recording) -> str:
    """Return a Mermaid flowchart of the modules that call other modules."""
    order = list(_THREADS)

    def position(function: Function) -> int:
        return next(index for index, thread in enumerate(order) if function.thread.startswith(thread))

    calls = sorted(walk.calls, key=lambda call: position(walk.functions[call[0]]))
    pairs: dict[tuple[str, str], None] = {}
    for (source, _), (target, _) in calls:
        if source != target and (target, source) not in pairs:
            pairs[source, target] = None
    inner = {source for source, _ in pairs}
    arrows = [(source, target) for source, target in pairs if target in inner]
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
    documented = importlib.import_module(f"model.{function.module.replace('/', '.')}")
    for part in _name(function).split("."):
        documented = getattr(documented, part)
    sentence = " ".join((documented.__doc__ or "").split()).partition(". ")[0].rstrip(".")
    return f": {sentence}" if sentence else ""


def _folder(module: str) -> str:
    return module.rpartition("/")[0]


def _node(module: str) -> str:
    return module.replace("/", "_")


def main(command_line: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("release")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "architecture.md")
    arguments = parser.parse_args([*command_line])
    logging.disable(logging.INFO)
    arguments.out.write_text(document(*trace(arguments.store, arguments.release)))
    print(f"wrote {arguments.out}", flush=True)
    os._exit(0)  # without waiting for the model's threads


if __name__ == "__main__":
    main(sys.argv[1:])
