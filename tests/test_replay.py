from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import ChatMessage

from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.prompts import Passage, format_passages
from llama_index_agentic_kb.replay import RecordedLLM, RecordedReply, Recording

REPLY = RecordedReply(
    when="<evidence>", content="Old [ref_id:7], new [ref_id:2].", quotes={"7": "old text", "2": "new"}
)
RECORDING = Recording(question="q", model="someone", replies=[RecordedReply(when="plan", content="{}"), REPLY])


def prompt(*contents: str) -> str:
    passages = [Passage(number, f"t{number}", content) for number, content in enumerate(contents)]
    return f"<evidence>\n{format_passages(passages)}\n</evidence>"


def test_markers_and_findings_follow_their_passages() -> None:
    """Numbers are this run's; where a passage is gone, its marker is an error, and its finding names none."""
    assert REPLY.for_prompt(prompt("the new one", "nothing", "the old text")) == "Old [ref_id:2], new [ref_id:0]."
    with pytest.raises(LLMError, match="old text"):
        REPLY.for_prompt(prompt("the new one"))
    content = '{"step": "q1", "answers": [{"value": "x", "ref": 1, "confidence": "stated"}]}'
    reply = RecordedReply(when="who?", content=content, quotes={"1": "one"})
    assert '"ref": 3' in reply.for_prompt(prompt("two", "three", "zero", "one"))
    assert '"ref": null' in reply.for_prompt(prompt("zero"))


async def test_each_prompt_gets_its_reply() -> None:
    """Replies are chosen by what the prompt holds; chat, completion and streams, sync and async, say the same."""
    llm = RecordedLLM(recording=RECORDING)
    asked = [ChatMessage(role="user", content=prompt("the new one", "the old text"))]
    said = "Old [ref_id:1], new [ref_id:0]."
    assert llm.chat(asked).message.content == said
    assert (await llm.achat(asked)).message.content == said
    assert llm.complete(str(asked[0].content)).text == said
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(asked)) == said
    assert "".join([chunk.delta or "" async for chunk in await llm.astream_chat(asked)]) == said
    assert "".join(chunk.delta or "" for chunk in llm.stream_complete(str(asked[0].content))) == said
    assert llm.chat([ChatMessage(content="plan this")]).message.content == "{}"


def test_replies_are_billed() -> None:
    """Tokens are counted, in streams by the last piece."""
    llm = RecordedLLM(recording=RECORDING)
    asked = [ChatMessage(content="plan this")]
    billed = llm.chat(asked).raw["usage"]
    assert billed["prompt_tokens"] > 0 < billed["completion_tokens"]
    raws = [chunk.raw for chunk in llm.stream_chat(asked)]
    assert raws[-1] == {"usage": billed}
    assert not any(raws[:-1])
