"""A JPEG in strips, which are encoded side by side: one file, the same pixels as if it had been encoded whole.

A baseline JPEG may begin its entropy coding anew after every so many blocks (ITU-T T.81, B.2.4.4 and E.2.4: restart
intervals). So strips of a picture that were encoded as pictures of their own, with the same tables, follow each other
behind one header.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

_BLOCK = 16  # pixels: the side of what is coded together, with colour at half resolution
_STRIP = 2**16  # pixels of a strip at least: some half a millisecond
_STRIPS = min(6, len(os.sched_getaffinity(0)))

_START_OF_FRAME, _START_OF_SCAN = 0xC0, 0xDA


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _STRIPS - 1), "preheat-strip")


def encode_in_strips(pixels: npt.NDArray[np.uint8], encode: Callable[[npt.NDArray[np.uint8]], bytes]) -> bytes:
    """`encode(pixels)` of a picture [height, width, 3], by as many threads as it is worth. `encode` makes a baseline
    JPEG with colour at half resolution (4:2:0), and lets other threads run meanwhile."""
    height, width = pixels.shape[:2]
    blocks = -(-height // _BLOCK)
    count = min(_STRIPS, height * width // _STRIP, blocks)
    if count < 2:
        return encode(pixels)
    step = -(-blocks // count)  # rows of blocks
    cuts = range(0, height, step * _BLOCK)
    others = [_threads().submit(encode, pixels[at : at + step * _BLOCK]) for at in cuts[1:]]
    first = encode(pixels[: cuts[1]])
    return join([first, *(other.result() for other in others)], height, step * -(-width // _BLOCK))


def join(strips: Sequence[bytes], height: int, interval: int) -> bytes:
    """Baseline JPEGs of a picture's strips, from its top, as one of `height` pixels. Each but the last is of `interval`
    blocks; all were encoded with the same settings and without restarts."""
    header, first = _split(strips[0])
    frame = _segment(header, _START_OF_FRAME)
    header[frame + 5 : frame + 7] = height.to_bytes(2)
    scan = _segment(header, _START_OF_SCAN)
    header[scan:scan] = b"\xff\xdd\x00\x04" + interval.to_bytes(2)
    parts = [bytes(header), first]
    for number, strip in enumerate(strips[1:]):
        parts += [bytes([0xFF, 0xD0 + number % 8]), _split(strip)[1]]
    return b"".join([*parts, b"\xff\xd9"])


def _split(file: bytes) -> tuple[bytearray, bytes]:
    """All up to the entropy-coded data, and these."""
    scan = _segment(file, _START_OF_SCAN)
    end = scan + 2 + int.from_bytes(file[scan + 2 : scan + 4])
    return bytearray(file[:end]), file[end:-2]


def _segment(file: bytes | bytearray, kind: int) -> int:
    """Where the first segment of a kind begins; there is one."""
    at = 2
    while file[at + 1] != kind:
        at += 2 + int.from_bytes(file[at + 2 : at + 4])
    return at
