"""Memory of the GPU that a loaded release takes, by how many of its buckets are served: weights are there once.

    python -m engine_builder.benchmarks.memory STORE NAME/1 --buckets '[{"height": 1024, "width": 1024, "rows": 2}]'

A process for each set of buckets: what one has taken from the device is not given back. In GiB, once every loop and
graph is captured and a picture was drawn: what the device says is taken, by anyone; what of it torch has; the weights.
"""

import argparse
import json
from pathlib import Path

import torch

from engine_builder.benchmarks.bench import load_here, precision_of
from engine_builder.benchmarks.rows import Row, append_rows, make_row
from model.engines import components
from model.loading.load import (
    Loaded,
    ServedBucket,
)
from model.loading.warmup import warm_up
from model.metrics import gpu_memory
from model.store.store import open_store

_GIB = 2**30


def measure(loaded: Loaded) -> Row:
    """Of a release that was just loaded and is warm afterwards."""
    with torch.inference_mode():
        warm_up(loaded)
    torch.cuda.synchronize()
    taken = gpu_memory(loaded.model.device)
    buckets = len(loaded.model.engines[components.UNET].engines)
    precision = precision_of(loaded)
    extra = {
        "weights_gib": round(loaded.weight_bytes / _GIB, 2),
        "torch_gib": round(taken["reserved"] / _GIB, 2),
        "buckets": buckets,
    }
    name = f"{loaded.release}, device memory, {buckets} {'bucket' if buckets == 1 else 'buckets'}"
    return make_row(name, [taken["used"] / _GIB], "GiB", precision, 0, 0, digits=2, extra=extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder, file:// or s3:// URL")
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--buckets", default="[]", help="as in config.yaml; default: all that the release has")
    parser.add_argument("--out", type=Path, help="append the row to this JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here: this measures its memory.")
    buckets = [ServedBucket.from_config(entry) for entry in json.loads(given.buckets)]
    row = measure(load_here(open_store(given.store), given.release, buckets))
    if given.out is not None:
        append_rows(given.out, [row])
    print(json.dumps([row.to_dict()]))


if __name__ == "__main__":
    main()
