"""Read the containers PNG, JPEG and WebP: size, rotation and the part of a file that holds the pixels.

These functions run before Pillow sees an untrusted file, and decode no pixels. Pillow gets `Container.pixel_data` only:
the file without EXIF, text, colour profiles, previews and trailing data. So metadata cannot expand in memory. The
number of segments is limited too, because Pillow handles each one in Python, and each scan of a JPEG in a full pass.

Sources: PNG (W3C, third edition), JPEG (ITU-T T.81), WebP (RFC 9649), EXIF (CIPA DC-008).
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

InputFormat = Literal["png", "jpeg", "webp"]

MAX_PNG_CHUNKS = 50_000  # common encoders write 8 KiB in a chunk: 4,096 for the largest accepted file
MAX_JPEG_SEGMENTS = 2_000
MAX_JPEG_SCANS = 100  # a progressive JPEG has about 10
MAX_LARGE_JPEG_SCANS = 12  # of the largest accepted image; more scans are accepted of a smaller one
MAX_JPEG_SCAN_PIXELS = MAX_LARGE_JPEG_SCANS * 32_000_000  # scans times pixels: they take about a second to decode
MAX_WEBP_CHUNKS = 1_000

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT"}
_WEBP_PIXEL_CHUNKS = {b"VP8X", b"ALPH", b"VP8 ", b"VP8L"}
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)  # not a stuffed byte, not a restart marker
_FILL_BYTES = re.compile(rb"\xff+")  # may stand before a marker
_SOI, _EOI, _SOS, _APP0, _APP1, _APP14, _APP15, _COMMENT = 0xD8, 0xD9, 0xDA, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
_FRAME_HEADERS = {0xC0, 0xC1, 0xC2}  # baseline, extended, progressive: the processes that libjpeg decodes
_UNSUPPORTED_FRAMES = set(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # C4, C8, CC are not frame headers
_EXIF_ORIENTATION, _EXIF_SHORT = 0x0112, 3


class InvalidFile(Exception):
    """The bytes are not a file of an accepted format. The message is a clause about "the file".

    `remedy`: a sentence that states another file to send; "": any file of an accepted format.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Container:
    """What a file's headers state. `width` and `height` are those of the stored pixels, before any rotation."""

    format: InputFormat
    width: int
    height: int
    orientation: int
    """EXIF orientation, 1 to 8; 1 if the file has none."""
    animated: bool
    pixel_data: bytes
    """A file of the same format with the same pixels, and without metadata."""
    depth: int = 8
    """Bits of each stored level or palette index."""
    scans: int = 1
    """Passes of the decoder over all pixels; only a JPEG has more than one."""


def detect_format(file: bytes) -> InputFormat | None:
    """Return the format that the first bytes state, None for any other."""
    if file.startswith(_PNG_SIGNATURE):
        return "png"
    if file.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "webp" if file[:4] == b"RIFF" and file[8:12] == b"WEBP" else None


def read_container(file: bytes) -> Container:
    """Read the headers of a file. Raises InvalidFile."""
    read = {"png": _read_png, "jpeg": _read_jpeg, "webp": _read_webp}
    if (format := detect_format(file)) is None:
        raise InvalidFile("is not PNG, JPEG or WebP")
    try:
        return read[format](file)
    except (struct.error, IndexError) as error:
        raise InvalidFile("is truncated") from error


# -- PNG --------------------------------------------------------------------------------------------------------------


def _read_png(file: bytes) -> Container:
    if file[12:16] != b"IHDR":
        raise InvalidFile("is damaged: it has no PNG header")
    width, height, depth = struct.unpack_from(">IIB", file, 16)
    kept, orientation, animated, complete = [_PNG_SIGNATURE], 1, False, False
    for kind, start, end in _png_chunks(file):
        if kind == b"acTL":
            animated = True
        elif kind == b"eXIf":
            orientation = read_orientation(file[start + 8 : end - 4])
        elif kind == b"IEND":
            complete = True
        elif kind in _PNG_PIXEL_CHUNKS:
            kept.append(file[start:end])
    if not complete:
        raise InvalidFile("is truncated: its last chunk is missing")
    return Container("png", width, height, orientation, animated, b"".join([*kept, _PNG_END]), depth)


def _png_chunks(file: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type, start and end of each complete chunk, up to IEND."""
    start = len(_PNG_SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        length, kind = struct.unpack_from(">I4s", file, start)
        end = start + length + 12  # length, type and checksum take 4 bytes each
        if end > len(file):
            raise InvalidFile("is truncated")
        yield kind, start, end
        if kind == b"IEND":
            return
        start = end
    raise InvalidFile(f"has more than {MAX_PNG_CHUNKS} chunks")


# -- JPEG -------------------------------------------------------------------------------------------------------------


def _read_jpeg(file: bytes) -> Container:
    size, scans, complete = None, 0, False
    kept, exif = [file[:2]], []
    for marker, start, end in _jpeg_segments(file):
        if marker == _EOI:
            complete = True
        elif marker in _UNSUPPORTED_FRAMES:
            raise InvalidFile("is a lossless or arithmetic JPEG, which is not supported")
        elif marker in _FRAME_HEADERS:
            if size is not None:
                raise InvalidFile("is damaged: it has two frame headers")
            height, width = struct.unpack_from(">HH", file, start + 5)
            size = width, height
        elif marker == _APP1 and file[start + 4 : start + 10] == b"Exif\0\0":
            exif.append(file[start + 10 : end])
        elif marker == _SOS:
            scans += 1
            if scans > MAX_JPEG_SCANS:
                raise InvalidFile(f"has more than {MAX_JPEG_SCANS} scans")
        # APP0 and APP14 state the colour space.
        if marker in (_APP0, _APP14) or not (_APP0 <= marker <= _APP15 or marker == _COMMENT):
            kept.append(file[start:end])
    if not complete:
        raise InvalidFile("is truncated: its end marker is missing")
    if size is None:
        raise InvalidFile("is damaged: it has no frame header")
    width, height = size
    if scans > MAX_LARGE_JPEG_SCANS and scans * width * height > MAX_JPEG_SCAN_PIXELS:
        most = max(MAX_LARGE_JPEG_SCANS, MAX_JPEG_SCAN_PIXELS // (width * height))
        raise InvalidFile(
            f"has {scans} scans of {width} x {height} pixels; a JPEG of this size may have {most}",
            "Send it as a baseline JPEG, which has one scan, or as a PNG or WebP file.",
        )
    # The segments are parts of one EXIF, as for Pillow: the orientation is in the first unless that is very short.
    return Container("jpeg", *size, read_orientation(b"".join(exif)), False, b"".join(kept), scans=scans)


def _jpeg_segments(file: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment, up to the end marker. A scan includes its compressed data."""
    start = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if file[start] != 0xFF:
            raise InvalidFile("is damaged: a JPEG marker is missing")
        if file[start + 1] == 0xFF:
            fill = _FILL_BYTES.match(file, start)
            assert fill is not None
            start = fill.end() - 1
        marker = file[start + 1]
        if marker in (0x00, _SOI):
            raise InvalidFile("is damaged: a JPEG marker is missing")
        if marker == _EOI:
            yield marker, start, start + 2
            return
        (length,) = struct.unpack_from(">H", file, start + 2)
        end = start + 2 + length
        if length < 2 or end > len(file):
            raise InvalidFile("is truncated")
        if marker == _SOS:
            found = _JPEG_MARKER.search(file, end)
            if found is None:
                raise InvalidFile("is truncated: its end marker is missing")
            end = found.start()
        yield marker, start, end
        start = end
    raise InvalidFile(f"has more than {MAX_JPEG_SEGMENTS} segments")


# -- WebP -------------------------------------------------------------------------------------------------------------


def _read_webp(file: bytes) -> Container:
    (length,) = struct.unpack_from("<I", file, 4)
    if length + 8 > len(file):
        raise InvalidFile("is truncated")
    chunks = list(_webp_chunks(file, min(len(file), length + 8)))
    kind, start, _ = chunks[0]
    if kind == b"VP8X":
        flags = file[start + 8]
        width, height = (1 + int.from_bytes(file[start + at : start + at + 3], "little") for at in (12, 15))
    elif kind == b"VP8 " and file[start + 11 : start + 14] == b"\x9d\x01\x2a":
        flags = 0
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", file, start + 14))
    elif kind == b"VP8L" and file[start + 8] == 0x2F:
        flags = 0
        (bits,) = struct.unpack_from("<I", file, start + 9)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        raise InvalidFile("is damaged: it has no WebP header")
    orientation, kept = None, []
    for kind, start, end in chunks:
        if kind == b"EXIF" and orientation is None:  # RFC 9649: readers may ignore further chunks; libwebp does
            orientation = read_orientation(file[start + 8 : end])
        elif kind in _WEBP_PIXEL_CHUNKS:
            kept.append(file[start:end] + b"\0" * ((end - start) % 2))
    animated = bool(flags & 0x02) or any(kind in (b"ANIM", b"ANMF") for kind, _, _ in chunks)
    body = bytearray(b"".join(kept))
    if body[:4] == b"VP8X":
        body[8] &= 0x10  # of the features, only alpha is kept
    riff = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP"
    return Container("webp", width, height, orientation or 1, animated, riff + bytes(body))


def _webp_chunks(file: bytes, file_end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type, start and end (without padding) of each chunk."""
    start = 12
    for _ in range(MAX_WEBP_CHUNKS):
        kind, length = struct.unpack_from("<4sI", file, start)
        end = start + 8 + length
        if end > file_end:
            raise InvalidFile("is truncated")
        yield kind, start, end
        start = end + length % 2
        if start + 8 > file_end:
            return
    raise InvalidFile(f"has more than {MAX_WEBP_CHUNKS} chunks")


# -- EXIF -------------------------------------------------------------------------------------------------------------


def read_orientation(exif: bytes) -> int:
    """Return the orientation, 1 to 8, of EXIF data. 1 if it has no valid one.

    The data begin with their TIFF header, or with a JPEG segment's `Exif`, which some programs also write into PNG
    and WebP files.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for entry in range(entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, directory + 2 + 12 * entry)
            if tag == _EXIF_ORIENTATION:
                return value if (kind, count) == (_EXIF_SHORT, 1) and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
