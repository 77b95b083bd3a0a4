"""What the server counts and times, for Prometheus at /metrics/. The cold start's gauge is in `model.cold_start`.

Steps a second is rate(preheat_steps_total), images a second rate(preheat_images_total): over a time of the reader's.
"""

from functools import partial

import torch
from prometheus_client import Counter, Gauge, Histogram

from model.engines.components import (
    REFINER_UNET,
    UNET,
)

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300)
_IMAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

REQUESTS = Counter("preheat_requests_total", "Requests answered, by HTTP status.", ["status"])
ERRORS = Counter(
    "preheat_errors_total",
    "Requests that got no picture: refused, overloaded, unavailable, deadline, broken_image, failed, cancelled.",
    ["kind"],
)
CANCELLATIONS = Counter(
    "preheat_cancellations_total", "Requests whose client left or whose time ran out: queued or running.", ["state"]
)
QUEUE = Gauge("preheat_queue_images", "Images accepted and not yet in a loop.")
QUEUE_WAIT = Histogram("preheat_queue_wait_seconds", "From acceptance to the first step.", buckets=_SECONDS)
ACTIVE = Gauge("preheat_active_rows", "Images in the loops of a component.", ["component"])
STEP_IMAGES = Histogram("preheat_step_images", "Images that a step moves on.", ["component"], buckets=_IMAGES)
STEP_SECONDS = Histogram(
    "preheat_step_seconds", "Of a step, as the host sees it; a GPU may still work.", ["component"], buckets=_SECONDS
)
STEPS = Counter("preheat_steps_total", "Steps taken, each of all the rows of a loop.", ["component"])
STAGE_SECONDS = Histogram(
    "preheat_stage_seconds",
    "Of a request, by stage: text, denoise, refine, decode, encode.",
    ["stage"],
    buckets=_SECONDS,
)
REQUEST_SECONDS = Histogram("preheat_request_seconds", "From arrival to the finished pictures.", buckets=_SECONDS)
IMAGES = Counter("preheat_images_total", "Pictures finished.")
HEALTHY = Gauge("preheat_healthy", "1 while the model serves.")
GPU_MEMORY = Gauge("preheat_gpu_memory_bytes", "Of the device: total, used (by anyone), reserved (by torch).", ["kind"])

# From the start, so that a rate over the first of each is seen.
for _kind in ("refused", "overloaded", "unavailable", "deadline", "broken_image", "failed", "cancelled"):
    ERRORS.labels(_kind)
for _state in ("queued", "running"):
    CANCELLATIONS.labels(_state)
for _component in (UNET, REFINER_UNET):
    ACTIVE.labels(_component)
    STEPS.labels(_component)


def gpu_memory(device: torch.device) -> dict[str, int]:
    """Bytes of the GPU: all of it, taken by anyone, taken by torch. Nothing on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"total": total, "used": total - free, "reserved": torch.cuda.memory_reserved(device)}


def watch_gpu_memory(device: torch.device) -> None:
    """Have the GPU's memory read whenever the metrics are. Nothing on a CPU."""
    for kind in gpu_memory(device):
        GPU_MEMORY.labels(kind).set_function(partial(_gpu_bytes, device, kind))


def _gpu_bytes(device: torch.device, kind: str) -> float:
    return gpu_memory(device)[kind]
