"""Images of requests: base64 -> headers -> pixels. Files are written by Pillow, or by hand where it cannot."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from model.errors import RequestRefused
from model.images.containers import (
    MAX_JPEG_SCAN_PIXELS,
    MAX_JPEG_SCANS,
    MAX_LARGE_JPEG_SCANS,
    MAX_PNG_CHUNKS,
    read_container,
)
from model.images.inputs import (
    MAX_FILE_BYTES,
    MAX_INPUT_PIXELS,
    InputImage,
    Pixels,
    decode_mask,
    decode_rgb,
    read_image,
    read_mask,
)
from tests.support.odd_images import (
    FORMATS,
    ORIENTATION,
    WITH_SIZE,
    chunk,
    exif_segments,
    insert_chunks,
    insert_segments,
    png_of,
    text,
    with_png_size,
    write,
)
from tests.support.repository import REPOSITORY

WIDTH, HEIGHT = 48, 32


def picture(mode: str = "RGB", width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Return a smooth image without any symmetry."""
    y, x = np.mgrid[:height, :width]
    levels = np.stack([5 * x % 256, 7 * y % 256, (3 * x + 2 * y) % 256], axis=-1).astype(np.uint8)
    return Image.fromarray(levels).convert(mode)


PNG, JPEG, WEBP = (write(picture(), format) for format in FORMATS)
FILES = dict(zip(FORMATS, (PNG, JPEG, WEBP), strict=True))
PROGRESSIVE = write(picture(), "JPEG", progressive=True)


def read(file: bytes) -> InputImage:
    return read_image(text(file), "image")


def pixels(file: bytes) -> Pixels:
    return decode_rgb(read(file))


def pillow(file: bytes, mode: str = "RGB") -> Pixels:
    """Decode a file with Pillow, upright."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert(mode))


def refusal(call: Callable[..., object], *arguments: object, field: str = "image") -> str:
    with pytest.raises(RequestRefused) as refused:
        call(*arguments)
    assert refused.value.field == field
    assert len(str(refused.value)) < 400
    return str(refused.value)


# -- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_decodes_what_pillow_decodes(format: str) -> None:
    for prefix in (
        "",
        "data:image/{};base64,",
        "DATA:IMAGE/{};BASE64,",
        "data:image/jpg;base64,",
        "data:image/pjpeg;base64,",
        "data:image/png;base64,",
        "data:image/{};charset=utf-8;base64,",
        "data:image/{};base64;charset=utf-8,",
        "data:Image/JPG;name=a.jpg;Charset=UTF-8;Base64,",
        " data: image/{} ; charset=utf-8 ; base64 , ",
        f"data:image/png;name={'a' * 229};base64,",
    ):
        image = read_image(prefix.format(format.lower()) + text(FILES[format]), "image")
        assert (image.width, image.height) == (WIDTH, HEIGHT), prefix
        decoded = decode_rgb(image)
        assert decoded.dtype == np.uint8
        np.testing.assert_array_equal(decoded, pillow(FILES[format]), prefix)


@pytest.mark.parametrize(
    ("mode", "format", "options"),
    [
        *((mode, "PNG", {}) for mode in ("1", "L", "P")),
        *((mode, "JPEG", {}) for mode in ("L", "CMYK")),
        ("L", "WEBP", {}),
        ("RGB", "PNG", {"compress_level": 9}),
        ("RGB", "JPEG", {"progressive": True}),
        ("RGB", "WEBP", {"lossless": True}),
    ],
)
def test_converts_modes_as_pillow(mode: str, format: str, options: dict[str, Any]) -> None:
    file = write(picture(mode), format, **options)
    np.testing.assert_array_equal(pixels(file), pillow(file))
    np.testing.assert_array_equal(decode_mask(read(file)), pillow(file, "L"))


def test_divides_16_bit_levels_by_256() -> None:
    grey = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    file = write(Image.fromarray(grey), "PNG")
    for decoded in (pixels(file)[..., 1], decode_mask(read(file))):
        np.testing.assert_array_equal(decoded, grey >> 8)
    colours = np.random.default_rng(0).integers(0, 65536, (4, 6, 3)).astype(">u2")
    np.testing.assert_array_equal(pixels(png_of(colours, 16)), colours >> 8)


@pytest.mark.parametrize(("mode", "format"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG")])
def test_blends_transparent_pixels_with_white(mode: str, format: str) -> None:
    """Those of a mask are not repainted."""
    image = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
    image.paste((255, 0, 0, 0), (0, 0, 2, 2))
    file = write(image.convert(mode), format, lossless=True)
    decoded = pixels(file)
    assert (decoded[:, :2] == 255).all()
    assert (decoded[:, 2:] == ((255, 0, 0) if mode == "RGBA" else 76)).all()
    assert np.asarray(decode_mask(read(file)))[0].tolist() == [0, 0, 76, 76]
    assert pixels(write(Image.new("RGBA", (1, 1), (0, 0, 0, 51)), format, lossless=True)).tolist() == [[[204] * 3]]


def transparent_color(*levels: int) -> bytes:
    return chunk(b"tRNS", struct.pack(f">{len(levels)}H", *levels))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_blends_the_transparent_grey_level_of_every_depth(depth: int) -> None:
    """Of 16 bits the level is exact. Of 2 to 8, further bits are ignored."""
    scale = 255 / (2**depth - 1)
    levels = np.arange(2**depth)[None] if depth < 16 else np.array([[0, 1, 90, 90 << 8, 90 << 8 | 7, 65_534, 65_535]])
    eight_bits = (levels * scale).astype(int) if depth < 16 else levels >> 8
    for key in levels[0].tolist() if depth != 8 else (0, 2, 90, 255):
        files = [png_of(levels, depth, transparent_color(key))]
        files += [png_of(levels, depth, transparent_color(key + 2**depth))] if depth in (2, 4, 8) else []
        for file in files:
            np.testing.assert_array_equal(pixels(file)[..., 1], np.where(levels == key, 255, eight_bits))
            np.testing.assert_array_equal(decode_mask(read(file)), np.where(levels == key, 0, eight_bits))


@pytest.mark.parametrize("key", [(0, 0, 0), (10, 20, 30), (10, 20, 31), (255, 254, 253)])
def test_blends_the_transparent_colour_of_16_bits(key: tuple[int, int, int]) -> None:
    levels = np.array([[(0, 0, 0), (10, 20, 30), (10, 20, 29), (255, 254, 253)]])
    for low_byte in (0, 7, 255):
        file = png_of(levels << 8 | low_byte, 16, transparent_color(*(level << 8 | low_byte for level in key)))
        np.testing.assert_array_equal(pixels(file), pixels(png_of(levels, 8, transparent_color(*key))))
        np.testing.assert_array_equal(pixels(file), np.where((levels == key).all(axis=-1, keepdims=True), 255, levels))


COLORS = chunk(b"PLTE", bytes([200, 100, 0, 10, 20, 30]))


@pytest.mark.parametrize("alphas", [b"\xff\0", b"\x80\x40"], ids=["one-transparent", "several"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_blends_transparent_palette_entries_of_every_depth(depth: int, alphas: bytes) -> None:
    indices = np.array([[0, 1, 1, 0]])
    file = png_of(indices, depth, COLORS, chunk(b"tRNS", alphas), palette=True)
    alpha = np.frombuffer(alphas, np.uint8)[:, None] / 255
    expected = np.rint(np.array([[200, 100, 0], [10, 20, 30]]) * alpha + 255 * (1 - alpha))[indices]
    np.testing.assert_allclose(pixels(file), expected, atol=1)


def exif_of(orientation: int, order: str = "<") -> bytes:
    """Return EXIF data that state an orientation, from their TIFF header on."""
    entry = struct.pack(f"{order}HHIHHI", ORIENTATION, 3, 1, orientation, 0, 0)
    return (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, 1) + entry


def with_webp_exif(*parts: bytes) -> bytes:
    body = WITH_SIZE["WEBP"](WEBP, WIDTH, HEIGHT)[8:]
    body = body[:12] + b"\x08" + body[13:]  # the flag of VP8X for EXIF
    body += b"".join(b"EXIF" + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2) for part in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def with_jpeg_exif(*parts: bytes) -> bytes:
    return insert_segments(JPEG, b"".join(map(exif_segments, parts)))


def check_upright_as_pillow(file: bytes, turned: bool) -> None:
    image, expected = read(file), pillow(file)
    assert (image.height, image.width) == expected.shape[:2] == ((WIDTH, HEIGHT) if turned else (HEIGHT, WIDTH))
    np.testing.assert_array_equal(decode_rgb(image), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_turns_images_upright(format: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        check_upright_as_pillow(write(picture(), format, exif=exif), turned=orientation >= 5)


def test_reads_exif_as_files_have_it() -> None:
    """The first states the rotation, in either byte order, after the pixels, in several segments, with a prefix."""
    for first, second in ((6, 1), (1, 6), (6, 3), (8, 6)):
        check_upright_as_pillow(with_jpeg_exif(exif_of(first), exif_of(second)), turned=first >= 5)
        check_upright_as_pillow(with_webp_exif(exif_of(first), exif_of(second)), turned=first >= 5)
    check_upright_as_pillow(with_jpeg_exif(exif_of(6)[:8], exif_of(6)[8:]), turned=True)
    check_upright_as_pillow(insert_chunks(PNG, chunk(b"eXIf", b"Exif\0\0" + exif_of(6))), turned=True)
    check_upright_as_pillow(with_webp_exif(b"Exif\0\0" + exif_of(6)), turned=True)
    big_endian = b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, ORIENTATION, 3, 1, 6, 0)
    assert read(insert_chunks(PNG, chunk(b"eXIf", big_endian), before=b"IEND")).width == HEIGHT
    for damaged in (b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"nonsense"):
        assert read(insert_chunks(PNG, chunk(b"eXIf", damaged))).width == WIDTH


@pytest.mark.parametrize("format", FORMATS)
def test_pixel_data_has_no_metadata(format: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION], exif[0x010E] = 3, "private description"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "private text", zip=True)
    own: dict[str, Any] = {"PNG": {"pnginfo": info}, "JPEG": {"comment": "private text"}, "WEBP": {}}[format]
    file = write(picture(), format, exif=exif, icc_profile=profile, **own) + b"trailing"
    assert b"private description" in file
    kept = read_container(file).pixel_data
    assert len(kept) < len(file) - 200 and b"private" not in kept and not kept.endswith(b"trailing")
    with Image.open(io.BytesIO(kept)) as image:
        image.load()
        assert not {"exif", "icc_profile", "comment"} & image.info.keys()


def test_accepts_unusual_jpegs() -> None:
    """A phone's JPEG (MPO) holds its main image, then others. Bytes may fill the space before a marker."""
    file = write(picture(), "MPO", save_all=True, append_images=[picture().rotate(180)])
    np.testing.assert_array_equal(pixels(file), pixels(JPEG))
    at = JPEG.index(b"\xff\xdb")
    np.testing.assert_array_equal(pixels(JPEG[:at] + b"\xff" * 9 + JPEG[at:]), pixels(JPEG))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "got an empty text"),
        ("data:image/png;base64,", "got an empty text"),
        *((data, "the text is not base64") for data in ("not base64!", "é" * 8, "iVBORw0KGgo", "iVBORw0KGgo====")),
        ("iVBO\nRw0K", "without line breaks"),
        ("https://example.com/cat.png", 'got "https://example.com/cat.png"'),
        ("data:image/gif;base64,R0lGODlh", 'got "data:image/gif;base64"'),
        ("data:image/gif;base64,R0lGODlh", 'of the media type "image/gif". Expected image/png, image/jpeg, image/jpg'),
        ("data:text/plain;base64,R0lGODlh", 'of the media type "text/plain". Expected image/png'),
        ("data:;base64,R0lGODlh", 'of the media type "". Expected image/png'),
        ("data:image/png,abc", 'got "data:image/png" without ";base64,"'),
        ("data:image/png;charset=utf-8,abc", 'got "data:image/png;charset=utf-8" without ";base64,"'),
        ("data:image/png;base64", 'got "data:image/png;base64" without ";base64,"'),
        (f"data:image/png;name={'a' * 240};base64,AAAA", "without a comma in its first 256 characters. Leave out"),
        (f"data:image/png;base64;name={'a' * 240},AAAA", "without a comma in its first 256 characters. Leave out"),
        ("R0lGODlhAQABAAAAACw=", "is not PNG, JPEG or WebP"),
        (text(b"x"), "is not PNG, JPEG or WebP"),
    ],
)
def test_refuses_text_that_is_no_image(data: str, message: str) -> None:
    assert message in refusal(read_image, data, "masks.2.image", field="masks.2.image")


@pytest.mark.parametrize("excess", [0, 1])
def test_refuses_more_than_32_mib(excess: int) -> None:
    message = refusal(read, bytes(MAX_FILE_BYTES + excess))
    assert ("At most 32 MiB" in message) is (excess > 0)


@pytest.mark.parametrize("format", FORMATS)
def test_refuses_sizes_by_their_header(format: str) -> None:
    most = 65_535 if format == "JPEG" else 100_000
    for size in ((most, most), (20_000, 2), (2, 20_000), (6_000, 6_000)):
        message = refusal(read, WITH_SIZE[format](FILES[format], *size))
        assert f"{size[0]} x {size[1]} pixels. At most 32 megapixels" in message
    for size in () if format == "WEBP" else ((0, 5), (5, 0)):
        assert "Send at least 1 x 1" in refusal(read, WITH_SIZE[format](FILES[format], *size))


@pytest.mark.parametrize("format", FORMATS)
def test_refuses_every_truncation(format: str) -> None:
    """A file that lacks its last bytes is refused by its headers, or when its pixels are decoded."""
    for length in range(1, len(FILES[format])):
        assert refusal(pixels, FILES[format][:length])


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_refuses_pixels_that_end_early(format: str) -> None:
    """The headers state more pixels than the file has. libjpeg fills up a JPEG with grey, and does not report it."""
    assert "damaged" in refusal(pixels, WITH_SIZE[format](FILES[format], 4_000, 4_000))


@pytest.mark.parametrize(("mode", "missing"), [("RGB", 0), ("RGBA", 255)])
def test_missing_rows_of_a_png_are_black_or_transparent(mode: str, missing: int) -> None:
    """The limit that docs/requests.md states: the compressed data ends, complete, after a whole row."""
    image = picture(mode)
    decoded = pixels(with_png_size(write(image, "PNG"), WIDTH, 2 * HEIGHT))
    np.testing.assert_array_equal(decoded[:HEIGHT], np.asarray(image.convert("RGB")))
    assert (decoded[HEIGHT:] == missing).all()
    page = (REPOSITORY / "docs" / "requests.md").read_text()
    assert "The missing rows are black, or\n  transparent" in page


def with_flipped_byte() -> bytes:
    at = PNG.index(b"IDAT") + 20
    return PNG[:at] + bytes([PNG[at] ^ 0xFF]) + PNG[at + 1 :]


def with_palette_alphas(alphas: bytes) -> bytes:
    return png_of(np.array([[0, 1]]), 8, COLORS, chunk(b"tRNS", alphas), palette=True)


SCAN = PROGRESSIVE[PROGRESSIVE.rindex(b"\xff\xda") : -2]
FRAME = JPEG.index(b"\xff\xc0")
MANY_WEBP_CHUNKS = WEBP[8:] + b"JUNK\0\0\0\0" * 1_000


@pytest.mark.parametrize(
    ("file", "word"),
    [
        *((write(picture(), format, save_all=True, append_images=[picture().rotate(180)]), "animated")
          for format in ("PNG", "WEBP")),
        (with_flipped_byte(), "truncated or damaged"),
        (with_palette_alphas(b"\xff" * 300 + b"\0"), "truncated or damaged"),
        (with_palette_alphas(b"\1" * 300), "truncated or damaged"),
        (JPEG.replace(b"\xff\xc0", b"\xff\xc9", 1), "lossless or arithmetic"),
        (JPEG[:FRAME] + JPEG[FRAME : FRAME + 19] + JPEG[FRAME:], "two frame headers"),
        (insert_chunks(PNG, chunk(b"tEXt") * MAX_PNG_CHUNKS), "chunks"),
        (insert_segments(JPEG, b"\xff\xfe\0\x02" * 2_000), "segments"),
        (PROGRESSIVE[:-2] + SCAN * MAX_JPEG_SCANS + PROGRESSIVE[-2:], "scans"),
        (b"RIFF" + struct.pack("<I", len(MANY_WEBP_CHUNKS)) + MANY_WEBP_CHUNKS, "chunks"),
    ],
    ids=lambda case: case if isinstance(case, str) else len(case),
)  # fmt: skip
def test_refuses_damaged_and_unbounded_files(file: bytes, word: str) -> None:
    assert word in refusal(pixels, file)
    assert word in refusal(lambda: decode_mask(read(file)))


def test_compares_upright_sizes_of_mask_and_image() -> None:
    data = text(write(picture("L", HEIGHT, WIDTH), "PNG"))
    message = refusal(read_mask, data, "masks.0.image", read(PNG), field="masks.0.image")
    assert "the mask has 32 x 48 pixels, the image 48 x 32" in message
    assert read_mask(data, "masks.0.image", read(with_jpeg_exif(exif_of(6)))).width == HEIGHT


# -- bombs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_does_not_expand_compressed_metadata(kind: bytes) -> None:
    bomb = b"a\0\0" + zlib.compress(bytes(64 * 2**20))
    file = insert_chunks(PNG, chunk(kind, bomb))
    assert len(read(file).container.pixel_data) < len(file) - len(bomb)
    np.testing.assert_array_equal(pixels(file), np.asarray(picture()))


def test_does_not_read_exif_entries_that_overlap() -> None:
    """65,535 entries that each refer to the same large value: Pillow copies it for each."""
    entries = b"".join(struct.pack("<HHII", tag, 7, 10_000, 8) for tag in range(0x200, 0x1000))
    file = with_jpeg_exif(*3 * [b"II*\0" + struct.pack("<IH", 8, 0xE00) + entries])
    assert b"Exif" not in read(file).container.pixel_data
    assert pixels(file).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    ("width", "height", "most"), [(8_000, 4_000, 12), (16_000, 2_000, 12), (4_000, 2_000, 48), (2_000, 1_900, 100)]
)
def test_limits_the_scans_of_a_large_jpeg(width: int, height: int, most: int) -> None:
    """Each scan is decoded in a pass over all pixels. A small file states many scans and pixels."""
    assert MAX_JPEG_SCAN_PIXELS == MAX_LARGE_JPEG_SCANS * MAX_INPUT_PIXELS
    file = WITH_SIZE["JPEG"](PROGRESSIVE, width, height)
    accepted = file[:-2] + SCAN * (most - file.count(b"\xff\xda"))
    assert read(accepted + file[-2:]).width == width
    message = refusal(read, accepted + SCAN + file[-2:])
    if most < MAX_JPEG_SCANS:
        assert f"has {most + 1} scans of {width} x {height} pixels; a JPEG of this size may have {most}." in message
        assert message.endswith("Send it as a baseline JPEG, which has one scan, or as a PNG or WebP file.")


def test_reads_a_long_run_of_fill_bytes_once() -> None:
    """A search that starts again at each byte would take hours."""
    at, filler = JPEG.index(b"\xff\xdb"), b"\xff" * 2**24
    for altered in (JPEG[:at] + filler + JPEG[at:], JPEG[:-2] + filler + b"\0" + JPEG[-2:]):
        assert read(altered).container.width == WIDTH
