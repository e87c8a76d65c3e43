"""What a flow emits, changed on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llama_index_agentic_kb._flow.steps import Emit, Flow

__all__ = ["emitting"]

T = TypeVar("T")


def emitting(flow: Flow[T], change: Callable[[Any], Any], rest: Callable[[], Any] | None = None) -> Flow[T]:
    """Perform a flow, each item that it emits changed; its other steps, results and errors pass through.

    Args:
        flow: Any flow.
        change: Takes an item and gives what is emitted in its place; nothing is emitted for what is empty.
        rest: Gives what is emitted last, when the flow has returned; empty is nothing.

    Returns:
        What the flow returns.
    """
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = flow.send(answer) if failure is None else flow.throw(failure)
        except StopIteration as end:
            result: T = end.value
            break
        answer = failure = None
        if isinstance(step, Emit):
            item = change(step.item)
            if not item:
                continue
            step = Emit(item)
        try:
            answer = yield step
        except GeneratorExit:
            flow.close()
            raise
        except BaseException as error:  # noqa: BLE001 (it is the flow's to handle)
            failure = error
    last = rest() if rest is not None else None
    if last:
        yield Emit(last)
    return result
