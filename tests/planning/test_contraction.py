from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, RetrievalResponse, RetrieverOptions, ShardedSource
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.planning import contraction
from llama_index_agentic_kb.planning.contraction import MIN_SCOPE
from llama_index_agentic_kb.schema import AgenticReasoningActivity, Principal, ScopeReason, ScopeState, Topic, TurnScope
from llama_index_agentic_kb.search.prototypes import ScopeSettings
from llama_index_agentic_kb.sources.vectors import scope_indexes
from llama_index_agentic_kb.testing import HashEmbedding, ScriptedLLM

TOPICS = ["rocket engine thrust", "garden soil compost", "mortgage loan interest", "violin string bow"]
TOPICS += ["bread dough yeast", "glacier ice moraine", "chess pawn opening", "kidney blood dialysis"]
ROCKETS = [("user", "How much thrust has the rocket engine?"), ("assistant", "A lot.")]


def corpus(count: int = 480, **metadata: Any) -> VectorStoreIndex:
    nodes = [
        TextNode(id_=f"n{at}", text=f"{TOPICS[at % 8]} item{at} detail{at % 7}", metadata=metadata)
        for at in range(count)
    ]
    return VectorStoreIndex(nodes, embed_model=HashEmbedding())


@pytest.fixture(scope="module")
def documents() -> VectorStoreIndex:
    return corpus()


def base(
    index: VectorStoreIndex, *, indexed: bool = True, llm: ScriptedLLM | None = None, **source: Any
) -> KnowledgeBase:
    sources = [KnowledgeSource("docs", index=index, **source)]
    options = RetrieverOptions(scope=scope_indexes(sources) if indexed else {})
    return KnowledgeBase(sources, llm=llm, effort="minimal", output_mode="extractiveData", options=options)


def ask(
    kb: KnowledgeBase, question: str, history: Sequence[tuple[str, str]] = ROCKETS, **fields: Any
) -> tuple[RetrievalResponse, TurnScope]:
    """Return the response and the account's record of the conversation."""
    messages = [{"role": role, "content": text} for role, text in [*history, ("user", question)]]
    response = kb.retrieve(messages, **{"scope_state": ScopeState(), **fields})
    turn = next(one.conversation for one in response.activity or () if isinstance(one, AgenticReasoningActivity))
    assert turn is not None
    return response, turn


def topics_of(response: RetrievalResponse) -> list[str]:
    return [next(topic for topic in TOPICS if item.content.startswith(topic)) for item in response.extracts]


def test_a_follow_up_is_searched_in_its_conversation(documents: VectorStoreIndex) -> None:
    """The account says what was searched and how it was narrowed; most passages are about the topic."""
    response, turn = ask(base(documents), "And detail3?")
    alone, _ = ask(base(documents), "And detail3?", ())
    assert turn.expanded == "And detail3? much thrust rocket engine"
    assert turn.topic is Topic.CONTINUED
    assert turn.reason is None
    assert (turn.documents, turn.turn) == (480, 1)
    assert turn.scope is not None
    assert MIN_SCOPE <= turn.scope <= 130  # a quarter, and those that are as near
    assert topics_of(response).count(TOPICS[0]) >= 6
    assert topics_of(alone).count(TOPICS[0]) <= 2


def test_a_sample_stands_for_a_large_source(documents: VectorStoreIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is an estimate; what is found about the topic stays in the scope."""
    response, whole = ask(base(documents), "And detail3?")
    monkeypatch.setattr("llama_index_agentic_kb.search.prototypes.SAMPLE", 120)
    sampled, turn = ask(base(documents), "And detail3?")
    assert turn.scope is not None
    assert whole.scope is not None
    assert abs(turn.scope - whole.scope) <= 40
    assert topics_of(sampled) == topics_of(response)


def test_a_collection_in_shards_is_narrowed_as_one(documents: VectorStoreIndex) -> None:
    """The scope and the drift are those of one big index."""
    nodes = list(documents.docstore.docs.values())
    parts = [VectorStoreIndex(nodes[at::2], embed_model=HashEmbedding()) for at in range(2)]
    source = ShardedSource("docs", [KnowledgeSource(f"s{at}", index=part) for at, part in enumerate(parts)])
    options = RetrieverOptions(scope=scope_indexes([source]))
    kb = KnowledgeBase([source], effort="minimal", output_mode="extractiveData", options=options)
    (_, turn), (_, whole) = ask(kb, "And detail3?"), ask(base(documents), "And detail3?")
    assert (turn.reason, turn.scope, turn.drift) == (None, whole.scope, whole.drift)


def test_a_message_that_stands_alone_is_searched_as_it_is(documents: VectorStoreIndex) -> None:
    """A change of topic is reported, and finds what it would find without the conversation."""
    kb, question = base(documents), "How do violin string and bow item7 work together today?"
    response, turn = ask(kb, question)
    alone = kb.retrieve(question)
    assert (turn.expanded, turn.topic) == (None, Topic.SHIFTED)
    assert [item.content for item in response.extracts] == [item.content for item in alone.extracts]
    assert alone.scope_state is None
    state = response.scope_state
    assert state is not None
    assert (state.turn, state.shifts) == (1, (1,))


def test_a_state_goes_from_turn_to_turn(documents: VectorStoreIndex) -> None:
    """It is an immutable value with a JSON form, and holds the documents of the last two turns."""
    kb, history, state = base(documents), list[tuple[str, str]](), ScopeState()
    for number, question in enumerate(["rocket thrust?", "And item8?", "And item12?"], start=1):
        response, turn = ask(kb, question, history, scope_state=state)
        assert turn.turn == number
        assert turn.reason is (ScopeReason.NO_HISTORY if number == 1 else None)
        assert response.scope_state is not None
        state = ScopeState.parse(response.scope_state.to_dict())
        assert state == response.scope_state
        history += [("user", question), ("assistant", "Yes.")]
    assert [len(one) for one in state.recent] == [contraction.RECENT_DOCUMENTS] * 2
    assert state.last == turn


def test_pinned_and_recent_documents_stay_in_the_scope(documents: VectorStoreIndex) -> None:
    """A document of another topic is kept if it is pinned."""
    kb = base(documents)
    _, before = ask(kb, "And detail3?")
    state = ScopeState().pin("docs", "n5").pin("docs", "n1").unpin("docs", "n1")
    _, after = ask(kb, "And detail3?", scope_state=state)
    assert before.scope is not None
    assert after.scope == before.scope + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"indexed": False}, ScopeReason.NO_INDEX),
        ({"count": 150}, ScopeReason.SMALL_CORPUS),
        ({"insert": True}, ScopeReason.INDEX_STALE),
        ({"settings": ScopeSettings(floor=1.1)}, ScopeReason.LOW_SIMILARITY),
        ({"fail": True}, ScopeReason.FAILED),
        ({"model": "other"}, ScopeReason.NO_INDEX),
    ],
)
def test_a_search_that_can_not_be_narrowed_is_not(
    change: dict[str, Any], reason: ScopeReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account has the reason, and nothing is left out."""
    index = corpus(change.pop("count", 480))
    sources = [KnowledgeSource("docs", index=index)]
    scope = dict(scope_indexes(sources)) if change.pop("indexed", True) else {}
    if change.pop("insert", False):
        index.insert_nodes([TextNode(text="rocket engine news")])
    if change.pop("fail", False):
        monkeypatch.setattr(contraction, "contract", lambda *_, **__: 1 / 0)
    options = RetrieverOptions(scope={name: replace(one, **change) for name, one in scope.items()})
    kb = KnowledgeBase(sources, effort="minimal", output_mode="extractiveData", options=options)
    response, turn = ask(kb, "And detail3?")
    assert turn.reason is reason
    assert turn.scope is None
    assert len(response.extracts) == 10


def test_too_small_a_scope_leaves_nothing_out(documents: VectorStoreIndex) -> None:
    """If fewer passages than asked for would remain, all remain."""
    _, turn = ask(base(documents), "And detail3?", max_output_documents=200)
    assert turn.reason is ScopeReason.TOO_SMALL


def test_a_scope_never_widens_permissions() -> None:
    """A pinned document that the principal may not see is not found, and no count reveals hidden documents."""
    index = corpus(480, tenant="acme")
    index.insert_nodes([TextNode(id_="secret", text="rocket engine thrust secret", metadata={"tenant": "other"})])
    kb = base(index, permissions=Permissions(tenant="tenant"))
    state = ScopeState().pin("docs", "secret")
    response, turn = ask(kb, "And secret?", scope_state=state, principal=Principal(tenant="acme"))
    assert turn.reason is None
    assert (turn.documents, turn.scope, turn.scope_miss) == (None, None, None)
    assert "secret" not in response.text


def test_a_model_plans_from_the_conversation_itself(documents: VectorStoreIndex) -> None:
    """Its searches are not narrowed, and the turn is counted."""
    kb = base(documents, llm=ScriptedLLM(['{"sub_queries": []}']))
    response, turn = ask(kb, "And detail3?", retrieval_reasoning_effort="low", scope_state=ScopeState(turn=4))
    assert (turn.turn, turn.reason, turn.topic) == (5, ScopeReason.PLANNED, Topic.UNKNOWN)
    assert response.scope_state is not None
    assert response.scope_state.turn == 5
