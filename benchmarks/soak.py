"""Send random requests of what a server describes, for minutes, and watch its memory and each picture.

    python -m benchmarks.soak URL [--seconds 600] [--clients 16] [--leave 0.1]
    python -m benchmarks.soak --release MODEL/VERSION --store STORE --config CONFIG --lora NAME    # starts a server

Requests differ in release, size, sampler, forecast, steps, guidance, prompts and their syntax, format and enlargement.
They use the refiner, adapters, input images with a mask, a ControlNet, an IP-Adapter and streams with previews, each in
a share of the requests. Some clients leave before their answer. Ends with status 1 if an answer is no success or has a
broken picture, if the server holds images at the end, or if its memory grew in the second half of the time. In the
first half its caches fill with what the requests name.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import httpx
from PIL import Image

from benchmarks.rows import check_rows_file, finish, make_row
from benchmarks.server_load import connect
from gateway.endpoint import parse_endpoint
from model.denoising.sampler_specs import HEUN
from model.errors import PreheatError
from model.validation import PromptSyntax
from preheat.console import DEFAULT_STORE, DEMO_CONFIG, ROOT, SERVERS
from preheat.local_server.client import generate
from preheat.local_server.demo import read_metrics, serving

_PARTS = 10  # of the time, each with its memory in the row
_MAX_GROWTH = 0.1  # the most memory depends on which requests meet
_DESCRIBE_SECONDS = 60.0
_START_SECONDS = 600.0
_MAX_RANGE_SIDE = 2  # times the smallest side, of sizes that a release serves as a range
_PROMPTS = ("a large red circle on a blue background", "two green squares on white", "a (blue:1.2) line", "")
_MEMORY_METRICS = {
    "host": "preheat_host_memory_bytes",
    "gpu": 'preheat_gpu_memory_bytes{kind="used"}',  # of all processes
    "gpu_reserved": 'preheat_gpu_memory_bytes{kind="reserved"}',
}
_HELD_METRICS = ("preheat_queue_images", "preheat_active_images")
"""The beginnings of the metrics of images that a server holds."""


def random_request(described: Mapping[str, Any], generator: random.Random, max_steps: int) -> dict[str, Any]:
    """Return the body of a request that a release accepts. `described`: its answer to `describe`. `max_steps`: >= 2."""

    def chance(share: float) -> bool:
        return generator.random() < share

    takes_only_masks, limits = described["requires_masks"], described["limits"]
    width, height = _random_size(described["image_sizes" if takes_only_masks else "sizes"], generator)
    sampler = generator.choice(described["samplers"])
    steps = min(max_steps, limits["steps"], limits["steps_lcm"], limits["steps_heun"])
    refined = described["has_refiner"] and sampler != HEUN.name and chance(0.2)
    request: dict[str, Any] = {
        "prompt": " ".join(filter(None, generator.choices(_PROMPTS, k=3))) or _PROMPTS[0],
        "prompt_syntax": generator.choice(get_args(PromptSyntax)),
        "model": described["release"],
        "width": width,
        "height": height,
        "scheduler": sampler,
        "forecast": generator.choice(described["forecasts"][sampler]) if chance(0.3) else "off",
        "num_inference_steps": generator.randint(2, steps),
        "guidance_scale": generator.choice([1, 3, 7.5]),
        "use_refiner": refined,
        "seed": generator.randrange(2**32),
        "num_images": generator.choice([1, 1, 1, 2, 3]),
        "output_format": generator.choice(["jpeg", "jpeg", "png", "webp"]),
        "upscale": generator.choice([1, 1, 2]),
        "stream": chance(0.3),
        "preview_every": 0 if described["safety"] == "blank" else generator.choice([0, 1, 3]),
        "metadata": chance(0.3),
    }
    if chance(0.5):
        request["negative_prompt"] = generator.choice(_PROMPTS)
    if takes_only_masks or (_accepts(described["image_sizes"], width, height) and chance(0.3)):
        request |= {"image": _picture(width, height, generator), "strength": round(generator.uniform(0.6, 1), 2)}
        if takes_only_masks or chance(0.5):
            request["masks"] = [{"image": _mask(width, height, generator)}]
            request |= {"composite": chance(0.5), "color_match": chance(0.5)}
    if refined:  # adapters are refused with it
        return request
    if described["loras"] and chance(0.4):
        names = generator.sample(described["loras"], min(len(described["loras"]), generator.choice([1, 1, 2])))
        request["loras"] = [{"name": name, "scale": round(generator.uniform(-1, 1), 2)} for name in names]
    nets = [name for name, sizes in described["control_sizes"].items() if _accepts(sizes, width, height)]
    if nets and chance(0.3):
        control = {"name": generator.choice(nets), "image": _picture(width, height, generator), "preprocess": "canny"}
        if types := described["controlnets"][control["name"]]:
            control["mode"] = generator.randrange(types)
        request["controls"] = [control]
    if _accepts(described["ip_adapter_sizes"], width, height) and chance(0.3):
        name, most = generator.choice(list(described["ip_adapters"].items()))
        pictures = [_picture(width, height, generator) for _ in range(generator.randint(1, most))]
        request["ip_adapters"] = [{"name": name, "images": pictures}]
    return request


def _random_size(sizes: Mapping[str, Any], generator: random.Random) -> tuple[int, int]:
    if "sizes" in sizes:
        width, height = generator.choice(sizes["sizes"])
        return width, height
    smallest, multiple = sizes["min"], sizes["multiple"]
    sides = range(smallest, min(sizes["max"], _MAX_RANGE_SIDE * smallest) + 1, multiple)
    return generator.choice(sides), generator.choice(sides)


def _accepts(sizes: Mapping[str, Any] | None, width: int, height: int) -> bool:
    if sizes is None:
        return False
    if "sizes" in sizes:
        return [width, height] in sizes["sizes"]
    return all(sizes["min"] <= side <= sizes["max"] and side % sizes["multiple"] == 0 for side in (width, height))


def _picture(width: int, height: int, generator: random.Random) -> str:
    colours = bytes(generator.randrange(256) for _ in range(3 * 16))
    return _png_base64(Image.frombytes("RGB", (4, 4), colours).resize((width, height)))


def _mask(width: int, height: int, generator: random.Random) -> str:
    mask = Image.new("L", (width, height))
    mask.paste(255, (0, 0, width // generator.choice([1, 2]), height // 2))
    return _png_base64(mask)


def _png_base64(image: Image.Image) -> str:
    image.save(buffer := io.BytesIO(), format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class Soak:
    """The result of `seconds` of requests. `latencies`: seconds of whole answers.

    `problems`: by kind, their numbers. `examples`: one of each kind. `memory`: by kind, (second, bytes).
    """

    seconds: float
    left: int = 0
    refused: int = 0
    latencies: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add_problem(self, kind: str, example: object) -> None:
        self.problems[kind] += 1
        self.examples.setdefault(kind, str(example)[:300])

    def memory_mib(self, kind: str) -> list[int | None]:
        """Return the most MiB in each tenth of the time; None: it was not read then."""
        tenths: list[list[float]] = [[] for _ in range(_PARTS)]
        for at, count in self.memory[kind]:
            tenths[min(_PARTS - 1, int(_PARTS * at / self.seconds))].append(count)
        return [round(max(counts) / 2**20) if counts else None for counts in tenths]

    def failures(self) -> list[str]:
        """Return what is wrong, empty if nothing is."""
        wrong = [f"{count} times {kind}: {self.examples[kind]}" for kind, count in self.problems.items()]
        if not self.latencies:
            wrong.append("No request was answered.")
        for kind in sorted({"host", *self.memory}):
            halves: tuple[list[float], list[float]] = [], []
            for at, count in self.memory.get(kind, []):
                halves[at >= self.seconds / 2].append(count)
            before, after = (max(half, default=0.0) / 2**20 for half in halves)
            if not before or not after:
                wrong.append(f"The {kind} memory is not known in both halves of the time.")
            elif after > (1 + _MAX_GROWTH) * before:
                wrong.append(f"The {kind} memory grew from {before:.0f} to {after:.0f} MiB.")
        return wrong


def soak(
    url: str,
    seconds: float,
    clients: int,
    leave_share: float,
    max_steps: int,
    sample_seconds: float = 2.0,
    settle_seconds: float = 30.0,
) -> Soak:
    """Send random requests from `clients` clients to a local server, in which clients leave a share of them early.

    `settle_seconds`: after the last answer, until the images of clients that left must be dropped. Raises CallFailed
    or BadEndpoint if the server does not describe itself.
    """
    read_metrics(url)

    def describe(**model: str) -> dict[str, Any]:
        return generate(url, {"prompt": "-", "describe": True, **model}, _DESCRIBE_SECONDS)

    described = [describe(model=name) for name in describe()["models"]]
    result, began, predict_url = Soak(seconds), time.monotonic(), parse_endpoint(url).predict_url

    async def send_repeatedly(number: int, client: httpx.AsyncClient) -> None:
        generator = random.Random(number)
        while time.monotonic() < began + seconds:
            request = await asyncio.to_thread(random_request, generator.choice(described), generator, max_steps)
            typical = result.latencies[-1] if result.latencies else 1.0
            patience = generator.uniform(0, typical) if generator.random() < leave_share else None
            await _send(client, predict_url, request, patience, result)

    async def sample() -> None:
        while True:
            try:
                metrics = await asyncio.to_thread(read_metrics, url)
            except PreheatError as error:
                result.add_problem("metrics", error)
                metrics = {}
            for kind, name in _MEMORY_METRICS.items():
                if name in metrics:
                    result.memory.setdefault(kind, []).append((time.monotonic() - began, metrics[name]))
            await asyncio.sleep(sample_seconds)

    async def run() -> None:
        async with connect(parse_endpoint(url)) as client:
            sampling = asyncio.create_task(sample())
            await asyncio.gather(*(send_repeatedly(number, client) for number in range(clients)))
            sampling.cancel()

    asyncio.run(run())
    _check_held(url, result, sample_seconds, settle_seconds)
    return result


def _check_held(url: str, result: Soak, sample_seconds: float, settle_seconds: float) -> None:
    """Add a problem if the server still holds images after `settle_seconds`, or no longer answers."""
    end = time.monotonic() + settle_seconds
    try:
        while held := {name: n for name, n in read_metrics(url).items() if name.startswith(_HELD_METRICS) and n}:
            if time.monotonic() > end:
                result.add_problem("images held after the last answer", held)
                return
            time.sleep(sample_seconds)
    except PreheatError as error:
        result.add_problem("metrics", error)


async def _send(
    client: httpx.AsyncClient, url: str, request: dict[str, Any], patience: float | None, result: Soak
) -> None:
    """Send a request and count its answer. `patience`: seconds after which the client leaves; None: it waits."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            answer = await client.post(url, json=request)
    except TimeoutError:
        result.left += 1
        return
    except httpx.TransportError as error:
        result.add_problem("no answer", repr(error))
        return
    seconds = time.monotonic() - began
    if answer.status_code == 429:
        result.refused += 1
        await asyncio.sleep(int(answer.headers["Retry-After"]))
    elif answer.status_code != 200:
        result.add_problem(str(answer.status_code), answer.text)
    elif problem := await asyncio.to_thread(_problem_of, answer, request):
        result.add_problem("a broken answer", problem)
    else:
        result.latencies.append(seconds)


def _problem_of(answer: httpx.Response, request: Mapping[str, Any]) -> str:
    """Return what is wrong with the body of a successful answer, or ""."""
    try:
        if request["stream"]:
            events = [json.loads(line) for line in answer.text.splitlines()]
            if events[-1]["event"] != "done":
                return f"the stream ended with {events[-1]}"
            images = [event for event in events if event["event"] == "image"]
        else:
            images = answer.json()["images"]
        sizes = [_size_of_picture(image["data"]) for image in images]
    except (ValueError, LookupError, TypeError, OSError) as error:
        return repr(error)
    expected = [(request["upscale"] * request["width"], request["upscale"] * request["height"])] * request["num_images"]
    return "" if sizes == expected else f"pictures of {sizes} in place of {expected}"


def _size_of_picture(data: str) -> tuple[int, int]:
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        image.load()
        return image.size


@contextmanager
def _url_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the options, or the URL of a server that is started for their release."""
    if options.url is not None:
        yield options.url
        return
    config, store = options.config or DEMO_CONFIG, options.store or DEFAULT_STORE
    with serving(ROOT, config, SERVERS, store, [options.release], loras=options.lora or ()) as server:
        server.wait_ready(_START_SECONDS)
        yield server.url


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a running server, for example of `preheat serve`")
    parser.add_argument("--release", help="MODEL/VERSION: start a server of it")
    parser.add_argument("--store", help="with --release: its store; default: .preheat/store")
    parser.add_argument("--config", type=Path, help="with --release: the config.yaml; default: the demo's")
    parser.add_argument("--lora", action="append", help="with --release: an adapter, repeatable, also as a pattern")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--leave", type=float, default=0.1, help="share of the requests whose client leaves early")
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--precision", default="", help="of the release, for the row")
    parser.add_argument("--out", type=Path, help="append the row to this JSON file")
    options = parser.parse_args(arguments)
    if (options.url is None) == (options.release is None):
        parser.error("give either a URL or --release")
    if options.url is not None and (options.store or options.config or options.lora):
        parser.error("--store, --config and --lora need --release")
    if options.max_steps < 2:
        parser.error("--max-steps: at least 2, because an input image leaves fewer")
    try:
        check_rows_file(options.out)
        with _url_of(options) as url:
            result = soak(url, options.seconds, options.clients, options.leave, options.max_steps)
    except PreheatError as error:
        sys.exit(str(error))
    if result.latencies:
        extra: dict[str, Any] = {"left": result.left, "refused": result.refused, "failed": result.problems.total()}
        extra |= {f"{kind}_mib": result.memory_mib(kind) for kind in result.memory}
        case = f"soak, {options.clients} clients for {options.seconds:g} s"
        row = make_row(case, result.latencies, "s", options.precision, 0, 1, digits=3, **extra)
        finish([row], options.out)
    if failures := result.failures():
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
