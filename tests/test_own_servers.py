"""Models as people run them, at the door: own servers by the environment, unknown names, thoughts, own citations."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb import AgenticStreamingResponse, KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible
from llama_index_agentic_kb.schema.grounding import Verdict
from llama_index_agentic_kb.synthesizers import get_response_synthesizer
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply

QUESTION = "How tall was the Saturn V rocket, and who flew it?"
TEXTS = ["The Saturn V rocket was 110.6 m tall.", "Apollo 11 was launched by a Saturn V rocket in July 1969."]
STYLES = ["[{}]", "({})", "[Source {}]", "(Source {})", "【{}】", "【{}†source】", "[^{}]", "[Passage {}]", "[ref {}]"]


def writes(form: str, *, base: int) -> Callable[[ChatRequest], Reply]:
    """A model that thinks aloud, plans one search, and cites the height in a form of its own, counting from a base."""

    def reply(request: ChatRequest) -> Reply:
        if "You plan searches" in request.text:
            plan = json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V rocket"}]})
            return Reply(f'<think>{{"sub_queries": [{{"query": "no [1]"}}]}}</think>{plan}', chunk_size=7)
        first = request.text.find(TEXTS[0]) > request.text.find(TEXTS[1])
        cited = form.format(first + base) + form.format(1 - first + base)
        return Reply(f"<think>Is it [1]?</think>\n\nThe Saturn V was 110.6 m tall {cited}.", chunk_size=5)

    return reply


def base(server: LoopbackOpenAI) -> KnowledgeBase:
    return KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], llm=server.llm())


@pytest.mark.parametrize("form", STYLES)
@pytest.mark.parametrize("first", [0, 1])
def test_citations_in_a_style_of_the_model_s_are_ours_and_no_claim_suffers(form: str, first: int) -> None:
    """Whole and streamed: markers lead to the passage that says it, and no thought and no number is left."""
    with LoopbackOpenAI(writes(form, base=first)) as server:
        response = base(server).retrieve(QUESTION)
        answer = base(server).answer(QUESTION, filtering_level="low")
        stream = base(server).as_query_engine(streaming=True).query(QUESTION)
        assert isinstance(stream, AgenticStreamingResponse)
        streamed = "".join(stream.response_gen)
    assert response.plan is not None
    assert [query.query for query in response.plan.sub_queries][1:] == ["height of the Saturn V rocket"]
    [claim] = response.grounding.claims  # type: ignore[union-attr]
    height = next(item.id for item in response.references if TEXTS[0] in str(item.source_data))
    assert (claim.verdict, {"0", "1"} >= set(claim.cited)) == (Verdict.SUPPORTED, True)
    assert first or height in claim.cited  # counted from 1, the first number of two may mean either
    assert answer.text == "The Saturn V was 110.6 m tall."
    assert answer.answer.skipped_reasons == []
    assert streamed == response.text
    assert not [thought for thought in ("think", "no [1]", "Is it") if thought in response.to_json()]
    assert "characters of thoughts were left out" in str((response.activity or [])[-1].warning)


@pytest.mark.parametrize("name", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
@pytest.mark.parametrize("key", [None, "sk-test"])
def test_the_environment_s_server_is_asked(name: str, key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under both names that clients use, with a key or without one."""
    with LoopbackOpenAI("It was 110.6 m tall [ref_id:0].") as server:
        monkeypatch.setenv(name, server.base_url)
        if key is not None:
            monkeypatch.setenv("OPENAI_API_KEY", key)
        kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], effort="minimal")
        assert kb.retrieve(QUESTION).text == "It was 110.6 m tall [ref_id:0]."
        assert len(server.chats) == 1


def test_a_model_of_any_name_works() -> None:
    """LlamaIndex's OpenAI with a name that it does not know, in a base, its chat engines, and a synthesizer alone."""
    with LoopbackOpenAI("It was 110.6 m tall [ref_id:0].") as server:
        llm = OpenAI(model="my-model", api_base=server.base_url, api_key="key", temperature=0.7)
        kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], llm=llm, effort="minimal")
        assert isinstance(kb.llm, OpenAICompatible)
        assert (kb.llm.model, kb.llm.temperature, llm.api_key) == ("my-model", 0.7, kb.llm.api_key)
        assert kb.retrieve(QUESTION).text == "It was 110.6 m tall [ref_id:0]."
        assert str(kb.as_chat_engine("context").chat(QUESTION))  # type: ignore[arg-type]
        assert get_response_synthesizer(llm).get_response(QUESTION, TEXTS) == "It was 110.6 m tall [ref_id:0]."
        known = OpenAI(model="gpt-4o-mini", api_base=server.base_url, api_key="key")
        assert KnowledgeBase([*kb.sources.values()], llm=known).llm is known
