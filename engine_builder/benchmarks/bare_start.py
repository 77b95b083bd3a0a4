"""A cold start without the Truss server: this process loads a release and generates one image.

For machines without Truss, and to separate this code's share of a start. Imports model/ only:

    python -m engine_builder.benchmarks.bare_start STORE NAME/1 --steps 30 --size 1024x1024

Prints the phases and ends with one JSON line. Seconds count from the start of the process, without its interpreter's.
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
    """Load, generate, and print the phases. Returns them with the response's timings."""
    from model.model import Model

    model = Model(config={"model_metadata": {"preheat": settings}}, secrets={})
    model.load()

    from starlette.requests import Request

    from model.api.request import GenerationRequest

    async def disconnected() -> Any:
        await asyncio.sleep(3600)

    http = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, disconnected)
    began = time.perf_counter()
    response = asyncio.run(model.predict(GenerationRequest(**request), http))
    seconds_of_request = time.perf_counter() - began
    answer = json.loads(response.body)
    if response.status_code != 200:
        raise SystemExit(f"The request returned no image: {answer}")
    phases: dict[str, float] = dict(model._cold_start.phases)
    for phase, seconds in (phases | {"first request": seconds_of_request}).items():
        print(f"{seconds:8.3f} s  {phase}")
    return {
        "phases": phases,
        "request_seconds": round(seconds_of_request, 4),
        "timings": answer["timings"],
        "engine": answer["engine"],
    }


if __name__ == "__main__":
    main()
