"""Keys that must be found nowhere, a server that repeats all it is sent, and who writes down all that we say."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from llama_index.core.callbacks import LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr
from rich.console import Console

from llama_index_agentic_kb import RetrievalResponse
from llama_index_agentic_kb._terminal import show_response
from tests.loopback import Asked, Loopback

KEYS: Final = {
    "key": "sk-proj-CaNaRy0key0123456789abcdef",
    "password": "CaNaRy1hunter",
    "header": "CaNaRy2header",
    "embedding": "CaNaRy3embedding",  # of no known shape
    "chroma": "CaNaRy4chroma",
    "query": "CaNaRy5query",
}
CANARIES: Final = ("CaNaRy", "bWU6Q2FOYVJ5")
"""What stands in each of them and nowhere else: as it is, and as Basic authentication encodes it."""


def assert_clean(text: str) -> None:
    for canary in CANARIES:
        at = text.find(canary)
        assert at < 0, f"leaked: ...{text[max(0, at - 200) : at + 60]}..."


class Echo(Loopback):
    """Answers every request with a status and an error that repeats its address, its key and all of its headers."""

    def __init__(self, status: int = 401, saying: Callable[[dict[str, str]], str] | None = None) -> None:
        def answer(asked: Asked) -> tuple[int, Any]:
            sent = dict(asked.headers.items())
            bearer = sent.get("Authorization", "").removeprefix("Bearer ")
            told = f"Incorrect API key provided: {bearer}. GET http://me:{KEYS['password']}@{sent.get('Host')}"
            told += f"{asked.path}?api_key={KEYS['query']} with {sent} and Authorization: {sent.get('Authorization')}"
            self.told.append(told if saying is None else saying(sent))
            return status, {"error": {"message": self.told[-1], "type": "invalid", "code": None}}

        self.told: list[str] = []
        super().__init__(answer, {"Connection": "close"})

    @property
    def address(self) -> str:
        return f"http://me:{KEYS['password']}@127.0.0.1:{self.port}/v1"


def told_of(error: BaseException) -> str:
    """Give all that an error of ours says by itself; its ``__cause__`` is the client's own."""
    told = [str(error), repr(error), *traceback.format_exception(error, chain=False)]
    told += [repr(getattr(error, name, None)) for name in ("partial", "failures", "step", "args")]
    return "\n".join(told)


class _Events(BaseEventHandler):
    _told: list[str] = PrivateAttr()

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def handle(self, event: Any, **_: Any) -> None:
        # LlamaIndex's own two events of its client's error: it sends them itself, past everything of ours.
        if type(event).__name__ not in ("SpanDropEvent", "ExceptionEvent"):
            self._told.append(f"event {event!r}")


class Witness:
    """Writes down every log line of ours, every callback and event, and what it is shown."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.handler = LlamaDebugHandler(print_trace_on_end=False)

    @property
    def text(self) -> str:
        return "\n".join([*self.told, *map(repr, self.handler.get_events())])

    @contextmanager
    def watching(self) -> Iterator[Witness]:
        written, ours, root = io.StringIO(), logging.getLogger("llama_index_agentic_kb"), get_dispatcher("root")
        handler, level = logging.StreamHandler(written), ours.level
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        events = _Events(self.told)
        ours.addHandler(handler)
        ours.setLevel(logging.DEBUG)
        root.add_event_handler(events)
        try:
            yield self
        finally:
            ours.removeHandler(handler)
            ours.setLevel(level)
            root.event_handlers.remove(events)
            self.told.append(written.getvalue())

    def shown(self, response: RetrievalResponse) -> None:
        console = Console(file=io.StringIO(), width=300)
        show_response(console, response)
        assert isinstance(console.file, io.StringIO)
        self.told += [response.to_json(), response._repr_html_(), repr(response), str(response)]
        self.told.append(console.file.getvalue())
