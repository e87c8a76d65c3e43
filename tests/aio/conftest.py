"""What the flow's tests share: every driver under one interface, and a watch for what asyncio complains of."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, closing
from itertools import islice
from logging.handlers import BufferingHandler
from typing import Any

import pytest

from llama_index_agentic_kb._aio import Call, aiterate, arun, iterate, read_ahead, run


class Driver:
    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_async(self) -> bool:
        return self.name == "async"

    def run(self, flow: Coroutine[Any, Any, Any]) -> Any:
        """Perform a flow as a caller in no loop, in a running loop, or of the async driver."""
        return self._call(lambda: run(flow), lambda: arun(flow))

    def items(self, flow: Coroutine[Any, Any, Any], take: int | None = None) -> list[Any]:
        """Perform a flow and give what it emits; after ``take`` items it is closed."""

        def items() -> list[Any]:
            with closing(iterate(flow)) as generator:
                return list(islice(generator, take))

        async def aitems() -> list[Any]:
            items: list[Any] = []
            async with aclosing(aiterate(flow)) as generator:
                async for item in generator:
                    items.append(item)
                    if len(items) == take:
                        break
            return items

        return list(self._call(items, aitems))

    def _call(self, sync: Callable[[], Any], native: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def in_loop() -> Any:
            return sync()

        if self.name == "sync":
            return sync()
        return asyncio.run(native() if self.is_async else in_loop())


@pytest.fixture(params=["sync", "sync in a loop", "async"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


class Leaves:
    """Makes calls and streams that are sync, native async, or both."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def call(self, work: Callable[[], Any], seconds: float = 0.0, **kwargs: Any) -> Call[Any]:
        """A call that takes so long, and then does the work."""

        def sync() -> Any:
            time.sleep(seconds)
            return work()

        async def native() -> Any:
            await asyncio.sleep(seconds)
            return work()

        return Call(
            sync=None if self.kind == "native" else sync, native=None if self.kind == "sync" else native, **kwargs
        )

    def open(self, source: Callable[[], Iterator[Any]], pause: float = 0.0, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """A stream of an iterator's items, with a pause before each."""

        def sync() -> Iterator[Any]:
            for item in source():
                time.sleep(pause)
                yield item

        async def items() -> AsyncIterator[Any]:
            for item in source():
                await asyncio.sleep(pause)
                yield item

        async def native() -> AsyncIterator[Any]:
            return items()

        return read_ahead(
            sync=None if self.kind == "native" else sync, native=None if self.kind == "sync" else native, **kwargs
        )


@pytest.fixture(params=["sync", "native"])
def leaves(request: pytest.FixtureRequest) -> Leaves:
    return Leaves(request.param)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """No task destroyed while pending, and no exception that nobody retrieved: asyncio logs these."""
    gc.collect()  # what other modules left
    handler = BufferingHandler(1_000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("asyncio").addHandler(handler)
    yield
    gc.collect()
    logging.getLogger("asyncio").removeHandler(handler)
    assert [record.getMessage() for record in handler.buffer] == []


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition for some seconds, and return whether it came true."""
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    return condition()
