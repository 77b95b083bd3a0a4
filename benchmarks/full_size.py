"""Measure everything in docs/benchmarks.md that needs full-size models: make them with random weights, build, measure.

    python -m benchmarks.full_size WORK [--only images --only controls ...] [--jobs 8]

Takes some 40 minutes on an H100 with 16 cores, most of it for compiling (an estimate). With --gpus one image is also
measured on several GPUs: with two in halves of guidance and in two bands, with more in halves of two bands or more
images. WORK/rows/NAME.json has the rows of each measurement, WORK/logs/ the output of each command. A command that has
succeeded is not run again, so the same call continues after an interruption. A failed command ends with its last lines,
and what does not need it goes on.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Command = tuple[str, ...]
"""A Python module and its arguments."""

_LAST_LINES = 15  # of a failed command
_CLI = "preheat"
_BENCHMARKS = "benchmarks"
_RANDOM = "engine_builder.checkpoints.random_models"


@dataclass(frozen=True)
class Work:
    """A name, and commands that run one after the other. `needs`: names of the work that must have succeeded."""

    name: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()


def plan(options: argparse.Namespace) -> tuple[list[Work], list[Work]]:
    """Return the releases to prepare, and the measurements, which use one release each. `options`: of `main`."""
    folder, size = options.work.absolute(), options.size
    store, sdxl, sd, adapter = (str(folder / name) for name in ("store", "sdxl", "sd", "ip-adapter"))
    nets = {kind: str(folder / f"controlnet-{kind}") for kind in ("full", "small")}
    controlnets = [part for kind, path in nets.items() for part in ("--controlnet", f"{kind}={path}")]

    def make(model: str, path: str, *arguments: str) -> Command:
        return (_RANDOM, model, path, *arguments)

    def release(model: str, name: str, sizes: Sequence[str], *arguments: str) -> tuple[Command, ...]:
        sized = [part for each in sizes for part in ("--size", each)]
        build = ("build", model, "--name", name, "--store", store, "--no-refiner", "--jobs", str(options.jobs))
        return (_CLI, *build, *sized, *arguments), (_CLI, "publish", f"{name}/1", "--store", store)

    def measurement(name: str, needs: str, module: Command, *arguments: str) -> Work:
        rows = str(folder / "rows" / f"{name}.json")
        command = (f"{_BENCHMARKS}.{module[0]}", *module[1:], store, f"{needs}/1", "--out", rows, *arguments)
        return Work(name, (command,), (needs,))

    base, sizes, sd_size = ("sdxl-model",), [f"{size}@1", f"{size}@2"], options.sd_size
    make_nets = [make("controlnet", path, "--kind", kind) for kind, path in nets.items()]
    ip_release = release(sdxl, "sdxl-ip", [f"{size}@2"], "--ip-adapter", f"plain={adapter}/plain.safetensors")
    prepared = [
        Work("sdxl-model", (make("sdxl", sdxl),)),
        Work("sdxl", (*make_nets, *release(sdxl, "sdxl", sizes, *controlnets)), base),
        Work("sdxl-lora", release(sdxl, "sdxl-lora", [f"{size}@16"], "--lora-rank", "32"), base),
        Work("sdxl-ip", (make("ip-adapter", adapter), *ip_release), base),
        Work("sd", (make("sd", sd), *release(sd, "sd", [f"{sd_size}@1", f"{sd_size}@2"]))),
    ]
    counts = ("--steps", str(options.steps), "--runs", str(options.runs))
    measured = [
        measurement("text", "sdxl", ("latency", "text"), "--peer", sdxl),
        measurement("images", "sdxl", ("latency", "images"), *counts),
        measurement("controls", "sdxl", ("latency", "controls"), *counts),
        measurement("image-prompts", "sdxl-ip", ("latency", "image-prompts"), *counts),
        measurement("adapters", "sdxl-lora", ("adapters",), "--rank", "64", "--images", "8", "--batch-rank", "32"),
        measurement("sd-text", "sd", ("latency", "text"), "--peer", sd),
    ]
    if options.gpus > 1:
        large = "x".join(str(2 * int(side)) for side in size.split("x"))
        build = release(sdxl, "sdxl-bands", [*sizes, f"{large}@1"], "--bands", "2")
        prepared.append(Work("sdxl-bands", build, base))
        bench = (_CLI, "bench", "multi-gpu", "sdxl-bands/1", "--store", store, "--gpus", str(options.gpus), *counts)
        rows = ("--out", str(folder / "rows" / "multi-gpu.json"))
        ways = (("--bands", "2"),) if options.gpus > 2 else ((), ("--bands", "2"))
        commands = tuple((*bench, "--size", each, *way, *rows) for each in (size, large) for way in ways)
        measured.append(Work("multi-gpu", commands, ("sdxl-bands",)))
    return prepared, measured


def run_work(folder: Path, work: Work) -> bool:
    """Run the commands that have not succeeded yet. Returns False after the first one that fails."""
    for number, command in enumerate(work.commands):
        done = folder / "done" / hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
        if done.exists():
            continue
        log = folder / "logs" / f"{work.name}-{number}.txt"
        began = time.monotonic()
        with log.open("w") as output:
            status = subprocess.run([sys.executable, "-m", *command], stdout=output, stderr=output).returncode
        seconds = f"{time.monotonic() - began:.0f} s"
        if status:
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print(f"{work.name}: failed after {seconds}: {' '.join(command)}", *lines, sep="\n  ", flush=True)
            return False
        print(f"{work.name}: {seconds}: {' '.join(command[:2])}", flush=True)
        done.touch()
    return True


def run_all(folder: Path, prepared: Sequence[Work], measured: Sequence[Work]) -> bool:
    """Run what `measured` needs of `prepared`, then `measured`. Returns True if all succeeded.

    Work of `prepared` may need earlier work of it.
    """
    for name in ("done", "logs", "rows"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    needed = {need for work in measured for need in work.needs}
    for work in reversed(prepared):
        needed |= set(work.needs) if work.name in needed else set()
    results: dict[str, bool] = {}
    for work in [*(work for work in prepared if work.name in needed), *measured]:
        failed = [need for need in work.needs if not results[need]]
        if failed:
            print(f"{work.name}: skipped, because {failed[0]} failed", flush=True)
        results[work.name] = not failed and run_work(folder, work)
    return all(results.values())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models, store, logs and rows; 40 GB")
    parser.add_argument("--only", action="append", default=[], help="a measurement, repeatable; default: all")
    parser.add_argument("--size", default="1024x1024", help="of SDXL's images")
    parser.add_argument("--sd-size", default="512x512", help="of SD 1.5's images")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=5, help="engines that each build compiles at once")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2, 4, 8), help="also measure an image on so many")
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    prepared, measured = plan(options)
    names = [work.name for work in measured]
    if unknown := [name for name in options.only if name not in names]:
        parser.error(f"--only {unknown[0]}: expected one of {', '.join(names)}")
    chosen = [work for work in measured if not options.only or work.name in options.only]
    if not run_all(options.work.absolute(), prepared, chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
