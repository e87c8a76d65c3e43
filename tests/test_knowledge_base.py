from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine.types import ChatMode

from llama_index_agentic_kb import (
    ConfigurationError,
    DeniedError,
    InvalidRequestError,
    KnowledgeBase,
    KnowledgeSource,
    Permissions,
    Principal,
    RetrievalRequest,
)
from llama_index_agentic_kb.grounding import scorers
from llama_index_agentic_kb.grounding.scorers import lexical
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.schema import ActivityRecord, Message
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.testing import HashEmbedding, LoopbackOpenAI, MemoryRetriever, ScriptedLLM
from tests.space import ANSWER

QUESTION = "How tall was the rocket that launched Apollo 11?"
ROCKETS = ["The Saturn V rocket was 110.6 m tall.", "The Ariane 5 was about 50 m tall."]
NEVER = [{"knowledgeSourceName": name, "neverQuerySource": True} for name in ("rockets", "missions")]
MISSIONS = ["Apollo 11 was launched by a Saturn V rocket in July 1969.", "Voyager 1 left in 1977."]


def sources(**kwargs: Any) -> list[KnowledgeSource]:
    return [
        KnowledgeSource("rockets", "launch vehicles", retriever=MemoryRetriever(ROCKETS, **kwargs)),
        KnowledgeSource("missions", "space missions", retriever=MemoryRetriever(MISSIONS, **kwargs)),
    ]


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        [ChatMessage(role=MessageRole.USER, content=QUESTION)],
        [Message.model_validate({"content": QUESTION})],
        RetrievalRequest(messages=[Message.model_validate({"content": QUESTION})]),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
        {"intents": [{"type": "semantic", "search": QUESTION}]},
    ],
)
async def test_takes_every_form_of_question(server: LoopbackOpenAI, question: Any) -> None:
    """Strings, conversations and requests, typed and wire, sync and async, are one and the same question."""
    kb = KnowledgeBase(sources(), llm=server.llm())
    response = await kb.aretrieve(question)
    assert response.text == kb.retrieve(question).text == ANSWER


@pytest.mark.parametrize(
    ("question", "fields", "names"),
    [
        ("", {}, "question"),
        (7, {}, "question"),
        ([], {}, "messages"),
        ({"messages": [], "foo": 1}, {}, "foo"),
        (QUESTION, {"max_runtime_in_seconds": 0}, "max_runtime_in_seconds"),
        (QUESTION, {"knowledge_source_params": [{"knowledge_source_name": "nope"}]}, "nope"),
        (QUESTION, {"knowledge_source_params": [{"knowledgeSourceName": "rockets", "kind": "web"}]}, "rockets"),
        (QUESTION, {"knowledge_source_params": NEVER}, "leaves no source to search"),
        (QUESTION, {"output_mode": "answerSynthesis"}, "outputMode"),
    ],
)
def test_bad_requests_name_the_field(question: Any, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        KnowledgeBase(sources()).retrieve(question, **fields)


def test_configuration_is_checked() -> None:
    """A knowledge base without sources, with one name twice, or with an answer mode and no model is refused."""
    with pytest.raises(ConfigurationError, match="at least one"):
        KnowledgeBase([])
    for wrong, kind in ((None, "NoneType"), (sources()[0], "KnowledgeSource")):
        with pytest.raises(ConfigurationError, match=f"sources: expected a list of KnowledgeSource, got {kind}"):
            KnowledgeBase(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rockets"):
        KnowledgeBase([sources()[0], sources()[0]])
    with pytest.raises(ConfigurationError, match="language model"):
        KnowledgeBase(sources(), output_mode="answerSynthesis")


def test_activity_is_told_as_it_happens() -> None:
    """An observer hears of each record twice: when its stage begins and when it ends."""
    heard: list[tuple[int, bool]] = []

    def hear(record: ActivityRecord) -> None:
        heard.append((record.id, record.completed_at is not None))

    response = KnowledgeBase(sources()).retrieve(QUESTION, on_activity=hear, include_activity=False)
    assert response.activity is None
    assert sorted(heard) == [(number, ended) for number in range(3) for ended in (False, True)]


def test_from_store_opens_what_was_ingested(tmp_path: Path) -> None:
    for name, text in (("rockets", ROCKETS[0]), ("missions", MISSIONS[0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.md").write_text(f"# One\n\n{text}\n", encoding="utf-8")
    model = HashEmbedding()
    with KnowledgeStore.open(tmp_path / "kb", embed_model=model, create=True) as store:
        ingest([tmp_path / "rockets", tmp_path / "missions"], store, chunk_size=128, chunk_overlap=0)
    kb = KnowledgeBase.from_store(tmp_path / "kb", embed_model=model).warm_up()
    response = kb.retrieve("Saturn V rocket")
    assert {reference.knowledge_source_name for reference in response.references} == {"rockets", "missions"}
    assert "_repr_html_" in dir(response)
    with pytest.raises(ConfigurationError):
        KnowledgeBase.from_store(tmp_path / "nothing")


async def test_warm_up_leaves_nothing_to_load(server: LoopbackOpenAI) -> None:
    """Warming up sends no request to the model, and after it a query does not hold the loop up."""
    lexical._shipped.cache_clear()
    scorers._named.cache_clear()
    kb = await KnowledgeBase(sources(), llm=server.llm()).awarm_up()
    assert not server.requests
    assert lexical._shipped.cache_info().currsize == 1  # the model that checks answers
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            began = time.thread_time()  # the loop's own work: the machine's other business is none of ours
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - began)

    ticker = asyncio.create_task(tick())
    await kb.aretrieve(QUESTION)
    gaps.clear()
    await kb.aretrieve(QUESTION)
    ticker.cancel()
    assert max(gaps) < 0.1


def test_extracts_that_do_not_fit_are_told() -> None:
    """What the output's budget left out stands in ``missing``, in the account and nowhere as an error."""
    response = KnowledgeBase(sources()).retrieve(QUESTION, max_output_size_in_tokens=5)
    assert response.text == "[]"
    assert response.status_code == 200
    assert [(part.what, part.outcome) for part in response.missing] == [("extracts", "skipped")]


def test_answers_over_their_budget_are_told(server: LoopbackOpenAI) -> None:
    response = KnowledgeBase(sources(), llm=server.llm()).retrieve(QUESTION, max_output_size_in_tokens=2)
    assert response.text == ANSWER
    assert "over the budget of 2" in str((response.activity or [])[-1].warning)


async def test_a_cancelled_request_closes_its_records() -> None:
    """Stages under way when a request is cancelled end in the account as skipped."""
    ended: list[ActivityRecord] = []

    def hear(record: ActivityRecord) -> None:
        if record.completed_at is not None:
            ended.append(record)

    with MemoryRetriever(["x"], fault="hang", mode="async") as hung:
        kb = KnowledgeBase([KnowledgeSource("hung", retriever=hung)])
        task = asyncio.create_task(kb.aretrieve(QUESTION, on_activity=hear))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
    assert [(record.type, record.outcome) for record in ended] == [("searchIndex", "skipped")]


def test_a_stores_sources_may_have_permissions(tmp_path: Path) -> None:
    """One declaration for all, or one for each: a source that is left out by mistake would be everybody's."""
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "alien.md").write_text("Alien is a film about rain in space.")
    with KnowledgeStore.open(tmp_path / "kb", embed_model=HashEmbedding(), create=True) as store:
        ingest([tmp_path / "films"], store)
    access = Permissions(tenant="tenant")

    def opened(permissions: Any) -> KnowledgeBase:
        return KnowledgeBase.from_store(
            tmp_path / "kb", embed_model=HashEmbedding(), permissions=permissions, effort="minimal"
        )

    with pytest.raises(DeniedError, match="no principal was given"):
        opened(access).retrieve("rain")
    for kb in (opened(access), opened({"films": access})):
        assert kb.retrieve("rain", principal=Principal(tenant="acme")).references == []
        assert kb.count("films", principal=Principal(tenant="acme")) == 0
    assert opened({"films": None}).count("films") == 1
    with pytest.raises(ConfigurationError, match="given for movies, and the store's sources are films"):
        opened({"movies": access})


@pytest.mark.parametrize("mode", [ChatMode.BEST, ChatMode.CONDENSE_QUESTION])
def test_chat_engines_have_the_base_s_defaults(mode: ChatMode) -> None:
    """The size and the checks of answers, in each mode that answers with our query engine."""
    checks = Grounding(filtering="high")
    kb = KnowledgeBase(sources(), llm=ScriptedLLM("ok"), grounding=checks, max_output_size_in_tokens=77)
    chat: Any = kb.as_chat_engine(mode)
    engine = chat.query_engine if mode is ChatMode.BEST else chat._query_engine
    assert engine.grounding == checks
    assert engine.synthesizer.max_output_tokens == 77


def test_a_request_lifts_the_base_s_size_of_answers() -> None:
    """None in a request is no limit; without a field the base's default holds."""
    limits: list[object] = []

    class Limited(ScriptedLLM):
        max_tokens: int | None = None

        def chat(self, messages: Any, **kwargs: Any) -> Any:
            limits.append(kwargs.get("max_tokens"))
            return super().chat(messages, **kwargs)

    kb = KnowledgeBase(sources(), llm=Limited(replies=lambda _: "ok"), effort="minimal", max_output_size_in_tokens=77)
    kb.retrieve(QUESTION)
    kb.retrieve(QUESTION, max_output_size_in_tokens=None)
    assert limits == [77, None]
