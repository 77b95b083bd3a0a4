"""No command prints a traceback for a user's mistake: generated command lines, each with an invalid value.

Most run in one process, which prevents forbidden actions (see `tests.support.command_worker`). One of each fast command
runs as users run it. No case compiles anything, because no case names a model that has weights.
"""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands, odd_files
from tests.support.commands import Invocation, command_tree
from tests.support.odd_files import NAMES, NUMBERS, SIZES, TEXTS, URLS, OddFiles

SEED = 20
ENDLESS_FILE = "/dev/zero"  # the one process limits its memory, a process of its own does not
SHORT_COMMANDS = ("generate", "releases")  # of the fast ones, in `make test`
FAST_COMMANDS = (*SHORT_COMMANDS, "keygen", "publish", "add-embedding", "add-lora", "verify", "copy", "gc", "save")
FAST_COMMANDS += ("remove-lora", "plan-replicas", "serve", "gateway", "kubernetes")
Values = Sequence[str]


def odd_values(files: OddFiles) -> dict[str, Values]:
    """Return odd values of an option by its name, or by its command and name. Others get texts and numbers."""
    paths, stores, inputs = files.paths, files.stores, [*files.paths, *files.json]
    models = [*paths, *files.models, *TEXTS, "a/b", "owner/model"]
    files_of = {
        **dict.fromkeys(
            ("--out", "--plot", "--previews", "--cache-dir", "--policy", "--thresholds", "--prompts"), paths
        ),
        **dict.fromkeys(("--key-file", "--history", "--image-encoder"), paths),
        "--autoscaling": inputs,
        **dict.fromkeys(("--image", "--mask", "--load", "load --out", "--requests"), inputs),
    }
    return files_of | {
        **dict.fromkeys(("--store", "--from", "--s3"), stores),
        **dict.fromkeys(("--model", "--refiner", "--vae", "--peer", "--safety-checker"), models),
        "triton-client --triton-model": ["generate_20_pipeline", *TEXTS],
        **dict.fromkeys(("--size", "--bucket", "--original-size", "--target-size"), SIZES),
        **dict.fromkeys(("--url", "--backend", "--address", "compare --against"), [*URLS, *TEXTS]),
        **dict.fromkeys(("--release", "--validation"), NAMES),
        "--config": [*paths, *files.configs],
        "--sign": [*paths, *files.keys],
        "--control": [*TEXTS, *(f"edges={path}" for path in inputs)],
        "--ip-adapter": [*TEXTS, *(f"style={path}@1" for path in inputs)],
        "--lora": [*TEXTS, ":", "a:x", "x:nan", ":1"],
        "--crop": [*SIZES, "1,2", "1,x", ","],
        "--timesteps": [*NUMBERS, "999,1", ","],
        "--sigmas": [*NUMBERS, "9,nan", "1,0"],
        "--clients": [*NUMBERS, "1,", ",", "1,2,x", "0,1"],
        "--public-key": [*TEXTS, "ed25519:", "ed25519:AAAA", "A" * 44, ",,"],
        "--older-than": [*TEXTS, *NUMBERS, "1s", "999999w", "9999999w", "24h ", "٣d"],
        "--hours": [number for number in NUMBERS if number != "1_000"],  # a simulation of 1,000 hours takes a minute
        "--runtime": [*TEXTS, "tensorrt", "tensorrt-rtx"],
        "--curve": ["", "1", "1:", ":1", "1:0", "0:1", "1:nan", "1:inf", "1:1,", "1:1e308", "1:1e-308", "-1:1", "[/]",
                    "99999999999:1", "1:0.1,1:0.2"],
    }  # fmt: skip


def odd_arguments(files: OddFiles) -> dict[str, tuple[Values, ...]]:
    """Return odd values of each positional argument of a command. Of these or the options one is always invalid."""
    paths, inputs = files.paths, [*files.paths, *files.json]
    models = [*paths, *files.models, *TEXTS, "a/b", "owner/model"]
    unknown = [name for name in NAMES if name != "toy/1"]  # the good store has this one, and a server would start
    traffic = ["", "constant:", "constant:nan", "constant:-1", "constant:1e308", "constant:1:2", "wave:1:2",
               "wave:1:0.5", "spike:1:2:3", "spike:1:1e9:1e9", "constant:0", "constant:0.1", "constant:[/]",
               *files.traffic, *paths]  # fmt: skip
    return {
        **dict.fromkeys(("build", "calibrate", "check-fp8", "compare", "export-onnx"), (models,)),
        **dict.fromkeys(("load", "publish", "verify", "copy", "export-triton", "bench latency"), (NAMES,)),
        **dict.fromkeys(("serve", "bench cold-start"), (unknown,)),
        **dict.fromkeys(("help", "triton-client", "generate"), (TEXTS,)),
        "add-lora": (NAMES, inputs),
        "remove-lora": (NAMES,),
        "add-embedding": (NAMES, [*TEXTS, *(f"<x>={path}" for path in inputs)]),
        "check-config": ([*paths, *files.configs],),
        "report": ([*paths, f"{Path(files.json[0]).parent}"],),
        "keygen": ([*paths, *TEXTS],),
        "request": (inputs,),
        "plan-replicas": (traffic,),
        "kubernetes": (NAMES,),
    }


MISSING = {"--model": "missing"}
DEFAULTS: dict[str, dict[str, str]] = {
    "load": {"--url": "http://127.0.0.1:9"},
    "generate": {"--url": "http://127.0.0.1:9"},
    "triton-client": {"--address": "127.0.0.1:9"},
    "plan-replicas": {"--cold-start": "30", "--p99": "1", "--hours": "0.02", "--curve": "1:0.1"},
    "gateway": {"--key-file": "missing"},
    "kubernetes": {"--namespace": "n", "--image": "i", "--store": "s3://models"},
    "bench multi-gpu": {"--gpus": "1"},
    "demo": MISSING,
    "playground": MISSING,
}
"""Options that every case of a command has; an odd value replaces a default."""
OF_THE_GOOD_STORE = ("load", "publish", "verify", "add-lora", "add-embedding", "copy", "gc", "export-triton", "serve")
OF_THE_GOOD_STORE += ("compare", "remove-lora", "bench latency", "bench cold-start", "bench multi-gpu")
# Options that would take long, that end a command at once, or that would start it with valid values.
SKIPPED = {"--help", "--grpc", "playground --store"}


def every_command() -> Iterator[tuple[str, Any]]:
    """Yield the name and the parameters of every command."""
    group = command_tree()
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {own}", each.params) for own, each in command.commands.items())
        else:
            yield name, command.params


def generate_cases(files: OddFiles, count: int) -> Iterator[Invocation]:
    """Yield cases of all commands, one after the other, each with up to three odd options."""
    rng, all_commands, answers = random.Random(SEED), list(every_command()), odd_files.predict_outputs()
    odd, positional = odd_values(files), odd_arguments(files)
    for number in range(count):
        name, parameters = all_commands[number % len(all_commands)]
        known = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        known = [one for one in known if not {one.opts[0], f"{name} {one.opts[0]}"} & SKIPPED]
        flags = [one.opts[0] for one in known if one.is_flag]
        texts = sorted(one.opts[0] for one in known if not one.is_flag)
        options = dict(DEFAULTS.get(name, {}))
        if name in OF_THE_GOOD_STORE:
            options["--store"] = files.good_store
        if name == "copy":
            options["--from"] = files.good_store
        if name == "export-triton":
            options["--out"] = files.paths[0]
        for option in rng.sample(texts, min(len(texts), rng.randint(0, 3))):
            options[option] = rng.choice(odd.get(f"{name} {option}", odd.get(option, [*TEXTS, *NUMBERS])))
        args = [f"{option}={value}" for option, value in options.items()]
        args += [flag for flag in flags if rng.random() < 0.2]
        rng.shuffle(args)
        if rng.random() < 0.05:
            args.append(rng.choice(["--unknown", "-x", "--store", "extra", "--help", *TEXTS]))
        stdin = rng.choice(answers) if name == "save" else b""
        # After "--" a value that begins with a dash is not an option.
        values = [rng.choice(each) for each in positional.get(name, ())]
        yield Invocation([*name.split(), *args, *(["--", *values] if values else [])], stdin)


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


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_no_generated_command_line_ends_in_a_traceback(count: int, sandbox: Path, files: OddFiles) -> None:
    cases = list(generate_cases(files, count))
    results = commands.run(sandbox, cases)
    problems = [
        describe(case, problem, result)
        for case, result in zip(cases, results, strict=True)
        if (problem := find_problem(result)) is not None
    ]
    assert not problems, f"{len(problems)} of {count}\n\n" + "\n\n".join(problems[:40])


@pytest.mark.parametrize("names", [SHORT_COMMANDS, pytest.param(FAST_COMMANDS, marks=pytest.mark.full)])
def test_no_process_ends_in_a_traceback(names: Sequence[str], sandbox: Path, files: OddFiles) -> None:
    """A case of each fast command with real arguments, if possible with bytes that are not UTF-8, and a real status."""
    by_command: dict[str, Invocation] = {}
    for case in generate_cases(files, 1000):
        name, is_bytes = case.args[0], any("\udc80" <= letter <= "\udcff" for letter in "".join(case.args))
        if name in names and ENDLESS_FILE not in case.args and (is_bytes or name not in by_command):
            by_command[name] = case
    assert by_command.keys() == set(names)
    problems = []
    for case in by_command.values():
        ran = subprocess.run(
            [sys.executable, "-m", "preheat", *map(os.fsencode, case.args)],
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
