"""Faults of what sources return: other people's code returns anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final

import numpy as np
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import Document, ImageNode, IndexNode, NodeWithScore, TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Resilience, RetrievalError, RetrievalResponse
from llama_index_agentic_kb.schema import Outcome
from llama_index_agentic_kb.sources.search import MAX_CHARACTERS
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, Verbatim
from tests.faults.registry import failing, fault, searches

AREA: Final = "garbage"

FINE: Final = "It rains in Paris."
KEPT: Final = "the good nodes of the list, and the other source's, are answered; the response can be written"


class Raises(TextNode):
    def get_content(self, *args: Any, **kwargs: Any) -> str:
        raise RuntimeError("no way to the text at http://me:secret-1234@host")


def scored(text: str, node_id: str = "", **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=node_id or text[:20], text=text, **fields), score=0.5)


def forced(made: NodeWithScore, *, of_node: bool = False, **fields: Any) -> NodeWithScore:
    """Set what pydantic would refuse, as code that goes around it does."""
    (made.node if of_node else made).__dict__.update(fields)
    return made


def writable(response: RetrievalResponse) -> str:
    """Write a response in every way, and give one of them."""
    "".join([response.to_json(), response._repr_html_(), str(response)]).encode("utf-8")
    return json.dumps(response.to_dict())


def asked(returned: Any, **fields: Any) -> list[RetrievalResponse]:
    """Ask a source that returns this, beside one that is well: sync and async."""
    patient = Resilience(straggler_grace=None)  # some of what it returns takes its time
    bad = KnowledgeSource("bad", retriever=MemoryRetriever(["x"], fault=Verbatim(returned)), resilience=patient)
    well = KnowledgeSource("well", retriever=MemoryRetriever(["It rains in Oslo."]))
    kb = KnowledgeBase([bad, well], effort="minimal", **fields)
    return [kb.retrieve("Where does it rain?"), asyncio.run(kb.aretrieve("Where does it rain?"))]


def survives(make: Callable[[], Sequence[Any]], *, dropped: int = 0) -> None:
    """Put a good node behind the garbage, and see that all that is good arrives."""
    for response in asked([*make(), scored(FINE)]):
        text = writable(response)
        assert "It rains in Oslo." in text
        assert FINE in text
        record = searches(response, "bad")[0]
        assert record.outcome is Outcome.OK
        assert (record.dropped_as_unusable or 0) == dropped
        assert not dropped or (record.lanes or [])[0].note
        assert "secret" not in text


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def deep() -> list[Any]:
    """Lists inside each other, deeper than Python's recursion goes."""
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


CYCLE: Final[dict[str, Any]] = {}
CYCLE["itself"] = CYCLE

USED: Final[dict[str, Callable[[], Sequence[Any]]]] = {
    "one id, one text, twice": lambda: [scored("It rains."), scored("It rains.")],
    "one id, two texts": lambda: [scored("It rains.", "one"), scored("It pours.", "one")],
    "empty texts": lambda: [scored("", "empty"), scored(" \n", "blank")],
    "scores that are None, NaN and infinite": lambda: [
        NodeWithScore(node=TextNode(text=f"rain {score}"), score=score)
        for score in (None, float("nan"), float("inf"), float("-inf"))
    ],
    "scores that are no floats": lambda: [
        forced(scored(f"rain {score!r}"), score=score)
        for score in (np.float32(0.5), Decimal("0.5"), "0.5", True, "high", [1], 10**400)
    ],
    "nodes of other kinds": lambda: [
        NodeWithScore(node=ImageNode(text="rain", image_path="/etc/passwd"), score=1),
        NodeWithScore(node=Document(text="rain again"), score=1),
        NodeWithScore(node=IndexNode(text="more rain", index_id="nowhere"), score=1),
    ],
    "NUL, bidi and zero-width characters": lambda: [scored("rain\x00 \u202egnip\u202c \u200b\ufeff")],
    "lone surrogates in texts, ids and metadata": lambda: [
        scored(
            "rain \ud800 in \udfff", "id\ud83d", metadata={"title": "\ud800", "url": "http://\udc00", "a": ["\ud800"]}
        )
    ],
    "metadata without text for keys, or none": lambda: [
        forced(scored("rain one"), of_node=True, metadata={1: 2, None: "x"}),
        forced(scored("rain two"), of_node=True, metadata=None),
    ],
    "metadata that are huge, cyclic, or no data": lambda: [
        scored("rain one", metadata={"a": "x" * 2_000_000}),
        scored("rain two", metadata={"a": CYCLE}),
        scored("rain three", metadata={"a": object(), "b": {1, 2}, "c": b"\xff", "d": float("nan")}),
    ],
    "metadata 100,000 levels deep, numbers without end, and objects that can't be written": lambda: [
        scored("rain one", metadata={"a": deep(), "title": 10**5_000}),
        scored("rain two", metadata={"title": Mute(), "a": [Mute()]}),
    ],
    "nodes whose fields are of other kinds": lambda: [
        forced(scored(f"rain {name}"), of_node=True, **{name: None})
        for name in ("relationships", "excluded_llm_metadata_keys", "text_template", "metadata_separator")
    ],
}
for name, make in USED.items():
    fault(AREA, f"a source returns {name}", KEPT)(partial(survives, make))

DROPPED: Final[dict[str, tuple[int, Callable[[], Sequence[Any]]]]] = {
    "items that are no nodes": (3, lambda: [None, "rain", {"text": "rain"}]),
    "nodes whose text can't be read": (1, lambda: [NodeWithScore(node=Raises(text="x"), score=1)]),
    "nodes whose id is no text": (1, lambda: [forced(scored("rain"), of_node=True, id_=7)]),
    "nodes whose metadata are a list": (1, lambda: [forced(scored("rain"), of_node=True, metadata=[1])]),
    "nodes whose metadata have 200,000 fields": (
        1,
        lambda: [scored("rain", metadata={f"field {number}": number for number in range(200_000)})],
    ),
    "nodes whose id has a million characters": (1, lambda: [scored("rain", "x" * 1_000_000)]),
}
for name, (count, make) in DROPPED.items():
    fault(AREA, f"a source returns {name}", f"{KEPT}; the bad ones are counted, with the reason")(
        partial(survives, make, dropped=count)
    )

NOTHING: Final[dict[str, Any]] = {
    "None": None,
    "a mapping": {"nodes": []},
    "text": "rain",
    "a generator": (node for node in [scored("rain")]),
    "only garbage": [None, 1],
}


def is_told(returned: Any) -> None:
    """Beside another source it is an error of its own; alone it is the request's."""
    for response in asked(returned):
        writable(response)
        assert response.status_code == 206
        assert searches(response, "bad")[0].outcome is Outcome.ERROR
        assert response.references
    alone = KnowledgeBase([KnowledgeSource("bad", retriever=MemoryRetriever(["x"], fault=Verbatim(returned)))])
    failing(RetrievalError, "'bad' returned no list of NodeWithScore", lambda: alone.retrieve("rain"))


for name, returned in NOTHING.items():
    fault(AREA, f"a source returns {name}", "it is an error of that source, never an empty result")(
        partial(is_told, returned)
    )


@fault(AREA, "a source returns a text of 10 MB, without a space", "it is cut, reported, and answered within the budget")
def too_long() -> None:
    for response in asked([scored("rain" * 2_500_000), scored(FINE)], max_output_size_in_tokens=500):
        assert len(response.text) < 10_000
        notes = (searches(response, "bad")[0].lanes or [])[0].note or ""
        assert f"was cut to {MAX_CHARACTERS:,}" in notes
        writable(response)


@fault(AREA, "a source returns a million spaces", "they are counted in pieces, and answered within the budget")
def spaces() -> None:
    for response in asked([scored(" " * 1_000_000 + "rain"), scored(FINE)], max_output_size_in_tokens=500):
        assert FINE in writable(response) or "It rains in Oslo." in writable(response)


@fault(AREA, "a source's list ends midway with an error", "what it gave by then is answered, and the error is reported")
def ends_midway() -> None:

    class Ending(list[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            raise ConnectionResetError("the server is gone")

    for response in asked(Ending([scored(FINE)])):
        assert FINE in writable(response)
        assert "the server is gone" in ((searches(response, "bad")[0].lanes or [])[0].note or "")


@fault(AREA, "a source returns 100,000 nodes", "no more than asked for are kept, all are counted")
def too_many() -> None:
    for response in asked([scored(f"rain {number}") for number in range(100_000)]):
        assert searches(response, "bad")[0].candidates == 100_000
        assert len(response.references) <= 11
        writable(response)


@fault(AREA, "a source's vectors have another length than the query's", "it is an error of that source")
def wrong_dimension() -> None:
    index = VectorStoreIndex([TextNode(text="rain")], embed_model=HashEmbedding(dimensions=8))
    index._embed_model = HashEmbedding(dimensions=16)
    bad = KnowledgeSource("bad", index=index, hybrid=False)
    well = KnowledgeSource("well", retriever=MemoryRetriever([FINE]))
    response = KnowledgeBase([bad, well], effort="minimal").retrieve("Where does it rain?")
    assert (response.status_code, searches(response, "bad")[0].outcome) == (206, Outcome.ERROR)
    assert FINE in writable(response)


@fault(AREA, "a question with NUL, lone surrogates and bidi controls", "it is searched, and everything can be written")
def hostile_question() -> None:
    kb = KnowledgeBase([KnowledgeSource("well", retriever=MemoryRetriever([FINE]))], effort="minimal")
    response = kb.retrieve("It rains \x00 \ud800 \u202e in Paris")
    assert FINE in writable(response)
