"""Measure how long a swap of LoRA adapters takes on this device, and a batch of images with different adapters.

    python -m benchmarks.adapters .preheat/store tiny-sdxl/1 --rank 64 --images 8 --batch-rank 32

The adapters have random factors for all linears of the UNet's transformers and of both text encoders, as most adapters
have. They are kept in a temporary folder, and the store is not changed. Measured in turn, in one run:

    swap       from the model to one adapter, whose factors are on the device
    exchange   from one adapter to another
    three      from the model to three adapters at once
    restore    back to the model
    read       from the store's blobs to factors on the device, in the background
    lora, dora, lokr
               from the model to one adapter of this algorithm, for all linears and convolutions

Times end when the device has finished. Nothing else runs meanwhile. If the release has a UNet that takes adapters as
inputs (`preheat build --lora-rank`), also, alternately:

    plain batch     the denoising of `--images` images without adapters
    adapter batch   the denoising of `--images` images, each with another adapter of rank `--batch-rank`
"""

import argparse
import hashlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.measure import precision_of, release_parser
from benchmarks.rows import Row, finish, make_row
from engine_builder.adapters.add import release_layers
from engine_builder.stores.local import WritableLocalStore
from model.adapters.layers import Layer
from model.adapters.library import load_changes
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.engines.features import LORA
from model.loading.load import Loaded
from model.loading.releases import load_deployment
from model.loading.warmup import warm_up
from model.pipeline.components import find_component
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.settings import read_settings
from model.store.adapter_forms import FormName, stored_shape
from model.store.adapter_record import AdapterLayer, AdapterRecord
from model.store.manifest import BLOB_LIMIT, Blob
from model.store.store import Store, open_store

_UNET_LAYERS = r"unet\..*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_in|proj_out)"
_LAYERS = _UNET_LAYERS + r"|text_encoder.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
_NAMES = ("one", "two", "three")
_ALGORITHMS = ("lora", "dora", "lokr")
_FACTOR = 8  # of the LoKr: the sides of its first matrix
_WARM_UPS, _BATCH_RUNS = 3, 5  # of swaps; of each batch, after one that is not counted
_STEPS = 20  # of an image of a batch


def with_adapters(store: Store, adapters: Store) -> Store:
    """Return a store that has the releases of `store`, and the records and blobs of the adapters in `adapters`."""
    theirs = {blob.sha256 for name in adapters.adapters() for blob in adapters.read_adapter(name).blobs}

    def by_digest(method: str) -> Callable[..., object]:
        return lambda digest, *rest: getattr(adapters if digest in theirs else store, method)(digest, *rest)

    overlay = SimpleNamespace(
        url=store.url, releases=store.releases, read_release=store.read_release,
        adapters=adapters.adapters, read_adapter=adapters.read_adapter, unpin=store.unpin,
        fetch=lambda blobs: store.fetch(blob for blob in blobs if blob.sha256 not in theirs),
        **{method: by_digest(method) for method in ("get", "read", "stream")},
    )  # fmt: skip
    return cast(Store, overlay)


def put_random_adapter(
    store: WritableLocalStore, name: str, layers: Iterable[Layer], rank: int, seed: int, algorithm: str = "lora"
) -> None:
    """Write an adapter with random parts in fp16 for these layers."""
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(seed)
    groups: list[dict[str, torch.Tensor]] = [{}]
    entries = {}
    for layer in layers:
        shape = stored_shape(layer.shape)
        shapes = _part_shapes(shape, rank, algorithm)
        parts = {
            f"{layer.name}.{role}": (0.01 * torch.randn(part, generator=generator)).half()
            for role, part in shapes.items()
        }
        if sum(tensor.nbytes for tensor in [*groups[-1].values(), *parts.values()]) > BLOB_LIMIT - 2**20:
            groups.append({})
        groups[-1] |= parts
        if algorithm == "lora":
            entries[layer.name] = AdapterLayer(rank=rank, scale=1.0, shape=shape)
        else:
            form: FormName = "kronecker" if algorithm == "lokr" else "matrix"
            entries[layer.name] = AdapterLayer(form=form, parts=shapes, scale=1.0, shape=shape)
    files = [save(group) for group in groups]
    blobs = tuple(Blob(sha256=store.put_bytes(data), bytes=len(data)) for data in files)
    source = hashlib.sha256(name.encode()).hexdigest()
    record = AdapterRecord(name=name, source=source, layers=entries, blobs=blobs)
    store.write_adapter(record.model_copy(update={"schema_version": record.required_schema}))


def _part_shapes(shape: tuple[int, ...], rank: int, algorithm: str) -> dict[str, tuple[int, ...]]:
    out, inner, *kernel = shape
    if algorithm != "lokr":
        factors: dict[str, tuple[int, ...]] = {"down": (rank, inner, *kernel), "up": (out, rank)}
        return factors | ({"magnitude": (out, 1)} if algorithm == "dora" else {})
    sides = [_FACTOR if side % _FACTOR == 0 else 1 for side in (out, inner)]
    rest = (out // sides[0], inner // sides[1])
    return {"1.full": (sides[0], sides[1]), "2.down": (rank, rest[1], *kernel), "2.up": (rest[0], rank)}


def swap_rows(loaded: Loaded, store: Store, options: argparse.Namespace) -> list[Row]:
    """Return the rows of swaps, in milliseconds. `store` has the adapters."""
    model, record = loaded.model, store.read_adapter(_NAMES[0])

    def swap(*names: str) -> Callable[[], object]:
        return lambda: model.use_adapters(tuple((name, 0.8) for name in sorted(names)))

    works: dict[str, Callable[[], object]] = {
        "swap": swap("one"),
        "exchange": swap("two"),
        "restore": swap(),
        "three": swap(*_NAMES),
        "restore from three": swap(),
        **{name: swap(name) for name in _ALGORITHMS},
        "restore from all": swap(),
        "read": lambda: load_changes(store, record, model.device),
    }
    times: dict[str, list[float]] = {case: [] for case in works}
    for run in range(-_WARM_UPS, options.runs):
        for case, work in works.items():
            _synchronize(model.device)
            began = time.perf_counter()
            work()
            _synchronize(model.device)
            if run >= 0:
                times[case].append((time.perf_counter() - began) * 1000)
    extra = {"rank": options.rank, "layers": len(record.layers), "adapter_mib": record.total_bytes // 2**20}
    return [_row(loaded, case, values, 0, 0, **extra) for case, values in times.items()]


def batch_rows(loaded: Loaded, options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Return the rows of a plain batch, and of one whose images have different adapters: milliseconds of denoising."""
    fields = {"prompt": "a large red circle on a blue background", "negative_prompt": "blurred", "seed": 1}
    fields |= {"num_inference_steps": _STEPS, "use_refiner": False}
    plain = resolve(GenerationRequest.model_validate(fields), loaded.served)
    seeds = range(len(names))
    batches = {
        "plain batch": [replace(plain, seed=seed) for seed in seeds],
        "adapter batch": [replace(plain, seed=seed, loras=((names[seed], 0.8),)) for seed in seeds],
    }
    times: dict[str, list[float]] = {case: [] for case in batches}
    for run in range(-1, _BATCH_RUNS):
        for case, batch in batches.items():
            _, stages, _ = generate(loaded.model, batch)
            if run >= 0:
                times[case].append(stages["denoise"])
    ratio = statistics.median(times["adapter batch"]) / statistics.median(times["plain batch"])
    print(f"{len(names)} images of {plain.width}x{plain.height}: with adapters {ratio:.3f} times the plain batch")
    extra = {"rank": options.batch_rank, "ratio": round(ratio, 3), "guidance": plain.guidance_scale}
    return [_row(loaded, case, values, _STEPS, len(names), **extra) for case, values in times.items()]


def _row(loaded: Loaded, case: str, values: Sequence[float], steps: int, batch: int, **extra: Any) -> Row:
    return make_row(f"{loaded.release} adapters: {case}", values, "ms", precision_of(loaded), steps, batch, **extra)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--batch-rank", type=int, default=32)
    options = parser.parse_args(arguments)
    settings = read_settings()
    store = open_store(options.store, settings.store_options())
    batch_names = tuple(f"image-{number}" for number in range(options.images))
    with tempfile.TemporaryDirectory(prefix="preheat-adapters-") as folder:
        adapters = WritableLocalStore(Path(folder))
        known = release_layers(store, store.read_release(options.release)).values()
        for names, pattern, rank in ((_NAMES, _LAYERS, options.rank), (batch_names, _UNET_LAYERS, options.batch_rank)):
            layers = [layer for layer in known if re.fullmatch(pattern, layer.name)]
            for seed, name in enumerate(names):
                put_random_adapter(adapters, name, layers, rank, seed)
        matrices = [layer for layer in known if len(layer.shape) > 1]
        for name in _ALGORITHMS:
            put_random_adapter(adapters, name, matrices, options.rank, 0, name)
        overlay = with_adapters(store, adapters)
        # The adapters are not signed, and plans take none.
        served = {"release": options.release, "public_key": [], "runtime": "aot_inductor"}
        served |= {"loras": [*_NAMES, *_ALGORITHMS, *batch_names], "lora_cache_bytes": 2**40}
        deployment = Deployment.of(settings.model_copy(update=served))
        loaded = load_deployment(overlay, deployment, settings.store_options().cache_folder, ColdStart())
        assert loaded.model.adapters is not None
        warm_up(loaded)
        loaded.model.adapters.load((*_NAMES, *_ALGORITHMS))
        rows = swap_rows(loaded, overlay, options)
        if any(LORA in find_component(name).features for name in loaded.model.engines):
            loaded.model.adapters.load(batch_names)
            rows += batch_rows(loaded, options, batch_names)
        loaded.model.adapters.close()
    for row in rows:
        print(f"{row.case:50} p50 {row.p50:8.1f}  p90 {row.p90:8.1f}  p99 {row.p99:8.1f} ms")
    finish(rows, options.out)


if __name__ == "__main__":
    main()
