"""The gate before publishing: FP8 engines need a stored validation of their quantization that keeps all limits."""

import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.commands.main import app
from engine_builder.quantization.check import Fp8Unsupported, check_target
from engine_builder.quantization.validation.report import (
    LayerResult,
    PromptResult,
    ValidationReport,
    describe,
)
from engine_builder.quantization.validation.stored import BadReport, StoredValidation, write_validation
from engine_builder.quantization.validation.thresholds import Thresholds
from engine_builder.releases import signing
from engine_builder.releases.gc import find_garbage
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.publish import NothingToPublish, publish
from engine_builder.releases.validation_gate import EmulatedEngines, LimitsViolated, NotValidated
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore, open_writable_store
from model.errors import PreheatError, UntrustedRelease
from model.loading.select import select
from model.loading.target import Target
from model.store.manifest import Blob, EngineRecord, Manifest, Validation
from model.store.manifest_json import parse_manifest
from model.store.precision import BF16, FP8, INT8, Precision
from model.store.signature import check_signature
from tests.engine_builder.helpers import folder_of
from tests.support import releases
from tests.support.repository import MODEL_FOLDER

GPU = Target("cuda", "h100", "sm90", "torch2.11-cu130")
DIGEST, OTHER_DIGEST = (hashlib.sha256(text).hexdigest() for text in (b"a quantization", b"another"))
PICTURES = b"pictures of pairs"


def report_of(decibels: float = 30.0, prompts: int = 32, steps: int = 8, **identity: str) -> ValidationReport:
    """Return the report of a quantization. `decibels`: SQNR of the final latents."""
    results = [
        PromptResult(
            number=number, prompt="a cat", negative_prompt="", seed=number, width=64, height=64, steps=steps,
            guidance=8.0, sampler="Euler", unet_decibels={"unet": (40.0,)}, latents_decibels=decibels,
            psnr_decibels=30.0, perceptual_distance=0.01,
        )
        for number in range(prompts)
    ]  # fmt: skip
    return ValidationReport(
        reference="fp16", quantized="fp8", device="a GPU", torch="2", prompts=tuple(results),
        identity={"quantization": DIGEST} | identity,
    )  # fmt: skip


def write_draft(store: WritableStore, target: str, precision: Precision | None = None, **changes: Any) -> Manifest:
    """Write the draft of a build for a target. Its UNet has the precision, or else the toy's own."""
    draft = releases.draft_release(store)

    def rebuilt(engine: EngineRecord) -> EngineRecord:
        is_quantized = precision is not None and engine.component == "unet"
        key = hashlib.sha256(f"{engine.key} {target} {precision}".encode()).hexdigest()
        return engine.model_copy(
            update={"target": target, "key": key} | ({"precision": precision} if is_quantized else {})
        )

    draft = draft.model_copy(update={"builder": {"source": "1"}, **changes})
    draft = draft.model_copy(update={"engines": tuple(rebuilt(engine) for engine in draft.engines)})
    store.write_record("drafts", f"toy.{target}.{precision or 'fp16'}", draft.to_json())
    return draft


def write_fp8_draft(store: WritableStore, target: str = GPU.key, digest: str = DIGEST, **changes: Any) -> Manifest:
    builder = {"source": "1", "quantization": digest}
    return write_draft(store, target, FP8, **{"builder": builder} | changes)


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    """A store with a draft of FP8 engines for a GPU."""
    store = WritableLocalStore(tmp_path / "store")
    write_fp8_draft(store)
    return store


@pytest.fixture
def validated(store: WritableLocalStore) -> WritableLocalStore:
    """The store, after a check that keeps all limits."""
    write_validation(store, report_of(), PICTURES)
    return store


def run(*arguments: object) -> tuple[int, str]:
    """Run a `preheat` command. Returns its exit status and its output or error, in one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, PreheatError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


# -- publishing ------------------------------------------------------------------------------------------------------


def test_release_of_fp8_engines_names_its_validation(validated: WritableLocalStore) -> None:
    manifest, is_new = publish(validated, "toy")
    assert is_new and validated.read_release("toy/1") == manifest
    assert manifest.builder == {"source": "1", "quantization": DIGEST} and manifest.schema_version == 2
    assert manifest.validation is not None
    assert (manifest.validation.accepted, manifest.validation.violations) == (False, ())
    report, pictures = (
        validated.get(blob.sha256, blob.bytes).read_bytes()
        for blob in (manifest.validation.report, manifest.validation.pictures)
    )
    assert ValidationReport.model_validate_json(report) == report_of() and pictures == PICTURES
    assert publish(validated, "toy") == (manifest, False)


def test_refuses_fp8_engines_without_a_validation(store: WritableLocalStore) -> None:
    command = f"Run `preheat check-fp8 MODEL --store {store.url} --no-refiner`"
    with pytest.raises(NotValidated, match=f"no intact validation of the quantization {DIGEST[:12]} of toy") as caught:
        publish(store, "toy")
    assert command in str(caught.value)
    with pytest.raises(NotValidated):
        publish(store, "toy", accept=True)
    assert store.releases() == []


def test_check_that_is_missing_may_need_the_refiner(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path / "store")
    draft = releases.draft_release(store, refiner=True)
    write_fp8_draft(store, settings=draft.settings, architectures=draft.architectures)
    with pytest.raises(NotValidated, match="Run `preheat check-fp8 MODEL --store [^ ]*`"):
        publish(store, "toy")


def test_refuses_engines_that_name_no_quantization(validated: WritableLocalStore) -> None:
    write_fp8_draft(validated, builder={"source": "1"})
    with pytest.raises(NotValidated, match="do not state how they were quantized. Build them again"):
        publish(validated, "toy")


def test_refuses_a_validation_of_another_quantization(store: WritableLocalStore) -> None:
    write_validation(store, report_of(quantization=OTHER_DIGEST), PICTURES)
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


def test_refuses_a_blob_that_is_not_a_report(store: WritableLocalStore) -> None:
    blob = Blob(sha256=store.put_bytes(b"[]"), bytes=2)
    StoredValidation(report=blob, pictures=blob).write(store, DIGEST)
    with pytest.raises(BadReport, match="is not the report of a validation"):
        publish(store, "toy")


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
        ({"prompts": report_of(steps=7).prompts}, "The report has images of 7 steps; at least 8 are required."),
    ],
    ids=["fp32", "bf16", "CPU", "steps"],
)
def test_refuses_a_report_of_other_conditions(
    changes: dict[str, Any], sentence: str, store: WritableLocalStore
) -> None:
    write_draft(store, releases.cpu_target().key)  # in fp32, but on another target
    write_validation(store, report_of().model_copy(update=changes), PICTURES)
    with pytest.raises(LimitsViolated, match=f"violates 1 limit: {re.escape(sentence)}"):
        publish(store, "toy")
    manifest, _ = publish(store, "toy", accept=True)
    assert manifest.validation is not None and manifest.validation.violations == (sentence,)


def test_reference_may_be_the_precision_of_the_other_engines(store: WritableLocalStore) -> None:
    write_draft(store, GPU.key, BF16)
    write_validation(store, report_of().model_copy(update={"reference": "bf16"}), PICTURES)
    assert publish(store, "toy")[0].validation
    write_validation(store, report_of().model_copy(update={"reference": "fp32"}), PICTURES)
    with pytest.raises(LimitsViolated, match="compares with fp32; a comparison with fp16 or bf16 is required"):
        publish(store, "toy/2")


def test_thresholds_of_the_call_decide(validated: WritableLocalStore) -> None:
    with pytest.raises(LimitsViolated, match="violates 1 limit: .* at least 35 dB is required"):
        publish(validated, "toy", thresholds=Thresholds(min_latents_decibels_median=35.0))
    assert publish(validated, "toy", thresholds=Thresholds(min_latents_decibels_median=25.0))[1]


def test_accepted_violations_are_in_the_manifest(store: WritableLocalStore) -> None:
    write_validation(store, report_of(decibels=15.0), PICTURES)
    manifest, _ = publish(store, "toy", accept=True)
    assert manifest.validation is not None and manifest.validation.accepted
    assert manifest.validation.violations == (
        "The median SQNR of final latents is 15.00 dB; at least 20 dB is required.",
    )
    assert publish(store, "toy", accept=True) == (manifest, False)
    with pytest.raises(LimitsViolated):
        publish(store, "toy")


def test_accept_changes_nothing_if_all_limits_are_kept(validated: WritableLocalStore) -> None:
    manifest, _ = publish(validated, "toy", accept=True)
    assert manifest.validation is not None and not manifest.validation.accepted


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


def test_int8_engines_need_a_validation_too(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path / "store")
    write_draft(store, GPU.key, INT8)
    with pytest.raises(NotValidated):
        publish(store, "toy")


def test_fp8_builds_can_be_left_out(store: WritableLocalStore) -> None:
    """Builds in FP8 must not block the others. A later release may have them."""
    write_draft(store, GPU.key, created="2020-01-01T00:00:00+00:00")
    with pytest.raises(NotValidated, match="or publish the other engines \\(`--without-fp8`\\)"):
        publish(store, "toy")
    status, output = run("publish", "toy", "--store", store.url, "--without-fp8")
    assert status == 0, output
    manifest = store.read_release("toy/1")
    assert manifest.schema_version == 1 and manifest.validation is None and "quantization" not in manifest.builder
    assert manifest.engines and all(engine.precision != FP8 for engine in manifest.engines)
    write_validation(store, report_of(), PICTURES)
    assert FP8 in {engine.precision for engine in publish(store, "toy")[0].engines}


def test_newer_fp8_build_of_other_files_is_left_out_too(tmp_path: Path) -> None:
    """The build in FP8 is the newest one, and the model's files have changed since the other build."""
    store = WritableLocalStore(tmp_path / "store")
    write_draft(store, GPU.key, created="2020-01-01T00:00:00+00:00")
    write_fp8_draft(store, builder={"source": "2", "quantization": DIGEST})
    manifest, _ = publish(store, "toy", without_fp8=True)
    assert manifest.builder == {"source": "1"} and manifest.targets == (GPU.key,)
    with pytest.raises(NotValidated):
        publish(store, "toy")


def test_refuses_to_leave_out_all_builds(store: WritableLocalStore) -> None:
    with pytest.raises(NothingToPublish, match="has only drafts of toy with 8-bit engines"):
        publish(store, "toy", without_fp8=True)
    assert store.releases() == []


@pytest.mark.parametrize("option", [["--accept"], ["--thresholds", "limits.toml"]])
def test_limits_contradict_leaving_out_fp8(option: list[str], store: WritableLocalStore) -> None:
    status, output = run("publish", "toy", "--store", store.url, "--without-fp8", *option)
    assert status == 2 and "contradicts --accept and --thresholds" in output


# -- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("created", ["2020-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"])
def test_quantization_is_kept_beside_other_drafts(validated: WritableLocalStore, created: str) -> None:
    """A draft in fp16 may be older or newer."""
    write_draft(validated, releases.cpu_target().key, created=created)
    manifest, _ = publish(validated, "toy")
    assert manifest.builder["quantization"] == DIGEST and manifest.validation is not None
    assert set(manifest.targets) == {GPU.key, releases.cpu_target().key}


def test_publishes_only_the_newest_quantization(validated: WritableLocalStore) -> None:
    """The weights of a release are those of one quantization, which was validated."""
    other = GPU.key.replace("h100", "h200")
    write_fp8_draft(validated, other, OTHER_DIGEST, created="2020-01-01T00:00:00+00:00")
    assert publish(validated, "toy/older")[0].targets == (GPU.key,)
    write_fp8_draft(validated, other, OTHER_DIGEST, created="2099-01-01T00:00:00+00:00")
    with pytest.raises(NotValidated, match=OTHER_DIGEST[:12]):
        publish(validated, "toy/newer")
    write_fp8_draft(validated, other, created="2099-01-01T00:00:00+00:00")
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


BLOB = {"sha256": "a" * 64, "bytes": 7}
GOOD: dict[str, Any] = {"report": BLOB, "pictures": BLOB, "accepted": True, "violations": ["It is bad."]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accepted": False}, "if, and only if"),
        ({"violations": []}, "if, and only if"),
        ({"violations": ["line\nbreak"]}, "violations"),
        ({"violations": ["\x1b[31m"]}, "violations"),
        ({"violations": ["a" * 301]}, "violations"),
        ({"violations": ["a"] * 101}, "violations"),
        ({"report": BLOB | {"bytes": 2**26 + 1}}, "more than 67108864 bytes"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_manifest_refuses_an_invalid_validation(changes: dict[str, Any], words: str) -> None:
    Validation.model_validate(GOOD)
    with pytest.raises(ValidationError, match=words):
        Validation.model_validate(GOOD | changes)


def test_validation_alone_needs_schema_2(tmp_path: Path) -> None:
    manifest = releases.draft_release(WritableLocalStore(tmp_path / "store"))
    assert manifest.required_schema == 1
    with_validation = manifest.model_copy(update={"validation": Validation.model_validate(GOOD)})
    assert with_validation.required_schema == 2


def test_signature_covers_the_validation(store: WritableLocalStore, tmp_path: Path) -> None:
    write_validation(store, report_of(decibels=15.0), PICTURES)
    key = tmp_path / "key.pem"
    public = signing.write_key(key)
    signed, _ = publish(store, "toy", signing.read_key(key), accept=True)
    check_signature(store.read_release("toy/1"), [public])
    assert signed.validation is not None
    better = signed.validation.model_copy(update={"accepted": False, "violations": ()})
    for changed in (better, None):
        forged = parse_manifest(signed.model_copy(update={"validation": changed}).to_json(), signed.name)
        with pytest.raises(UntrustedRelease):
            check_signature(forged, [public])


def test_copy_takes_the_validation_along(validated: WritableLocalStore, tmp_path: Path) -> None:
    manifest, _ = publish(validated, "toy")
    mirror = WritableLocalStore(tmp_path / "mirror")
    copy_release(validated, mirror, "toy/1")
    assert manifest.validation is not None
    for blob in (manifest.validation.report, manifest.validation.pictures):
        mirror.check(blob.sha256, blob.bytes)
    assert "final latents, SQNR" in run("releases", "--store", mirror.url, "--validation", "toy/1")[1]


def test_verify_finds_a_damaged_report(validated: WritableLocalStore) -> None:
    manifest, _ = publish(validated, "toy")
    assert run("verify", "toy/1", "--store", validated.url)[0] == 0
    assert manifest.validation is not None
    validated.get(manifest.validation.pictures.sha256, manifest.validation.pictures.bytes).write_bytes(b"x")
    status, output = run("verify", "toy/1", "--store", validated.url)
    assert status == 1 and manifest.validation.pictures.sha256[:12] in output


def test_server_does_not_fetch_the_validation(validated: WritableLocalStore) -> None:
    manifest, _ = publish(validated, "toy")
    assert manifest.validation is not None
    blobs = {manifest.validation.report.sha256, manifest.validation.pictures.sha256}
    assert blobs <= manifest.blobs().keys()
    engines = tuple(
        engine.model_copy(update={"precision": manifest.weights[0].precision}) for engine in manifest.engines
    )
    selection = select(manifest.model_copy(update={"engines": engines}), [GPU], ())
    assert not blobs & {blob.sha256 for blob in selection.blobs()}


def test_gc_keeps_validations_and_calibrations(store: WritableLocalStore) -> None:
    """Also before a draft or a release names them: a check comes before the build. A replaced check is garbage."""
    calibration = store.put_bytes(b"ranges")
    store.write_record("calibrations", "key", json.dumps({"ranges": {"sha256": calibration, "bytes": 6}}).encode())
    write_validation(store, report_of(decibels=15.0), b"first pictures")
    first = StoredValidation.find(store, DIGEST)
    assert first is not None

    def garbage() -> set[str]:
        return set(find_garbage(store, 0, now=2**33).blobs)

    assert garbage() == set()
    write_validation(store, report_of(), PICTURES)
    assert garbage() == {first.report.sha256, first.pictures.sha256}
    publish(store, "toy")
    write_validation(store, report_of(decibels=16.0), b"later pictures")
    assert garbage() == {first.report.sha256, first.pictures.sha256}, "the release needs the second validation"


# -- commands --------------------------------------------------------------------------------------------------------


def test_publish_command_takes_thresholds_and_accept(store: WritableLocalStore, tmp_path: Path) -> None:
    write_validation(store, report_of(decibels=15.0), PICTURES)
    strict, lenient = tmp_path / "strict.toml", tmp_path / "lenient.toml"
    strict.write_text("min_psnr_decibels_median = 99.0\n")
    lenient.write_text("min_latents_decibels_median = 10.0\n")
    publishing = ["publish", "toy", "--store", store.url]
    assert "violates 2 limits" in run(*publishing, "--thresholds", strict)[1]
    assert "violates 1 limit:" in run(*publishing)[1]
    status, output = run(*publishing, "--accept")
    assert status == 0 and "accepted The median SQNR of final latents is 15.00 dB" in output
    assert "published with violated limits" in run("releases", "--store", store.url)[1]
    status, output = run(*publishing, "--thresholds", lenient)
    assert status == 0 and "Published toy/2" in output and "accepted" not in output
    assert "validated" in run("releases", "--store", store.url)[1]


def test_publish_command_reads_thresholds_first(validated: WritableLocalStore, tmp_path: Path) -> None:
    status, output = run("publish", "toy", "--store", validated.url, "--thresholds", tmp_path / "missing.toml")
    assert status == 1 and "is not a file of thresholds" in output and validated.releases() == []


def test_releases_command_shows_the_stored_report(store: WritableLocalStore, tmp_path: Path) -> None:
    write_validation(store, report_of(decibels=15.0), PICTURES)
    publish(store, "toy", accept=True)
    showing = ["releases", "--store", store.url, "--validation", "toy/1"]
    status, output = run(*showing, "--out", tmp_path / "out")
    assert status == 0
    for words in ("fp8 against fp16: 32 prompts, a GPU, 8 steps, guidance 8, 64x64", "15.0 dB",
                  "accepted The median SQNR of final latents is 15.00 dB"):  # fmt: skip
        assert words in output
    written = ValidationReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes())
    assert written == report_of(decibels=15.0) and (tmp_path / "out" / "pairs.png").read_bytes() == PICTURES


def test_releases_command_without_a_validation(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path / "store")
    write_draft(store, GPU.key)
    publish(store, "toy")
    showing = ["releases", "--store", store.url, "--validation", "toy/1"]
    assert run(*showing) == (0, "toy/1 has no validation: only FP8 engines need one.")
    assert run("releases", "--store", store.url, "--out", tmp_path)[0] == 2
    assert run(*showing[:-1], "toy/2")[0] == 1


@pytest.mark.parametrize("name", ["[/red]", "\x1b[31mred", "line\nbreak"])
def test_report_of_an_untrusted_release_is_shown_safely(name: str) -> None:
    layer = LayerResult(component="unet", name=name, decibels=9.0, worst_decibels=8.0, calls=1)
    report = report_of().model_copy(update={"layers": (layer,), "device": name, "quantized": name})
    console = Console(file=io.StringIO(), width=200)
    console.print(describe(report))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text and name.split("\n")[0].split("\x1b")[-1] in text


# -- check-fp8 and calibrate -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that `calibrate` and `check-fp8` share, after a calibration without a refiner."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "prompts.txt").write_text("a circle\na square\n")
    arguments = [str(toy_folder), "--prompts", f"{folder}/prompts.txt", "--steps", "2", "--size", "64x64",
                 "--no-refiner", "--store", f"{folder}/store"]  # fmt: skip
    status, output = run("calibrate", *arguments)
    assert status == 0, output
    return arguments


def test_checked_model_can_be_published(calibrated: list[str], tmp_path: Path) -> None:
    """The way of a user: check, build (here only its draft), publish, show."""
    store = open_writable_store(calibrated[-1])
    status, output = run("check-fp8", *calibrated, "--out", tmp_path / "out")
    [digest] = store.records("validations")
    assert status in (0, 1) and f"stored as validation {digest[:12]}" in output
    write_fp8_draft(store, digest=digest)
    refused = run("publish", "toy", "--store", store.url)[1]
    for words in ("has 2 prompts; at least 32 are", "images of 2 steps; at least 8 are", "with fp32;", "on a CPU ("):
        assert words in refused
    assert run("publish", "toy", "--store", store.url, "--accept")[0] == 0
    assert run("releases", "--store", store.url, "--validation", "toy/1", "--out", tmp_path / "kept")[0] == 0
    for file in ("report.json", "pairs.png"):
        assert (tmp_path / "kept" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    report = ValidationReport.model_validate_json((tmp_path / "kept" / "report.json").read_bytes())
    assert report.identity["quantization"] == digest
    assert json.loads(report.identity["policy"])["keep_fp16"] == ["*.proj_in", "*.proj_out"]
    with Image.open(tmp_path / "kept" / "pairs.png") as sheet:
        assert sheet.format == "PNG"


def test_check_warns_that_it_is_too_small_to_publish(calibrated: list[str], tmp_path: Path) -> None:
    sentences = [
        "warning `preheat publish` requires at least 32 prompts; this check has 2.",
        "warning `preheat publish` requires at least 8 steps; this check has 2.",
    ]
    output = run("check-fp8", *calibrated)[1]
    assert all(sentence in output for sentence in sentences) and "are required" not in output
    (tmp_path / "limits.toml").write_text("min_prompts = 1\nmin_steps = 1\n")
    assert "preheat publish" not in run("check-fp8", *calibrated, "--thresholds", tmp_path / "limits.toml")[1]


def test_later_check_replaces_the_stored_one(calibrated: list[str], tmp_path: Path) -> None:
    store = open_writable_store(calibrated[-1])
    policy = tmp_path / "policy.toml"
    policy.write_text('keep_fp16 = ["down_blocks.*", "up_blocks.*"]\n')
    before = set(store.records("validations"))
    for count in (2, 1):
        run("check-fp8", *calibrated, "--policy", policy, "--count", count)
        [digest] = set(store.records("validations")) - before
        record = StoredValidation.find(store, digest)
        assert record is not None
        data = store.get(record.report.sha256, record.report.bytes).read_bytes()
        assert len(ValidationReport.model_validate_json(data).prompts) == count


@pytest.mark.parametrize(("capability", "suits"), [("sm80", False), ("sm86", False), ("sm89", True), ("sm90", True),
                                                   ("sm100", True), ("sm120", True)])  # fmt: skip
def test_fp8_needs_compute_capability_8_9(capability: str, suits: bool) -> None:
    target = Target("cuda", "gpu", capability, "torch2.11-cu130")
    if suits:
        check_target(target, FP8)
    else:
        with pytest.raises(Fp8Unsupported, match=rf"The GPU gpu \({capability}\) does not multiply FP8 numbers"):
            check_target(target, FP8)
    check_target(releases.cpu_target(), FP8)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make this machine appear to have a GPU. Returns a function of its product and compute capability."""

    def pretend(product: str, capability: str) -> None:
        target = Target("cuda", product, capability, "torch2.11-cu130")
        monkeypatch.setattr(compiler, "build_target", lambda: target)

    return pretend


def test_check_fp8_refuses_an_old_gpu_before_any_work(on_gpu: Callable[[str, str], None]) -> None:
    on_gpu("a100", "sm80")
    status, output = run("check-fp8", "no-model", "--prompts", "no-prompts.txt")
    assert status == 1 and "The GPU a100 (sm80) does not multiply FP8 numbers." in output


def test_check_fp8_refuses_fp32_on_a_gpu_before_any_work(on_gpu: Callable[[str, str], None]) -> None:
    on_gpu("h100", "sm90")
    status, output = run("check-fp8", "no-model", "--prompts", "no-prompts.txt", "--precision", "fp32")
    assert status == 2 and "--precision" in output and "are fp16 or bf16" in output


def test_no_refiner_leaves_out_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a circle\n")
    store = open_writable_store(tmp_path / "store")
    arguments = [MODEL_FOLDER, "--prompts", tmp_path / "prompts.txt", "--steps", "1", "--size", "64x64",
                 "--store", store.url, "--no-refiner"]  # fmt: skip
    status, output = run("calibrate", *arguments)
    assert status == 0 and "unet calibrated" in output and "refiner_unet" not in output
    run("check-fp8", *arguments, "--out", tmp_path)
    report = ValidationReport.model_validate_json((tmp_path / "report.json").read_bytes())
    assert report.identity.keys() == {"unet", "quantization", "policy"}
    assert "has no intact calibration of this model's refiner_unet" in run("check-fp8", *arguments[:-1])[1]


@pytest.mark.parametrize("command", ["calibrate", "check-fp8"])
def test_no_refiner_contradicts_a_refiner(command: str, toy_folder: Path) -> None:
    status, output = run(command, toy_folder, "--refiner", toy_folder, "--no-refiner")
    assert status == 2 and "contradicts --refiner" in output
