"""What is encoded once for all images of a request: texts, an input image, the factors of adapters.

It imports neither torch nor numpy: jobs are made in processes without them.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class EncodedOnce:
    """Holds each value until all images have taken it. Used on one thread."""

    def __init__(self, indices: Iterable[int]) -> None:
        """`indices`: the images that take the values. They may be only some of the request's."""
        self._indices = frozenset(indices)
        self._held: dict[Hashable, tuple[Any, set[int]]] = {}  # values, with the images that have yet to take them

    def get(self, key: Hashable, index: int, make: Callable[[], T], again: bool = False) -> T:
        """Return the value of `key` for image `index`. The first image makes it.

        The value is dropped once each image has taken it with `again` false. `again`: the image will take it once more.
        """
        if key not in self._held:
            self._held[key] = make(), set(self._indices)
        value: T
        value, missing = self._held[key]
        if not again:
            missing.discard(index)
        if not missing:
            del self._held[key]
        return value

    def clear(self) -> None:
        """Drop all values. No image may take one afterwards."""
        self._held.clear()
