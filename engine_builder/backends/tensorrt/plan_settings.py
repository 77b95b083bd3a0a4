"""The decisions of a build of plans, as plain functions without a library: profiles, flags, memory, keys."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_builder.backends.aot_inductor.compile import sizes_of
from engine_builder.backends.onnx.export_graph import graph_key
from engine_builder.backends.tensorrt.plan_options import PlanOptions, Refit
from engine_builder.networks.network import Network, digest_json
from model.engines.shapes import shape_at
from model.errors import PreheatError
from model.loading.target import Target
from model.store.manifest import Bucket, Signature, WeightsRecord
from model.store.precision import Precision

# Part of every plan key. Raise it when these settings change the result of a build.
PLAN_VERSION = 1

# Copies of the weights that a build holds at its peak, estimated from the documentation of parser and builder, not
# measured. On the host: the files and the network. On the GPU: the network, and the engine while it is timed.
_HOST_COPIES, _GPU_COPIES = 3, 2
_MAX_KINDS = 20  # of unsupported nodes that an error lists
_MIN_WORKSPACE_BYTES = 256 * 2**20

Shape = tuple[int, ...]


class NotEnoughMemory(PreheatError):
    """A build would not fit into this machine's memory."""


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input in one profile: smallest, the one that kernels are tuned for, largest."""

    smallest: Shape
    tuned: Shape
    largest: Shape


Profile = dict[str, ShapeRange]
"""One optimization profile: the range of every input, by name."""


def optimization_profiles(signature: Signature, buckets: Sequence[Bucket]) -> list[Profile]:
    """Return a profile for each bucket, in order. A dynamic bucket's kernels are tuned for its largest shape.

    Every profile names every input, although they share sizes. An exported graph can have two symbols for the batch:
    `time_ids` had one of its own. TensorRT refuses a dynamic input that no profile names.
    """
    symbols = ("rows", "height", "width")
    profiles = []
    for bucket in buckets:
        low = dict(zip(symbols, sizes_of(bucket, "min"), strict=True))
        high = dict(zip(symbols, sizes_of(bucket, "max"), strict=True))
        profile = {}
        for spec in signature.inputs:
            largest = shape_at(spec.shape, high)
            profile[spec.name] = ShapeRange(shape_at(spec.shape, low), largest, largest)
        profiles.append(profile)
    return profiles


def builder_flags(refit: Refit, precision: Precision) -> dict[str, bool]:
    """Return BuilderFlag -> set or cleared. STRIP_PLAN leaves the weights out of a plan that is refit.

    TensorRT's default for fp32 is TF32, which keeps 10 of 23 mantissa bits. An fp32 engine has it off.
    """
    return {
        "STRIP_PLAN": refit != "none",
        "REFIT_IDENTICAL": refit == "identical",
        "REFIT": refit == "any",
        "TF32": precision.compute != "float32",
    }


def plan_key(
    network: Network,
    targets: Sequence[Target],
    version: str,
    buckets: Sequence[Bucket],
    options: PlanOptions,
    weights: WeightsRecord,
) -> str:
    """Return the SHA-256 of everything that decides a plan. The weights do not count if the plan takes any.

    `version` is the full version of the library.
    """
    return digest_json(
        {
            "recipe": PLAN_VERSION,
            "graph": graph_key(network),
            "target": "+".join(target.key for target in targets),
            "tensorrt": version,
            "buckets": [bucket.model_dump(mode="json") for bucket in buckets],
            "flags": builder_flags(options.refit, network.precision),
            "compatibility": options.compatibility,
            "workspace": options.workspace,
            "level": options.level,
            "weights": list(weights.identity) if options.refit != "any" else None,
        }
    )


def profile_key(plan: str, profile: int, target: Target | None = None) -> str:
    """Return the engine key of one profile of a plan. `target`: one of several that the plan serves."""
    suffix = f" {target.key}" if target else ""
    return hashlib.sha256(f"{plan} profile {profile}{suffix}".encode()).hexdigest()


def workspace_limit(options: PlanOptions, weight_bytes: int, free_gpu: int | None) -> int | None:
    """Return the bytes of GPU memory for kernels: the chosen number, else half of what the weights leave free.

    `free_gpu`: bytes; None: there is no GPU. Then, and without a chosen number, the result is None: no limit.
    """
    if options.workspace is not None or free_gpu is None:
        return options.workspace
    return max((free_gpu - _GPU_COPIES * weight_bytes) // 2, _MIN_WORKSPACE_BYTES)


def check_build_memory(
    component: str, weight_bytes: int, workspace: int | None, free_gpu: int | None, free_host: int
) -> None:
    """Raise NotEnoughMemory for a build that cannot fit. It would fail after minutes, or end the process.

    All sizes are in bytes. `free_gpu`: None if the build needs no GPU.
    """
    needs = [
        ("memory", _HOST_COPIES * weight_bytes, free_host, "End other processes, or use a machine with more memory.")
    ]
    if free_gpu is not None:
        remedy = (
            "End other programs on the GPU, give a smaller --workspace, or build on a larger GPU with --compatibility."
        )
        needs.insert(0, ("GPU memory", _GPU_COPIES * weight_bytes + (workspace or 0), free_gpu, remedy))
    for kind, needed, free, remedy in needs:
        if needed > free:
            raise NotEnoughMemory(
                f"Building {component} takes about {needed / 2**30:.1f} GiB of {kind}, and {free / 2**30:.1f} GiB are "
                "free.",
                remedy,
            )


def describe_unsupported(nodes: Iterable[tuple[str, str, str]]) -> str:
    """List nodes (operator, name, reason) by frequency: "Op x3 (first: node_name): reason; ..."."""
    groups: dict[tuple[str, str], list[str]] = {}
    for operator, name, reason in nodes:
        groups.setdefault((operator, reason), []).append(name)
    lines = [
        f"{operator} x{len(names)} (first: {names[0]}): {reason}"
        for (operator, reason), names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    omitted = [f"and {len(lines) - _MAX_KINDS} more kinds"] if len(lines) > _MAX_KINDS else []
    return "; ".join(lines[:_MAX_KINDS] + omitted)
