"""Adding finished requests to the history. Nothing here delays an image or fails a request."""

import asyncio
from collections.abc import AsyncIterator

from gateway.backend_answers import Event
from gateway.history import History
from model.api.request import without_images

_OF_DONE = ("time", "timings", "warnings", "engine")


async def recorded(history: History, key: str, native: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield the events of a request, and add it to the history when its images are finished."""
    seeds: list[int] = []
    async for event in events:
        if event["event"] == "image":
            seeds.append(event["seed"])
        elif event["event"] == "done":
            entry = {"seeds": sorted(seeds), **{name: event[name] for name in _OF_DONE if name in event}}
            await asyncio.to_thread(_add, history, key, native, entry)  # images are hashed
        yield event


def _add(history: History, key: str, native: Event, entry: Event) -> None:
    request = {name: value for name, value in native.items() if name not in ("stream", "preview_every")}
    try:
        history.add(key, {"request": without_images(request), **entry})
    except Exception as error:  # such as an image that is not base64, which the backend has not refused
        history.count_lost(error)
