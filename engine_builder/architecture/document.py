"""Write docs/architecture.md: the walks of a request and of a load, traced with a real release.

`python -m engine_builder.architecture.document STORE RELEASE [--out FILE]`
"""

import argparse
import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request

from engine_builder.architecture.trace import Function, Tracer, Walk, mark_steps
from model.api.request import GenerationRequest
from model.model import Model

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
_THREADS = {
    "MainThread": "Main thread (the server's event loop)",
    "preheat-worker": "Scheduler",
    "preheat-encode": "Output workers",
}
_INTRODUCTION = """# Architecture

Two walks lead through `model/`: a request's, from `Model.predict` to the response, and a load's, `Model.load`. This
page is made by a tool that traces both with the tiny model on a CPU:

    python -m engine_builder.architecture.document STORE RELEASE

A numbered function is entered from another module. Below it stand the functions of its own module that it calls. A
function is listed once, at its first call; (step) marks those that run in every denoising step. Nested functions count
as their function, and properties as data. The diagrams show modules from which other modules are entered. Arrows are
numbered in the order of first calls, one thread after the other.

Stages, components and their facts are data: [model/pipeline/stages.py](../model/pipeline/stages.py) has the stages,
[model/pipeline/spec.py](../model/pipeline/spec.py) the components. To add a feature, add a component, a stage or both;
[tests/test_extension.py](../tests/test_extension.py) is an example.
"""
_REQUEST = f"""## A request

One guided image of the native size in {STEPS} steps. Caches are filled: a request with another prompt and seed
came before.
"""
_REFINED = """### With the refiner

The same request with the refiner runs these in addition.
"""
_LOAD = """## A load

The release is in a local store. The warm-up generates an image, so the functions above are not repeated.
"""


def trace(store: str, release: str) -> tuple[Walk, Walk, Walk]:
    """Load a release and answer requests in this process. Returns the walks of a load, a request, a refined request."""
    tracer = Tracer(ROOT / "model", _THREADS)
    tracer.install()
    model = Model(config={"model_metadata": {"preheat": {"store": store, "release": release}}})
    with tracer.recording() as load:
        model.load()

    async def never() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def answer(request: GenerationRequest) -> None:
        await model.predict(request, Request({"type": "http", "method": "POST", "path": "/", "headers": []}, never))
        await asyncio.sleep(0.5)  # until the scheduler waits for the next request

    async def record(prompt: str, seed: int, steps: int, use_refiner: bool) -> Walk:
        request = GenerationRequest(prompt=prompt, seed=seed, num_inference_steps=steps, use_refiner=use_refiner)
        with tracer.recording() as walk:
            await answer(request)
        return walk

    async def requests() -> list[Walk]:
        walks = []
        for use_refiner in (False, True):
            await record("a red circle", 1, STEPS, use_refiner)  # fills caches
            walk = await record("a blue square", 2, STEPS, use_refiner)
            mark_steps(walk, await record("a blue square", 2, 2 * STEPS, use_refiner), STEPS)
            walks.append(walk)
        return walks

    request, refined = asyncio.run(requests())
    return load, request, refined


def document(load: Walk, request: Walk, refined: Walk) -> str:
    """Return the page."""
    added, loading = without(refined, request), without(load, request)
    parts = [
        _INTRODUCTION, _REQUEST, diagram(request), "", *listing(request),
        _REFINED, *listing(added), _LOAD, diagram(loading), "", *listing(loading),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def without(walk: Walk, other: Walk) -> Walk:
    """Return a walk without the functions of another, and without calls of them."""
    functions = {key: function for key, function in walk.functions.items() if key not in other.functions}
    return Walk(functions, {call: None for call in walk.calls if call[0] in functions and call[1] in functions})


def listing(walk: Walk) -> list[str]:
    """Return the lines of a numbered list for each thread."""

    def mark(function: Function) -> str:
        return " (step)" if function.in_each_step else ""

    lines, number = [], 0
    for thread, title in _THREADS.items():
        of_thread = [function for function in walk.functions.values() if function.thread.startswith(thread)]
        entered = [function for function in of_thread if _entry(function, walk) is function]
        lines += [f"**{title}**", ""] if entered else []
        for function in entered:
            number += 1
            lines.append(f"{number}. `{function.module}.py` **{_name(function)}**{mark(function)}{_summary(function)}")
            helpers = [other for other in of_thread if other is not function and _entry(other, walk) is function]
            lines += [f"    - {', '.join(f'`{_name(other)}`{mark(other)}' for other in helpers)}"] if helpers else []
        lines += [""] if entered else []
    return [*lines, f"{number} functions entered from another module, {len(walk.functions)} in all.", ""]


def diagram(walk: Walk) -> str:
    """Return a Mermaid flowchart of the modules that enter other modules."""
    order = list(_THREADS)

    def position(function: Function) -> int:
        return next(index for index, thread in enumerate(order) if function.thread.startswith(thread))

    calls = sorted(walk.calls, key=lambda call: position(walk.functions[call[0]]))
    pairs = dict.fromkeys((caller[0], called[0]) for caller, called in calls if caller[0] != called[0])
    inner = {source for source, _ in pairs}
    arrows = [(source, target) for source, target in pairs if target in inner]
    folders: dict[str, list[str]] = {}
    for module in dict.fromkeys(module for arrow in arrows for module in arrow):
        folders.setdefault(module.rpartition("/")[0], []).append(module)
    lines = ["```mermaid", "flowchart LR"]
    for folder, modules in folders.items():
        nodes = [f"    {_node(module)}[{module.rpartition('/')[2]}]" for module in modules]
        lines += [f"  subgraph {folder}", *nodes, "  end"] if folder else nodes
    lines += [f"  {_node(a)} -->|{number}| {_node(b)}" for number, (a, b) in enumerate(arrows, start=1)]
    return "\n".join([*lines, "```"])


def _entry(function: Function, walk: Walk) -> Function:
    """The function of its module, entered from another, below which a function is listed."""
    while not function.is_entered and function.caller in walk.functions:
        function = walk.functions[function.caller]
    return function


def _name(function: Function) -> str:
    """The function's name; a class stands for its constructor."""
    return function.key[1].removesuffix(".__init__")


def _summary(function: Function) -> str:
    """The first sentence of its docstring, after a colon."""
    target = importlib.import_module(f"model.{function.module.replace('/', '.')}")
    for part in _name(function).split("."):
        target = getattr(target, part)
    sentence = " ".join((target.__doc__ or "").split()).partition(". ")[0].rstrip(".")
    return f": {sentence}" if sentence else ""


def _node(module: str) -> str:
    return module.replace("/", "_")


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("release")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "architecture.md")
    given = parser.parse_args([*arguments])
    logging.disable(logging.INFO)
    given.out.write_text(document(*trace(given.store, given.release)))
    print(f"wrote {given.out}", flush=True)
    os._exit(0)  # the scheduler's thread would keep the process alive until its device is closed


if __name__ == "__main__":
    main(sys.argv[1:])
