"""Validations in a store: the report and the pictures of a quantization, by the quantization's digest.

The settings of a validation are part of its report, so they stay with it when a release is copied.
"""

from typing import ClassVar

from engine_builder.backends.built import BuiltRecord, put_blob
from engine_builder.quantization.validation.report import ValidationReport
from engine_builder.stores.store import WritableStore
from model.errors import PreheatError
from model.store.manifest import Blob
from model.store.store import Store

QUANTIZATION = "quantization"  # the entry of a report's identity that holds the digest


class BadReport(PreheatError):
    """The blob of a validation's report is not a report."""

    remedy = "Run `preheat check-fp8` again, then `preheat publish`."


class StoredValidation(BuiltRecord):
    """The blobs of report.json and pairs.png, stored in the record "validations/<digest of the quantization>"."""

    kind: ClassVar[str] = "validations"

    report: Blob
    pictures: Blob


def write_validation(store: WritableStore, report: ValidationReport, pictures: bytes) -> None:
    """Store a report and its contact sheet (PNG). They replace an earlier validation of the same quantization."""
    data = report.model_dump_json(indent=1).encode()
    record = StoredValidation(report=put_blob(store, data), pictures=put_blob(store, pictures))
    record.write(store, report.identity[QUANTIZATION])


def read_report(store: Store, blob: Blob) -> ValidationReport:
    """Return the report of a validation. Raises CorruptBlob, or BadReport if the blob is something else."""
    try:
        return ValidationReport.model_validate_json(store.get(blob.sha256, blob.bytes).read_bytes())
    except ValueError as error:
        raise BadReport(f"The blob {blob.sha256[:12]} is not the report of a validation.") from error
