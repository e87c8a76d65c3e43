"""A shop behind a loopback HTTP service, and its tools: what the dialogues of the tests are about."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from llama_index_agentic_kb import KnowledgeSource, ToolSource, WriteLedger, Writes
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.loopback import Asked, Loopback

Order = Annotated[str, Field(pattern=r"^A-\d{4}$", description="the order number")]
Reason = Annotated[Literal["damaged", "wrong size", "changed my mind"], Field(description="the reason")]


class Shop:
    """The service's state, and its tools."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.returns: list[dict[str, Any]] = []
        self.broken = False
        self.pages = [
            "Coupons: enter the code of a coupon at the checkout.",
            "You get your refund 5 days after a return.",
        ]
        self.remark = ""

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=20) as response:
            return json.load(response)

    def order_status(self, order: Order) -> Any:
        """The status of an order."""
        return self._ask(f"/orders/{order}")

    def submit_return(self, order: Order, reason: Reason, idempotency_key: str = "") -> Any:
        """Submit a return of an order."""
        return self._ask("/returns", {"order": order, "reason": reason, "key": idempotency_key})

    def refund_status(self, order: Order) -> Any:
        """When the refund of a returned order is paid."""
        return self._ask(f"/refunds/{order}")

    def sources(self, ledger: WriteLedger | None = None) -> list[KnowledgeSource]:
        """The shop's pages, and its tools; members of staff may submit returns."""
        writes = Writes(permit=lambda principal: "staff" in principal.groups, ledger=ledger or WriteLedger())
        return [
            KnowledgeSource("pages", "help pages", retriever=MemoryRetriever(self.pages)),
            ToolSource(self.order_status, examples=["where is my order", "order status"]),
            ToolSource(self.submit_return, examples=["return", "send it back"], writes=writes),
            ToolSource(self.refund_status, examples=["refund"]),
        ]


@contextmanager
def open_shop() -> Iterator[Shop]:
    """Serve a shop on a loopback port."""

    def answer(asked: Asked) -> tuple[int, dict[str, str]]:
        kind, _, order = asked.path.strip("/").partition("/")
        if asked.method == "POST":
            shop.returns.append(json.loads(asked.body))
        if shop.broken:
            return 503, {"error": "down"}
        if asked.method == "POST":
            return 200, {"return": "R-1"}
        if kind == "orders":
            return 200, {"order": order, "status": "delivered", "remark": shop.remark}
        return 200, {"order": order, "refund": "paid on 2026-11-27"}

    with Loopback(answer) as server:
        shop = Shop(server.url)
        yield shop
