"""Check a `.pt2` package before it is unpacked: that it stays in its folder, and that it is its record's engine.

torch's C++ loader writes to every path that the archive names, also outside its own folder. Packages built by Preheat
have no such path. Their top folder is named after the component and the engine key that they were compiled for. The
entry `IDENTITY` states the bucket and the signature.
"""

import io
import re
import stat
import zipfile
from collections.abc import Collection

from pydantic import BaseModel, ValidationError

from model.engines.features import parse_name
from model.errors import EngineError
from model.store.manifest import Bucket, EngineRecord, Signature

IDENTITY = "preheat.json"  # an entry of the top folder; packages of earlier builds lack it
_MAX_IDENTITY_BYTES = 2**20
_MAX_ENTRIES = 10_000
_TOP_FOLDER = re.compile(r"([a-z0-9_]+)-([0-9a-f]{12})")


class Identity(BaseModel):
    """The bucket and signature that a package was compiled for."""

    bucket: Bucket
    signature: Signature


def folder_name(component: str) -> str:
    """Return the part of a package's top folder that names the code. It is the same for all ControlNets."""
    return component.replace(".", "_") if parse_name(component).features else component.partition(".")[0]


def top_folder(component: str, key: str) -> str:
    """Return the name of a package's top folder."""
    return f"{folder_name(component)}-{key[:12]}"


def check_package(component: str, package: bytes) -> None:
    """Refuse bytes that are not an archive, and archives that write outside their folder or more bytes than they have.

    Raises EngineError.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            problem = _find_problem(archive.infolist(), len(package))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        problem = f"it is not a package: {' '.join(str(error).split())[:100]}"
    if problem:
        raise EngineError(f"The {component} engine cannot be opened ({problem}).")


def calls_operators(package: bytes) -> bool:
    """True if the code calls operators of other modules: a JSON file with the name of its library lists them."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        names = set(archive.namelist())
    return any(name.endswith(".so") and f"{name.removesuffix('.so')}.json" in names for name in names)


def check_identity(record: EngineRecord, package: bytes, others: Collection[str]) -> None:
    """Refuse a package that was compiled for another component, key, bucket or signature than its record states.

    `others`: the `folder_name`s of code that the record's component cannot share. A package without such a top folder
    or without `IDENTITY` is accepted. Raises EngineError.
    """
    check_package(record.component, package)
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        names = archive.namelist()
        library = next((name for name in names if name.endswith(".so")), "")
        folder = _TOP_FOLDER.fullmatch(library.partition("/")[0])
        if folder is None:
            return
        component, key = folder.groups()
        if key != record.key[:12] or component in others:
            raise _wrong_code(record, f"the {component} engine {key}")
        entry = f"{folder.group()}/{IDENTITY}"
        if entry not in names:
            return
        try:
            with archive.open(entry) as file:
                identity = Identity.model_validate_json(file.read(_MAX_IDENTITY_BYTES))
        except (ValidationError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise EngineError(f"The {record.component} engine cannot be opened (its {IDENTITY} is damaged).") from error
    if identity.bucket != record.bucket:
        raise _wrong_code(record, "another bucket")
    if identity.signature != record.signature:
        raise _wrong_code(record, "other inputs or outputs")


def _wrong_code(record: EngineRecord, compiled_for: str) -> EngineError:
    return EngineError(
        f"The {record.component} engine {record.key[:12]} cannot be used. Its code was compiled for {compiled_for}, so "
        "the release mixes up its engines."
    )


def _find_problem(entries: list[zipfile.ZipInfo], size: int) -> str:
    """Describe the first problem in the archive's list of entries, or return ""."""
    if len(entries) > _MAX_ENTRIES:
        return f"its package holds more than {_MAX_ENTRIES} files"
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        return "its package holds two files with the same name"
    for entry in entries:
        shown = repr(entry.filename[:80])
        # The name as stored: zipfile itself cuts a name at a NUL.
        name = entry.orig_filename
        parts = name.removesuffix("/").split("/")
        if ".." in parts or "" in parts or "\\" in name or ":" in name or not name.isprintable():
            return f"its package holds {shown}, which leads out of the folder it is unpacked in"
        if stat.S_ISLNK(entry.external_attr >> 16):
            return f"its package holds {shown}, which is a link"
        if entry.compress_type != zipfile.ZIP_STORED:
            return f"its package holds {shown}, which is compressed; engine packages are stored uncompressed"
    if sum(entry.file_size for entry in entries) > size:
        return "its entries claim more bytes than the file has"
    return ""
