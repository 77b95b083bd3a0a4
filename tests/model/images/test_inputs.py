"""Images of requests: base64 -> headers -> pixels. Files are written by Pillow, or by hand where it cannot."""

import base64
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
    Container,
    read_container,
)
from model.images.inputs import (
    MAX_FILE_BYTES,
    MAX_INPUT_PIXELS,
    InputImage,
    decode_mask,
    decode_rgb,
    read_image,
    read_mask,
)
from tests.support.odd_images import chunk, png_of
from tests.support.repository import REPOSITORY

FORMATS = ("PNG", "JPEG", "WEBP")
WIDTH, HEIGHT = 48, 32
ORIENTATION = 0x0112


def picture(mode: str = "RGB", width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Return a smooth image without any symmetry."""
    y, x = np.mgrid[:height, :width]
    levels = np.stack([5 * x % 256, 7 * y % 256, (3 * x + 2 * y) % 256], axis=-1).astype(np.uint8)
    return Image.fromarray(levels).convert(mode)


def write(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def text(file: bytes) -> str:
    return base64.b64encode(file).decode()


def read(file: bytes) -> InputImage:
    return read_image(text(file), "image")


def pixels(file: bytes) -> np.ndarray[Any, Any]:
    return decode_rgb(read(file))


def refusal(call: Callable[[], object], field: str = "image") -> str:
    with pytest.raises(RequestRefused) as refused:
        call()
    assert refused.value.field == field
    assert len(str(refused.value)) < 400
    return str(refused.value)


def insert_chunk(png: bytes, kind: bytes, data: bytes, before: bytes = b"IDAT") -> bytes:
    at = png.index(before) - 4
    return png[:at] + chunk(kind, data) + png[at:]


def with_png_size(png: bytes, width: int, height: int) -> bytes:
    return png[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + png[24:29]) + png[33:]


def with_jpeg_size(jpeg: bytes, width: int, height: int) -> bytes:
    at = jpeg.index(b"\xff\xc2" if b"\xff\xc2" in jpeg else b"\xff\xc0")  # progressive or baseline
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def with_webp_size(webp: bytes, width: int, height: int) -> bytes:
    extended = (
        b"VP8X" + struct.pack("<II", 10, 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )
    body = b"WEBP" + extended + webp[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


SET_SIZE = {"PNG": with_png_size, "JPEG": with_jpeg_size, "WEBP": with_webp_size}


# -- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "prefix",
    [
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
    ],
)
def test_decodes_what_pillow_decodes(format: str, prefix: str) -> None:
    file = write(picture(), format)
    image = read_image(prefix.format(format.lower()) + text(file), "image")
    assert (image.width, image.height) == (WIDTH, HEIGHT)
    decoded = decode_rgb(image)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))


MODES = [("1", "PNG"), ("L", "PNG"), ("L", "JPEG"), ("P", "PNG"), ("CMYK", "JPEG"), ("L", "WEBP")]


@pytest.mark.parametrize(("mode", "format"), MODES)
def test_converts_modes_as_pillow(mode: str, format: str) -> None:
    file = write(picture(mode), format)
    expected = Image.open(io.BytesIO(file))
    np.testing.assert_array_equal(pixels(file), np.asarray(expected.convert("RGB")))
    np.testing.assert_array_equal(decode_mask(read(file)), np.asarray(expected.convert("L")))


@pytest.mark.parametrize("format", FORMATS)
def test_decodes_progressive_and_lossless_files(format: str) -> None:
    file = write(picture(), format, progressive=True, lossless=True, compress_level=9)
    np.testing.assert_array_equal(pixels(file), np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))


def test_divides_16_bit_values_by_256() -> None:
    levels = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    file = write(Image.fromarray(levels))
    for decoded in (pixels(file)[..., 1], decode_mask(read(file))):
        np.testing.assert_array_equal(decoded, levels >> 8)


def test_divides_16_bit_colours_by_256() -> None:
    levels = np.random.default_rng(0).integers(0, 65536, (4, 6, 3)).astype(">u2")
    np.testing.assert_array_equal(pixels(png_of(levels, 16)), levels >> 8)


def transparent(mode: str) -> Image.Image:
    """Return an image that is red, and transparent in its left half."""
    image = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
    image.paste((255, 0, 0, 0), (0, 0, 2, 2))
    return image if mode == "RGBA" else image.convert(mode)


@pytest.mark.parametrize(("mode", "format"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG")])
def test_blends_transparent_pixels_with_white(mode: str, format: str) -> None:
    decoded = pixels(write(transparent(mode), format, lossless=True))
    assert (decoded[:, :2] == 255).all()
    assert (decoded[:, 2:] == ((255, 0, 0) if mode == "RGBA" else 76)).all()


def test_blends_by_alpha() -> None:
    assert pixels(write(Image.new("RGBA", (1, 1), (0, 0, 0, 51)))).tolist() == [[[204, 204, 204]]]


@pytest.mark.parametrize("grey_levels", [8, 16])
def test_blends_the_transparent_colour_with_white(grey_levels: int) -> None:
    levels = np.full((2, 4), 7 << (grey_levels - 8), np.uint16 if grey_levels == 16 else np.uint8)
    levels[:, 2:] = 90 << (grey_levels - 8)
    file = write(Image.fromarray(levels))
    file = insert_chunk(file, b"tRNS", struct.pack(">H", int(levels[0, 0])))
    assert pixels(file)[0, :, 0].tolist() == [255, 255, 90, 90]


def transparent_color(*levels: int) -> bytes:
    return chunk(b"tRNS", struct.pack(f">{len(levels)}H", *levels))


@pytest.mark.parametrize(
    ("depth", "key"),
    [(depth, key) for depth in (1, 2, 4) for key in range(2**depth)] + [(8, 0), (8, 90), (8, 255)],
)
def test_blends_the_transparent_grey_level_of_every_depth(depth: int, key: int) -> None:
    """A file of few bits has the pixels of its 8-bit equivalent."""
    levels = np.arange(2**depth)[None].repeat(2, axis=0)
    scale = 255 // (2**depth - 1)
    file = png_of(levels, depth, transparent_color(key))
    equivalent = png_of(levels * scale, 8, transparent_color(key * scale))
    expected = np.where(levels == key, 255, levels * scale)
    np.testing.assert_array_equal(pixels(file), pixels(equivalent))
    np.testing.assert_array_equal(pixels(file)[..., 1], expected)
    np.testing.assert_array_equal(decode_mask(read(file)), np.where(levels == key, 0, levels * scale))


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_ignores_unused_bits_of_the_transparent_level(depth: int) -> None:
    levels = np.arange(2**depth)[None]
    file = png_of(levels, depth, transparent_color(2 + 2**depth))
    np.testing.assert_array_equal(pixels(file), pixels(png_of(levels, depth, transparent_color(2))))


@pytest.mark.parametrize("key", [0, 90, 90 << 8, 90 << 8 | 7, 65_535])
def test_the_transparent_level_of_16_bits_is_exact(key: int) -> None:
    levels = np.array([[0, 1, 90, 90 << 8, 90 << 8 | 7, 65_534, 65_535]])
    file = png_of(levels, 16, transparent_color(key))
    np.testing.assert_array_equal(pixels(file)[..., 0], np.where(levels == key, 255, levels >> 8))


@pytest.mark.parametrize("key", [(0, 0, 0), (10, 20, 30), (10, 20, 31), (255, 254, 253)])
@pytest.mark.parametrize("low_byte", [0, 7, 255])
def test_blends_the_transparent_colour_of_16_bits(key: tuple[int, int, int], low_byte: int) -> None:
    levels = np.array([[(0, 0, 0), (10, 20, 30), (10, 20, 29), (255, 254, 253)]])
    wide_key = (level << 8 | low_byte for level in key)
    file = png_of(levels << 8 | low_byte, 16, transparent_color(*wide_key))
    np.testing.assert_array_equal(pixels(file), pixels(png_of(levels, 8, transparent_color(*key))))
    np.testing.assert_array_equal(pixels(file), np.where((levels == key).all(axis=-1, keepdims=True), 255, levels))


@pytest.mark.parametrize("alphas", [b"\xff\0", b"\x80\x40"], ids=["one-transparent", "several"])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_blends_transparent_palette_entries_of_every_depth(depth: int, alphas: bytes) -> None:
    indices = np.array([[0, 1, 1, 0]])
    colors = chunk(b"PLTE", bytes([200, 100, 0, 10, 20, 30]))
    file = png_of(indices, depth, colors, chunk(b"tRNS", alphas), palette=True)
    palette = np.array([[200, 100, 0], [10, 20, 30]])
    alpha = np.frombuffer(alphas, np.uint8)[:, None] / 255
    expected = np.rint(palette * alpha + 255 * (1 - alpha))[indices]
    np.testing.assert_allclose(pixels(file), expected, atol=1)


def test_does_not_repaint_transparent_pixels_of_a_mask() -> None:
    mask = Image.new("RGBA", (4, 2), (255, 255, 255, 255))
    mask.paste((255, 255, 255, 0), (0, 0, 2, 2))
    assert np.asarray(decode_mask(read(write(mask))))[0].tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turns_images_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = write(picture(), format, exif=exif)
    image = read(file)
    assert (image.width, image.height) == ((HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
    np.testing.assert_array_equal(decode_rgb(image), np.asarray(expected))


def test_reads_big_endian_exif_after_the_pixels() -> None:
    exif = b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, ORIENTATION, 3, 1, 6, 0)
    image = read(insert_chunk(write(picture()), b"eXIf", exif, before=b"IEND"))
    assert (image.width, image.height) == (HEIGHT, WIDTH)


def exif_of(orientation: int) -> bytes:
    """Return EXIF data that state an orientation, from their TIFF header on."""
    return b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, ORIENTATION, 3, 1, orientation, 0, 0)


def with_jpeg_exif(file: bytes, *parts: bytes) -> bytes:
    segments = [b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts]
    return b"".join([file[:2], *segments, file[2:]])


def with_webp_exif(file: bytes, *parts: bytes) -> bytes:
    body = with_webp_size(file, WIDTH, HEIGHT)[8:]
    body = body[:12] + b"\x08" + body[13:]  # the flag of VP8X for EXIF
    body += b"".join(b"EXIF" + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2) for part in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def check_upright_as_pillow(file: bytes, turned: bool) -> None:
    image = read(file)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
    assert (image.width, image.height) == expected.size == ((HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT))
    np.testing.assert_array_equal(decode_rgb(image), np.asarray(expected))


@pytest.mark.parametrize("add", [with_jpeg_exif, with_webp_exif])
@pytest.mark.parametrize(("first", "second"), [(6, 1), (1, 6), (6, 3), (8, 6)])
def test_the_first_exif_states_the_rotation(add: Callable[..., bytes], first: int, second: int) -> None:
    file = add(write(picture(), "JPEG" if add is with_jpeg_exif else "WEBP"), exif_of(first), exif_of(second))
    check_upright_as_pillow(file, turned=first >= 5)


def test_joins_exif_in_several_jpeg_segments() -> None:
    exif = exif_of(6)
    check_upright_as_pillow(with_jpeg_exif(write(picture(), "JPEG"), exif[:8], exif[8:]), turned=True)


def test_reads_exif_with_the_prefix_of_a_jpeg() -> None:
    exif = b"Exif\0\0" + exif_of(6)
    check_upright_as_pillow(insert_chunk(write(picture()), b"eXIf", exif), turned=True)
    check_upright_as_pillow(with_webp_exif(write(picture(), "WEBP"), exif), turned=True)


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"nonsense"])
def test_ignores_damaged_exif(exif: bytes) -> None:
    image = read(insert_chunk(write(picture()), b"eXIf", exif))
    assert (image.width, image.height) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("format", FORMATS)
def test_pixel_data_has_no_metadata(format: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION], exif[0x010E] = 3, "private description"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    options: dict[str, Any] = {"exif": exif, "icc_profile": profile}
    if format == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_text("comment", "private text", zip=True)
        options["pnginfo"] = info
    if format == "JPEG":
        options["comment"] = "private text"
    file = write(picture(), format, **options) + b"trailing"
    assert b"private description" in file
    kept = read_container(file).pixel_data
    assert len(kept) < len(file) - 200 and b"private" not in kept and not kept.endswith(b"trailing")
    with Image.open(io.BytesIO(kept)) as image:
        image.load()
        assert not {"exif", "icc_profile", "comment"} & image.info.keys()


def test_accepts_a_jpeg_with_further_images() -> None:
    """A phone's JPEG (MPO) holds its main image, then others."""
    file = write(picture(), "MPO", save_all=True, append_images=[picture().rotate(180)])
    first = write(picture(), "JPEG")
    np.testing.assert_array_equal(pixels(file), pixels(first))


def test_accepts_fill_bytes_before_a_jpeg_marker() -> None:
    file = write(picture(), "JPEG")
    at = file.index(b"\xff\xdb")
    np.testing.assert_array_equal(pixels(file[:at] + b"\xff" * 9 + file[at:]), pixels(file))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "got an empty text"),
        ("data:image/png;base64,", "got an empty text"),
        ("not base64!", "the text is not base64"),
        ("é" * 8, "the text is not base64"),
        ("iVBORw0KGgo", "the text is not base64"),
        ("iVBO\nRw0K", "without line breaks"),
        ("iVBORw0KGgo====", "the text is not base64"),
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
    assert message in refusal(lambda: read_image(data, "masks.2.image"), "masks.2.image")


@pytest.mark.parametrize("excess", [0, 1, 2, 3])
def test_refuses_more_than_32_mib(excess: int) -> None:
    data = text(bytes(MAX_FILE_BYTES + excess))
    message = refusal(lambda: read_image(data, "image"))
    assert ("At most 32 MiB" in message) is (excess > 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(100_000, 100_000), (20_000, 2), (2, 20_000), (6_000, 6_000)], ids=str)
def test_refuses_large_sizes_by_their_header(format: str, size: tuple[int, int]) -> None:
    if format == "JPEG" and max(size) > 65_535:
        size = (65_535, 65_535)
    message = refusal(lambda: read(SET_SIZE[format](write(picture(), format), *size)))
    assert f"{size[0]} x {size[1]} pixels. At most 32 megapixels" in message


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(0, 5), (5, 0)], ids=str)
def test_refuses_an_image_without_pixels(format: str, size: tuple[int, int]) -> None:
    assert "Send at least 1 x 1" in refusal(lambda: read(SET_SIZE[format](write(picture(), format), *size)))


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_refuses_animations(format: str) -> None:
    file = write(picture(), format, save_all=True, append_images=[picture().rotate(180)])
    assert "animated" in refusal(lambda: read(file))


@pytest.mark.parametrize("format", FORMATS)
def test_refuses_every_truncation(format: str) -> None:
    """A file that lacks its last bytes is refused by its headers, or when its pixels are decoded."""
    file = write(picture(), format)
    for length in range(1, len(file)):
        assert refusal(lambda length=length: pixels(file[:length]))  # type: ignore[misc]


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_refuses_pixels_that_end_early(format: str) -> None:
    """The headers state more pixels than the file has. libjpeg fills up a JPEG with grey, and does not report it."""
    file = SET_SIZE[format](write(picture(), format), 4_000, 4_000)
    image = read(file)
    assert "damaged" in refusal(lambda: decode_rgb(image))


@pytest.mark.parametrize(("mode", "missing"), [("RGB", 0), ("RGBA", 255)])
def test_missing_rows_of_a_png_are_black_or_transparent(mode: str, missing: int) -> None:
    """The limit that docs/requests.md states: the compressed data ends, complete, after a whole row."""
    image = picture(mode)
    decoded = pixels(with_png_size(write(image), WIDTH, 2 * HEIGHT))
    np.testing.assert_array_equal(decoded[:HEIGHT], np.asarray(image.convert("RGB")))
    assert (decoded[HEIGHT:] == missing).all()
    page = (REPOSITORY / "docs" / "requests.md").read_text()
    assert "The missing rows are black, or\n  transparent" in page


def test_refuses_damaged_compressed_data() -> None:
    file = bytearray(write(picture()))
    file[file.index(b"IDAT") + 20] ^= 0xFF
    image = read(bytes(file))
    assert "truncated or damaged" in refusal(lambda: decode_rgb(image))


@pytest.mark.parametrize("alphas", [b"\xff" * 300 + b"\0", b"\1" * 300])
@pytest.mark.parametrize("decode", [decode_rgb, decode_mask])
def test_refuses_transparency_of_too_many_palette_entries(decode: Callable[..., object], alphas: bytes) -> None:
    colors = chunk(b"PLTE", bytes([200, 100, 0, 10, 20, 30]))
    image = read(png_of(np.array([[0, 1]]), 8, colors, chunk(b"tRNS", alphas), palette=True))
    assert "truncated or damaged" in refusal(lambda: decode(image))


def test_refuses_an_arithmetic_jpeg() -> None:
    file = write(picture(), "JPEG").replace(b"\xff\xc0", b"\xff\xc9", 1)
    assert "lossless or arithmetic" in refusal(lambda: read(file))


def test_refuses_a_mask_of_another_size() -> None:
    image = read(write(picture()))
    data = text(write(picture("L", HEIGHT, WIDTH)))
    message = refusal(lambda: read_mask(data, "masks.0.image", image), "masks.0.image")
    assert "the mask has 32 x 48 pixels, the image 48 x 32" in message


def test_compares_upright_sizes_of_mask_and_image() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = read(write(picture(), "JPEG", exif=exif))
    assert read_mask(text(write(picture("L", HEIGHT, WIDTH))), "masks.0.image", image).width == HEIGHT


# -- bombs ------------------------------------------------------------------------------------------------------------


def container(file: bytes) -> Container:
    return read(file).container


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_does_not_expand_compressed_metadata(kind: bytes) -> None:
    bomb = b"a\0\0" + zlib.compress(bytes(64 * 2**20))
    file = insert_chunk(write(picture()), kind, bomb)
    assert len(container(file).pixel_data) < len(file) - len(bomb)
    np.testing.assert_array_equal(pixels(file), np.asarray(picture()))


def test_does_not_read_exif_entries_that_overlap() -> None:
    """65,535 entries that each refer to the same large value: Pillow copies it for each."""
    entries = b"".join(struct.pack("<HHII", tag, 7, 10_000, 8) for tag in range(0x200, 0x1000))
    exif = b"II*\0" + struct.pack("<IH", 8, 0xE00) + entries
    file = write(picture(), "JPEG")
    for _ in range(3):
        file = file[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif + file[2:]
    assert b"Exif" not in container(file).pixel_data
    assert pixels(file).shape == (HEIGHT, WIDTH, 3)


def test_limits_the_chunks_of_a_png() -> None:
    file = write(picture())
    at = file.index(b"IDAT") - 4
    assert "chunks" in refusal(lambda: read(file[:at] + chunk(b"tEXt") * MAX_PNG_CHUNKS + file[at:]))


def test_limits_the_segments_of_a_jpeg() -> None:
    file = write(picture(), "JPEG")
    assert "segments" in refusal(lambda: read(file[:2] + b"\xff\xfe\0\x02" * 2_000 + file[2:]))


def test_limits_the_scans_of_a_jpeg() -> None:
    file = write(picture(), "JPEG", progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    assert "scans" in refusal(lambda: read(file[:-2] + scan * MAX_JPEG_SCANS + file[-2:]))
    assert pixels(file[:-2] + scan * 3 + file[-2:]).shape


@pytest.mark.parametrize(
    ("width", "height", "most"), [(8_000, 4_000, 12), (16_000, 2_000, 12), (4_000, 2_000, 48), (2_000, 1_900, 100)]
)
def test_limits_the_scans_of_a_large_jpeg(width: int, height: int, most: int) -> None:
    """Each scan is decoded in a pass over all pixels. A small file states many scans and pixels."""
    assert MAX_JPEG_SCAN_PIXELS == MAX_LARGE_JPEG_SCANS * MAX_INPUT_PIXELS
    file = with_jpeg_size(write(picture(), "JPEG", progressive=True), width, height)
    first, last = file.index(b"\xff\xda"), file.rindex(b"\xff\xda")
    scans = file.count(b"\xff\xda", first)
    accepted = file[:-2] + file[last:-2] * (most - scans)
    assert read(accepted + file[-2:]).width == width
    message = refusal(lambda: read(accepted + file[last:]))
    if most < MAX_JPEG_SCANS:
        assert f"has {most + 1} scans of {width} x {height} pixels; a JPEG of this size may have {most}." in message
        assert message.endswith("Send it as a baseline JPEG, which has one scan, or as a PNG or WebP file.")


def test_limits_the_chunks_of_a_webp() -> None:
    file = write(picture(), "WEBP")
    body = file[8:] + b"JUNK\0\0\0\0" * 1_000
    assert "chunks" in refusal(lambda: read(b"RIFF" + struct.pack("<I", len(body)) + body))


def test_reads_a_long_run_of_fill_bytes_once() -> None:
    """A search that starts again at each byte would take hours."""
    file = write(picture(), "JPEG")
    at = file.index(b"\xff\xdb")
    filler = b"\xff" * 2**24
    for altered in (file[:at] + filler + file[at:], file[:-2] + filler + b"\0" + file[-2:]):
        assert container(altered).width == WIDTH
