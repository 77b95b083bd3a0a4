"""Compare requests with an IP-Adapter to plain text to image on one release, alternating in one run.

    python -m engine_builder.benchmarks.ip_adapter STORE NAME/1 --out docs/...json

Measures in this process, from the request to the encoded JPEG, at the native size, one guided image, for each
IP-Adapter of the release with one and with the most reference images. Prints the ratio of the p50 of a request with it
to that of a plain request, and the same ratio of a step, as `engine_builder.benchmarks.control` does. The time of a
request includes the image encoder. The last line is JSON. `engine_builder.checkpoints.random_ip_adapter` writes an
IP-Adapter of full size.
"""

import json
from dataclasses import replace

import numpy as np

from engine_builder.benchmarks.bench import load_in_process, release_parser
from engine_builder.benchmarks.control import compare_to_plain, plain_request
from engine_builder.benchmarks.rows import Row, append_rows
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams, ImagePrompt


def compare(
    loaded: Loaded, steps: int, runs: int, warm_ups: int = 3, side: int | None = None
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Measure all requests alternately. `side`: pixels; None: the native size.

    Returns the rows, and for each adapter and number of images the ratios "request" and "step". Raises RequestRefused
    if the release has no IP-Adapters, and ValueError for fewer than 6 steps.
    """
    if not loaded.served.ip_adapters:
        raise RequestRefused("ip_adapters", f"release {loaded.release} has no IP-Adapters.")
    plain = plain_request(loaded, steps, side)
    return compare_to_plain(loaded, plain, _cases(loaded, plain), runs, warm_ups)


def _cases(loaded: Loaded, plain: GenerationParams) -> dict[str, GenerationParams]:
    cases = {}
    for name, adapter in loaded.served.ip_adapters.items():
        for images in sorted({1, adapter.images}):
            shape = (images, adapter.side, adapter.side, 3)
            levels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
            title = f"{name}, {images} image{'s' if images > 1 else ''}"
            cases[title] = replace(plain, image_prompts=(ImagePrompt(name, levels, scale=0.6),))
    return cases


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--side", type=int, help="pixels; default: the native size")
    arguments = parser.parse_args()
    loaded = load_in_process(arguments.store, arguments.release)
    rows, ratios = compare(loaded, arguments.steps, arguments.runs, side=arguments.side)
    for row in rows:
        print(f"{row.case}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {row.stages}", flush=True)
    for name, numbers in ratios.items():
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    if arguments.out is not None:
        append_rows(arguments.out, rows)
    print(json.dumps({"rows": [row.to_dict() for row in rows], "ratios": ratios}))


if __name__ == "__main__":
    main()
