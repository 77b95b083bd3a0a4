"""Measure everything in docs/benchmarks.md that needs full-size models: make them with random weights, build, measure.

    python -m benchmarks.full_size WORK [--only images --only controls ...] [--jobs 8]

Takes some 40 minutes on an H100 with 16 cores without `load`, `load-fp8`, `releases` and `soak`, most of it for
compiling (an estimate). These four measure the Truss server on one GPU: with a release in fp16 and in FP8, with three
releases in two slots, and with random requests that use adapters, a ControlNet and an IP-Adapter. `compare` compares
the release in fp16 with diffusers. With --gpus one image is also measured on several GPUs: with two in halves of
guidance and in two bands, with more in halves of two bands or more images.

WORK/rows/ has a file of rows for each measurement (`releases` also writes cold-start.json), WORK/compare/ the report of
`compare`, WORK/logs/ the output of each command, WORK/config.yaml and WORK/soak.yaml the configs of the servers. A
command that has succeeded is not run again, so the same call continues after an interruption. A failed command ends
with its last lines, and what does not need it goes on.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

Command = tuple[str, ...]
"""A Python module and its arguments."""

_LAST_LINES = 15  # of a failed command
_CLI = "preheat"
_BENCHMARKS = "benchmarks"
_DATA = Path(__file__).resolve().parents[1] / "data"
_CONFIG = _DATA.parent / "truss" / "configs" / "h200.yaml"
_CONFIGS = {"config.yaml": 16, "soak.yaml": 4}
"""The name of a config of a server -> the largest batch of its UNet."""
_SERVER, _SOAK = _CONFIGS
_LOADS = [
    ("", "1,8,32", "0.68,0.87"),
    ("lcm", "1,8", ""),
    ("two", "1", ""),
    ("mix", "32", ""),
    ("fast", "1,8,32", "0.68,0.87"),
]
"""A list of data/requests (or none), and the clients and the shares of `preheat load`. The longest ones last."""
_RANDOM = "engine_builder.checkpoints.random_models"


@dataclass(frozen=True)
class Work:
    """A name, and commands that run one after the other. `needs`: names of the work that must have succeeded."""

    name: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()


Plan = tuple[list[Work], list[Work]]
"""Releases to prepare, and the measurements, which use one release each."""


class _Commands:
    """The commands of a plan, with the paths and the numbers of the options of `main`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.work.absolute()
        self.sdxl = self.path("sdxl")
        self.store = ("--store", self.path("store"))
        self.counts = ("--steps", str(options.steps), "--runs", str(options.runs))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def rows(self, name: str) -> Command:
        return ("--out", str(self.folder / "rows" / f"{name}.json"))

    def make(self, model: str, path: str, *arguments: str) -> Command:
        return (_RANDOM, model, path, *arguments)

    def build(self, model: str, name: str, sizes: Sequence[str], *arguments: str) -> Command:
        sized = [part for each in sizes for part in ("--size", each)]
        build = ("build", model, "--name", name, *self.store, "--no-refiner", "--jobs", str(self.options.jobs))
        return (_CLI, *build, *sized, *arguments)

    def publish(self, name: str, *arguments: str) -> Command:
        return (_CLI, "publish", f"{name}/1", *self.store, *arguments)

    def release(self, model: str, name: str, sizes: Sequence[str], *arguments: str) -> tuple[Command, ...]:
        return self.build(model, name, sizes, *arguments), self.publish(name)

    def measurement(self, name: str, needs: str, module: Command, *arguments: str) -> Work:
        named = (*module[1:], self.path("store"), f"{needs}/1")
        return Work(name, ((f"{_BENCHMARKS}.{module[0]}", *named, *self.rows(name), *arguments),), (needs,))

    def batches(self, *batches: int) -> list[str]:
        return [f"{self.options.size}@{batch}" for batch in batches]


def plan(options: argparse.Namespace) -> Plan:
    """Return what is prepared and measured. `options`: of `main`."""
    commands = _Commands(options)
    plans = [_plan_pipelines(commands), _plan_servers(commands), _plan_soak(commands)]
    if options.gpus > 1:
        plans.append(_plan_several_gpus(commands))
    prepared, measured = ([work for each in kind for work in each] for kind in zip(*plans, strict=True))
    return [Work("sdxl-model", (commands.make("sdxl", commands.sdxl),)), *prepared], measured


def _plan_pipelines(commands: _Commands) -> Plan:
    """Plan what runs in one process, without a server."""
    make, release, measurement = commands.make, commands.release, commands.measurement
    sdxl, sd, adapter = commands.sdxl, commands.path("sd"), commands.path("ip-adapter")
    nets = {kind: commands.path(f"controlnet-{kind}") for kind in ("full", "small")}
    controlnets = [part for kind, path in nets.items() for part in ("--controlnet", f"{kind}={path}")]
    make_nets = [make("controlnet", path, "--kind", kind) for kind, path in nets.items()]
    ip = ("--ip-adapter", f"plain={adapter}/plain.safetensors")
    lora, sd_size = ("--lora-rank", "32"), commands.options.sd_size
    compared = ("--release", "sdxl/1", "--runs", "12", "--out", commands.path("compare"))
    base = ("sdxl-model",)
    prepared = [
        Work("sdxl", (*make_nets, *release(sdxl, "sdxl", commands.batches(1, 2), *controlnets)), base),
        Work("sdxl-lora", release(sdxl, "sdxl-lora", commands.batches(16), *lora), base),
        Work("sdxl-ip", (make("ip-adapter", adapter), *release(sdxl, "sdxl-ip", commands.batches(2), *ip)), base),
        Work("sd", (make("sd", sd), *release(sd, "sd", [f"{sd_size}@1", f"{sd_size}@2"]))),
    ]
    return prepared, [
        measurement("text", "sdxl", ("latency", "text"), "--peer", sdxl),
        Work("compare", ((_CLI, "compare", sdxl, *commands.store, *compared),), ("sdxl",)),
        measurement("images", "sdxl", ("latency", "images"), *commands.counts),
        measurement("controls", "sdxl", ("latency", "controls"), *commands.counts),
        measurement("image-prompts", "sdxl-ip", ("latency", "image-prompts"), *commands.counts),
        measurement("adapters", "sdxl-lora", ("adapters",), "--rank", "64", "--images", "8", "--batch-rank", "32"),
        measurement("sd-text", "sd", ("latency", "text"), "--peer", sd),
    ]


def _plan_servers(commands: _Commands) -> Plan:
    """Plan the Truss server: load on a release in fp16 and in FP8, and three releases in two slots."""
    options, release = commands.options, commands.release
    batches, served = commands.batches(1, 2, 4, 8, 16), (*commands.store, "--config", commands.path(_SERVER))
    seconds = ("--seconds", str(options.seconds), "--open-seconds", str(options.open_seconds))
    loads = (*served, "--size", options.size, "--steps", "20", *seconds)
    size = ("--size", options.size)
    policy = ("--policy", str(_DATA / "policies" / "fp8-convolutions.toml"))
    of_model = (commands.sdxl, *commands.store, "--no-refiner", "--count", "4", "--steps", "4", *size)
    fp8 = (
        (_CLI, "calibrate", *of_model),
        (_CLI, "check-fp8", *of_model, *policy),
        commands.build(commands.sdxl, "sdxl-fp8", batches, "--precision", "fp8", *policy),
        commands.publish("sdxl-fp8", "--accept"),  # with fewer prompts and steps than a release needs
    )
    tuned, fine_tunes = {seed: commands.path(f"sdxl-{seed}") for seed in ("1", "2")}, []
    for seed, path in tuned.items():
        fine_tunes += [commands.make("sdxl", path, "--unet-seed", seed), *release(path, f"sdxl-{seed}", batches)]
    several = ["sdxl-load/1", *(f"sdxl-{seed}/1" for seed in tuned)]
    further = [part for name in several[1:] for part in ("--with", name)]

    def load(work: str, name: str) -> Work:
        numbers = (*size, "--steps", "20", "--seconds", str(options.seconds), "--share", "0")
        offline = (f"{_BENCHMARKS}.in_flight", f"{name}/1", *commands.store, *numbers, *commands.rows(work))
        plain = (_CLI, "load", f"{name}/1", *loads, *commands.rows(work))

        def cell(requests: str, clients: str, shares: str) -> Command:
            listed = ("--requests", str(_DATA / "requests" / f"{requests}.json")) if requests else ()
            return (*plain, "--clients", clients, "--shares", shares, *listed)

        return Work(work, (offline, *(cell(*one) for one in _LOADS)), (name,))

    def bench(kind: str, *names: str) -> Command:
        return (_CLI, "bench", kind, *names, *served, *size, *commands.counts, *commands.rows(kind))

    base = ("sdxl-model",)
    prepared = [
        Work("sdxl-load", release(commands.sdxl, "sdxl-load", batches), base),
        Work("sdxl-fp8", fp8, base),
        Work("sdxl-tuned", tuple(fine_tunes), ("sdxl-load",)),
    ]
    return prepared, [
        load("load", "sdxl-load"),
        load("load-fp8", "sdxl-fp8"),
        Work(
            "releases",
            (bench("releases", *several), bench("cold-start", several[0], *further)),
            ("sdxl-load", "sdxl-tuned"),
        ),
    ]


def _plan_soak(commands: _Commands) -> Plan:
    """Plan random requests to a server of a release with everything: adapters as inputs and merged, two networks."""
    make, path = commands.make, commands.path
    small, adapter, loras = (path(name) for name in ("controlnet-small", "ip-adapter", "loras"))
    made = (  # the first two as for other releases, so they are written once
        make("controlnet", small, "--kind", "small"),
        make("ip-adapter", adapter),
        make("lora", loras),
        make("lora", loras, "--kind", "all", "--rank", "32", "--seed", "1"),
    )
    options = ("--controlnet", f"small={small}", "--ip-adapter", f"plain={adapter}/plain.safetensors")
    release = commands.release(commands.sdxl, "sdxl-soak", commands.batches(1, 2, 4), *options, "--lora-rank", "16")
    added = tuple((_CLI, "add-lora", kind, f"{loras}/{kind}.safetensors", *commands.store) for kind in ("unet", "all"))
    named = (*commands.store, "--config", path(_SOAK), "--lora", "unet", "--lora", "all", "--clients", "12")
    for_seconds = ("--seconds", str(commands.options.soak_seconds), "--precision", "fp16")
    soak = (f"{_BENCHMARKS}.soak", "--release", "sdxl-soak/1", *named, *for_seconds, *commands.rows("soak"))
    prepared = Work("sdxl-soak", (*made, *release, *added), ("sdxl-model",))
    return [prepared], [Work("soak", (soak,), ("sdxl-soak",))]


def _plan_several_gpus(commands: _Commands) -> Plan:
    """Plan one image on several GPUs."""
    options = commands.options
    large = "x".join(str(2 * int(side)) for side in options.size.split("x"))
    build = commands.release(commands.sdxl, "sdxl-bands", [*commands.batches(1, 2), f"{large}@1"], "--bands", "2")
    bench = (_CLI, "bench", "multi-gpu", "sdxl-bands/1", *commands.store, "--gpus", str(options.gpus), *commands.counts)
    ways: tuple[Command, ...] = (("--bands", "2"),) if options.gpus > 2 else ((), ("--bands", "2"))
    rows = commands.rows("multi-gpu")
    measured = tuple((*bench, "--size", each, *way, *rows) for each in (options.size, large) for way in ways)
    return [Work("sdxl-bands", build, ("sdxl-model",))], [Work("multi-gpu", measured, ("sdxl-bands",))]


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


def write_config(config: Path, path: Path, size: str, rows: int) -> None:
    """Write a config of one worker that serves one size. `rows`: the largest batch of its UNet."""
    content = yaml.safe_load(config.read_text())
    width, height = map(int, size.split("x"))
    bucket = {"height": height, "width": width, "rows": rows}
    content["model_metadata"]["preheat"] |= {"buckets": [bucket], "workers": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models, store, logs and rows; 80 GB")
    parser.add_argument("--only", action="append", default=[], help="a measurement, repeatable; default: all")
    parser.add_argument("--size", default="1024x1024", help="of SDXL's images")
    parser.add_argument("--sd-size", default="512x512", help="of SD 1.5's images")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=40, help="of each load without pauses")
    parser.add_argument("--open-seconds", type=int, default=300, help="of each load with random arrivals")
    parser.add_argument("--soak-seconds", type=int, default=600, help="of `soak`")
    parser.add_argument(
        "--config", type=Path, default=_CONFIG, help="config.yaml of the servers; its buckets are replaced"
    )
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
    for name, rows in _CONFIGS.items():
        write_config(options.config, options.work / name, options.size, rows)
    if not run_all(options.work.absolute(), prepared, chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
