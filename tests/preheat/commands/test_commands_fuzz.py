"""No command prints a traceback for a user's mistake: 1,000 generated command lines, each with an invalid value.

Most run in one process, which prevents forbidden actions (see `tests.support.command_worker`). One of each fast command
runs as users run it. No case compiles anything, because no case names a model that has weights.
"""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands, odd_files
from tests.support.commands import Invocation
from tests.support.odd_files import NAMES, NUMBERS, SIZES, TEXTS, URLS, OddFiles

CASES = 1000
SEED = 20
ENDLESS_FILE = "/dev/zero"  # the one process limits its memory, a process of its own does not
FAST_COMMANDS = {
    "keygen",
    "publish",
    "add-embedding",
    "add-lora",
    "releases",
    "verify",
    "copy",
    "gc",
    "save",
    "generate",
    "plan-replicas",
    "serve",
    "gateway",
}


@dataclass(frozen=True)
class Command:
    """A command, and the values that its cases choose from."""

    name: str
    odd: dict[str, Sequence[str]]
    """Odd values of each option."""
    defaults: dict[str, str]
    """Options that every case has; an odd value replaces a default."""
    positional: tuple[Sequence[str], ...] = ()
    """Odd values of each positional argument."""
    flags: tuple[str, ...] = ()


def every_command(files: OddFiles) -> list[Command]:
    """Return every command, with values of which at least one is always invalid."""
    paths, stores = files.paths, files.stores
    store = {"--store": stores, "--cache-dir": paths}
    good = {"--store": files.good_store}
    models = [*paths, *files.models, *TEXTS, "a/b", "owner/model"]
    json_files = [*paths, *files.json]
    missing = [name for name in NAMES if name != "toy/1"]  # the good store has this one, and a server would start
    hours = [number for number in NUMBERS if number != "1_000"]  # a simulation of 1,000 hours takes a minute
    request = {"--width": NUMBERS, "--height": NUMBERS, "--steps": NUMBERS, "--guidance-scale": NUMBERS,
               "--seed": NUMBERS, "--images": NUMBERS, "--negative-prompt": TEXTS, "--scheduler": TEXTS,
               "--lora": [*TEXTS, ":", "a:x", "a:nan"], "--prompt-syntax": TEXTS, "--clip-skip": NUMBERS,
               "--end-cfg-frac": NUMBERS, "--guidance-rescale": NUMBERS, "--denoising-frac": NUMBERS,
               "--original-size": SIZES, "--target-size": SIZES, "--crop": [*SIZES, "1,2", "1,x", ","],
               "--timesteps": [*NUMBERS, "999,1", ","], "--sigmas": [*NUMBERS, "9,nan", "1,0"], "--quality": NUMBERS,
               "--preview-every": NUMBERS, "--api-key": TEXTS, "--previews": paths}  # fmt: skip
    inputs = [*paths, *files.json]
    build = {"--refiner": models, "--precision": TEXTS, **store}
    return [
        Command("build", {**build, "--name": [*TEXTS, *NAMES], "--vae-precision": TEXTS,
                          "--vae": models, "--preset": TEXTS, "--size": SIZES,
                          "--runtime": [*TEXTS, "tensorrt", "tensorrt-rtx"], "--gpu": [*TEXTS, "h100"],
                          "--refit": TEXTS, "--compatibility": TEXTS,
                          "--workspace": NUMBERS, "--level": NUMBERS, "--jobs": NUMBERS, "--lora-rank": NUMBERS,
                          "--ip-adapter": [*TEXTS, *(f"style={path}" for path in paths)], "--ip-images": NUMBERS,
                          "--image-encoder": paths, "--embedding-rows": NUMBERS,
                          "--text-chunks": NUMBERS, "--bands": NUMBERS,
                          "--safety-checker": [*paths, *files.models],
                          "--lora": [*paths, "x:", "x:nan", ":1"]},
                {}, (models,)),
        Command("calibrate", {"--refiner": models, "--precision": TEXTS, **store, "--prompts": paths, "--size": SIZES,
                              "--steps": NUMBERS, "--guidance": NUMBERS, "--count": NUMBERS,
                              "--negative-prompt": TEXTS},
                {}, (models,), ("--no-refiner",)),
        Command("check-fp8", {"--refiner": models, "--precision": TEXTS, **store, "--prompts": paths, "--size": SIZES,
                              "--steps": NUMBERS, "--guidance": NUMBERS, "--count": NUMBERS, "--policy": paths,
                              "--thresholds": paths, "--out": paths, "--quantized": [*TEXTS, "int8"]},
                {}, (models,), ("--no-refiner",)),
        Command("export-onnx", {**build, "--out": paths, "--policy": paths}, {}, (models,)),
        Command("check-config", {"--store": stores}, {}, ([*paths, *files.configs],)),
        Command("report", {"--out": paths}, {}, ([*paths, f"{Path(files.json[0]).parent}"],)),
        Command("load", {**store, "--config": [*paths, *files.configs], "--size": SIZES, "--steps": NUMBERS,
                         "--clients": [*NUMBERS, "1,", ",", "1,2,x", "0,1"], "--seconds": NUMBERS, "--out": json_files,
                         "--plot": paths, "--url": URLS},
                {**good, "--url": "http://127.0.0.1:9"}, (NAMES,)),
        Command("plan-replicas", {"--cold-start": NUMBERS, "--p99": NUMBERS, "--load": json_files, "--hours": hours,
                                  "--curve": ["", "1", "1:", ":1", "1:0", "0:1", "1:nan", "1:inf", "1:1,", "1:1e308",
                                              "1:1e-308", "99999999999:1", "-1:1", "[/]", "1:0.1,1:0.2"],
                                  "--steps": NUMBERS, "--max-replica": NUMBERS, "--max-queue": NUMBERS, "--out": paths,
                                  "--plot": paths},
                {"--cold-start": "30", "--p99": "1", "--hours": "0.02", "--curve": "1:0.1"},
                (["", "constant:", "constant:nan", "constant:-1", "constant:1e308", "constant:1:2", "wave:1:2",
                  "wave:1:0.5", "spike:1:2:3", "spike:1:1e9:1e9", "constant:0", "constant:0.1", "constant:[/]",
                  *files.traffic, *paths],)),
        Command("keygen", {}, {}, ([*paths, *TEXTS],)),
        Command("publish", {**store, "--sign": [*paths, *files.keys], "--thresholds": paths}, good, (NAMES,),
                ("--accept",)),
        Command("releases", {**store, "--validation": NAMES, "--out": paths}, {}),
        Command("verify", {**store, "--public-key": [*TEXTS, "ed25519:", "ed25519:AAAA", "A" * 44, ",,"]}, good,
                (NAMES,)),
        Command("add-lora", {**store, "--release": NAMES, "--sign": [*paths, *files.keys]}, good,
                (NAMES, [*paths, *files.json])),
        Command("add-embedding", {**store, "--sign": [*paths, *files.keys]}, good,
                (NAMES, [*TEXTS, *(f"<x>={path}" for path in [*paths, *files.json])])),
        Command("copy", {**store, "--from": stores}, {**good, "--from": files.good_store}, (NAMES,)),
        Command("gc", {**store, "--older-than": [*TEXTS, *NUMBERS, "1s", "999999w", "9999999w", "24h ", "٣d"]}, good,
                flags=("--delete",)),
        Command("export-triton", {**store, "--out": paths, "--steps": NUMBERS}, {**good, "--out": files.paths[0]},
                (NAMES,), ("--loop",)),
        Command("triton-client", {"--address": [*TEXTS, *URLS], "--version": NUMBERS, "--out": paths,
                                  "--steps": NUMBERS, "--seed": NUMBERS, "--timeout": NUMBERS,
                                  "--guidance-scale": NUMBERS, "--model": ["generate_20_pipeline", *TEXTS]},
                {"--address": "127.0.0.1:9"}, (TEXTS,)),
        Command("save", {"--out": paths}, {}),
        Command("generate", {"--url": URLS, "--out": paths, "--timeout": NUMBERS, **request, "--image": inputs,
                             "--mask": inputs, "--mask-prompt": TEXTS, "--strength": NUMBERS, "--feather": NUMBERS,
                             "--resize": TEXTS, "--upscale": NUMBERS,
                             "--control": [*TEXTS, *(f"edges={path}" for path in inputs)], "--control-scale": NUMBERS,
                             "--control-start": NUMBERS, "--control-mode": NUMBERS, "--mask-strength": NUMBERS,
                             "--ip-adapter": [*TEXTS, *(f"style={path}@1" for path in inputs)]},
                {"--url": "http://127.0.0.1:9"}, (TEXTS,),
                ("--refiner", "--composite", "--color-match", "--canny", "--no-stream", "--metadata", "--describe")),
        Command("help", {}, {}, (TEXTS,)),
        Command("demo", {"--prompt": TEXTS, "--seed": NUMBERS, "--out": paths}, {"--model": "missing"}),
        Command("demo", {"--model": models, "--out": paths}, {"--model": "missing"}),
        Command("serve", {**store, "--config": [*paths, *files.configs], "--port": NUMBERS}, good, (missing,)),
        Command("serve", {"--config": [*paths, *files.configs]}, {**good, "--config": "missing"}, (["toy/1"],)),
        Command("gateway", {"--backend": URLS, "--key-file": paths, "--host": TEXTS, "--port": NUMBERS,
                            "--history": paths},
                {"--key-file": "missing"}),
        Command("playground", {"--port": NUMBERS, "--model": models}, {"--model": "missing"}),
        Command("bench latency", {**store, "--size": SIZES, "--steps": NUMBERS, "--guidance-scale": NUMBERS,
                                  "--images": NUMBERS, "--prompt": TEXTS, "--warm-ups": NUMBERS, "--runs": NUMBERS,
                                  "--peer": models, "--out": json_files},
                good, (NAMES,), ("--refiner", "--compiled")),
        Command("bench multi-gpu", {**store, "--gpus": NUMBERS, "--size": SIZES, "--steps": NUMBERS, "--runs": NUMBERS},
                {**good, "--gpus": "1"}),
        Command("bench cold-start", {**store, "--s3": stores, "--config": [*paths, *files.configs], "--size": SIZES,
                                     "--steps": NUMBERS, "--bucket": SIZES, "--runs": NUMBERS, "--out": json_files},
                good, (missing,)),
        Command("bench cold-start", {"--config": [*paths, *files.configs]}, {**good, "--config": "missing"},
                (["toy/1"],)),
    ]  # fmt: skip


def generate_cases(files: OddFiles) -> Iterator[Invocation]:
    """Yield cases of all commands, one after the other, each with up to three odd options."""
    rng, all_commands, answers = random.Random(SEED), every_command(files), odd_files.predict_outputs()
    for number in range(CASES):
        command = all_commands[number % len(all_commands)]
        options = dict(command.defaults)
        for option in rng.sample(sorted(command.odd), min(len(command.odd), rng.randint(0, 3))):
            options[option] = rng.choice(command.odd[option])
        args = [f"{name}={value}" for name, value in options.items()]
        args += [flag for flag in command.flags if rng.random() < 0.2]
        rng.shuffle(args)
        if rng.random() < 0.05:
            args.append(rng.choice(["--unknown", "-x", "--store", "extra", "--help", *TEXTS]))
        positional = [rng.choice(values) for values in command.positional]
        stdin = rng.choice(answers) if command.name == "save" else b""
        # After "--" a value that begins with a dash is not an option.
        yield Invocation([*command.name.split(), *args, *(["--", *positional] if positional else [])], stdin)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = commands.make_sandbox(tmp_path_factory.mktemp("sandbox"))
    yield folder
    odd_files.unlock(folder / "files")


@pytest.fixture(scope="module")
def files(sandbox: Path) -> OddFiles:
    return odd_files.write(sandbox / "files")


def find_problem(result: dict[str, Any]) -> str | None:
    """Return what is wrong with a command's result, or None."""
    text = result["stdout"] + result["stderr"]
    if result["status"] not in (0, 1, 2):
        return f"status {result['status']}"
    if "Traceback" in text:
        return "a traceback"
    if result["forbidden"]:
        return f"forbidden: {result['forbidden'][0]}"
    if not re.search(r"\w+[^\w\n]+\w+[^\w\n]+\w+" if result["status"] else r"\w", text):
        return "no sentence"
    return None


def describe(case: Invocation, problem: str, result: dict[str, Any]) -> str:
    """Return a failure as text: the arguments, shortened, and the last lines of the output."""
    text = (result["stdout"] + result["stderr"]).encode(errors="backslashreplace").decode()
    shown = [arg if len(arg) < 300 else f"{arg[:80]}... ({len(arg)} characters)" for arg in case.args]
    lines = text.splitlines()
    frames = [line for line in lines[:-3] if re.search(r'File ".*/(engine_builder|model)/', line)]
    return f"{problem}: preheat {shown!r} < {case.stdin[:80]!r}\n" + "\n".join([*frames[-3:], *lines[-3:]])


def test_no_generated_command_line_ends_in_a_traceback(sandbox: Path, files: OddFiles) -> None:
    cases = list(generate_cases(files))
    results = commands.run(sandbox, cases)
    problems = [
        describe(case, problem, result)
        for case, result in zip(cases, results, strict=True)
        if (problem := find_problem(result)) is not None
    ]
    assert not problems, f"{len(problems)} of {CASES}\n\n" + "\n\n".join(problems[:40])


def test_no_process_ends_in_a_traceback(sandbox: Path, files: OddFiles) -> None:
    """A case of each fast command with real arguments, if possible with bytes that are not UTF-8, and a real status."""
    by_command: dict[str, Invocation] = {}
    for case in generate_cases(files):
        name, is_bytes = case.args[0], any("\udc80" <= letter <= "\udcff" for letter in "".join(case.args))
        if name in FAST_COMMANDS and ENDLESS_FILE not in case.args and (is_bytes or name not in by_command):
            by_command[name] = case
    assert by_command.keys() == FAST_COMMANDS
    problems = []
    for case in by_command.values():
        ran = subprocess.run(
            [sys.executable, "-m", "engine_builder.commands.main", *map(os.fsencode, case.args)],
            input=case.stdin,
            cwd=sandbox / "work",
            env=commands.environment(sandbox),
            capture_output=True,
            timeout=60,
        )
        stdout, stderr = ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace")
        result = {"status": ran.returncode, "stdout": stdout, "stderr": stderr, "forbidden": []}
        if (problem := find_problem(result)) is not None:
            problems.append(describe(case, problem, result))
    assert not problems, "\n\n".join(problems)
