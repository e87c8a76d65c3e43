"""Google's own client against a loopback server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.wire.loopback import LoopbackGoogle


@pytest.fixture
def google() -> Iterator[LoopbackGoogle]:
    """A server that records requests and answers as a test sets it."""
    with LoopbackGoogle() as server:
        yield server


@pytest.fixture
def answers(google: LoopbackGoogle) -> Iterator[Any]:
    """The stock client of the conversational search service."""
    with google.client("ConversationalSearchServiceClient") as client:
        yield client
