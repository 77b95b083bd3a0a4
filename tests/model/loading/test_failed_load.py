"""`Model.load` during a failure, and when Truss calls it again."""

import gc
import json
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.errors import PreheatError
from model.model import Model
from model.pipeline.loaded_model import LoadedModel
from tests.support.releases import RELEASE_NAME


def count_loaded_models() -> int:
    return sum(isinstance(tracked, LoadedModel) for tracked in gc.get_objects())


class FailureHandler(logging.Handler):
    """At each log line of a failed load, records if garbage collection is on, and the number of loaded models."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.collecting: list[bool] = []
        self.loaded_models: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(json.loads(record.getMessage())["error"])
        self.collecting.append(gc.isenabled())
        self.loaded_models.append(count_loaded_models())


@pytest.fixture
def failures() -> Iterator[FailureHandler]:
    handler, logger = FailureHandler(), logging.getLogger("preheat")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_garbage_collection_pauses_during_a_load(failures: FailureHandler) -> None:
    with pytest.raises(PreheatError, match="No store is configured"):
        Model(config={}).load()
    assert failures.collecting == [False] and gc.isenabled()


def test_memory_of_a_failed_load_is_freed_before_the_next(
    valid_store: WritableLocalStore, failures: FailureHandler
) -> None:
    """The release loads, and its warm-up fails, because its networks are not those of an SDXL."""
    gc.collect()
    before = count_loaded_models()
    model = Model(config={"model_metadata": {"preheat": {"store": valid_store.url, "release": RELEASE_NAME}}})
    for _ in range(2):
        gc.disable()  # so that only the load itself frees the memory
        with suppress(PreheatError):
            model.load()
    assert [number - before for number in failures.loaded_models] == [1, 1]
    assert [error.partition(".")[0] for error in failures.errors] == ["The text_encoder engines cannot be used"] * 2
