"""Loading a release as a server does, and changing its manifest."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import PreheatError
from model.loading.load import Loaded
from model.loading.target import Target
from model.settings import ServedBucket
from model.store.store import Store
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.deployments import deployed, load_release
from tests.support.releases import RELEASE_NAME, cpu_target

Entries = dict[str, Any]
Change = Callable[[Entries], object]

UNET = BASE_COMPONENTS.index("unet")
"""The position of the UNet among a release's engines and weights."""
VAE_ENCODER = BASE_COMPONENTS.index("vae_encoder")
REBUILD = "`preheat build`, `preheat publish`"


def load(
    store: Store,
    name: str = RELEASE_NAME,
    targets: list[Target] | None = None,
    buckets: list[ServedBucket] | None = None,
) -> Loaded:
    return load_release(store, deployed(name, buckets=tuple(buckets or ())), targets or [cpu_target()], ColdStart())


def refusal(kind: type[PreheatError], store: Store, **options: Any) -> str:
    """Return the message of the load's error, which must be of exactly this class and fit into a log line."""
    with pytest.raises(PreheatError) as caught:
        load(store, **options)
    assert type(caught.value) is kind, repr(caught.value)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 900
    return message


def change_manifest(store: WritableLocalStore, entries: Entries, change: Change) -> None:
    """Write a changed copy of a manifest's entries to the store."""
    changed = copy.deepcopy(entries)
    change(changed)
    releases.write_manifest(store.root, changed)


def make_static(entries: Entries, *sizes: tuple[int, int], component: str) -> None:
    """Replace the dynamic engine of a component by one for each size (height, width)."""
    dynamic = next(engine for engine in entries["engines"] if engine["component"] == component)
    entries["engines"].remove(dynamic)
    for number, (height, width) in enumerate(sizes):
        engine = copy.deepcopy(dynamic) | {"key": f"{number:064d}"}
        engine["bucket"]["height"] = {"min": height, "max": height, "multiple": 1}
        engine["bucket"]["width"] = {"min": width, "max": width, "multiple": 1}
        entries["engines"].append(engine)


def without_component(name: str) -> Change:
    def change(entries: Entries) -> None:
        del entries["architectures"][name]
        for kind in ("engines", "weights"):
            entries[kind] = [record for record in entries[kind] if record["component"] != name]

    return change
