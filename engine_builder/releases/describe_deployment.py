"""Lines that describe what a server of a deployment would serve, and the memory that it needs."""

from collections.abc import Sequence
from typing import Any

from model.deployment import Deployment
from model.loading.select import Selection
from model.loading.served import ServedModel, SizeList
from model.pipeline.spec import UNET
from model.settings import Settings


def describe_memory(selections: Sequence[Selection], config: Any, settings: Settings) -> list[str]:
    """Describe the memory of the releases and their slots, as a load estimates it."""
    import torch  # here, because a check with refusals does not need it

    from model.loading.memory import common_weights, further_bytes, needed_bytes

    accelerator = config.resources.accelerator.accelerator
    device = torch.device("cuda" if accelerator else "cpu")
    first = needed_bytes(device, selections[0], Deployment.of(settings).ranks)
    note = "(an estimate, without the memory of running steps, decoding and adapters)"
    if len(selections) == 1:
        return [f"memory   {first / 2**20:.0f} MiB {note}"]
    further = further_bytes(device, selections[0], common_weights(selections, bool(settings.loras)))
    slots = min(settings.weight_slots or len(selections), len(selections))
    sizes = [first, further, first + (slots - 1) * further]
    of_first, of_further, of_all = (f"{size / 2**20:.0f} MiB" for size in sizes)
    return [
        f"memory   {of_first} for the first release, {of_further} for each further one, {of_all} for {slots} of "
        f"{len(selections)} at once {note}"
    ]


def describe(selection: Selection, served: ServedModel, settings: Settings) -> list[str]:
    """Describe a release: its signer, target, sizes, what a cold start fetches, and its adapters."""
    manifest, sizes = selection.manifest, served.sizes
    own = [engine for engine in selection.engines[UNET] if engine.component == UNET]
    by_precision = [[e.bucket for e in own if e.precision == p] for p in {engine.precision for engine in own}]
    if isinstance(sizes, SizeList):
        parts = []
        for width, height in sizes.sizes:
            batches = [
                max(bucket.batch.max for bucket in buckets if bucket.holds(bucket.batch.max, height, width))
                for buckets in by_precision
            ]
            limits = [bucket.rows for bucket in settings.buckets if (bucket.width, bucket.height) == (width, height)]
            parts.append(f"{width}x{height}@{min([*batches, *limits])}")
        listed = ", ".join(parts)
    else:
        batch = min(max(bucket.batch.max for bucket in buckets) for buckets in by_precision)
        listed = f"sides from {sizes.min_side} to {sizes.max_side} pixels in steps of {sizes.multiple}, @{batch}"
    total = sum(blob.bytes for blob in selection.blobs())
    signer = f"signed by {manifest.signature.key_id}" if manifest.signature else "not signed"
    return [
        f"release  {manifest.name}, {signer}",
        f"target   {selection.target}",
        f"sizes    {listed} (width x height @ the UNet's largest batch; an image with guidance takes two)",
        *(
            []
            if served.image_sizes == sizes
            else [f"images   requests with an image: {served.image_sizes or 'refused'}"]
        ),
        f"fetches  {total / 2**20:.0f} MiB at a cold start",
        *([f"adapters {', '.join(settings.loras)}"] if settings.loras else []),
    ]
