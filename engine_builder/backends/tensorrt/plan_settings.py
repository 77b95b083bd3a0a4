"""What a TensorRT build decides, as plain functions that need no TensorRT: profiles, flags, memory, keys."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine_builder.backends.onnx.export import graph_key
from engine_builder.backends.tensorrt.options import (
    Choices,
    Refit,
)
from engine_builder.networks.network import Network
from model.errors import PreheatError
from model.loading.target import Target
from model.store.manifest import Bucket, Signature, Span, WeightsRecord

# Raised whenever these settings change what comes out of a build.
RECIPE = 1
Shape = tuple[int, ...]


class NotEnoughMemory(PreheatError):
    """A build would not fit in this machine's memory."""


@dataclass(frozen=True)
class Range:
    """The shapes of one input in one profile: smallest, the one that kernels are tuned for, largest."""

    smallest: Shape
    tuned: Shape
    largest: Shape


Profile = dict[str, Range]
"""One optimization profile: every input by name."""


def profiles(signature: Signature, buckets: Sequence[Bucket]) -> list[Profile]:
    """A profile for each bucket, in order. A static bucket's has one shape; a dynamic one is tuned for its largest.

    Every input is in every profile, though they share sizes: in an exported graph two inputs' rows can be two symbols
    (`time_ids` has had one of its own), and TensorRT refuses a network with a dynamic input that no profile names.
    """
    made = []
    for bucket in buckets:
        profile = {}
        for spec in signature.inputs:
            shapes = [_shape(spec.shape, bucket, end) for end in ("min", "max")]
            profile[spec.name] = Range(shapes[0], shapes[1], shapes[1])
        made.append(profile)
    return made


def _shape(dimensions: Sequence[int | str], bucket: Bucket, end: Literal["min", "max"]) -> Shape:
    spans = {"rows": bucket.rows, "height": bucket.height, "width": bucket.width}
    shape = []
    for dimension in dimensions:
        if isinstance(dimension, int):
            shape.append(dimension)
            continue
        symbol, _, divisor = dimension.partition("/")
        span = spans[symbol]
        assert isinstance(span, Span), "a bucket has the sizes of its signature"
        shape.append((span.min if end == "min" else span.max) // int(divisor or 1))
    return tuple(shape)


def builder_flags(refit: Refit, precision: str) -> dict[str, bool]:
    """BuilderFlag -> set or cleared. STRIP_PLAN leaves the weights out of the plan; the refit it allows is named.

    TF32 is TensorRT's default for fp32 and keeps 10 bits of 23: fp32 is asked for by those who want them all.
    """
    return {
        "STRIP_PLAN": True,
        "REFIT_IDENTICAL": refit == "identical",
        "REFIT": refit == "any",
        "TF32": precision != "fp32",
    }


def plan_key(
    network: Network,
    target: Target,
    version: str,
    buckets: Sequence[Bucket],
    choices: Choices,
    weights: WeightsRecord,
) -> str:
    """SHA-256 over all that decides a plan: the graph, the target, TensorRT's full version, profiles, choices, and the
    weights where the refit is identical."""
    recipe = {
        "recipe": RECIPE,
        "graph": graph_key(network),
        "target": target.key,
        "tensorrt": version,
        "buckets": [bucket.model_dump(mode="json") for bucket in buckets],
        "flags": builder_flags(choices.refit, network.precision),
        "compatibility": choices.compatibility,
        "workspace": choices.workspace,
        "level": choices.level,
        "weights": list(weights.identity) if choices.refit == "identical" else None,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def profile_key(plan: str, profile: int) -> str:
    """The engine key of one profile of a plan."""
    return hashlib.sha256(f"{plan} profile {profile}".encode()).hexdigest()


# Copies of the weights that a build holds at its largest, by what is documented of parser and builder: on the host the
# file's and the network's; on the GPU the network's and the engine's while it is timed. Not measured.
_HOST_COPIES, _GPU_COPIES = 3, 2
_LEAST_WORKSPACE = 256 * 2**20


def workspace_limit(choices: Choices, weight_bytes: int, free_gpu: int) -> int:
    """Bytes of GPU memory for kernels' workspace: what was chosen, else half of what the weights leave."""
    if choices.workspace is not None:
        return choices.workspace
    return max((free_gpu - _GPU_COPIES * weight_bytes) // 2, _LEAST_WORKSPACE)


def check_build_memory(component: str, weight_bytes: int, workspace: int, free_gpu: int, free_host: int) -> None:
    """Refuse a build that cannot fit before it begins: it would fail after minutes, or end the process.

    Raises NotEnoughMemory with what is missing and what would do.
    """
    for kind, needed, free, remedy in (
        ("GPU memory", _GPU_COPIES * weight_bytes + workspace, free_gpu, "end what else uses the GPU, give a smaller "
         "--workspace, or build on a larger GPU with --compatibility"),
        ("memory", _HOST_COPIES * weight_bytes, free_host, "end other processes, or build on a machine with more"),
    ):  # fmt: skip
        if needed > free:
            raise NotEnoughMemory(
                f"Building {component} takes about {needed / 2**30:.1f} GiB of {kind} and {free / 2**30:.1f} GiB are "
                f"free: {remedy}."
            )


def describe_unsupported(nodes: Sequence[Mapping[str, str]], limit: int = 20) -> str:
    """A readable list of what TensorRT's parser does not take: "Op x3 (first: node_name): why", most frequent first.

    `nodes`: {"operator", "name", "reason"} each.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        groups.setdefault((node["operator"], node["reason"]), []).append(node["name"])
    lines = [
        f"{operator} x{len(names)} (first: {names[0]}): {reason}"
        for (operator, reason), names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    more = [f"and {len(lines) - limit} more kinds"] if len(lines) > limit else []
    return "; ".join(lines[:limit] + more)
