"""Image files as untrusted clients send them: valid, unusual, damaged, and made to exhaust a server.

    python -m tests.support.odd_images < CASES

resolves requests with such files, a line of JSON each (`as_line`), in a process of its own. It prints a line of JSON:
how many cases of each kind there were, what was unexpected, and the process's memory.
"""

import base64
import io
import json
import random
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageCms

from model.api.images import resolve_with_images
from model.errors import RequestRefused
from model.loading.served import Defaults, ServedModel, SizeList
from model.request_fields import GenerationRequest

Outcome = Literal["accepted", "refused", "either"]
SIZE = 64  # of the requested image
FORMATS = ("PNG", "JPEG", "WEBP")
ORIENTATION = 0x0112


@dataclass(frozen=True)
class Case:
    """A request's fields, without its prompt, and how it must end. `field` is the one that a refusal names."""

    kind: str
    fields: dict[str, Any]
    outcome: Outcome
    field: str = "image"


def text(file: bytes) -> str:
    return base64.b64encode(file).decode()


def picture(rng: random.Random, mode: str = "RGB", size: tuple[int, int] | None = None) -> Image.Image:
    width, height = size or (rng.randint(1, 200), rng.randint(1, 200))
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4}.get(mode, 3)
    levels = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (height, width, channels), np.uint8)
    image = Image.fromarray(levels[..., 0] if channels == 1 else levels, mode if channels in (1, 2) else None)
    return image if image.mode == mode else image.convert("RGB").convert(mode)


def write(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(levels: np.ndarray[Any, Any], depth: int, *chunks: bytes, palette: bool = False) -> bytes:
    """Return a PNG of grey levels or palette indices [height, width], or of colours [height, width, 3].

    depth: bits of each level. chunks: those before the pixels.
    """
    height, width = levels.shape[:2]
    color_type = 3 if palette else 2 if levels.ndim == 3 else 0
    if depth < 8:
        bits = levels.astype(np.uint8)[..., None] >> np.arange(depth - 1, -1, -1) & 1
        rows = np.packbits(bits.reshape(height, -1), axis=1)
    else:
        rows = levels.astype(f">u{depth // 8}").reshape(height, -1).view(np.uint8)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *chunks, data, chunk(b"IEND")])


def insert_chunks(png: bytes, chunks: bytes, before: bytes = b"IDAT") -> bytes:
    at = png.index(before) - 4
    return png[:at] + chunks + png[at:]


def insert_segments(jpeg: bytes, segments: bytes) -> bytes:
    return jpeg[:2] + segments + jpeg[2:]


def with_png_size(png: bytes, width: int, height: int) -> bytes:
    return png[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + png[24:29]) + png[33:]


def with_jpeg_size(jpeg: bytes, width: int, height: int) -> bytes:
    at = jpeg.index(b"\xff\xc2" if b"\xff\xc2" in jpeg else b"\xff\xc0")  # progressive or baseline
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def with_webp_size(webp: bytes, width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<II", 10, 0) + sides + webp[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


WITH_SIZE = {"PNG": with_png_size, "JPEG": with_jpeg_size, "WEBP": with_webp_size}


def overlapping_exif() -> bytes:
    """Return EXIF whose 40,000 entries all refer to the same 50,000 bytes. Pillow copies those for each entry."""
    entries = b"".join(struct.pack("<HHII", tag, 7, 50_000, 8) for tag in range(1_000, 41_000))
    return b"II*\0" + struct.pack("<IH", 8, 40_000) + entries


def exif_segments(exif: bytes) -> bytes:
    """Return EXIF as segments of a JPEG, which Pillow joins."""
    parts = [exif[start : start + 65_000] for start in range(0, len(exif), 65_000)]
    return b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts)


# -- kinds: each function returns one case ----------------------------------------------------------------------------


def _valid(rng: random.Random) -> Case:
    format = rng.choice(FORMATS)
    file = write(picture(rng), format)
    prefix = rng.choice(["", f"data:image/{format.lower()};base64,"])
    return Case("valid", {"image": prefix + text(file)}, "accepted")


def _mode(rng: random.Random) -> Case:
    modes = [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("L", "JPEG"),
             ("CMYK", "JPEG"), ("RGBA", "WEBP")]  # fmt: skip
    mode, format = rng.choice(modes)
    if mode == "I;16":
        levels = np.random.default_rng(rng.getrandbits(32)).integers(0, 65536, (rng.randint(1, 99), 50), np.uint16)
        return Case("mode I;16", {"image": text(write(Image.fromarray(levels), format))}, "accepted")
    return Case(f"mode {mode} {format}", {"image": text(write(picture(rng, mode), format))}, "accepted")


def _exif(rng: random.Random) -> Case:
    exif = Image.Exif()
    exif[ORIENTATION] = rng.randint(0, 9)
    width, height = rng.choice([(64, 96), (96, 64)])
    file = write(picture(rng, size=(width, height)), rng.choice(FORMATS), exif=exif)
    rotated = 5 <= exif[ORIENTATION] <= 8
    return Case("exif", {"image": text(file), "width": height if rotated else width,
                         "height": width if rotated else height, "resize": "refuse"}, "accepted")  # fmt: skip


def _metadata(rng: random.Random) -> Case:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    file = write(picture(rng), rng.choice(FORMATS), icc_profile=profile) + rng.randbytes(rng.randint(0, 2000))
    return Case("metadata", {"image": text(file)}, "accepted")


def _truncated(rng: random.Random) -> Case:
    file = write(picture(rng), rng.choice(FORMATS))
    return Case("truncated", {"image": text(file[: rng.randrange(len(file))])}, "refused")


def _flipped(rng: random.Random) -> Case:
    """Flip bytes anywhere, or in the header."""
    file = bytearray(write(picture(rng), rng.choice(FORMATS)))
    length = rng.choice([len(file), min(64, len(file))])
    for _ in range(rng.randint(1, 20)):
        file[rng.randrange(length)] = rng.randrange(256)
    return Case("flipped bytes", {"image": text(bytes(file))}, "either")


def _shuffled_chunks(rng: random.Random) -> Case:
    file = write(picture(rng, "P"), "PNG")
    kinds = [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT", b"iCCP", b"eXIf", b"zTXt", b"gAMA"]
    chunks = b"".join(chunk(rng.choice(kinds), rng.randbytes(rng.randint(0, 40))) for _ in range(rng.randint(1, 5)))
    return Case("chunks", {"image": text(insert_chunks(file, chunks, rng.choice([b"IHDR", b"IDAT", b"IEND"])))},
                "either")  # fmt: skip


def _large_header(rng: random.Random) -> Case:
    format, size = rng.choice(FORMATS), rng.choice([(100_000, 100_000), (17_000, 1_000), (2, 40_000), (6_000, 6_000)])
    if format == "JPEG":
        size = (min(size[0], 65_535), min(size[1], 65_535))
    file = WITH_SIZE[format](write(picture(rng), format), *size)
    return Case("large header", {"image": text(file)}, "refused")


def _large(rng: random.Random) -> Case:
    """A few kilobytes that decode to 31 megapixels."""
    mode = rng.choice(["RGB", "RGBA", "L"])
    format = "PNG" if mode == "L" else rng.choice(["PNG", "WEBP"])
    side = rng.choice([(5_600, 5_600), (16_383, 1_900), (1_900, 16_383)])
    image = Image.new(mode, side, 7 if mode == "L" else (9, 99, 200) + (100,) * (mode == "RGBA"))
    exif = Image.Exif()
    exif[ORIENTATION] = rng.randint(1, 8)
    options = {"lossless": True, "quality": 0, "method": 0} if format == "WEBP" else {}
    return Case("31 megapixels", {"image": text(write(image, format, exif=exif, **options))}, "accepted")


def _animated(rng: random.Random) -> Case:
    frames = [picture(rng, size=(20, 30)) for _ in range(rng.randint(2, 4))]
    file = write(frames[0], rng.choice(["PNG", "WEBP"]), save_all=True, append_images=frames[1:])
    return Case("animated", {"image": text(file)}, "refused")


def _no_image(rng: random.Random) -> Case:
    data = rng.choice([
        "", "=", "A", "AAAA", "%%%%", "\u202e", "data:", "data:image/png;base64", "data:image/png;base64,",
        "file:///etc/passwd", "http://169.254.169.254/", "data:image/svg+xml;base64,PHN2Zy8+", "x" * 1000,
        text(rng.randbytes(rng.randint(1, 500))), text(b"\x89PNG\r\n\x1a\n"), text(b"\xff\xd8\xff"),
        text(b"\xff\xd8\xff\xd9"), text(b"RIFF\0\0\0\0WEBP"), text(b"RIFF\xff\xff\xff\xffWEBPVP8 "),
    ])  # fmt: skip
    return Case("no image", {"image": data}, "refused")


def _bad_text(rng: random.Random) -> Case:
    data = text(write(picture(rng), "PNG"))
    at = rng.randrange(len(data))
    broken = rng.choice([data[:at] + "\n" + data[at:], data[:at] + "-" + data[at + 1 :], data.rstrip("=")[:-1] + "\0",
                         data + "A", "data:image/gif;base64," + data, "data:text/plain;base64," + data, " " + data,
                         data[:at] + "é" + data[at:]])  # fmt: skip
    return Case("bad text", {"image": broken}, "refused")


def _too_many_bytes(rng: random.Random) -> Case:
    return Case("more than 32 MiB", {"image": text(bytes(32 * 2**20 + rng.randint(1, 2**20)))}, "refused")


def _bomb(rng: random.Random) -> Case:
    png, jpeg = write(picture(rng), "PNG"), write(picture(rng), "JPEG")
    progressive = write(picture(rng), "JPEG", progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    inflated = b"a\0\0" + zlib.compress(bytes(2**26))
    exif = overlapping_exif()
    makers: list[Callable[[], tuple[bytes, Outcome]]] = [
        lambda: (insert_chunks(png, chunk(b"zTXt", inflated) * 8), "accepted"),
        lambda: (insert_chunks(png, chunk(b"iCCP", inflated)), "accepted"),
        lambda: (insert_chunks(png, chunk(b"iTXt", b"a\0\1\0\0\0" + inflated[3:]), b"IEND"), "accepted"),
        lambda: (insert_chunks(png, chunk(b"eXIf", exif)), "accepted"),
        lambda: (insert_segments(jpeg, exif_segments(exif)), "accepted"),
        lambda: (insert_chunks(png, chunk(b"tEXt") * 200_000), "refused"),
        lambda: (insert_chunks(png, chunk(b"IDAT") * 200_000), "refused"),
        lambda: (insert_segments(jpeg, b"\xff\xfe\0\x02" * 500_000), "refused"),
        lambda: (insert_segments(jpeg, b"\xff" * 2**24), "accepted"),
        lambda: (progressive[:-2] + scan * 5_000 + progressive[-2:], "refused"),
        lambda: (jpeg[:-2] + b"\xff" * 2**24 + b"\0" + jpeg[-2:], "accepted"),
    ]
    file, outcome = rng.choice(makers)()
    return Case("bomb", {"image": text(file)}, outcome)


def _mask(rng: random.Random) -> Case:
    """A valid image with masks: of its size and of other sizes, damaged and unusual."""
    size = rng.randint(8, 99), rng.randint(8, 99)
    fields: dict[str, Any] = {"image": text(write(picture(rng, size=size), "PNG"))}
    good = {"image": text(write(picture(rng, "L", size), "PNG"))}
    makers: dict[str, Callable[[], bytes]] = {
        "good": lambda: write(picture(rng, rng.choice(["1", "L", "RGB", "P"]), size), "PNG"),
        "transparent": lambda: write(picture(rng, "RGBA", size), rng.choice(["PNG", "WEBP"])),
        "other size": lambda: write(picture(rng, "L", (size[0] + 1, size[1])), "PNG"),
        "damaged": lambda: write(picture(rng, "L", size), "PNG")[:-30],
        "animated": lambda: write(
            picture(rng, size=size), "WEBP", save_all=True, append_images=[picture(rng, size=size)]
        ),
    }
    kind = rng.choice(list(makers))
    # A transparent one may be so dark that a blur leaves nothing to repaint, which is refused.
    feather = 0 if kind == "transparent" else rng.choice([0, 3])
    fields["masks"] = [*[good] * rng.randint(0, 2), {"image": text(makers[kind]()), "feather": feather}]
    accepted = kind in ("good", "transparent")
    field = f"masks.{len(fields['masks']) - 1}.image"
    return Case(f"mask: {kind}", fields, "accepted" if accepted else "refused", field)


# Kind -> its share of all cases.
_KINDS: dict[Callable[[random.Random], Case], int] = {
    _valid: 10, _mode: 15, _exif: 10, _metadata: 4, _truncated: 12, _flipped: 20, _shuffled_chunks: 12,
    _large_header: 6, _animated: 4, _no_image: 9, _bad_text: 6, _bomb: 2, _mask: 12,
}  # fmt: skip
_EXPENSIVE = (_large, _too_many_bytes)  # one of each in a hundred cases


def cases(number: int, seed: int = 0) -> Iterator[Case]:
    """Yield so many cases. Fields that a case leaves open are those of a small request that resizes any image."""
    rng = random.Random(seed)
    defaults = {"width": SIZE, "height": SIZE}
    for index in range(number):
        if index % 50 == 49:
            made = _EXPENSIVE[index // 50 % 2](rng)
        else:
            [make] = rng.choices(list(_KINDS), list(_KINDS.values()))
            made = (list(_KINDS)[index] if index < len(_KINDS) else make)(rng)  # each kind at least once
        resize = {"resize": rng.choice(["stretch", "crop", "pad"])}
        yield Case(made.kind, defaults | resize | made.fields, made.outcome, made.field)


# -- in a process of its own ------------------------------------------------------------------------------------------

SIZES = SizeList(((SIZE, SIZE), (64, 96), (96, 64)))
SERVED = ServedModel(SIZE, SIZE, SIZES, has_refiner=False, defaults=Defaults(), release="toy/1", image_sizes=SIZES)


def find_problem(case: Case) -> str | None:
    """Resolve a request. Return what was unexpected, or None."""
    request = GenerationRequest(prompt="a cat", **case.fields)
    try:
        params = resolve_with_images(request, SERVED)
    except RequestRefused as error:
        if case.outcome == "accepted":
            return f"refused: {error}"
        if error.field != case.field:
            return f"the refusal names {error.field}: {error}"
        return None if len(str(error)) < 400 else f"a long refusal: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if case.outcome == "refused":
        return "accepted"
    assert params.image is not None
    shapes = {params.image.shape[:2], *(mask.levels.shape for mask in params.masks)}
    return None if shapes == {(params.height, params.width)} else f"shapes {shapes}"


def peak_mib() -> float:
    """Return the largest resident memory of this process so far.

    ``ru_maxrss`` of a new program is at least the resident memory of the process that started it. VmHWM is its own.
    """
    [kilobytes] = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024


def as_line(case: Case) -> bytes:
    """Return a case as a line of JSON."""
    return json.dumps([case.kind, case.fields, case.outcome, case.field]).encode() + b"\n"


def main() -> None:
    """Resolve the cases of standard input, and print how they ended. The first one only warms up."""
    kinds, problems, before = Counter[str](), [], 0.0
    for index, line in enumerate(sys.stdin.buffer):
        case = Case(*json.loads(line))
        if (problem := find_problem(case)) is not None:
            problems.append(f"{index}: {case.kind}: {problem}")
        kinds[case.kind] += 1
        before = before or peak_mib()
    print(json.dumps({"kinds": kinds, "problems": problems, "before_mib": before, "peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
