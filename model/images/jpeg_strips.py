"""Encode a JPEG in strips, concurrently: one file, the same pixels as if it had been encoded whole.

A baseline JPEG may restart its entropy coding after a fixed number of blocks (ITU-T T.81, B.2.4.4 and E.2.4: restart
intervals). Strips that were encoded as separate images with the same tables can therefore be joined behind one header.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from model.images.pixels import Pixels

_BLOCK_SIDE = 16  # pixels of a block with colour at half resolution
_MIN_STRIP_PIXELS = 2**16  # about half a millisecond of work
_MAX_STRIPS = min(6, len(os.sched_getaffinity(0)))
_MAX_INTERVAL = 2**16 - 1  # blocks from one restart to the next; the file has 16 bits for it

_START_OF_FRAME, _START_OF_SCAN = 0xC0, 0xDA


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _MAX_STRIPS - 1), "preheat-strip")


def encode_in_strips(
    pixels: Pixels,
    encode: Callable[[Pixels], bytes],
    max_strips: int = _MAX_STRIPS,
    min_strip_pixels: int = _MIN_STRIP_PIXELS,
) -> bytes:
    """Return `encode(pixels)` of an image [height, width, 3], computed by several threads if it is large.

    It has more strips than `max_strips` if a strip would otherwise have more than 65,535 blocks.

    `encode` makes a baseline JPEG with colour at half resolution (4:2:0) and releases the interpreter lock.
    """
    height, width = pixels.shape[:2]
    blocks = -(-height // _BLOCK_SIDE)
    count = min(max_strips, height * width // min_strip_pixels, blocks)
    if count < 2:
        return encode(pixels)
    blocks_in_row = -(-width // _BLOCK_SIDE)  # at most 4,096: a JPEG has at most 65,535 pixels on a side
    step = min(-(-blocks // count), _MAX_INTERVAL // blocks_in_row)  # rows of blocks in a strip
    cuts = range(0, height, step * _BLOCK_SIDE)
    others = [_thread_pool().submit(encode, pixels[at : at + step * _BLOCK_SIDE]) for at in cuts[1:]]
    first = encode(pixels[: cuts[1]])
    return join_strips([first, *(other.result() for other in others)], height, step * blocks_in_row)


def join_strips(strips: Sequence[bytes], height: int, interval: int) -> bytes:
    """Join the baseline JPEGs of an image's strips, top first, into one JPEG of `height` pixels.

    Each strip but the last has `interval` blocks. All were encoded with the same settings and without restarts.
    """
    header, first = _split(strips[0])
    frame = _find_segment(header, _START_OF_FRAME)
    header[frame + 5 : frame + 7] = height.to_bytes(2)
    scan = _find_segment(header, _START_OF_SCAN)
    header[scan:scan] = b"\xff\xdd\x00\x04" + interval.to_bytes(2)  # DRI: the restart interval
    parts = [bytes(header), first]
    for number, strip in enumerate(strips[1:]):
        parts += [bytes([0xFF, 0xD0 + number % 8]), _split(strip)[1]]  # RST0 to RST7
    return b"".join([*parts, b"\xff\xd9"])  # EOI: the end of the image


def _split(file: bytes) -> tuple[bytearray, bytes]:
    """Return the header up to the entropy-coded data, and that data."""
    scan = _find_segment(file, _START_OF_SCAN)
    end = scan + 2 + int.from_bytes(file[scan + 2 : scan + 4])
    return bytearray(file[:end]), file[end:-2]


def _find_segment(file: bytes | bytearray, kind: int) -> int:
    """Return the offset of the first segment of a kind, which must exist."""
    at = 2
    while file[at + 1] != kind:
        at += 2 + int.from_bytes(file[at + 2 : at + 4])
    return at
