"""Images of a request: base64 text -> checked header -> pixels.

`read_image` and `read_mask` check everything that the file's headers state, and decode no pixels. `decode_rgb` and
`decode_mask` decode them. All four take milliseconds to a second: call them from a worker thread. Pillow releases the
interpreter lock while it decodes. Each of them raises RequestRefused, which names the field.

    image = read_image(request.image, "image")          # image.width, image.height: after the rotation by EXIF
    mask = read_mask(request.masks[0].image, "masks.0.image", image)
    pixels = decode_rgb(image)                           # uint8 [image.height, image.width, 3]
    repainted = decode_mask(mask)                        # L, image.width x image.height, 255 is repainted

`model.images.fit` resizes the pixels to the requested size.
"""

import binascii
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image

from model.errors import RequestRefused
from model.images.containers import Container, InvalidFile, read_container
from model.images.pixels import Pixels
from model.validation import format_value

MAX_FILE_BYTES = 32 * 2**20
MAX_INPUT_PIXELS = 32_000_000
MAX_REQUEST_PIXELS = 10 * MAX_INPUT_PIXELS  # of all images of a request: they take three seconds to decode
MAX_INPUT_SIDE = 16_384  # pixels
# Pillow's default of 16 MiB is below glibc's threshold for memory that is returned to the system once it is free.
Image.core.set_block_size(64 * 2**20)  # type: ignore[attr-defined]
_STRIP_ROWS = 256  # of a mask, converted at once
_ACCEPTED = "base64 or a data: URL of a PNG, JPEG or WebP file"
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/pjpeg", "image/webp")
_MAX_PREFIX_CHARACTERS = 256  # of the text before the comma of a data: URL
# EXIF orientation -> the operation that turns the stored pixels upright, as in PIL.ImageOps.exif_transpose.
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FIRST_ROTATED = 5  # orientations 5 to 8 exchange width and height


@dataclass(frozen=True)
class InputImage:
    """An image or a mask of a request, with a checked header. `width` and `height` are those of the upright image."""

    field: str
    width: int
    height: int
    container: Container

    @property
    def price(self) -> int:
        """What decoding costs, in pixels of a simple file: the pixels of all scans, or the file's bytes if more."""
        return max(self.width * self.height * self.container.scans, len(self.container.pixel_data))


def read_image(data: str, field: str) -> InputImage:
    """Decode base64 or a `data:` URL, and check the file's headers. No pixel is decoded.

    The file's first bytes decide its format, whatever the URL states. Raises RequestRefused for text that is not strict
    base64, a media type of no accepted format, a file of more than 32 MiB, another format than PNG, JPEG or WebP, an
    animation, a truncated file, a JPEG of too many scans, more than 32 megapixels, and a side of more than 16,384
    pixels.
    """
    file = _decode_base64(data, field)
    try:
        container = read_container(file)
    except InvalidFile as error:
        raise RequestRefused(field, f"the file {error}. {error.remedy or f'Send {_ACCEPTED}.'}") from error
    width, height = container.width, container.height
    if not width or not height:
        raise RequestRefused(field, f"the image has {width} x {height} pixels. Send at least 1 x 1.")
    if width * height > MAX_INPUT_PIXELS or max(width, height) > MAX_INPUT_SIDE:
        raise RequestRefused(
            field,
            f"the image has {width} x {height} pixels. At most {MAX_INPUT_PIXELS // 10**6} megapixels are accepted, "
            f"and {MAX_INPUT_SIDE} pixels on each side.",
        )
    if container.animated:
        raise RequestRefused(field, "the image is animated. Send a single frame.")
    if container.orientation >= _FIRST_ROTATED:
        width, height = height, width
    return InputImage(field, width, height, container)


def read_mask(data: str, field: str, image: InputImage) -> InputImage:
    """Read a mask of `image`, like `read_image`. Raises RequestRefused also if their sizes differ."""
    mask = read_image(data, field)
    if (mask.width, mask.height) != (image.width, image.height):
        raise RequestRefused(
            field,
            f"the mask has {mask.width} x {mask.height} pixels, the image {image.width} x {image.height}. Send a mask "
            "of the image's size.",
        )
    return mask


def decode_rgb(image: InputImage, resize: Callable[[Image.Image], Pixels] = np.asarray) -> Pixels:
    """Decode to RGB, uint8 [height, width, 3], upright.

    `resize` is called with each channel, an upright image of mode L, and its results are the channels of the result. So
    the largest image never exists in more than one form at once.

    Transparent pixels are blended with white. 16-bit values are divided by 256. The transparent colour of a 16-bit RGB
    PNG includes all colours with the same high bytes. Grey, palette and CMYK are converted by Pillow. Colour profiles
    and gamma are ignored, as by diffusers' `load_image`.

    Raises RequestRefused for data that cannot be decoded. Some damage is not detected: libjpeg repairs it within a
    JPEG, and Pillow accepts a PNG whose compressed data ends after a whole row.
    """
    with _refusing_damage(image):
        colors = _as_colors(_load(image))
    alpha = colors.getchannel("A") if "A" in colors.getbands() else None
    channels = []
    for name in colors.getbands()[: -1 if alpha else None]:
        channel = colors.getchannel(name)
        if alpha is not None:
            channel = _on_background(channel, alpha, "white")
        channels.append(resize(turn_upright(channel, image.container)))
        del channel  # before the next one is made
    return np.stack(channels if len(channels) == 3 else 3 * channels, axis=-1)


def decode_mask(mask: InputImage) -> Image.Image:
    """Decode to luma (ITU-R 601, mode L), upright.

    Transparent pixels are blended with black, so they are not repainted. Raises RequestRefused like `decode_rgb`.
    """
    with _refusing_damage(mask):
        decoded = _load(mask)
        if decoded.mode == "L" and not decoded.has_transparency_data:
            return turn_upright(decoded, mask.container)
        luma = Image.new("L", decoded.size)
        for top in range(0, decoded.height, _STRIP_ROWS):
            strip = decoded.crop((0, top, decoded.width, min(decoded.height, top + _STRIP_ROWS)))
            if strip.has_transparency_data:
                with_alpha = strip.convert("RGBA")
                strip = _on_background(with_alpha, with_alpha, "black")
            luma.paste(strip.convert("L"), (0, top))
        return turn_upright(luma, mask.container)


def turn_upright(pixels: Image.Image, container: Container) -> Image.Image:
    """Return the decoded pixels of `container`, turned as its EXIF orientation states."""
    transposition = _TRANSPOSITIONS.get(container.orientation)
    return pixels if transposition is None else pixels.transpose(transposition)


def _decode_base64(data: str, field: str) -> bytes:
    """Return the file that base64 or a `data:` URL holds."""
    data = data[_prefix_length(data[: _MAX_PREFIX_CHARACTERS + 1], field) :]
    if not data:
        raise RequestRefused(field, f"got an empty text. Expected {_ACCEPTED}.")
    size = len(data) * 3 // 4 - data[-2:].count("=")
    if size > MAX_FILE_BYTES:
        raise RequestRefused(
            field, f"the file has {size / 2**20:.1f} MiB. At most {MAX_FILE_BYTES // 2**20} MiB are accepted."
        )
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character outside ASCII
        raise RequestRefused(
            field,
            f"the text is not base64 ({error}). Expected {_ACCEPTED}, in the standard alphabet, padded, without line "
            "breaks.",
        ) from error


def _prefix_length(start: str, field: str) -> int:
    """Return the characters before the base64 of a `data:` URL (RFC 2397), 0 of base64 alone. Raises RequestRefused.

    `start`: of the text. Parameters may be in any order and have no meaning. White space around them is ignored.
    """
    scheme, colon, rest = start.partition(":")
    if not colon or not re.fullmatch(r"\s*[a-z][\w+.-]*", scheme, re.IGNORECASE | re.ASCII):
        return 0
    head, comma, encoded = rest.partition(",")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    shown = format_value(f"{scheme}:{head}")
    if scheme.strip().lower() != "data":
        raise RequestRefused(field, f"got {shown}. Expected {_ACCEPTED}; other URLs are not fetched.")
    if media_type not in _MEDIA_TYPES:
        raise RequestRefused(
            field, f"got {shown}, of the media type {format_value(media_type)}. Expected {', '.join(_MEDIA_TYPES)}."
        )
    if not comma and len(start) > _MAX_PREFIX_CHARACTERS:
        raise RequestRefused(
            field,
            f"got {shown}, without a comma in its first {_MAX_PREFIX_CHARACTERS} characters. Leave out the parameters "
            "other than base64.",
        )
    if not comma or "base64" not in parameters:
        raise RequestRefused(field, f'got {shown} without ";base64,". Expected {_ACCEPTED}.')
    return len(start) - len(encoded.lstrip())


@contextmanager
def _refusing_damage(image: InputImage) -> Iterator[None]:
    """Raise RequestRefused for data that Pillow cannot decode or convert."""
    try:
        yield
    except InvalidFile as error:
        raise RequestRefused(image.field, f"the file {error}.") from error
    except Exception as error:
        # Pillow raises many types for damaged data. Its texts may repeat parts of the file, so they are not shown.
        format = image.container.format.upper()
        raise RequestRefused(
            image.field, f"the {format} file is truncated or damaged: its pixels cannot be decoded."
        ) from error


def _load(image: InputImage) -> Image.Image:
    """Decode the stored pixels, 8 bits for each level or palette index. Raises InvalidFile, and as Pillow does."""
    container = image.container
    with Image.open(io.BytesIO(container.pixel_data), formats=[container.format.upper()]) as decoded:
        if decoded.size != (container.width, container.height):
            raise InvalidFile("is damaged: its headers state different sizes")
        return to_8_bits(decoded, container.depth)


def to_8_bits(image: Image.Image, depth: int) -> Image.Image:
    """Load an image with levels of 8 bits, in place of `image`. depth: bits of each stored level or palette index.

    Pillow scales the levels of a PNG to 8 bits, but not its transparent colour (tRNS), except of 1 bit.
    """
    image.load()
    transparent = image.info.get("transparency")
    if image.mode == "I;16":  # grey; Pillow reduces other PNGs of 16 bits to their high bytes
        levels = np.asarray(image)
        image.close()
        grey = Image.fromarray((levels >> 8).astype(np.uint8))
        if transparent is not None:
            alpha = Image.fromarray(np.where(levels == transparent, np.uint8(0), np.uint8(255)))
            del levels  # 64 MB of the largest image
            grey.putalpha(alpha)
        return grey
    if image.mode == "L" and depth in (2, 4) and isinstance(transparent, int):
        largest = 2**depth - 1
        image.info["transparency"] = (transparent & largest) * 255 // largest  # the unused high bits mean nothing
    elif image.mode == "RGB" and depth == 16 and isinstance(transparent, tuple):
        image.info["transparency"] = tuple(level >> 8 for level in transparent)
    return image


def _as_colors(image: Image.Image) -> Image.Image:
    """Return an image in the mode L, LA, RGB or RGBA, in place of `image`."""
    if image.has_transparency_data:
        mode = image.mode if image.mode in ("LA", "RGBA") else "RGBA"
    else:
        mode = "L" if image.mode in ("1", "L") else "RGB"
    if image.mode == mode:
        return image
    converted = image.convert(mode)
    image.close()
    return converted


def _on_background(image: Image.Image, alpha: Image.Image, color: str) -> Image.Image:
    """Blend an image, of mode L or RGBA, with a color. `alpha`: of mode L or RGBA."""
    opaque = Image.new("L" if image.mode == "L" else "RGB", image.size, color)
    opaque.paste(image, mask=alpha)
    return opaque
