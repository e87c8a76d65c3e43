from __future__ import annotations

from llama_index_agentic_kb._aio import Call, emit, emitting, iterate, run


async def counting(end: str = "done") -> str:
    """Emits, calls, and gives back what the call gave."""
    await emit("a")
    got = await Call(sync=lambda: "b", what="call")
    await emit(got)
    try:
        await Call(sync=lambda: 1 / 0, what="call")
    except ZeroDivisionError:
        await emit("caught")
    return end


def test_items_are_changed_and_all_else_passes() -> None:
    """Results reach the flow, errors are the flow's to handle, and what is empty is not emitted."""
    held: list[str] = []

    def change(item: str) -> str:
        held.append(item)
        return "" if item == "b" else item.upper()

    assert list(iterate(emitting(counting(), change, lambda: "rest"))) == ["A", "CAUGHT", "rest"]
    assert held == ["a", "b", "caught"]
    assert run(emitting(counting("x"), str)) == "x"


def test_closing_reaches_the_flow() -> None:
    """A reader who leaves ends what is read."""
    left = []

    async def endless() -> None:
        try:
            while True:
                await emit("x")
        finally:
            left.append(True)

    stream = iterate(emitting(endless(), str))
    assert next(stream) == "x"
    stream.close()
    assert left == [True]
