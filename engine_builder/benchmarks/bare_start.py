"""A cold start without the Truss server around it: this process loads a release and draws one picture.

For machines that have no Truss, and to see what of a start is ours. Imports model/ and nothing of the offline half:

    python -m engine_builder.benchmarks.bare_start STORE NAME/1 --steps 30 --size 1024x1024

Prints the phases and ends with one JSON line. Seconds count from the start of the process, but for its interpreter's.
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
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the release's own")
    parser.add_argument(
        "--buckets", default="[]", help='as in config.yaml: [{"height": 1024, "width": 1024, "rows": 2}]'
    )
    given = parser.parse_args()
    settings = {"store": given.store, "release": given.release, "buckets": json.loads(given.buckets)}
    width, height = given.size.split("x") if given.size else (None, None)
    asked = {"width": int(width), "height": int(height)} if width and height else {}
    print(json.dumps(run(settings, {"prompt": "a red circle", "seed": 1, "num_inference_steps": given.steps} | asked)))


def run(settings: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Load and draw; prints phases; returns them with the answer's own timings."""
    from model.model import Model

    model = Model(config={"model_metadata": {"preheat": settings}}, secrets={})
    model.load()

    from starlette.requests import Request

    from model.api.request import GenerationRequest

    async def disconnected() -> Any:
        await asyncio.sleep(3600)

    http = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, disconnected)
    began = time.perf_counter()
    response = asyncio.run(model.predict(GenerationRequest(**entries), http))
    drawn = time.perf_counter() - began
    answer = json.loads(response.body)
    if response.status_code != 200:
        raise SystemExit(f"No picture: {answer}")
    phases: dict[str, float] = dict(model._cold_start.phases)
    for phase, seconds in (phases | {"first request": drawn}).items():
        print(f"{seconds:8.3f} s  {phase}")
    return {
        "phases": phases,
        "request_seconds": round(drawn, 4),
        "timings": answer["timings"],
        "engine": answer["engine"],
    }


if __name__ == "__main__":
    main()
