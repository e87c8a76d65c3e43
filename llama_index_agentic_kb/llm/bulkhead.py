"""A model's bulkhead: its calls hold a place each, and its streams as long as they are open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

from llama_index_agentic_kb._aio import Call, Stream, open_stream
from llama_index_agentic_kb.guard.bulkhead import Bulkhead, Place

__all__ = ["MODEL_PLACES", "ModelBulkhead"]

MODEL_PLACES: Final = 128
"""Calls of one model object that may be under way at once, abandoned ones included; further ones wait."""


class ModelBulkhead(Bulkhead):
    """A bulkhead that streams hold a place of too."""

    async def open(
        self,
        sync: Callable[[], Iterator[Any]],
        native: Callable[[], Awaitable[AsyncIterator[Any]]] | None,
        place: Place,
        *,
        deadline: float | None,
        what: str,
    ) -> Stream[Any]:
        """Open a stream when there is a place for it. Whoever reads it has to ``leave`` the place.

        Args:
            sync: Returns the stream, for sync doors.
            native: Returns the stream, for async doors.
            place: A new one.
            what: Names the stream in errors.
            deadline: ``time.monotonic()`` until which a place is waited for; None waits.

        Raises:
            BulkheadFullError: Too many wait already, or what hangs holds every place.
            DeadlineExceededError: There was no place in time.
        """
        place.what = what
        self._enter(place)
        try:
            if not place.granted:
                await self._wait(place, Call(deadline=deadline, what=what))
            opened: Stream[Any] = open_stream(
                sync=partial(self._read, place, sync),
                native=None if native is None else partial(self._aread, place, native),
                pool=self._pool,
                what=what,
            )
        except BaseException:
            self.leave(place)
            raise
        return opened

    def leave(self, place: Place) -> None:
        """End the interest in a stream; one that is still read by its thread holds its place until it ends."""
        self._leave(place)

    def _read(self, place: Place, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._begin(place, on_thread=True)
        error: BaseException | None = None
        try:
            yield from source()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(place, error)

    async def _aread(self, place: Place, source: Callable[[], Awaitable[AsyncIterator[Any]]]) -> AsyncIterator[Any]:
        return self._items(place, source)

    async def _items(self, place: Place, source: Callable[[], Awaitable[AsyncIterator[Any]]]) -> AsyncIterator[Any]:
        self._begin(place)
        error: BaseException | None = None
        try:
            async for item in await source():
                yield item
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(place, error)
