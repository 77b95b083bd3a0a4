"""Measure a cold start without the Truss server: this process loads a release and generates one image.

For machines without Truss, and to separate Preheat's share of a start from Truss's. Imports only model/:

    python -m engine_builder.benchmarks.bare_start STORE NAME/1 --steps 30 --size 1024x1024

Prints the phases, and one JSON line at the end. Seconds count from the start of the process; the interpreter's own
start is not included.
"""

import argparse
import asyncio
import json
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("release")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the release's native size")
    parser.add_argument(
        "--buckets", default="[]", help='as in config.yaml: [{"height": 1024, "width": 1024, "rows": 2}]'
    )
    arguments = parser.parse_args()
    settings = {"store": arguments.store, "release": arguments.release, "buckets": json.loads(arguments.buckets)}
    request = {"prompt": "a red circle", "seed": 1, "num_inference_steps": arguments.steps}
    if arguments.size:
        request["width"], request["height"] = map(int, arguments.size.split("x"))
    print(json.dumps(run(settings, request)))


def run(settings: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Load a release, generate an image, and print the phases. Returns them with the response's timings."""
    from model.model import Model

    model = Model(config={"model_metadata": {"preheat": settings}}, secrets={})
    model.load()

    from starlette.requests import Request

    from model.api.request import GenerationRequest

    async def receive() -> Any:
        await asyncio.sleep(3600)  # the client never disconnects

    http = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    began = time.perf_counter()
    response = asyncio.run(model.predict(GenerationRequest(**request), http))
    request_seconds = time.perf_counter() - began
    answer = json.loads(response.body)
    if response.status_code != 200:
        raise SystemExit(f"The request returned no image: {answer}")
    phases: dict[str, float] = dict(model._cold_start.phases)
    for phase, seconds in (phases | {"first request": request_seconds}).items():
        print(f"{seconds:8.3f} s  {phase}")
    return {
        "phases": phases,
        "request_seconds": round(request_seconds, 4),
        "timings": answer["timings"],
        "engine": answer["engine"],
    }


if __name__ == "__main__":
    main()
