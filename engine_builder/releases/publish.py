"""Merge the drafts of one model, for any number of targets, into one release. Compiles nothing."""

from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases.signing import public_key, sign
from engine_builder.stores.store import WritableStore
from model.errors import ManifestError, PreheatError, UntrustedRelease
from model.store.manifest import Manifest
from model.store.manifest_json import split_name
from model.store.signature import check_signature


class NothingToPublish(PreheatError):
    """The store has no draft of the model."""

    remedy = "Run `preheat build` first."


def publish(store: WritableStore, name: str, key: Ed25519PrivateKey | None = None) -> tuple[Manifest, bool]:
    """Publish the drafts of `name` ("model/version", or "model" for the next whole number), signed with `key`.

    Returns the manifest, and False if nothing new was published. Without a version, drafts equal to the newest release
    publish nothing, unless that release lacks the requested signature. Raises NothingToPublish, ReleaseExists,
    CorruptBlob or StoreError.
    """
    model, _, version = name.partition("/")
    split_name(f"{model}/{version or '1'}")
    drafts = read_drafts(store, model)
    merged = merge(drafts)
    if not version:
        published = [split_name(release) for release in store.releases()]
        numbers = sorted((number for of_model, number in published if of_model == model and number.isdigit()), key=int)
        if numbers:
            newest = store.read_release(f"{model}/{numbers[-1]}")
            if _content(newest) == _content(merged) and _is_signed(newest, key):
                return newest, False
        version = str(int(numbers[-1]) + 1 if numbers else 1)
    manifest = merged.model_copy(
        update={"version": version, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    )
    if key is not None:
        manifest = sign(manifest, key)
    store.write_release(manifest)
    return manifest, True


def read_drafts(store: WritableStore, model: str) -> list[Manifest]:
    """Return the model's drafts, newest first. Drafts of another source than the newest draft's are omitted."""
    drafts = []
    for record in store.records("drafts"):
        data = store.read_record("drafts", record)
        try:
            draft = Manifest.model_validate_json(data or b"")
        except ValueError as error:
            raise ManifestError(
                f"The draft {record} in {store.url} is damaged.", "Run `preheat build` again."
            ) from error
        if draft.model == model:
            drafts.append(draft)
    if not drafts:
        raise NothingToPublish(f"{store.url} has no build of {model}.")
    drafts.sort(key=lambda draft: draft.created, reverse=True)
    return [draft for draft in drafts if draft.builder.get("source") == drafts[0].builder.get("source")]


def merge(drafts: list[Manifest]) -> Manifest:
    """Return one manifest with the engines and weights of all drafts. They have one source, so other entries agree.

    Entries are sorted, so rebuilding one of several drafts gives an equal manifest.
    """
    newest = drafts[0]
    engines = {(e.component, e.key): e for draft in reversed(drafts) for e in draft.engines}
    weights = {(w.component, w.precision.name, w.layout): w for draft in reversed(drafts) for w in draft.weights}
    return newest.model_copy(
        update={
            "builder": {key: value for key, value in newest.builder.items() if key != "tensorrt"},
            "engines": tuple(engine for _, engine in sorted(engines.items(), key=lambda item: item[0])),
            "weights": tuple(record for _, record in sorted(weights.items(), key=lambda item: item[0])),
        }
    )


def _is_signed(manifest: Manifest, key: Ed25519PrivateKey | None) -> bool:
    """True if `key` signed the release, or is None."""
    if key is None:
        return True
    try:
        check_signature(manifest, [public_key(key)])
    except UntrustedRelease:
        return False
    return True


def _content(manifest: Manifest) -> object:
    """Return the entries that distinguish two releases: all but versions, dates, signatures and measurements."""
    return manifest.model_dump(
        mode="json",
        exclude={
            "version": True,
            "created": True,
            "signature": True,
            "engines": {"__all__": {"accuracy", "build_seconds"}},
        },
    )
