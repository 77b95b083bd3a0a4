"""How fast weights go from a store to the device: GB/s by number of threads, of a release or of made-up blobs.

Needs torch and what `model.store` imports (pydantic), and nothing else of the offline half:

    python -m engine_builder.benchmarks.streaming --gigabytes 5 --folder /dev/shm/blobs
    python -m engine_builder.benchmarks.streaming --store STORE --release NAME/1

Blobs are read once before they are measured, so from the page cache; with hashing, and without, as those of which a
prefetch has made sure. Prints a table and ends with one JSON line.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from model.store.manifest import Blob
from model.store.store import (
    Store,
    open_store,
)
from model.weights.stream import (
    SLOT_BYTES,
    SLOTS,
    stream_weights,
)

_TENSOR = 8 * 2**20  # bytes of a made-up tensor
_BLOB = 31 * _TENSOR  # with its header just below the largest blob that a builder writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="folder, file:// or s3:// URL of a store")
    parser.add_argument("--release", help="MODEL/VERSION in it, all weights of which are streamed")
    parser.add_argument("--gigabytes", type=float, default=5.0, help="how much to make up without a release")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/preheat-blobs"), help="where to keep it")
    parser.add_argument("--threads", default="1,4,8,12,16", help="numbers of threads to try")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    url = given.store or given.folder
    store = open_store(url)
    if given.store:
        weights = store.read_release(given.release).weights
        blobs = list({blob.sha256: blob for record in weights for blob in record.blobs}.values())
    else:
        blobs = make_blobs(store, given.gigabytes)
    size = sum(blob.bytes for blob in blobs)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the CUDA context is no part of this
    print(f"{len(blobs)} blobs, {size / 1e9:.2f} GB, to {device}, {SLOTS} slots of {SLOT_BYTES // 2**20} MiB a thread")
    stream_weights(store, blobs, device)
    rows = []
    for threads in map(int, given.threads.split(",")):
        # A store that was opened anew hashes; `store` knows these blobs by now, as after a prefetch.
        hashed = min(_once(open_store(url), blobs, device, threads) for _ in range(given.runs))
        known = min(_once(store, blobs, device, threads) for _ in range(given.runs))
        rows.append({"threads": threads, "hashed_seconds": round(hashed, 4), "known_seconds": round(known, 4)})
        rates = f"{size / 1e9 / hashed:6.2f} GB/s hashed, {size / 1e9 / known:6.2f} GB/s known"
        print(f"{threads:3} threads  {hashed:6.3f} s and {known:6.3f} s  {rates}  (best of {given.runs})")
    print(json.dumps({"device": str(device), "bytes": size, "torch": torch.__version__, "rows": rows}))


def _once(store: Store, blobs: list[Blob], device: torch.device, threads: int) -> float:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.perf_counter()
    stream_weights(store, blobs, device, threads)
    return time.perf_counter() - began


def make_blobs(store: Store, gigabytes: float) -> list[Blob]:
    """Safetensors blobs of noise, kept in the store from one run to the next."""
    made = []
    for number in range(max(1, round(gigabytes * 1e9 / _BLOB))):
        entries = {
            f"tensor{at}": {"dtype": "F16", "shape": [_TENSOR // 2], "data_offsets": [at * _TENSOR, (at + 1) * _TENSOR]}
            for at in range(_BLOB // _TENSOR)
        }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        generator = torch.Generator().manual_seed(number)
        noise = torch.randint(0, 256, (_BLOB,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        data = len(header).to_bytes(8, "little") + header + noise
        made.append(Blob(sha256=store.put_bytes(data), bytes=len(data)))
    return made


if __name__ == "__main__":
    main()
