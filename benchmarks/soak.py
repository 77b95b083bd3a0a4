"""Send random requests of every kind that a server describes, for minutes, and watch its memory and each picture.

    python -m benchmarks.soak URL [--seconds 600] [--clients 16] [--leave 0.1]

Some clients leave before their answer, some read streams. Ends with status 1 if an answer is missing, is no success or
has a broken picture, if the server holds images at the end, or if its memory grew in the second half of the time. In
the first half its caches fill with what the requests name.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.rows import check_rows_file, finish, make_row
from benchmarks.server_load import connect
from gateway.endpoint import parse_endpoint
from model.denoising.sampler_specs import HEUN
from preheat.local_server.demo import read_metrics

_SAMPLE_SECONDS = 2.0
_PARTS = 10  # of the time, each with its memory
_MAX_GROWTH = 0.1  # the most memory depends on which requests meet
_SETTLE_SECONDS = 30.0  # at most, after the last answer, until the images of clients that left are dropped
_MAX_RANGE_SIDE = 2  # times the smallest side, of sizes that a release serves as a range
_PROMPTS = ("a large red circle on a blue background", "two green squares on white", "a (blue:1.2) line", "")
_MEMORY = {"host": "preheat_host_memory_bytes", "gpu": 'preheat_gpu_memory_bytes{kind="used"}'}
"""The server's metrics of memory."""
_HELD = ("preheat_queue_images", "preheat_active_images")
"""The beginnings of the metrics of images that a server holds."""


def random_request(described: Mapping[str, Any], generator: random.Random, max_steps: int) -> dict[str, Any]:
    """Return the body of a valid request. `described`: the answer of a release to `describe`.

    Every optional part is asked for in a share of the requests, in all combinations.
    """

    def chance(share: float) -> bool:
        return generator.random() < share

    width, height = _random_size(described["sizes"], generator)
    sampler = generator.choice(described["samplers"])
    request: dict[str, Any] = {
        "prompt": " ".join(filter(None, generator.choices(_PROMPTS, k=3))) or _PROMPTS[0],
        "model": described["release"],
        "width": width,
        "height": height,
        "scheduler": sampler,
        "num_inference_steps": generator.randint(2, max_steps),
        "guidance_scale": generator.choice([1, 3, 7.5]),
        "seed": generator.randrange(2**32),
        "num_images": generator.choice([1, 1, 1, 2, 3]),
        "output_format": generator.choice(["jpeg", "jpeg", "png", "webp"]),
        "stream": chance(0.3),
        "preview_every": generator.choice([0, 1, 3]),
        "metadata": chance(0.3),
    }
    if chance(0.3):
        request["forecast"] = generator.choice(described["forecasts"][sampler])
    if chance(0.5):
        request["negative_prompt"] = generator.choice(_PROMPTS)
    if described["has_refiner"] and sampler != HEUN.name and chance(0.2):  # Heun is refused with the refiner
        request["use_refiner"] = True
    if described["loras"] and chance(0.4):
        names = generator.sample(described["loras"], min(len(described["loras"]), generator.choice([1, 1, 2])))
        request["loras"] = [{"name": name, "scale": round(generator.uniform(-1, 1), 2)} for name in names]
    picture = _picture(width, height, generator)
    if described["image_sizes"] is not None and _accepts(described["image_sizes"], width, height):
        if described["requires_masks"] or chance(0.3):
            request |= {"image": picture, "strength": round(generator.uniform(0.6, 1), 2)}
            if described["requires_masks"] or chance(0.5):
                request["masks"] = [{"image": _mask(width, height, generator)}]
                request |= {"composite": chance(0.5), "color_match": chance(0.5)}
    nets = [name for name, sizes in described["control_sizes"].items() if _accepts(sizes, width, height)]
    if nets and not request.get("use_refiner") and chance(0.3):
        name = generator.choice(nets)
        types = described["controlnets"][name]
        mode = {"mode": generator.randrange(types)} if types else {}
        request["controls"] = [{"name": name, "image": picture, "scale": 0.7, "preprocess": "canny", **mode}]
    adapters, adapter_sizes = described["ip_adapters"], described["ip_adapter_sizes"]
    if adapters and _accepts(adapter_sizes, width, height) and not request.get("use_refiner") and chance(0.3):
        name = generator.choice(list(adapters))
        request["ip_adapters"] = [{"name": name, "images": [picture] * generator.randint(1, adapters[name])}]
    return request


def _random_size(sizes: Mapping[str, Any], generator: random.Random) -> tuple[int, int]:
    if "sizes" in sizes:
        width, height = generator.choice(sizes["sizes"])
        return width, height
    least, multiple = sizes["min"], sizes["multiple"]
    sides = range(least, min(sizes["max"], _MAX_RANGE_SIDE * least) + 1, multiple)
    return generator.choice(sides), generator.choice(sides)


def _accepts(sizes: Mapping[str, Any], width: int, height: int) -> bool:
    if "sizes" in sizes:
        return [width, height] in sizes["sizes"]
    return all(sizes["min"] <= side <= sizes["max"] and side % sizes["multiple"] == 0 for side in (width, height))


def _picture(width: int, height: int, generator: random.Random) -> str:
    colours = bytes(generator.randrange(256) for _ in range(3 * 16))
    return _file(Image.frombytes("RGB", (4, 4), colours).resize((width, height), Image.Resampling.BICUBIC))


def _mask(width: int, height: int, generator: random.Random) -> str:
    mask = Image.new("L", (width, height))
    mask.paste(255, (0, 0, width // generator.choice([1, 2]), height // 2))
    return _file(mask)


def _file(image: Image.Image) -> str:
    image.save(buffer := io.BytesIO(), format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class Soak:
    """The result. `latencies`: seconds of whole answers. `problems`: by text, their numbers.

    `memory`: by kind, bytes at the seconds of `sampled`.
    """

    sent: int = 0
    left: int = 0
    refused: int = 0
    latencies: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    sampled: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)

    def memory_mib(self, seconds: float) -> dict[str, list[int]]:
        """Return the most MiB in each tenth of `seconds` that was sampled, by the kind of memory."""
        tenths = [min(_PARTS - 1, int(_PARTS * at / seconds)) for at in self.sampled]
        return {
            kind: [
                round(max(count for tenth, count in zip(tenths, counts, strict=True) if tenth == part) / 2**20)
                for part in sorted(set(tenths))
            ]
            for kind, counts in self.memory.items()
        }

    def failures(self, seconds: float) -> list[str]:
        """Return what is wrong, empty if nothing is."""
        wrong = [f"{count} times {problem}" for problem, count in self.problems.items()]
        if self.sent != len(self.latencies) + self.left + self.refused + self.problems.total():
            wrong.append("requests were lost")
        for kind, parts in self.memory_mib(seconds).items():
            before, after = max(parts[: _PARTS // 2]), max(parts[_PARTS // 2 :], default=0)
            if after > (1 + _MAX_GROWTH) * before:
                wrong.append(f"{kind} memory grew from {before} to {after} MiB")
        return wrong


async def soak(url: str, seconds: float, clients: int, leave: float, max_steps: int) -> Soak:
    """Send random requests from `clients` clients. `leave`: the share of requests whose client leaves early."""
    result, endpoint, began = Soak(), parse_endpoint(url), time.monotonic()
    async with connect(endpoint) as client:

        async def describe(**model: str) -> dict[str, Any]:
            answer = await client.post(endpoint.predict_url, json={"prompt": "-", "describe": True, **model})
            described: dict[str, Any] = answer.raise_for_status().json()
            return described

        described = [await describe(model=name) for name in (await describe())["models"]]

        async def send_repeatedly(number: int) -> None:
            generator = random.Random(number)
            while time.monotonic() < began + seconds:
                request = random_request(generator.choice(described), generator, max_steps)
                typical = result.latencies[-1] if result.latencies else 1.0
                patience = generator.uniform(0, typical) if generator.random() < leave else None
                await _send(client, endpoint.predict_url, request, patience, result)

        async def sample() -> None:
            while True:
                metrics = await asyncio.to_thread(read_metrics, url)
                result.sampled.append(time.monotonic() - began)
                for kind, name in _MEMORY.items():
                    if name in metrics:
                        result.memory.setdefault(kind, []).append(metrics[name])
                await asyncio.sleep(_SAMPLE_SECONDS)

        sampling = asyncio.create_task(sample())
        await asyncio.gather(*(send_repeatedly(number) for number in range(clients)))
        sampling.cancel()
        end = time.monotonic() + _SETTLE_SECONDS
        while held := {name for name, count in read_metrics(url).items() if name.startswith(_HELD) and count}:
            if time.monotonic() > end:
                result.problems[f"images are still held: {', '.join(sorted(held))}"] += 1
                result.sent += 1
                break
            await asyncio.sleep(_SAMPLE_SECONDS)
    return result


async def _send(
    client: httpx.AsyncClient, url: str, request: dict[str, Any], patience: float | None, result: Soak
) -> None:
    """Send a request and count its answer. `patience`: seconds after which the client leaves; None: it waits."""
    result.sent += 1
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            answer = await client.post(url, json=request)
    except TimeoutError:
        result.left += 1
        return
    except httpx.TransportError as error:
        result.problems[f"no answer: {error!r}"] += 1
        return
    if answer.status_code == 429:
        result.refused += 1
        await asyncio.sleep(int(answer.headers["Retry-After"]))
    elif problem := await asyncio.to_thread(_problem_of, answer, request):
        result.problems[problem] += 1
    else:
        result.latencies.append(time.monotonic() - began)


def _problem_of(answer: httpx.Response, request: Mapping[str, Any]) -> str:
    """Return what is wrong with an answer, or ""."""
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:300]}"
    if request["stream"]:
        events = [json.loads(line) for line in answer.text.splitlines()]
        if events[-1]["event"] != "done":
            return f"a stream ended with {events[-1]}"
        images = [event for event in events if event["event"] == "image"]
    else:
        images = answer.json()["images"]
    sizes = [_size_of_picture(image["data"]) for image in images]
    expected = [(request["width"], request["height"])] * request["num_images"]
    return "" if sizes == expected else f"pictures of {sizes} in place of {expected}"


def _size_of_picture(data: str) -> tuple[int, int]:
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        image.load()
        return image.size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a running server, for example of `preheat serve`")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--leave", type=float, default=0.1, help="share of the requests whose client leaves early")
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--precision", default="fp16", help="of the release, for the row")
    parser.add_argument("--out", type=Path, help="append the row to this JSON file")
    options = parser.parse_args(arguments)
    check_rows_file(options.out)
    result = asyncio.run(soak(options.url, options.seconds, options.clients, options.leave, options.max_steps))
    failures = result.failures(options.seconds)
    if result.latencies:
        extra: dict[str, Any] = {"left": result.left, "refused": result.refused, "failed": result.problems.total()}
        extra |= {f"{kind}_mib": parts for kind, parts in result.memory_mib(options.seconds).items()}
        case = f"soak, {options.clients} clients for {options.seconds:g} s"
        row = make_row(case, result.latencies, "s", options.precision, 0, 1, digits=3, **extra)
        finish([row], options.out)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures or not result.latencies:
        sys.exit(1)


if __name__ == "__main__":
    main()
