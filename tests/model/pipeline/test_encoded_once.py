"""What is encoded once for several images lives until the last of them has taken it."""

import weakref

import pytest

from model.pipeline.encoded_once import EncodedOnce


class Value:
    made = 0

    def __init__(self) -> None:
        Value.made += 1


@pytest.mark.parametrize("indices", [(0, 1, 2), (1,), (2, 0)], ids=["all images", "one of three", "two of three"])
def test_value_lives_until_the_last_image_takes_it(indices: tuple[int, ...]) -> None:
    encoded, before = EncodedOnce(indices), Value.made
    first = weakref.ref(encoded.get("text", indices[0], Value))
    for index in indices[1:]:
        assert encoded.get("text", index, Value) is first()
    assert first() is None and Value.made == before + 1


def test_value_that_is_taken_again_lives_until_the_last_time() -> None:
    encoded = EncodedOnce([0, 1])
    value = weakref.ref(encoded.get("factors", 0, Value, again=True))
    for index, again in ((0, False), (1, True), (1, False)):
        assert encoded.get("factors", index, Value, again) is value()
    assert value() is None


def test_failed_value_is_made_anew_and_clear_drops_all() -> None:
    encoded = EncodedOnce([0, 1])
    with pytest.raises(ZeroDivisionError):
        encoded.get("text", 0, lambda: 1 // 0)
    values = [weakref.ref(encoded.get(key, 0, Value)) for key in ("text", "image")]
    assert all(value() for value in values)
    encoded.clear()
    assert not any(value() for value in values)
