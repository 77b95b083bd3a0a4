"""Compare a release with diffusers, or with another server, on the same requests: pictures, seconds and memory.

The reference is the first variant. All variants of a release are images of the same requests: as it is, in 8 bits, with
forecasts, and with as few evaluations but without forecasts. Pictures come from one run of each request. Seconds are
those of the first request, which the variants generate alternately.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from benchmarks.comparison import Comparison, Variant
from benchmarks.measure import Work, load_in_process, measure, precision_of, release_work, timed_row
from benchmarks.memory import MemoryGrowth
from benchmarks.peers import PEERS, Peer, check_peer, out_of_memory, start_peers
from engine_builder.building.build import fingerprint
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.quantization.validation.distances import perceptual_distance, psnr
from gateway.endpoint import Endpoint
from model.api.resolve import resolve
from model.denoising.forecast import evaluation_count
from model.denoising.sampler_specs import check_forecast, sampler_spec
from model.errors import NoEngineForTarget, RequestRefused
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Manifest
from model.store.precision import FP8
from preheat.local_server.client import CallFailed, decode_images
from preheat.local_server.client import generate as call

RELEASE = "release"  # the name of that variant
FIELDS = (
    "prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "guidance_start",
    "guidance_end", "guidance_rescale", "clip_skip", "prompt_syntax", "scheduler", "seed",
)  # fmt: skip
"""Fields of the requests that are compared. A server gets all of them, so its own defaults do not count."""
_TIMEOUT_SECONDS = 600.0
Change = Callable[[GenerationParams], GenerationParams]
Report = Callable[[str], None]
"""Called with what is being done."""


@dataclass(frozen=True)
class Candidate:
    """A way to generate the requests.

    generate: returns the image, and the peak memory in bytes so far if it is known. load_seconds: None if it uses the
    model of an earlier candidate, or a server. change: makes the variant's parameters from those of a request. own:
    entries of its row in place of this process's.
    """

    name: str
    generate: Callable[[GenerationParams], tuple[Pixels, int | None]]
    work: Callable[[GenerationParams], Work]
    precision: str
    load_seconds: float | None
    change: Callable[[GenerationParams], GenerationParams] = lambda params: params
    own: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Made:
    """A candidate with its picture of each request. `first_seconds`: of the first one.

    memory_bytes: the peak so far, None if it is not known.
    """

    candidate: Candidate
    pictures: tuple[Pixels, ...]
    first_seconds: float
    memory_bytes: int | None


def compare(
    store: str,
    manifest: Manifest,
    requests: Sequence[GenerationRequest],
    reference: Checkpoint | Endpoint,
    *,
    compiled: bool = False,
    runs: int = 3,
    notes: Sequence[str] = (),
    report: Report = lambda _: None,
) -> Comparison:
    """Generate all requests with each variant, then measure the first one. Nothing is written.

    reference: the model's folder for diffusers, or a server. compiled: also measures diffusers under torch.compile.
    Raises RequestRefused for a request that the release or the reference does not serve, PeerFailed, CallFailed,
    BrokenImage, NotComparable, and as `load_in_process`.
    """
    report(f"Loading {manifest.name}")
    loaded, plain = _load_release(store, manifest.name, RELEASE)
    unavailable: dict[str, str] = {}
    params = tuple(_resolve(loaded, number, request, reference) for number, request in enumerate(requests, start=1))
    if not compiled and isinstance(reference, Checkpoint):
        unavailable["diffusers compiled"] = "Compilation takes minutes. Add --compiled."
    try:
        with _references(reference, loaded, compiled, report) as references:
            made = [_generate(each, params, report) for each in references]  # first: a wrong reference fails at once
            for each in _of_release(store, manifest, loaded, plain, params, unavailable, report):
                made.append(_generate(each, params, report))
            variants = _measure(made, params, runs, report)
    except torch.OutOfMemoryError as error:
        raise out_of_memory() from error
    return Comparison(manifest.name, params, variants, unavailable, tuple(notes))


def compare_weights(manifest: Manifest, base: Checkpoint, refiner: Checkpoint | None) -> str | None:
    """Return a sentence if the release was not built from these files, or merged adapters into them. Else None."""
    if "adapters" in manifest.builder:
        return f"{manifest.name} has merged adapters (--lora), which the model's folder lacks: pictures differ."
    if manifest.builder.get("source") == fingerprint(base, refiner if manifest.has_refiner else None):
        return None
    return (
        f"{manifest.name} was not built from the files of {base.root} alone: a file has changed, or the build had "
        "options such as --vae or --controlnet. Pictures may differ for this reason."
    )


# -- what is compared ------------------------------------------------------------------------------------------------


def _resolve(
    loaded: Loaded, number: int, request: GenerationRequest, reference: Checkpoint | Endpoint
) -> GenerationParams:
    """Return the parameters of a request, without a refiner and forecasts. Raises RequestRefused with its number."""
    try:
        plain = request.model_copy(update={"use_refiner": False, "forecast": "off", "output_format": "png"})
        params = resolve(plain, loaded.served)
        if isinstance(reference, Checkpoint):
            check_peer(params)
        return params
    except RequestRefused as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise RequestRefused(f"request {number}, {error.field}", message) from error


def _load_release(store: str, release: str, name: str, **changes: object) -> tuple[Loaded, Candidate]:
    """Load a release with these changed settings, and return it also as a candidate."""
    memory, began = MemoryGrowth(), time.perf_counter()
    loaded = load_in_process(store, release, **changes)
    load_seconds = time.perf_counter() - began

    def generate_one(params: GenerationParams) -> tuple[Pixels, int | None]:
        [image], _, _ = generate(loaded.model, [params])
        return image, memory.peak_bytes()

    return loaded, Candidate(
        name, generate_one, lambda params: release_work(loaded, params), precision_of(loaded), load_seconds
    )


def _of_release(
    store: str,
    manifest: Manifest,
    loaded: Loaded,
    plain: Candidate,
    requests: Sequence[GenerationParams],
    unavailable: dict[str, str],
    report: Report,
) -> Iterator[Candidate]:
    """Yield the release; then in 8 bits, which is loaded once its pictures have shown its memory; then forecasts."""
    yield plain
    quantized = next((engine.precision for engine in manifest.engines if engine.precision.is_quantized), FP8)
    in_8_bits = f"{RELEASE} in {quantized.name.upper()}"
    if loaded.precision != quantized:
        report(f"Loading the {in_8_bits}, if it has these engines")
        try:
            _, candidate = _load_release(store, manifest.name, in_8_bits, precision=quantized.name)
        except NoEngineForTarget as error:
            unavailable[in_8_bits] = error.args[0]  # without the remedy, which is for a deployment
        else:
            yield candidate
    yield from _forecasts(plain, requests, unavailable)


def _forecasts(
    plain: Candidate, requests: Sequence[GenerationParams], unavailable: dict[str, str]
) -> Iterator[Candidate]:
    """Yield the release with forecasts, and without them in as many steps as they evaluate."""

    def fewer_steps(params: GenerationParams) -> GenerationParams:
        return replace(params, num_inference_steps=evaluation_count("fast", params.num_inference_steps))

    names = f"{RELEASE}, forecast fast", f"{RELEASE}, fewer steps"
    try:
        for params in requests:
            check_forecast(sampler_spec(params.scheduler), "fast")
            if fewer_steps(params) == params:
                raise RequestRefused("forecast", f"none of {params.num_inference_steps} steps is forecast. Use more.")
    except RequestRefused as error:
        unavailable |= dict.fromkeys(names, str(error))
        return
    loaded = replace(plain, load_seconds=None)
    yield replace(loaded, name=names[0], change=lambda params: replace(params, forecast="fast"))
    yield replace(loaded, name=names[1], change=fewer_steps)


@contextmanager
def _references(
    reference: Checkpoint | Endpoint, loaded: Loaded, compiled: bool, report: Report
) -> Iterator[list[Candidate]]:
    """Start the reference's processes, and yield it as candidates, the reference itself first."""
    if isinstance(reference, Endpoint):
        yield [_of_server(reference)]
        return
    kinds, precision = PEERS if compiled else PEERS[:1], loaded.precision.io
    report("Loading diffusers")
    with start_peers(reference, precision, kinds) as peers:
        yield [_of_peer(peer, precision) for peer in peers]


def _of_peer(peer: Peer, precision: str) -> Candidate:
    def generate_one(params: GenerationParams) -> tuple[Pixels, int | None]:
        [image], memory = peer.generate(params)
        return image, memory

    own = (("diffusers", version("diffusers")),)
    return Candidate(f"diffusers {peer.kind}", generate_one, peer.work, precision, peer.load_seconds, own=own)


def _of_server(endpoint: Endpoint) -> Candidate:
    def ask(params: GenerationParams) -> Pixels:
        fields = {name: value for name in FIELDS if (value := getattr(params, name)) is not None}
        asked = fields | {"use_refiner": False, "forecast": params.forecast, "output_format": params.output_format}
        [file, *_] = decode_images(call(endpoint, asked, _TIMEOUT_SECONDS))
        try:
            return np.asarray(Image.open(io.BytesIO(file), formats=["PNG"]).convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise CallFailed(f"{endpoint.url} returned an image that is not a PNG.") from error

    def work(params: GenerationParams) -> Work:
        def generate_one() -> dict[str, float]:
            ask(params)
            return {}

        return generate_one

    own = tuple((name, "unknown") for name in ("gpu", "driver", "torch", "commit"))
    return Candidate("server", lambda params: (ask(params), None), work, "unknown", None, own=own)


# -- how it is measured ----------------------------------------------------------------------------------------------


def _measure(
    made: Sequence[Made], requests: Sequence[GenerationParams], runs: int, report: Report
) -> tuple[Variant, ...]:
    """Measure the first request of each candidate. The pictures of the first candidate are the reference."""
    report(f"Measuring {len(made)} variants alternately")
    works = [each.candidate.work(each.candidate.change(requests[0])) for each in made]
    variants = []
    for each, times in zip(made, measure(works, 0, runs), strict=True):
        candidate, params = each.candidate, each.candidate.change(requests[0])
        has_load = candidate.load_seconds is not None
        row = timed_row(candidate.name, params, candidate.precision, *times)
        variants.append(
            Variant(
                name=candidate.name,
                params=params,
                pictures=each.pictures,
                distances=tuple(map(_distances, made[0].pictures, each.pictures)),
                load_seconds=candidate.load_seconds,
                first_seconds=each.first_seconds if has_load else None,
                memory_bytes=each.memory_bytes if has_load else None,
                row=row.model_copy(update=dict(candidate.own)),
            )
        )
    return tuple(variants)


def _generate(candidate: Candidate, requests: Sequence[GenerationParams], report: Report) -> Made:
    """Generate the picture of each request."""
    pictures, seconds, memory = [], [], None
    for number, params in enumerate(requests, start=1):
        report(f"{candidate.name}: picture {number} of {len(requests)}")
        began = time.perf_counter()
        image, memory = candidate.generate(candidate.change(params))
        seconds.append(time.perf_counter() - began)
        pictures.append(image)
    return Made(candidate, tuple(pictures), seconds[0], memory)


def _distances(expected: Pixels, found: Pixels) -> tuple[float, float]:
    return psnr(expected, found), perceptual_distance(expected, found)
