"""Measure everything in docs/benchmarks.md that needs full-size models: make them with random weights, build, measure.

    python -m engine_builder.benchmarks.full_size WORK [--only images --only controls ...] [--jobs 8]

Takes some 30 minutes on an H100 with 16 cores, most of it for compiling (an estimate). The models are built one after
the other, because compilations of two builds filled the 80 GB of a GPU; --builds changes that. With --gpus each GPU has
builds of its own. One image is then also measured on all GPUs: with two in halves of guidance and in two bands, with
more in halves of two bands or more images. WORK/rows/NAME.json has
the rows of each measurement, WORK/logs/ the output of each command. A command that has succeeded is not run again, so
the same call continues after an interruption. A failed command ends with its last lines, and what does not need it goes
on.

--model, --sd-model and --controlnet name models that take the place of random ones.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from model.child_process import visible_gpu

Command = tuple[str, ...]
"""A Python module and its arguments."""

_LAST_LINES = 15  # of a failed command
_CLI = "engine_builder.commands.main"
_BENCHMARKS = "engine_builder.benchmarks"


@dataclass(frozen=True)
class Work:
    """A name, and commands that run one after the other. `needs`: names of the work that must have succeeded."""

    name: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Models:
    """Folders of the models: a base model of SDXL, a model of Stable Diffusion 1.5, and ControlNets by name.

    None and no ControlNets: random weights, and a full and a small ControlNet.
    """

    sdxl: Path | None = None
    sd: Path | None = None
    controlnets: tuple[tuple[str, Path], ...] = ()


def plan(
    folder: Path, models: Models, size: str, sd_size: str, steps: int, runs: int, jobs: int, gpus: int = 1
) -> tuple[list[Work], list[Work]]:
    """Return the releases to prepare, and the measurements, which use one release each.

    size, sd_size: WIDTHxHEIGHT of the images of SDXL and of SD 1.5. jobs: engines that each build compiles at once.
    gpus: with several, one image is also measured on all of them, at `size` and at twice its sides.
    """
    store = str(folder / "store")
    sdxl, sd = str(models.sdxl or folder / "sdxl"), str(models.sd or folder / "sd")
    nets = models.controlnets or tuple((kind, folder / f"controlnet-{kind}") for kind in ("full", "small"))
    controlnets = [part for name, path in nets for part in ("--controlnet", f"{name}={path}")]

    def release(model: str, name: str, sizes: Sequence[str], *options: str) -> tuple[Command, ...]:
        sized = [part for each in sizes for part in ("--size", each)]
        build = ("build", model, "--name", name, "--store", store, "--no-refiner", "--jobs", str(jobs))
        return (_CLI, *build, *sized, *options), (_CLI, "publish", f"{name}/1", "--store", store)

    def measurement(name: str, needs: str, module: str, *options: str) -> Work:
        rows = str(folder / "rows" / f"{name}.json")
        return Work(name, ((f"{_BENCHMARKS}.{module}", store, f"{needs}/1", "--out", rows, *options),), (needs,))

    make_sdxl = (("engine_builder.checkpoints.random_sdxl", sdxl),) if models.sdxl is None else ()
    make_sd = (("engine_builder.checkpoints.random_sd", sd),) if models.sd is None else ()
    make_controlnets = () if models.controlnets else tuple(
        ("engine_builder.checkpoints.random_controlnet", str(path), "--kind", kind) for kind, path in nets
    )  # fmt: skip
    make_ip_adapter = ("engine_builder.checkpoints.random_ip_adapter", str(folder / "ip-adapter"))
    ip_adapter = ("--ip-adapter", f"plain={folder / 'ip-adapter' / 'plain.safetensors'}")
    sizes = [f"{size}@1", f"{size}@2"]
    prepared = [
        Work("sdxl-model", make_sdxl),
        Work("sdxl", (*make_controlnets, *release(sdxl, "sdxl", sizes, *controlnets)), ("sdxl-model",)),
        Work("sdxl-lora", release(sdxl, "sdxl-lora", [f"{size}@16"], "--lora-rank", "32"), ("sdxl-model",)),
        Work("sdxl-ip", (make_ip_adapter, *release(sdxl, "sdxl-ip", [f"{size}@2"], *ip_adapter)), ("sdxl-model",)),
        Work("sd", (*make_sd, *release(sd, "sd", [f"{sd_size}@1", f"{sd_size}@2"]))),
    ]
    counts = ("--steps", str(steps), "--runs", str(runs))
    measured = [
        measurement("text", "sdxl", "suite", "--peer", sdxl),
        measurement("images", "sdxl", "image_tasks", *counts),
        measurement("controls", "sdxl", "control", *counts, "--model", sdxl, *controlnets),
        measurement("image-prompts", "sdxl-ip", "ip_adapter", *counts),
        measurement("adapters", "sdxl-lora", "adapters", "--rank", "64", "--images", "8", "--batch-rank", "32"),
        measurement("sd-text", "sd", "suite", "--peer", sd),
    ]
    if gpus > 1:
        large = "x".join(str(2 * int(side)) for side in size.split("x"))
        build = release(sdxl, "sdxl-bands", [*sizes, f"{large}@1"], "--bands", "2")
        prepared.append(Work("sdxl-bands", build, ("sdxl-model",)))
        bench = (_CLI, "bench", "multi-gpu", "sdxl-bands/1", "--store", store, "--gpus", str(gpus), *counts)
        rows = ("--out", str(folder / "rows" / "multi-gpu.json"))
        ways = (("--bands", "2"),) if gpus > 2 else ((), ("--bands", "2"))
        commands = tuple((*bench, "--size", each, *way, *rows) for each in (size, large) for way in ways)
        measured.append(Work("multi-gpu", commands, ("sdxl-bands",)))
    return prepared, measured


def run_work(folder: Path, work: Work, gpu: str | None = None) -> bool:
    """Run the commands that have not succeeded yet. Returns False after the first one that fails.

    `gpu`: the only one that they see; None: all.
    """
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    for number, command in enumerate(work.commands):
        digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
        done = folder / "done" / digest
        if done.exists():
            continue
        log = folder / "logs" / f"{work.name}-{number}.txt"
        began = time.monotonic()
        with log.open("w") as output:
            status = subprocess.run(
                [sys.executable, "-m", *command], stdout=output, stderr=output, env=environment
            ).returncode
        seconds = time.monotonic() - began
        if status:
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print(
                f"{work.name}: failed after {seconds:.0f} s: {' '.join(command)}\n  " + "\n  ".join(lines), flush=True
            )
            return False
        print(f"{work.name}: {seconds:.0f} s: {' '.join(command[:2])}", flush=True)
        done.touch()
    return True


def run_all(folder: Path, prepared: Sequence[Work], measured: Sequence[Work], at_once: int = 1, gpus: int = 1) -> bool:
    """Run at most `at_once` of the prepared work concurrently, then measure one by one. Returns True if all succeeded.

    Work of `prepared` may need earlier work of it. `gpus`: with several, each prepared work sees one of them.
    """
    for name in ("done", "logs", "rows"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    results: dict[str, Future[bool]] = {}
    free: Queue[str | None] = Queue()
    for number in range(at_once):
        free.put(visible_gpu(number % gpus, gpus) if gpus > 1 else None)

    def prepare(work: Work) -> bool:
        gpu = free.get()
        try:
            return run(work, gpu)
        finally:
            free.put(gpu)

    def run(work: Work, gpu: str | None = None) -> bool:
        if failed := [need for need in work.needs if not results[need].result()]:
            print(f"{work.name}: skipped, because {failed[0]} failed", flush=True)
            return False
        return run_work(folder, work, gpu)

    with ThreadPoolExecutor(at_once) as pool:
        for work in prepared:
            results[work.name] = pool.submit(prepare, work)
    return all([run(work) for work in measured]) and all(result.result() for result in results.values())


def needed_work(prepared: Sequence[Work], measured: Sequence[Work]) -> list[Work]:
    """Return the prepared work that measurements need, in the order of `prepared`."""
    names = {need for work in measured for need in work.needs}
    for work in reversed(prepared):
        names |= set(work.needs) if work.name in names else set()
    return [work for work in prepared if work.name in names]


def _name_and_path(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models, store, logs and rows; 40 GB with random models")
    parser.add_argument("--only", action="append", default=[], help="a measurement, repeatable; default: all")
    parser.add_argument("--model", type=Path, help="folder of an SDXL base model; default: random weights")
    parser.add_argument("--sd-model", type=Path, help="folder of a Stable Diffusion 1.5 model; default: random weights")
    parser.add_argument("--controlnet", action="append", default=[], type=_name_and_path, help="NAME=PATH, repeatable")
    parser.add_argument("--size", default="1024x1024", help="of SDXL's images")
    parser.add_argument("--sd-size", default="512x512", help="of SD 1.5's images")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=5, help="engines that each build compiles at once")
    parser.add_argument("--builds", type=int, help="models that are built at once; default: one on each GPU")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2, 4, 8), help="GPUs of this machine to use")
    arguments = parser.parse_args()
    models = Models(arguments.model, arguments.sd_model, tuple(arguments.controlnet))
    folder = arguments.work.absolute()
    prepared, measured = plan(
        folder, models, arguments.size, arguments.sd_size, arguments.steps, arguments.runs, arguments.jobs,
        arguments.gpus,
    )  # fmt: skip
    names = [work.name for work in measured]
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"--only {unknown[0]}: expected one of {', '.join(names)}")
    measured = [work for work in measured if not arguments.only or work.name in arguments.only]
    builds = arguments.builds or arguments.gpus
    if not run_all(folder, needed_work(prepared, measured), measured, builds, arguments.gpus):
        sys.exit(1)


if __name__ == "__main__":
    main()
