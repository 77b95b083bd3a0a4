"""Text in the files of images: how an image was made.

PNG: an iTXt chunk with the keyword "preheat". JPEG and WebP: the tag UserComment of EXIF (Exif 2.32, 4.6.5), in ASCII.
The text is JSON with only ASCII characters. Pillow is imported at its first use: the request's schema needs this module
before torch is imported.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

KEYWORD = "preheat"
MAX_JPEG_BYTES = 65_000  # a JPEG segment has at most 65,533 bytes; the rest is EXIF's own structure
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_ASCII = b"ASCII\0\0\0"
DIGEST = "sha256:"
"""The beginning of what stands for an image in a request's metadata."""

Metadata = Mapping[str, Any]
"""{"release", "request"}: JSON values. `request` is a whole request whose images are digests."""


def metadata_text(metadata: Metadata, seed: int) -> str:
    """Return the text of one image. Its request has the image's own seed, and makes this image only."""
    return json.dumps({**metadata, "request": {**metadata["request"], "seed": seed, "num_images": 1}})


def png_text(text: str) -> "PngInfo":
    """Return the chunks of a PNG with the text."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt(KEYWORD, text)
    return info


def exif(text: str) -> bytes:
    """Return EXIF with the text, as a WebP holds it."""
    from PIL import Image

    tags = Image.Exif()
    tags.get_ifd(_EXIF_IFD)[_USER_COMMENT] = _ASCII + text.encode("ascii")
    return tags.tobytes()


def add_to_jpeg(file: bytes, text: str) -> bytes:
    """Return a JPEG with the text in an APP1 segment, after the JFIF segment that Pillow writes first.

    `text`: at most MAX_JPEG_BYTES.
    """
    data = exif(text)
    at = 4 + int.from_bytes(file[4:6]) if file[2:4] == b"\xff\xe0" else 2
    return b"".join([file[:at], b"\xff\xe1", (len(data) + 2).to_bytes(2), data, file[at:]])


def user_comment(image: "Image.Image") -> bytes:
    """Return EXIF's UserComment of an image that Pillow has opened, b"" without one."""
    comment = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT)
    return comment if isinstance(comment, bytes) else b""


def read_text(image: "Image.Image") -> str:
    """Return the text of an image that Pillow has opened, "" without one. EXIF of other programs is no such text."""
    if KEYWORD in image.info:
        return str(image.info[KEYWORD])
    comment = user_comment(image)
    is_own = comment.startswith(_ASCII) and comment.isascii()
    return comment.removeprefix(_ASCII).decode("ascii") if is_own else ""
