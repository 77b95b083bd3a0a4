"""Publish 8-bit engines only with a stored validation of exactly their quantization that keeps all limits."""

from engine_builder.quantization.validation.report import ValidationReport
from engine_builder.quantization.validation.stored import QUANTIZATION, StoredValidation, read_report
from engine_builder.quantization.validation.thresholds import Thresholds, violations
from engine_builder.stores.store import WritableStore
from engine_builder.stores.writing import record_key
from model.errors import PreheatError
from model.pipeline.components import find_component
from model.store.manifest import EngineRecord, Manifest, Validation
from model.store.precision import FP16

_LEAVE_OUT = "publish the other engines (`--without-fp8`)"


class NotValidated(PreheatError):
    """8-bit engines have no validation."""


class LimitsViolated(PreheatError):
    """A validation of 8-bit engines violates limits."""

    remedy = (
        "Nothing was published. Check again, or build with a policy that keeps more layers in fp16. To publish all the "
        "same, add `--accept`; to publish the other engines, add `--without-fp8`."
    )


class EmulatedEngines(PreheatError):
    """8-bit engines for a CPU are never published: they compute what a GPU would, for tests."""


def quantized_engines(manifest: Manifest) -> list[EngineRecord]:
    """Return the engines in an 8-bit precision."""
    return [engine for engine in manifest.engines if engine.precision.is_quantized]


def require_validation(store: WritableStore, manifest: Manifest, thresholds: Thresholds, accept: bool) -> Manifest:
    """Return the manifest with the validation of its 8-bit engines, or unchanged if it has none.

    The builder's entry "quantization" names the validation in the store. `accept`: violated limits are listed in the
    manifest and do not raise LimitsViolated. A report made on a CPU, or against another precision than the
    release's other engines have, violates a limit too.
    Raises EmulatedEngines for 8-bit engines of a CPU; NotValidated without an intact validation of this quantization;
    BadReport.
    """
    engines = quantized_engines(manifest)
    if not engines:
        return manifest
    _refuse_emulated(store, manifest.model, engines)
    record, report = _find_validation(store, manifest)
    found = (*_mismatches(manifest, engines, report), *violations(report, thresholds))
    if found and not accept:
        count = f"{len(found)} limit{'s' if len(found) > 1 else ''}"
        raise LimitsViolated(f"The validation of {manifest.model} violates {count}: {' '.join(found)}")
    validation = Validation(report=record.report, pictures=record.pictures, accepted=bool(found), violations=found)
    return manifest.model_copy(update={"validation": validation})


def _refuse_emulated(store: WritableStore, model: str, engines: list[EngineRecord]) -> None:
    for engine in engines:
        if engine.target.startswith("cpu"):
            draft = record_key("drafts", f"{model}.{engine.target}.{engine.precision}")  # see BuildPlan.draft_name
            raise EmulatedEngines(
                f"{model} has engines in {engine.precision} for {engine.target}, which are only for tests.",
                f"Delete their draft ({draft} in {store.url}) and build for a GPU, or {_LEAVE_OUT}.",
            )


def _mismatches(manifest: Manifest, engines: list[EngineRecord], report: ValidationReport) -> list[str]:
    """Return a sentence for each way in which a report is not about these 8-bit engines, which are all for GPUs."""
    found = []
    unets = [engine for engine in engines if find_component(engine.component).phase == "step"]
    replaced = {(engine.component, engine.target) for engine in unets}
    allowed = {FP16.name} | {
        engine.precision.name
        for engine in manifest.engines
        if (engine.component, engine.target) in replaced and not engine.precision.is_quantized
    }
    if report.reference not in allowed:
        names = " or ".join(sorted(allowed, reverse=True))
        found.append(f"The report compares with {report.reference}; a comparison with {names} is required.")
    if not report.is_of_gpu:
        found.append(f"The report was made on a CPU ({report.device}); the engines run on a GPU.")
    return found


def _find_validation(store: WritableStore, manifest: Manifest) -> tuple[StoredValidation, ValidationReport]:
    """Return the validation of a manifest's quantization, and its report. Raises NotValidated or BadReport."""
    digest = manifest.builder.get("quantization")
    if digest is None:
        raise NotValidated(
            f"The 8-bit engines of {manifest.model} do not state how they were quantized.",
            f"Build them again (`preheat build`), or {_LEAVE_OUT}.",
        )
    record = StoredValidation.find(store, digest)
    report = read_report(store, record.report) if record else None
    if record is None or report is None or report.identity.get(QUANTIZATION) != digest:
        options = f"--store {store.url}" + ("" if manifest.has_refiner else " --no-refiner")
        raise NotValidated(
            f"{store.url} has no intact validation of the quantization {digest[:12]} of {manifest.model}.",
            f"Run `preheat check-fp8 MODEL {options}` with the model, the VAE (--vae), the policy and the calibration "
            f"of the build, or {_LEAVE_OUT}.",
        )
    return record, report
