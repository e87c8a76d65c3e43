"""Generated garbage through the whole pipeline, written in every way."""

from __future__ import annotations

import asyncio
import copy
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import (
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from rich.console import Console

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, RetrievalResponse
from llama_index_agentic_kb._terminal import show_response
from llama_index_agentic_kb.llm import tokens_of
from llama_index_agentic_kb.schema import Outcome, SourceActivity
from llama_index_agentic_kb.sources.cleaning import MOST_FIELDS, MOST_ID, MOST_LEVELS, clean_nodes
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, Verbatim

FINE = "It rains in Paris."


class Mute:
    """An object that can't be written."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__

    def __float__(self) -> float:
        raise RuntimeError("no number")


class Unreadable(TextNode):
    """A node whose text can't be had, for a reason that can't be told."""

    def get_content(self, *args: Any, **kwargs: Any) -> str:
        raise ValueError(Mute())


class Fickle(TextNode):
    """A node whose text can be had once."""

    def get_content(self, *args: Any, **kwargs: Any) -> str:
        self.__dict__["asked"] = asked = self.__dict__.get("asked", 0) + 1
        if asked > 1:
            raise RuntimeError("gone")
        return "rain"


class EndsMidway(list[Any]):
    """A list that can't be read to its end."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise RuntimeError("the connection was lost")


def nested(levels: int) -> Any:
    value: Any = "deep"
    for level in range(levels):
        value = [value] if level % 2 else {"in": value}
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

ANY_TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(["\ud800", "a\x00b", "\u202e", "{x.__class__}", ""])
VALUES = st.one_of(
    ANY_TEXT,
    st.lists(ANY_TEXT, max_size=3),
    st.dictionaries(ANY_TEXT, ANY_TEXT | st.floats(), max_size=3),
    st.floats() | st.integers() | st.none() | st.booleans() | st.binary(max_size=3),
    st.sampled_from([CYCLE, 10**5_000, nested(2_000), object(), Decimal(1), float("nan"), {1, 2}, (1, None), Mute()]),
)
KNOWN = ["title", "url", "file_name", "a", "_node_content", "_node_type", "$or", "page_label"]
NAMES = st.sampled_from(KNOWN) | ANY_TEXT
METADATA = st.dictionaries(NAMES, VALUES, max_size=4)
SCORES: st.SearchStrategy[Any] = st.one_of(
    st.floats(),
    st.none(),
    st.booleans(),
    st.sampled_from(["0.5", "high", [1], np.float32(0.5), Decimal("NaN"), Mute()]),
)
FORCED = st.dictionaries(
    st.sampled_from(
        [
            "relationships",
            "excluded_llm_metadata_keys",
            "excluded_embed_metadata_keys",
            "embedding",
            "start_char_idx",
            "text_template",
            "metadata_template",
            "metadata_separator",
        ]
    ),
    st.none() | st.just("x") | st.integers(),
    max_size=2,
)


@st.composite
def usable(draw: st.DrawFn) -> NodeWithScore:
    """A node of some kind with flaws that can be mended."""
    kind = draw(st.sampled_from([TextNode, Document, ImageNode, IndexNode, Node]))
    text, metadata = draw(ANY_TEXT), draw(METADATA)
    given: dict[str, Any] = {"id_": draw(ANY_TEXT.filter(bool)), "metadata": metadata}
    if kind is IndexNode:
        given["index_id"] = draw(ANY_TEXT)
    if kind is ImageNode:
        given["image_path"] = "/etc/passwd"
    made: Any = Node(text_resource=MediaResource(text=text), **given) if kind is Node else kind(text=text, **given)
    made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=draw(ANY_TEXT))
    made.__dict__.update({name: value for name, value in draw(FORCED).items() if name in type(made).model_fields})
    return NodeWithScore.model_construct(node=made, score=draw(SCORES))


def unusable() -> st.SearchStrategy[Any]:
    """What is no node, or can't be read."""
    plain = st.one_of(st.none(), st.integers(), ANY_TEXT, st.just(TextNode(text="bare")), st.just({"text": "rain"}))
    broken: list[dict[str, Any]] = [
        {"id_": 7},
        {"id_": ""},
        {"id_": "x" * (MOST_ID + 1)},
        {"metadata": [1]},
        {"metadata": {Mute(): 1}},
        {"metadata": dict.fromkeys(map(str, range(MOST_FIELDS + 1)))},
    ]
    return plain | st.sampled_from(broken).map(_broken) | st.builds(lambda: NodeWithScore(node=Unreadable(text="x")))


def _broken(fields: dict[str, Any]) -> NodeWithScore:
    made = TextNode(text="rain")
    made.__dict__.update(fields)
    return NodeWithScore(node=made, score=0.5)


def written(response: RetrievalResponse) -> str:
    """Write a response in every way that there is, and give its JSON."""
    text = json.dumps(response.to_dict())
    json.loads(response.to_json())
    for shown in (response.to_json(), response.model_dump_json(fallback=str), response._repr_html_(), str(response)):
        shown.encode("utf-8")
    screen = io.StringIO()
    show_response(Console(file=screen, width=200), response)
    screen.getvalue().encode("utf-8")
    return text


def record_of(response: RetrievalResponse, name: str = "bad") -> SourceActivity:
    records = [one for one in response.activity or [] if isinstance(one, SourceActivity)]
    return next(one for one in records if one.knowledge_source_name == name)


def base(returned: Any, **fields: Any) -> KnowledgeBase:
    bad = KnowledgeSource("bad", retriever=MemoryRetriever(["x"], fault=Verbatim(returned)))
    return KnowledgeBase([bad, KnowledgeSource("well", retriever=MemoryRetriever(["It rains in Oslo."]))], **fields)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["evidence", "answer"])
def test_generated_garbage_costs_only_itself(mode: str) -> None:
    """Bad nodes are dropped and counted, good ones answered, sync and async; what came can be written in every way."""
    fields: dict[str, Any] = {"effort": "minimal"}
    if mode == "answer":
        fields |= {"llm": ScriptedLLM("It rains [ref_id:0]."), "output_mode": "answerSynthesis"}

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.lists(usable(), max_size=4), st.lists(unusable(), max_size=3), st.randoms(use_true_random=False))
    def run(good: list[NodeWithScore], bad: list[Any], random: Any) -> None:
        found = [*good, *bad]
        random.shuffle(found)
        fine = NodeWithScore(node=TextNode(text=FINE, id_="fine"), score=0.9)
        kb = base([*found, fine], **fields)
        before = [copy.copy(one.node.__dict__) for one in good]
        for response in (kb.retrieve("Where does it rain?"), asyncio.run(kb.aretrieve("Where does it rain?"))):
            text = written(response)
            assert "well" in text
            record = record_of(response)
            assert record.outcome is Outcome.OK, record.error
            assert (record.dropped_as_unusable or 0) == len(bad)
            assert not bad or (record.lanes or [])[0].note
            assert any(reference.doc_key == "fine" for reference in response.references)
        for one, was in zip(good, before, strict=True):
            assert all(one.node.__dict__[name] is value for name, value in was.items()), "the source's node was changed"

    run()


def test_a_list_that_ends_midway_gives_what_it_gave() -> None:
    """What was read before its error is answered, and the error is told; where nothing was read, it is one."""
    ends = EndsMidway([NodeWithScore(node=TextNode(text=FINE), score=1.0)])
    response = base(ends, effort="minimal").retrieve("Where does it rain?")
    assert FINE in written(response)
    assert (record_of(response).lanes or [])[0].note == "its list ended with the connection was lost"
    response = base(EndsMidway(), effort="minimal").retrieve("Where does it rain?")
    assert record_of(response).outcome is Outcome.ERROR
    assert "its list ended with the connection was lost" in written(response)


def test_a_node_that_changes_its_mind_is_the_source_s_error() -> None:
    """Its text could be had, and then it could not: the other source answers."""
    response = base([NodeWithScore(node=Fickle(text="x"), score=1.0)], effort="minimal").retrieve("Where does it rain?")
    assert "It rains in Oslo." in written(response)
    assert record_of(response).error is not None


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (nested(MOST_LEVELS - 1), True),
        (nested(MOST_LEVELS + 1), False),
        (["x"] * 200_000, False),
        (CYCLE, False),
        (10**5_000, False),
        (Mute(), False),
        ([Mute()], False),
        (Decimal("0.5"), True),
    ],
    ids=["levels", "too many levels", "too long", "cycle", "endless number", "mute", "mute within", "object"],
)
def test_fields_that_can_not_be_written_are_none(value: Any, kept: bool) -> None:
    """A filter holds for none of them: what can't be read passes nothing. The source's node keeps what it had."""
    given = NodeWithScore(node=TextNode(text="rain", metadata={"other": 1}), score=1.0)
    given.node.metadata["field"] = value
    (made,) = clean_nodes([given], "docs")
    assert made.node.metadata == {"other": 1, "field": value if kept else None}
    assert given.node.metadata["field"] is value


@pytest.mark.parametrize("unit", [" ", "\n", "\t", "\u3000", "a"])
def test_any_million_characters_can_be_counted(unit: str) -> None:
    """Whole, OpenAI's tokenizer raises on a million spaces."""
    assert 1_000 < len(tokens_of(unit * 1_000_000)) <= 500_000
