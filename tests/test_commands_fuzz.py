"""No command prints a traceback for a user's mistake: 1,000 generated command lines, each with something odd in it.

Most run in one process, which prevents what no case may do (see `tests.support.command_worker`). A few dozen run as
users run them. Nothing is compiled: no case names a model that has weights.
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
from tests.support.commands import Case
from tests.support.odd_files import NAMES, NUMBERS, SIZES, TEXTS, URLS, OddFiles

CASES = 1000
PROCESSES = 36
SEED = 20
DEVICE_WITHOUT_END = {"/dev/zero"}
CHEAP = {"keygen", "publish", "releases", "verify", "copy", "gc", "save", "generate", "plan-replicas", "serve"}


@dataclass(frozen=True)
class Command:
    """A command's values: odd ones by option, "" for a positional argument, and the values that are always given."""

    name: str
    odd: dict[str, Sequence[str]]
    given: dict[str, str]
    first: tuple[Sequence[str], ...] = ()
    """The odd values of each positional argument."""
    flags: tuple[str, ...] = ()


def every_command(files: OddFiles) -> list[Command]:
    """Return every command, with values of which at least one is always wrong."""
    paths, stores = files.paths, files.stores
    store = {"--store": stores, "--cache-dir": paths}
    good = {"--store": files.good_store}
    models = [*paths, *files.models, *TEXTS, "a/b", "owner/model"]
    rows = [*paths, *files.json]
    # The release exists in the good store, so a server would start but for the last value.
    missing = [name for name in NAMES if name != "toy/1"]
    hours = [number for number in NUMBERS if number != "1_000"]  # valid, and simulated for a minute
    request = {"--width": NUMBERS, "--height": NUMBERS, "--steps": NUMBERS, "--guidance-scale": NUMBERS,
               "--seed": NUMBERS, "--images": NUMBERS, "--negative-prompt": TEXTS, "--scheduler": TEXTS}  # fmt: skip
    build = {"--refiner": models, "--precision": TEXTS, **store}
    return [
        Command("build", {**build, "--name": [*TEXTS, *NAMES], "--vae-precision": TEXTS, "--size": SIZES,
                          "--runtime": [*TEXTS, "tensorrt"], "--refit": TEXTS, "--compatibility": TEXTS,
                          "--workspace": NUMBERS, "--level": NUMBERS, "--jobs": NUMBERS},
                {}, (models,)),
        Command("export-onnx", {**build, "--out": paths}, {}, (models,)),
        Command("check-config", {"--store": stores}, {}, ([*paths, *files.configs],)),
        Command("report", {"--out": paths}, {}, ([*paths, f"{Path(files.json[0]).parent}"],)),
        Command("load", {**store, "--config": [*paths, *files.configs], "--size": SIZES, "--steps": NUMBERS,
                         "--clients": [*NUMBERS, "1,", ",", "1,2,x", "0,1"], "--seconds": NUMBERS, "--out": rows,
                         "--plot": paths, "--url": URLS},
                {**good, "--url": "http://127.0.0.1:9"}, (NAMES,)),
        Command("plan-replicas", {"--cold-start": NUMBERS, "--p99": NUMBERS, "--load": rows, "--hours": hours,
                                  "--curve": ["", "1", "1:", ":1", "1:0", "0:1", "1:nan", "1:inf", "1:1,", "1:1e308",
                                              "1:1e-308", "99999999999:1", "-1:1", "[/]", "1:0.1,1:0.2"],
                                  "--steps": NUMBERS, "--max-replica": NUMBERS, "--max-queue": NUMBERS, "--out": paths,
                                  "--plot": paths},
                {"--cold-start": "30", "--p99": "1", "--hours": "0.02", "--curve": "1:0.1"},
                (["", "constant:", "constant:nan", "constant:-1", "constant:1e308", "constant:1:2", "wave:1:2",
                  "wave:1:0.5", "spike:1:2:3", "spike:1:1e9:1e9", "constant:0", "constant:0.1", "constant:[/]",
                  *files.traffic, *paths],)),
        Command("keygen", {}, {}, ([*paths, *TEXTS],)),
        Command("publish", {**store, "--sign": [*paths, *files.keys]}, good, (NAMES,)),
        Command("releases", store, {}),
        Command("verify", {**store, "--public-key": [*TEXTS, "ed25519:", "ed25519:AAAA", "A" * 44, ",,"]}, good,
                (NAMES,)),
        Command("copy", {**store, "--from": stores}, {**good, "--from": files.good_store}, (NAMES,)),
        Command("gc", {**store, "--older-than": [*TEXTS, *NUMBERS, "1s", "999999w", "9999999w", "24h ", "٣d"]}, good,
                flags=("--delete",)),
        Command("save", {"--out": paths}, {}),
        Command("generate", {"--url": URLS, "--out": paths, "--timeout": NUMBERS, **request},
                {"--url": "http://127.0.0.1:9"}, (TEXTS,), ("--refiner",)),
        Command("demo", {"--prompt": TEXTS, "--seed": NUMBERS, "--out": paths}, {"--model": "missing"}),
        Command("demo", {"--model": models, "--out": paths}, {"--model": "missing"}),
        Command("serve", {**store, "--config": [*paths, *files.configs], "--port": NUMBERS}, good, (missing,)),
        Command("serve", {"--config": [*paths, *files.configs]}, {**good, "--config": "missing"}, (["toy/1"],)),
        Command("bench latency", {**store, "--size": SIZES, "--steps": NUMBERS, "--guidance-scale": NUMBERS,
                                  "--images": NUMBERS, "--prompt": TEXTS, "--warm-ups": NUMBERS, "--runs": NUMBERS,
                                  "--peer": models, "--out": rows},
                good, (NAMES,), ("--refiner", "--compiled")),
        Command("bench cold-start", {**store, "--s3": stores, "--config": [*paths, *files.configs], "--size": SIZES,
                                     "--steps": NUMBERS, "--bucket": SIZES, "--runs": NUMBERS, "--out": rows},
                good, (missing,)),
        Command("bench cold-start", {"--config": [*paths, *files.configs]}, {**good, "--config": "missing"},
                (["toy/1"],)),
    ]  # fmt: skip


def generated(files: OddFiles) -> Iterator[Case]:
    """Yield the cases: one command after the other, each with one to three odd values."""
    chance, kinds, answers = random.Random(SEED), every_command(files), odd_files.predict_outputs()
    for number in range(CASES):
        command = kinds[number % len(kinds)]
        chosen = dict(command.given)
        for option in chance.sample(sorted(command.odd), min(len(command.odd), chance.randint(0, 3))):
            chosen[option] = chance.choice(command.odd[option])
        args = [f"{name}={value}" for name, value in chosen.items()]
        args += [flag for flag in command.flags if chance.random() < 0.2]
        chance.shuffle(args)
        if chance.random() < 0.05:
            args.append(chance.choice(["--unknown", "-x", "--store", "extra", "--help", *TEXTS]))
        first = [chance.choice(values) for values in command.first]
        stdin = chance.choice(answers) if command.name == "save" else b""
        # After "--" a value that begins with a dash is no option.
        yield Case([*command.name.split(), *args, *(["--", *first] if first else [])], stdin)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = commands.make_sandbox(tmp_path_factory.mktemp("sandbox"))
    yield folder
    odd_files.unlock(folder / "files")


@pytest.fixture(scope="module")
def files(sandbox: Path) -> OddFiles:
    return odd_files.write(sandbox / "files")


def problem(result: dict[str, Any]) -> str | None:
    """Return what is wrong with a command's end, or None."""
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


def told(case: Case, found: str, result: dict[str, Any]) -> str:
    """Return a failure as text: the arguments as a terminal shows them, and the last lines."""
    text = (result["stdout"] + result["stderr"]).encode(errors="backslashreplace").decode()
    shown = [arg if len(arg) < 300 else f"{arg[:80]}... ({len(arg)} characters)" for arg in case.args]
    lines = text.splitlines()
    frames = [line for line in lines[:-3] if re.search(r'File ".*/(engine_builder|model)/', line)]
    return f"{found}: preheat {shown!r} < {case.stdin[:80]!r}\n" + "\n".join([*frames[-3:], *lines[-3:]])


def test_no_generated_command_line_ends_in_a_traceback(sandbox: Path, files: OddFiles) -> None:
    cases = list(generated(files))
    results = commands.run(sandbox, cases)
    problems = [
        told(case, found, result)
        for case, result in zip(cases, results, strict=True)
        if (found := problem(result)) is not None
    ]
    assert not problems, f"{len(problems)} of {CASES}\n\n" + "\n\n".join(problems[:40])


def test_no_process_ends_in_a_traceback(sandbox: Path, files: OddFiles) -> None:
    """The same with real arguments, which are bytes, and a real exit status."""
    cases = [case for case in generated(files) if case.args[0] in CHEAP and not DEVICE_WITHOUT_END & set(case.args)]
    problems = []
    for case in random.Random(SEED).sample(cases, PROCESSES):
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
        if (found := problem(result)) is not None:
            problems.append(told(case, found, result))
    assert not problems, "\n\n".join(problems)
