"""Merge the drafts of one model, for any number of targets, into one release. Compiles nothing.

A draft is the manifest that `preheat build` writes for one target and precision. Its source is a digest of the model's
files: drafts of different sources cannot be merged.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.quantization.validation.thresholds import Thresholds
from engine_builder.releases.signing import public_key, sign
from engine_builder.releases.validation_gate import quantized_engines, require_validation
from engine_builder.stores.store import WritableStore
from model.errors import ManifestError, PreheatError, ReleaseExists, UntrustedRelease
from model.pipeline.components import find_component
from model.store.manifest import EngineRecord, Manifest, WeightsKey, WeightsRecord
from model.store.manifest_json import split_name
from model.store.precision import FP16
from model.store.signature import check_signature


class NothingToPublish(PreheatError):
    """The store has no draft of the model."""

    remedy = "Run `preheat build` first."


class MissingFp16Engines(PreheatError):
    """The first or last steps shall run in fp16, and a UNet has no fp16 engine for them."""

    remedy = (
        "Build the same sizes in fp16 (`preheat build --precision fp16`), or build in FP8 with a policy without "
        "fp16_steps."
    )


def publish(
    store: WritableStore,
    name: str,
    private_key: Ed25519PrivateKey | None = None,
    thresholds: Thresholds | None = None,
    accept: bool = False,
    without_fp8: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
) -> tuple[Manifest, bool]:
    """Publish the drafts of a model as one release. Sign the release if a private key is given.

    name: "model/version", or "model" for the next whole number.
    thresholds: the limits of the validation that 8-bit engines need; None: the defaults. accept: publish engines that
    violate them, and list the violations in the manifest. without_fp8: leave out the drafts with 8-bit engines.
    report: is called with a sentence for each draft that is left out because it is of another model than the newest.
    Returns what `write_once` returns. Raises NothingToPublish; ManifestError for an invalid name, a damaged draft or
    drafts that give no valid manifest; MissingFp16Engines; and as `require_validation` and `write_once` do.
    """
    model, _, version = name.partition("/")
    split_name(f"{model}/{version or '1'}")  # raises for an invalid name
    drafts, others = read_drafts(store, model, without_fp8)
    for draft, differing in others:
        report(f"Left out: the build for {_targets(draft)} of {draft.created[:16]}, which has another {differing}.")
    _check_weights(drafts)
    merged = merge_drafts(drafts)
    check_fp16_steps(merged)
    _check_signatures(merged)
    merged = require_validation(store, merged, thresholds or Thresholds(), accept)
    return write_once(store, merged, version, private_key)


def write_once(
    store: WritableStore, content: Manifest, version: str = "", private_key: Ed25519PrivateKey | None = None
) -> tuple[Manifest, bool]:
    """Write a release with this content under a version, "" for the next whole number. Sign it if a key is given.

    Returns the release's manifest, and True if this call wrote it. Returns an existing release and False if it has the
    same content, and the signature if one is requested: the newest numbered one, the one of the requested version, or
    one that was written at the same time.
    Raises ReleaseExists for another release of a requested version, CorruptBlob, StoreError, or ManifestError.
    """
    model = content.model

    def is_equal(existing: Manifest) -> bool:
        is_signed_as_requested = private_key is None or _is_signed_with(existing, private_key)
        return is_signed_as_requested and _content(existing) == _content(content)

    while True:
        versions = [version for _, version in map(split_name, store.releases(model))]
        newest = max(filter(str.isdigit, versions), key=int, default="")
        if not version and newest and is_equal(existing := store.read_release(f"{model}/{newest}")):
            return existing, False
        number, created = version or str(int(newest or 0) + 1), datetime.now(UTC).isoformat(timespec="seconds")
        manifest = content.model_copy(update={"version": number, "created": created, "signature": None})
        if private_key is not None:
            manifest = sign(manifest, private_key)
        try:
            store.write_release(manifest)
            return manifest, True
        except ReleaseExists:
            existing = store.read_release(manifest.name)
            if is_equal(existing):
                return existing, False
            if version:
                raise  # else another release took the number at this moment


def check_fp16_steps(manifest: Manifest) -> None:
    """Raise MissingFp16Engines if the release runs steps in fp16 for which it lacks engines of an 8-bit UNet."""
    steps = manifest.fp16_steps
    if steps is None or not steps.exist:
        return
    in_fp16 = {(e.component, e.target, e.bucket) for e in manifest.engines if e.precision == FP16}
    for engine in quantized_engines(manifest):
        is_unet = find_component(engine.component).phase == "step"
        if is_unet and (engine.component, engine.target, engine.bucket) not in in_fp16:
            raise MissingFp16Engines(
                f"The policy of {manifest.model} runs steps in fp16, and an engine of {engine.component} for "
                f"{engine.target} exists only in {engine.precision}."
            )


def read_drafts(
    store: WritableStore, model: str, without_fp8: bool = False
) -> tuple[list[Manifest], list[tuple[Manifest, str]]]:
    """Return the model's drafts that have the same source, preset and VAE as its newest draft, newest first. Then the
    others, each with what differs.

    Of drafts with 8-bit engines, only those with the newest one's quantization are returned: a release has one.
    without_fp8: ignores drafts with 8-bit engines, also as the newest draft.
    Raises NothingToPublish without a draft, ManifestError for a damaged one, or StoreError.
    """
    drafts = []
    for record_name in store.records("drafts"):  # of all models
        data = store.read_record("drafts", record_name)
        if data is None:  # deleted since it was listed
            continue
        try:
            draft = Manifest.model_validate_json(data)
        except ValueError as error:
            if not record_name.startswith(f"{model}."):  # of another model: see BuildPlan.draft_name
                continue
            raise ManifestError(
                f"The draft {record_name} in {store.url} is damaged.", "Run `preheat build` again."
            ) from error
        if draft.model == model:
            drafts.append(draft)
    if not drafts:
        raise NothingToPublish(f"{store.url} has no draft of {model}.")
    if without_fp8:
        drafts = [draft for draft in drafts if not quantized_engines(draft)]
        if not drafts:
            raise NothingToPublish(f"{store.url} has only drafts of {model} with 8-bit engines.")
    drafts.sort(key=lambda draft: draft.created, reverse=True)
    current: list[Manifest] = []
    others: list[tuple[Manifest, str]] = []
    quantizations: list[str | None] = []
    for draft in drafts:
        differing = [what for name, what in _MODEL.items() if draft.builder.get(name) != drafts[0].builder.get(name)]
        if not differing and quantized_engines(draft):
            quantizations.append(draft.builder.get("quantization"))
            differing = ["quantization"] if quantizations[-1] != quantizations[0] else []
        if differing:
            others.append((draft, " and another ".join(differing)))
        else:
            current.append(draft)
    return current, others


# The builder's entries that requests depend on -> what they are.
_MODEL = {
    "source": "source (files of the model, its refiner, ControlNets or IP-Adapters)",
    "preset": "preset",
    "vae": "VAE",
    "embedding_rows": "number of rows for embeddings",
}


# The builder's entries that describe only some of a release's engines.
_OF_ONE_DRAFT = ("tensorrt", "fp8", "fp8_convolutions", "int8", "lora_rank", "bands")


def merge_drafts(drafts: list[Manifest]) -> Manifest:
    """Return one manifest with the engines and weights of all drafts, which are of one source, newest first.

    Of equal engines, weights or architectures, the newest draft's entry is taken. Other entries are the newest draft's,
    without TensorRT's build options. Quantization and fp16 steps come from the newest draft that is quantized. The
    map for previews comes from the newest draft that has one.
    Engines and weights are sorted, so the order of the builds makes no difference. The schema is the oldest that has
    all entries.
    """
    newest = drafts[0]
    oldest_first = drafts[::-1]
    engines = {(engine.component, engine.key): engine for draft in oldest_first for engine in draft.engines}
    weights = {weights.key: weights for draft in oldest_first for weights in draft.weights}
    architectures = {name: digest for draft in oldest_first for name, digest in draft.architectures.items()}
    builder = {name: value for name, value in newest.builder.items() if name not in _OF_ONE_DRAFT}
    quantized = [draft for draft in drafts if "quantization" in draft.builder]
    previews = [draft.settings.preview for draft in drafts if draft.settings.preview is not None]
    merged = newest.model_copy(
        update={
            "builder": builder | ({"quantization": quantized[0].builder["quantization"]} if quantized else {}),
            "settings": newest.settings.model_copy(update={"preview": previews[0]}) if previews else newest.settings,
            "architectures": architectures,
            "fp16_steps": quantized[0].fp16_steps if quantized else None,
            "engines": tuple(engines[identity] for identity in sorted(engines)),
            "weights": tuple(weights[identity] for identity in sorted(weights)),
        }
    )
    return merged.model_copy(update={"schema_version": merged.required_schema})


def _check_weights(drafts: list[Manifest]) -> None:
    """Raise ManifestError if two drafts have other weights of a component: a release has them once.

    They are of one source, so a draft's weights are in the form of another version of Preheat.
    """
    first: dict[WeightsKey, tuple[Manifest, WeightsRecord]] = {}
    for draft in drafts:
        for weights in draft.weights:
            newer, other = first.setdefault(weights.key, (draft, weights))
            if other.identity != weights.identity:
                raise ManifestError(
                    f"The builds of {draft.model} for {_targets(newer)} and for {_targets(draft)} have the weights of "
                    f"{weights.component} in different forms.",
                    f"Build for {_targets(draft)} again with this version of Preheat (`preheat build`).",
                )


def _targets(draft: Manifest) -> str:
    return " and ".join(draft.targets)


def _check_signatures(manifest: Manifest) -> None:
    """Raise ManifestError if two engines of a component differ in what they take and return: no server loads them."""
    first: dict[tuple[str, str, str], EngineRecord] = {}
    for engine in manifest.engines:
        other = first.setdefault((engine.component, engine.target, engine.precision.unquantized.name), engine)
        if other.signature != engine.signature:
            raise ManifestError(
                f"The builds of {manifest.model} for {engine.target} have {engine.component} engines that take or "
                "return different tensors.",
                "Build each precision again with this version of Preheat and the same options (`preheat build`).",
            )


def _is_signed_with(manifest: Manifest, private_key: Ed25519PrivateKey) -> bool:
    try:
        check_signature(manifest, [public_key(private_key)])
    except UntrustedRelease:
        return False
    return True


def _content(manifest: Manifest) -> object:
    """Return the entries in which two different releases differ: all but version, date, signature and measurements."""
    return manifest.model_dump(
        mode="json",
        exclude={
            "version": True,
            "created": True,
            "signature": True,
            "settings": {"preview": {"layers", "error"}},  # fitted again by each build
            "engines": {"__all__": {"accuracy", "build_seconds"}},
        },
    )
