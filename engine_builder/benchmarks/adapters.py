"""Measure how long a swap of LoRA adapters takes on this device, and a batch of images with different adapters.

    python -m engine_builder.benchmarks.adapters .preheat/store tiny-sdxl/1 --rank 64 --images 8 --batch-rank 32

The adapters have random factors for all linears of the UNet's transformers and of both text encoders, as most adapters
have. They are kept in a temporary folder, and the store is not changed. Measured in turn, in one run:

    swap       from the model to one adapter, whose factors are on the device
    exchange   from one adapter to another
    three      from the model to three adapters at once
    restore    back to the model
    read       from the store's blobs to factors on the device, in the background

Times end when the device has finished. Nothing else runs meanwhile. If the release has a UNet that takes adapters as
inputs (`preheat build --lora-rank`), also, alternately:

    plain batch     the denoising of `--images` images without adapters
    adapter batch   the denoising of as many images, each with another adapter of rank `--batch-rank`
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

import torch

from engine_builder.adapters.add import release_layers
from engine_builder.benchmarks.bench import precision_of, release_parser
from engine_builder.benchmarks.rows import Row, finish, make_row
from engine_builder.stores.local import WritableLocalStore
from model.adapters.layers import AdapterSet, Layer
from model.adapters.library import load_factors
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.adapters import ServedAdapters
from model.loading.load import Loaded, load_release
from model.loading.runtimes import find_targets
from model.loading.warmup import warm_up
from model.pipeline.spec import UNET_LORA
from model.pipeline.text_to_image import generate
from model.settings import read_settings
from model.store.adapter_record import AdapterLayer, AdapterRecord
from model.store.manifest import BLOB_LIMIT, Blob, Manifest
from model.store.sink import Sink
from model.store.store import Store, open_store

_LAYERS = re.compile(
    r"unet\..*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_in|proj_out)"
    r"|text_encoder.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
)
_UNET_LAYERS = re.compile(r"unet\..*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_in|proj_out)")
_NAMES = ("one", "two", "three")


class AdapterOverlay:
    """A store with more adapters, whose records and blobs are in another one. Implements `Store`."""

    def __init__(self, store: Store, adapters: Store) -> None:
        self.url = store.url
        self._store, self._adapters = store, adapters
        self._blobs = {blob.sha256 for name in adapters.adapters() for blob in adapters.read_adapter(name).blobs}

    def _of(self, digest: str) -> Store:
        return self._adapters if digest in self._blobs else self._store

    def get(self, digest: str, size: int) -> Path:
        return self._of(digest).get(digest, size)

    def read(self, digest: str, into: memoryview) -> None:
        self._of(digest).read(digest, into)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        self._of(digest).stream(digest, size, sink)

    def fetch(self, blobs: Iterable[Blob]) -> None:
        self._store.fetch(blob for blob in blobs if blob.sha256 not in self._blobs)

    def read_release(self, name: str) -> Manifest:
        return self._store.read_release(name)

    def releases(self, model: str | None = None) -> list[str]:
        return self._store.releases(model)

    def read_adapter(self, name: str) -> AdapterRecord:
        return self._adapters.read_adapter(name)

    def adapters(self) -> list[str]:
        return self._adapters.adapters()


def put_random_adapter(store: WritableLocalStore, name: str, layers: Iterable[Layer], rank: int, seed: int) -> None:
    """Write an adapter with random factors in fp16 for these layers."""
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(seed)
    tensors, entries = {}, {}
    for layer in layers:
        out, *inner = layer.shape
        tensors[f"{layer.name}.down"] = (0.01 * torch.randn(rank, *inner, generator=generator)).half()
        tensors[f"{layer.name}.up"] = (0.01 * torch.randn(out, rank, generator=generator)).half()
        entries[layer.name] = AdapterLayer(rank=rank, scale=1.0, shape=layer.shape)
    blobs: list[Blob] = []
    group: dict[str, torch.Tensor] = {}
    size = 0
    for key in [*tensors, None]:
        if key is None or size + tensors[key].nbytes > BLOB_LIMIT - 2**20:
            data = save(group)
            blobs.append(Blob(sha256=store.put_bytes(data), bytes=len(data)))
            group, size = {}, 0
        if key is not None:
            group[key], size = tensors[key], size + tensors[key].nbytes
    source = hashlib.sha256(name.encode()).hexdigest()
    store.write_adapter(AdapterRecord(name=name, source=source, layers=entries, blobs=tuple(blobs)))


def batch_rows(loaded: Loaded, options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Return the rows of a plain batch, and of one whose images have different adapters: milliseconds of denoising."""
    assert loaded.model.adapters is not None
    loaded.model.adapters.load(names)
    width, _, height = options.size.partition("x")
    size = {"width": int(width), "height": int(height)} if options.size else {}
    fields = {"prompt": "a large red circle on a blue background", "negative_prompt": "blurred", "seed": 1}
    fields |= {"num_inference_steps": options.steps, "use_refiner": False, **size}
    request = GenerationRequest.model_validate(fields)
    plain = resolve(request, loaded.served)
    seeds = range(len(names))
    batches = {
        "plain batch": [replace(plain, seed=seed) for seed in seeds],
        "adapter batch": [replace(plain, seed=seed, loras=((names[seed], 0.8),)) for seed in seeds],
    }
    times: dict[str, list[float]] = {case: [] for case in batches}
    for run in range(-1, options.batch_runs):
        for case, batch in batches.items():
            _, stages, _ = generate(loaded.model, batch)
            if run >= 0:
                times[case].append(stages["denoise"])
                print(f"{case}: {stages['denoise']:.0f} ms", flush=True)
    ratio = statistics.median(times["adapter batch"]) / statistics.median(times["plain batch"])
    print(f"{len(names)} images of {plain.width}x{plain.height}: with adapters {ratio:.3f} times the plain batch")
    return [
        make_row(
            f"{loaded.release} adapters: {case}", values, "ms", precision_of(loaded), options.steps, len(names),
            rank=options.batch_rank, ratio=round(ratio, 3), guidance=plain.guidance_scale,
        )
        for case, values in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--batch-runs", type=int, default=5, help="of each batch, after one that is not counted")
    parser.add_argument("--batch-rank", type=int, default=32)
    parser.add_argument("--size", default="", help="WIDTHxHEIGHT of the images; default: the release's")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of the images")
    options = parser.parse_args()
    settings = read_settings()
    store = open_store(options.store, settings.store_options())
    with tempfile.TemporaryDirectory(prefix="preheat-adapters-") as folder:
        adapters = WritableLocalStore(Path(folder))
        known = release_layers(store, store.read_release(options.release)).values()
        layers = [layer for layer in known if _LAYERS.fullmatch(layer.name)]
        for seed, name in enumerate(_NAMES):
            put_random_adapter(adapters, name, layers, options.rank, seed)
        batch_names = tuple(f"image-{number}" for number in range(options.images))
        for seed, name in enumerate(batch_names):
            unet_layers = [layer for layer in known if _UNET_LAYERS.fullmatch(layer.name)]
            put_random_adapter(adapters, name, unet_layers, options.batch_rank, seed)
        overlay = AdapterOverlay(store, adapters)
        loaded = load_release(
            overlay,
            options.release,
            find_targets("aot_inductor"),
            settings.buckets,
            ColdStart(),
            precision=settings.served_precision,
            adapters=ServedAdapters(_NAMES + batch_names, cache_bytes=2**40),
        )
        model = loaded.model
        assert model.adapters is not None
        warm_up(loaded)
        model.adapters.load(_NAMES)

        def timed(work: Callable[[], object]) -> float:
            _synchronize(model.device)
            began = time.perf_counter()
            work()
            _synchronize(model.device)
            return (time.perf_counter() - began) * 1000

        def swap(*names: str) -> Callable[[], None]:
            adapters: AdapterSet = tuple((name, 0.8) for name in sorted(names))
            return lambda: model.use_adapters(adapters)

        cases: dict[str, list[float]] = {}
        for run in range(-options.warm_ups, options.runs):
            for case, work in (
                ("swap", swap("one")),
                ("exchange", swap("two")),
                ("restore", swap()),
                ("three", swap(*_NAMES)),
                ("restore from three", swap()),
                ("read", lambda: load_factors(overlay, adapters.read_adapter("one"), model.device)),
            ):
                milliseconds = timed(work)
                if run >= 0:
                    cases.setdefault(case, []).append(milliseconds)
        print(", ".join(f"{case} {statistics.median(times):.1f} ms" for case, times in cases.items()), flush=True)
        record = adapters.read_adapter("one")
        extra = {"rank": options.rank, "layers": len(record.layers), "adapter_mib": record.total_bytes // 2**20}
        rows = [
            make_row(f"{loaded.release} adapters: {case}", values, "ms", precision_of(loaded), 0, 0, **extra)
            for case, values in cases.items()
        ]
        rows += batch_rows(loaded, options, batch_names) if UNET_LORA in model.engines else []
        print(f"{len(record.layers)} layers of rank {options.rank}, {options.warm_ups} warm-ups, {options.runs} runs")
        for row in rows:
            print(f"{row.case:50} p50 {row.p50:8.1f}  p90 {row.p90:8.1f}  p99 {row.p99:8.1f} ms")
        finish(rows, options.out)
        model.adapters.close()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
