"""Lines of a backend's answer that other answers need the memory of."""

import asyncio
from collections.abc import AsyncIterator

import httpx

from gateway.bounded_reading import MAX_HELD_BYTES, HeldLines, LineReader
from gateway.errors import ApiError


def test_oldest_line_is_given_up_as_overload() -> None:
    """It is no answer of its backend, which would be marked as failed."""

    async def chunks(end: bytes) -> AsyncIterator[bytes]:
        for _ in range(MAX_HELD_BYTES // 2**21 + 1):
            yield b"a" * 2**20
        yield end

    async def read() -> None:
        held = HeldLines()
        readers = [LineReader(httpx.Response(200, content=chunks(b"\n")), 2 * MAX_HELD_BYTES, held) for _ in range(2)]
        oldest, newest = await asyncio.gather(*(reader.read(60) for reader in readers), return_exceptions=True)
        assert isinstance(oldest, ApiError) and oldest.status == 503
        assert isinstance(newest, bytes) and len(newest) > MAX_HELD_BYTES / 2
        for reader in readers:
            await reader.aclose()

    asyncio.run(read())
