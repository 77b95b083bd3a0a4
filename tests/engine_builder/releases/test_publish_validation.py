"""The gate before publishing: FP8 engines need a stored validation of their quantization that keeps all limits."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine_builder.quantization.validation.report import ValidationReport
from engine_builder.quantization.validation.stored import BadReport, StoredValidation, write_validation
from engine_builder.quantization.validation.thresholds import Thresholds
from engine_builder.releases import signing
from engine_builder.releases.gc import find_garbage
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.publish import NothingToPublish, publish
from engine_builder.releases.validation_gate import EmulatedEngines, LimitsViolated, NotValidated
from engine_builder.stores.local import WritableLocalStore
from model.errors import UntrustedRelease
from model.loading.select import select
from model.store.manifest import Blob, Validation
from model.store.manifest_json import parse_manifest
from model.store.precision import BF16, FP8, INT8, Precision
from model.store.signature import check_signature
from tests.engine_builder.helpers import folder_of
from tests.support import releases
from tests.support.deployments import deployed
from tests.support.quantization import GPU, prompt_result, run, write_draft, write_fp8_draft
from tests.support.quantization import report_of as report_of_prompts

DIGEST, OTHER_DIGEST = (hashlib.sha256(text).hexdigest() for text in (b"a quantization", b"another"))
PICTURES = b"pictures of pairs"
OLD, NEW = "2020-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"
TOO_LOW = "The median SQNR of final latents is 15.00 dB; at least 20 dB is required."


def report_of(decibels: float = 30.0, prompts: int = 32, digest: str = DIGEST, **entries: Any) -> ValidationReport:
    """Return the report of a quantization. `decibels`: SQNR of the final latents."""
    results = (prompt_result(number, latents_decibels=decibels) for number in range(prompts))
    return report_of_prompts(*results, **{"identity": {"quantization": digest}} | entries)


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    """A store with a draft of FP8 engines for a GPU."""
    store = WritableLocalStore(tmp_path / "store")
    write_fp8_draft(store, DIGEST)
    return store


@pytest.fixture
def validated(store: WritableLocalStore) -> WritableLocalStore:
    """The store, after a check that keeps all limits."""
    write_validation(store, report_of(), PICTURES)
    return store


@pytest.fixture
def violated(store: WritableLocalStore) -> WritableLocalStore:
    """The store, after a check that violates one limit."""
    write_validation(store, report_of(decibels=15.0), PICTURES)
    return store


# -- publishing ------------------------------------------------------------------------------------------------------


def test_release_of_fp8_engines_names_its_validation(validated: WritableLocalStore) -> None:
    manifest, is_new = publish(validated, "toy", accept=True)
    assert is_new and validated.read_release("toy/1") == manifest
    assert manifest.builder == {"source": "1", "quantization": DIGEST} and manifest.schema_version == 2
    assert manifest.validation is not None
    assert (manifest.validation.accepted, manifest.validation.violations) == (False, ()), "all limits are kept"
    report, pictures = (
        validated.get(blob.sha256, blob.bytes).read_bytes()
        for blob in (manifest.validation.report, manifest.validation.pictures)
    )
    assert ValidationReport.model_validate_json(report) == report_of() and pictures == PICTURES
    assert publish(validated, "toy") == (manifest, False)


def test_refuses_fp8_engines_without_a_validation(store: WritableLocalStore, tmp_path: Path) -> None:
    command = f"Run `preheat check-fp8 MODEL --store {store.url} --no-refiner`"
    with pytest.raises(NotValidated, match=f"no intact validation of the quantization {DIGEST[:12]} of toy") as caught:
        publish(store, "toy")
    assert command in str(caught.value)
    with pytest.raises(NotValidated):
        publish(store, "toy", accept=True)
    write_fp8_draft(store, DIGEST, builder={"source": "1"})
    with pytest.raises(NotValidated, match="do not state how they were quantized. Build them again"):
        publish(store, "toy")
    assert store.releases() == []
    with_refiner = WritableLocalStore(tmp_path / "refiner")
    draft = releases.draft_release(with_refiner, refiner=True)
    write_fp8_draft(with_refiner, DIGEST, settings=draft.settings, architectures=draft.architectures)
    with pytest.raises(NotValidated, match="Run `preheat check-fp8 MODEL --store [^ ]*`"):
        publish(with_refiner, "toy")
    int8 = WritableLocalStore(tmp_path / "int8")
    write_draft(int8, GPU.key, INT8)
    with pytest.raises(NotValidated):
        publish(int8, "toy")


def test_refuses_a_validation_of_another_quantization(store: WritableLocalStore) -> None:
    write_validation(store, report_of(digest=OTHER_DIGEST), PICTURES)
    with pytest.raises(NotValidated):
        publish(store, "toy")
    misplaced = store.read_record("validations", OTHER_DIGEST)
    assert misplaced is not None
    store.write_record("validations", DIGEST, misplaced)
    with pytest.raises(NotValidated):
        publish(store, "toy")


@pytest.mark.parametrize("entry", ["report", "pictures"])
def test_refuses_a_damaged_validation(validated: WritableLocalStore, entry: str) -> None:
    record = StoredValidation.find(validated, DIGEST)
    assert record is not None
    blob = getattr(record, entry)
    validated.get(blob.sha256, blob.bytes).unlink()
    with pytest.raises(NotValidated):
        publish(validated, "toy")
    blob = Blob(sha256=validated.put_bytes(b"[]"), bytes=2)
    StoredValidation(report=blob, pictures=blob).write(validated, DIGEST)
    with pytest.raises(BadReport, match="is not the report of a validation"):
        publish(validated, "toy")


def test_lists_every_violated_limit(store: WritableLocalStore) -> None:
    write_validation(store, report_of(decibels=3.0, prompts=4), PICTURES)
    with pytest.raises(LimitsViolated) as caught:
        publish(store, "toy")
    message = str(caught.value)
    for words in (
        "The validation of toy violates 3 limits: The report has 4 prompts; at least 32 are required.",
        "The median SQNR of final latents is 3.00 dB; at least 20 dB is required.",
        "The worst SQNR of final latents is 3.00 dB; at least 5 dB is required.",
        "add `--accept`",
    ):
        assert words in message
    assert store.releases() == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reference": "fp32"}, "The report compares with fp32; a comparison with fp16 is required."),
        ({"reference": "bf16"}, "The report compares with bf16; a comparison with fp16 is required."),
        ({"device": "x86_64 CPU"}, "The report was made on a CPU (x86_64 CPU); the engines run on a GPU."),
    ],
    ids=["fp32", "bf16", "CPU"],
)
def test_refuses_a_report_of_other_conditions(
    changes: dict[str, Any], sentence: str, store: WritableLocalStore
) -> None:
    write_draft(store, releases.cpu_target().key)  # in fp32, but on another target
    write_validation(store, report_of(**changes), PICTURES)
    with pytest.raises(LimitsViolated, match=f"violates 1 limit: {re.escape(sentence)}"):
        publish(store, "toy")
    manifest, _ = publish(store, "toy", accept=True)
    assert manifest.validation is not None and manifest.validation.violations == (sentence,)


def test_reference_may_be_the_precision_of_the_other_engines(store: WritableLocalStore) -> None:
    write_draft(store, GPU.key, BF16)
    write_validation(store, report_of(reference="bf16"), PICTURES)
    assert publish(store, "toy")[0].validation
    write_validation(store, report_of(reference="fp32"), PICTURES)
    with pytest.raises(LimitsViolated, match="compares with fp32; a comparison with fp16 or bf16 is required"):
        publish(store, "toy/2")


def test_accepted_violations_are_in_the_manifest(violated: WritableLocalStore) -> None:
    manifest, _ = publish(violated, "toy", accept=True)
    assert manifest.validation is not None and manifest.validation.accepted
    assert manifest.validation.violations == (TOO_LOW,)
    assert publish(violated, "toy", accept=True) == (manifest, False)
    with pytest.raises(LimitsViolated):
        publish(violated, "toy")


@pytest.mark.parametrize("precision", [FP8, INT8])
@pytest.mark.parametrize("accept", [False, True])
def test_never_publishes_emulated_engines(validated: WritableLocalStore, precision: Precision, accept: bool) -> None:
    target = releases.cpu_target().key
    write_draft(validated, target, precision, builder={"source": "1", "quantization": DIGEST})
    with pytest.raises(EmulatedEngines, match=f"toy has engines in {precision} for {target}") as caught:
        publish(validated, "toy", accept=accept)
    assert validated.releases() == []
    [draft] = folder_of(validated).rglob(f"*{target}.{precision}.json")
    assert str(draft.relative_to(folder_of(validated))) in str(caught.value)
    draft.unlink()
    assert publish(validated, "toy")[1]


def test_fp8_builds_can_be_left_out(store: WritableLocalStore) -> None:
    """Builds in FP8 must not block the others, also if theirs is newer and of other files. A later release may have
    them.
    """
    with pytest.raises(NothingToPublish, match="has only drafts of toy with 8-bit engines"):
        publish(store, "toy", without_fp8=True)
    write_draft(store, GPU.key, created=OLD)
    with pytest.raises(NotValidated, match="or publish the other engines \\(`--without-fp8`\\)"):
        publish(store, "toy")
    status, output = run("publish", "toy", "--store", store.url, "--without-fp8")
    assert status == 0, output
    manifest = store.read_release("toy/1")
    assert manifest.schema_version == 1 and manifest.validation is None and manifest.builder == {"source": "1"}
    assert manifest.engines and all(engine.precision != FP8 for engine in manifest.engines)
    write_validation(store, report_of(), PICTURES)
    assert FP8 in {engine.precision for engine in publish(store, "toy")[0].engines}
    write_fp8_draft(store, OTHER_DIGEST, builder={"source": "2", "quantization": OTHER_DIGEST})
    assert publish(store, "toy", without_fp8=True)[0].builder == {"source": "1"}
    with pytest.raises(NotValidated):
        publish(store, "toy")
    for option in (["--accept"], ["--thresholds", "limits.toml"]):
        status, output = run("publish", "toy", "--store", store.url, "--without-fp8", *option)
        assert status == 2 and "contradicts --accept and --thresholds" in output


# -- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("created", [OLD, NEW])
def test_quantization_is_kept_beside_other_drafts(validated: WritableLocalStore, created: str) -> None:
    """A draft in fp16 may be older or newer."""
    write_draft(validated, releases.cpu_target().key, created=created)
    manifest, _ = publish(validated, "toy")
    assert manifest.builder["quantization"] == DIGEST and manifest.validation is not None
    assert set(manifest.targets) == {GPU.key, releases.cpu_target().key}


def test_publishes_only_the_newest_quantization(validated: WritableLocalStore) -> None:
    """The weights of a release are those of one quantization, which was validated."""
    other = GPU.key.replace("h100", "h200")
    write_fp8_draft(validated, OTHER_DIGEST, other, created=OLD)
    assert publish(validated, "toy/older")[0].targets == (GPU.key,)
    write_fp8_draft(validated, OTHER_DIGEST, other, created=NEW)
    with pytest.raises(NotValidated, match=OTHER_DIGEST[:12]):
        publish(validated, "toy/newer")
    write_fp8_draft(validated, DIGEST, other, created=NEW)
    assert publish(validated, "toy/both")[0].targets == (GPU.key, other)


# -- the manifest ----------------------------------------------------------------------------------------------------

SCHEMA_1 = {
    "architectures", "builder", "created", "defaults", "engines", "family", "model", "schedulers", "schema_version",
    "settings", "tokenizers", "version", "weights",
}  # fmt: skip


def test_other_releases_keep_their_bytes(tmp_path: Path) -> None:
    """Older servers refuse unknown entries, and signatures cover the bytes."""
    store = WritableLocalStore(tmp_path / "store")
    write_draft(store, GPU.key)
    manifest, _ = publish(store, "toy", accept=True)
    data = (folder_of(store) / "releases" / "toy" / "1.json").read_bytes()
    entries = json.loads(data)
    assert entries.keys() == SCHEMA_1 and entries["schema_version"] == 1 and entries["builder"] == {"source": "1"}
    assert data == json.dumps(entries, indent=1, sort_keys=True).encode() == manifest.to_json()
    assert set(json.loads(parse_manifest(data, "toy/1").signed_bytes().partition(b"\n")[2])) == SCHEMA_1
    showing = ["releases", "--store", store.url, "--validation"]
    assert run(*showing, "toy/1") == (0, "toy/1 has no validation: only FP8 engines need one.")
    assert run(*showing, "toy/2")[0] == 1 and run("releases", "--store", store.url, "--out", tmp_path)[0] == 2


def test_manifest_refuses_an_invalid_validation(tmp_path: Path) -> None:
    blob = {"sha256": "a" * 64, "bytes": 7}
    good: dict[str, Any] = {"report": blob, "pictures": blob, "accepted": True, "violations": ["It is bad."]}
    validation = Validation.model_validate(good)
    manifest = releases.draft_release(WritableLocalStore(tmp_path / "store"))
    assert manifest.required_schema == 1
    assert manifest.model_copy(update={"validation": validation}).required_schema == 2
    for changes, words in (
        ({"accepted": False}, "if, and only if"),
        ({"violations": []}, "if, and only if"),
        ({"violations": ["line\nbreak"]}, "violations"),
        ({"violations": ["\x1b[31m"]}, "violations"),
        ({"violations": ["a" * 301]}, "violations"),
        ({"violations": ["a"] * 101}, "violations"),
        ({"report": blob | {"bytes": 2**26 + 1}}, "more than 67108864 bytes"),
        ({"surprise": 1}, "surprise"),
    ):
        with pytest.raises(ValidationError, match=words):
            Validation.model_validate(good | changes)


def test_signature_covers_the_validation(violated: WritableLocalStore, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    public = signing.write_key(key)
    signed, _ = publish(violated, "toy", signing.read_key(key), accept=True)
    check_signature(violated.read_release("toy/1"), [public])
    assert signed.validation is not None
    better = signed.validation.model_copy(update={"accepted": False, "violations": ()})
    for changed in (better, None):
        forged = parse_manifest(signed.model_copy(update={"validation": changed}).to_json(), signed.name)
        with pytest.raises(UntrustedRelease):
            check_signature(forged, [public])


def test_validation_is_copied_verified_and_not_served(validated: WritableLocalStore, tmp_path: Path) -> None:
    manifest, _ = publish(validated, "toy")
    assert manifest.validation is not None
    blobs = {blob.sha256: blob for blob in (manifest.validation.report, manifest.validation.pictures)}
    mirror = WritableLocalStore(tmp_path / "mirror")
    copy_release(validated, mirror, "toy/1")
    for blob in blobs.values():
        mirror.check(blob.sha256, blob.bytes)
    assert "final latents, SQNR" in run("releases", "--store", mirror.url, "--validation", "toy/1")[1]

    assert run("verify", "toy/1", "--store", validated.url)[0] == 0
    pictures = manifest.validation.pictures
    validated.get(pictures.sha256, pictures.bytes).write_bytes(b"x")
    status, output = run("verify", "toy/1", "--store", validated.url)
    assert status == 1 and pictures.sha256[:12] in output

    assert blobs.keys() <= manifest.blobs().keys()
    precision = manifest.weights[0].precision
    engines = tuple(engine.model_copy(update={"precision": precision}) for engine in manifest.engines)
    selection = select(manifest.model_copy(update={"engines": engines}), [GPU], deployed())
    assert not blobs.keys() & {blob.sha256 for blob in selection.blobs()}


def test_gc_keeps_validations_and_calibrations(violated: WritableLocalStore) -> None:
    """Also before a draft or a release names them: a check comes before the build. A replaced check is garbage."""
    calibration = violated.put_bytes(b"ranges")
    violated.write_record("calibrations", "key", json.dumps({"ranges": {"sha256": calibration, "bytes": 6}}).encode())
    first = StoredValidation.find(violated, DIGEST)
    assert first is not None

    def garbage() -> set[str]:
        return set(find_garbage(violated, 0, now=2**33).blobs)

    assert garbage() == set()
    write_validation(violated, report_of(), b"second pictures")
    assert garbage() == {first.report.sha256, first.pictures.sha256}
    publish(violated, "toy")
    write_validation(violated, report_of(decibels=16.0), b"later pictures")
    assert garbage() == {first.report.sha256, first.pictures.sha256}, "the release needs the second validation"


# -- commands --------------------------------------------------------------------------------------------------------


def test_publish_command_takes_thresholds_and_accept(violated: WritableLocalStore, tmp_path: Path) -> None:
    strict, lenient = tmp_path / "strict.toml", tmp_path / "lenient.toml"
    strict.write_text("min_psnr_decibels_median = 99.0\n")
    lenient.write_text("min_latents_decibels_median = 10.0\n")
    publishing = ["publish", "toy", "--store", violated.url]
    status, output = run(*publishing, "--thresholds", tmp_path / "missing.toml")
    assert status == 1 and "is not a file of thresholds" in output
    assert "violates 2 limits" in run(*publishing, "--thresholds", strict)[1]
    assert "violates 1 limit:" in run(*publishing)[1] and violated.releases() == []
    status, output = run(*publishing, "--accept")
    assert status == 0 and "accepted The median SQNR of final latents is 15.00 dB" in output
    assert "published with violated limits" in run("releases", "--store", violated.url)[1]

    showing = ["releases", "--store", violated.url, "--validation", "toy/1"]
    status, output = run(*showing, "--out", tmp_path / "out")
    assert status == 0
    for words in ("fp8 against fp16: 32 prompts, a GPU, 8 steps, guidance 8, 64x64", "15.0 dB",
                  "accepted The median SQNR of final latents is 15.00 dB"):  # fmt: skip
        assert words in output
    written = ValidationReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes())
    assert written == report_of(decibels=15.0) and (tmp_path / "out" / "pairs.png").read_bytes() == PICTURES

    status, output = run(*publishing, "--thresholds", lenient)
    assert status == 0 and "Published toy/2" in output and "accepted" not in output
    assert "validated" in run("releases", "--store", violated.url)[1]
    assert publish(violated, "toy", thresholds=Thresholds(min_latents_decibels_median=10.0))[1] is False
