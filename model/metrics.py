"""Counters and timings for Prometheus at /metrics/. `model.cold_start` has the cold start's gauge.

Steps per second: rate(preheat_steps_total). Images per second: rate(preheat_images_total).
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from prometheus_client import Counter, Gauge, Histogram

from model.pipeline.components import unets
from model.pipeline.params import Task
from model.statuses import STATUSES

# Upper bounds of the histograms.
_SECONDS_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300)
_IMAGES_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_EVALUATIONS_BOUNDS = (1, 2, 4, 8, 12, 16, 20, 25, 30, 40, 50, 75, 100)
_DECIBELS_BOUNDS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60)

REQUESTS = Counter(
    "preheat_requests_total",
    "Requests answered, by HTTP status and release; empty for a release that is not served.",
    ["status", "release"],
)
ERRORS = Counter(
    "preheat_errors_total",
    f"Requests without an image: {', '.join(kind for _, kind in STATUSES)}.",
    ["kind"],
)
CANCELLATIONS = Counter(
    "preheat_cancellations_total",
    "Requests cancelled by their client or their deadline, by state: decoding, queued or running.",
    ["state"],
)
QUEUE = Gauge("preheat_queue_images", "Accepted images that wait for a denoising loop.")
QUEUE_WAIT = Histogram("preheat_queue_wait_seconds", "Time from acceptance to joining a loop.", buckets=_SECONDS_BOUNDS)
ACTIVE = Gauge("preheat_active_images", "Images in the denoising loops of a component.", ["component"])
STEP_IMAGES = Histogram("preheat_step_images", "Images advanced by one step.", ["component"], buckets=_IMAGES_BOUNDS)
STEP_SECONDS = Histogram(
    "preheat_step_seconds",
    "Denoising step time on the host in seconds; GPU work may still be queued.",
    ["component"],
    buckets=_SECONDS_BOUNDS,
)
STEPS = Counter("preheat_steps_total", "Denoising steps. One step advances all images of a loop.", ["component"])
IMAGE_EVALUATIONS = Histogram(
    "preheat_image_evaluations",
    "Evaluations of the UNet for a finished image. With forecasts they are fewer than its steps.",
    buckets=_EVALUATIONS_BOUNDS,
)
STAGE_SECONDS = Histogram(
    "preheat_stage_seconds",
    "Request time by stage in seconds: text, denoise, refine, decode, encode.",
    ["stage"],
    buckets=_SECONDS_BOUNDS,
)
PREPARATION_WAIT = Histogram(
    "preheat_preparation_wait_seconds",
    "Time that an input image, or long prompts, waited to be decoded or read.",
    buckets=_SECONDS_BOUNDS,
)
PREPARATION_SECONDS = Histogram(
    "preheat_preparation_seconds",
    "Time to decode an input image, to read the headers of a request's images, or to read long prompts.",
    buckets=_SECONDS_BOUNDS,
)
REQUEST_SECONDS = Histogram(
    "preheat_request_seconds", "Time from arrival to the finished images, by task.", ["task"], buckets=_SECONDS_BOUNDS
)
IMAGES = Counter("preheat_images_total", "Finished images, by task: text_to_image, image_to_image, inpaint.", ["task"])
FLAGGED_IMAGES = Counter("preheat_flagged_images_total", "Finished images that the safety checker flagged.")
ADAPTER_MERGES = Counter("preheat_adapter_merges_total", "Times that other adapters were merged into the weights.")
ADAPTER_MERGE_SECONDS = Histogram(
    "preheat_adapter_merge_seconds",
    "Time of a merge on the host in seconds; GPU work may still be queued.",
    buckets=_SECONDS_BOUNDS,
)
ADAPTERS_CACHED = Gauge("preheat_adapters_cached", "LoRA adapters whose factors are on the device.")
ADAPTER_LISTS = Counter("preheat_adapter_lists_total", "Times that the store's list of adapters was read.")
ADAPTER_LOOKUPS = Counter(
    "preheat_adapter_lookups_total",
    "Adapters that requests named by a pattern of `loras`: read, missing, refused, failed. One that was read before is "
    "not counted.",
    ["outcome"],
)
RELEASE_RESIDENT = Gauge("preheat_release_resident", "1 while the weights of a release are on the device.", ["release"])
RELEASE_LOADS = Counter(
    "preheat_release_loads_total",
    "Releases that were loaded after the start: into a new slot (open), in place of another one (fill), failed.",
    ["outcome"],
)
RELEASE_LOAD_SECONDS = Histogram(
    "preheat_release_load_seconds",
    "Time to load a release after the start, without the time that it waited for its slot.",
    ["outcome"],
    buckets=_SECONDS_BOUNDS,
)
COMPARISONS = Counter(
    "preheat_comparisons_total",
    "Served images that were chosen to be compared with fp16, by outcome: compared, dropped, failed.",
    ["outcome"],
)
COMPARISON_DECIBELS = Histogram(
    "preheat_comparison_decibels",
    "PSNR in dB of served images against the same images in fp16; 100 for equal images.",
    buckets=_DECIBELS_BOUNDS,
)
HEALTHY = Gauge("preheat_healthy", "1 while the model is loaded and healthy, else 0.")
GPU_MEMORY = Gauge(
    "preheat_gpu_memory_bytes", "GPU memory: total, used (by all processes), reserved (by PyTorch).", ["kind"]
)
HOST_MEMORY = Gauge("preheat_host_memory_bytes", "Resident memory of the server and its workers; 0: not known.")


def _create_labels() -> None:
    """Create all labels, so that a rate includes the first event."""
    labels: dict[Counter | Gauge | Histogram, Iterable[str]] = {
        ERRORS: (kind for _, kind in STATUSES),
        CANCELLATIONS: ("decoding", "queued", "running"),
        ADAPTER_LOOKUPS: ("read", "missing", "refused", "failed"),
        COMPARISONS: ("compared", "dropped", "failed"),
        RELEASE_LOADS: ("open", "fill", "failed"),
        IMAGES: get_args(Task),
        REQUEST_SECONDS: get_args(Task),
        ACTIVE: (unet.name for unet in unets()),
        STEPS: (unet.name for unet in unets()),
    }
    for metric, values in labels.items():
        for value in values:
            metric.labels(value)


_create_labels()


def _resident_bytes() -> float:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        return 0.0


HOST_MEMORY.set_function(_resident_bytes)


def observe_preparation(waited: float, worked: float) -> None:
    """Count work that precedes the scheduler: the seconds that it has waited, and that it has taken."""
    PREPARATION_WAIT.observe(waited)
    PREPARATION_SECONDS.observe(worked)


def gpu_memory(device: torch.device) -> dict[str, int]:
    """Return bytes of GPU memory: total, used by all processes, reserved by PyTorch. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"total": total, "used": total - free, "reserved": torch.cuda.memory_reserved(device)}


def watch_gpu_memory(device: torch.device) -> None:
    """Report the GPU's memory at every scrape of the metrics. Does nothing on a CPU."""
    for kind in gpu_memory(device):
        GPU_MEMORY.labels(kind).set_function(partial(_gpu_bytes, device, kind))


def _gpu_bytes(device: torch.device, kind: str) -> float:
    return gpu_memory(device)[kind]
