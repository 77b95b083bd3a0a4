"""A gateway that runs in a thread of the test's process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.serve import prepare
from tests.support.waiting import eventually


@contextmanager
def running_gateway(
    backends: Sequence[str], key_file: Path | None = None, history: Path | None = None
) -> Iterator[str]:
    """Run a gateway on a free port of 127.0.0.1. Yields its URL."""
    prepared = prepare(list(backends), key_file, "127.0.0.1", 0, history)
    thread = threading.Thread(target=prepared.server.run, kwargs={"sockets": [prepared.listener]})
    port = prepared.listener.getsockname()[1]
    thread.start()
    try:
        eventually(lambda: prepared.server.started, "the gateway serves")
        yield f"http://127.0.0.1:{port}"
    finally:
        prepared.server.should_exit = True
        thread.join()
        prepared.listener.close()
