from __future__ import annotations

from typing import Annotated, Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import QueryBundle
from pydantic import AfterValidator, BaseModel, Field

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import LLMError, SynthesisError
from llama_index_agentic_kb.grounding.citations import AnswerRules, CheckedText
from llama_index_agentic_kb.llm import LanguageModel, Reply, Usage
from llama_index_agentic_kb.synthesizers import AnswerSynthesis, SimpleSummarize
from llama_index_agentic_kb.synthesizers.structured import ObjectAsker, read_object, strict_schema
from llama_index_agentic_kb.testing import Reply as Sent
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.conftest import Serve
from tests.faulty_server import Fault
from tests.synthesizers.conftest import Nodes


class River(BaseModel):
    """A river."""

    name: str
    length: int = Field(default=0, description="Kilometres.")


class City(BaseModel):
    """A city."""

    name: str
    rivers: list[River] = []
    title: str | None = None


class Loose(BaseModel):
    facts: dict[str, int]


PARIS = City(name="Paris", rivers=[River(name="Seine", length=777)])
JSON = '{"name": "Paris", "rivers": [{"name": "Seine", "length": 777}]}'


@pytest.mark.parametrize(
    "text",
    [
        JSON, f"Sure, here it is:\n```json\n{JSON}\n```\nAnything else?", f"The object: {JSON} I hope it helps.",
        f'{{"City": {JSON}}}', f"[{JSON}]", JSON[:-1], JSON.replace('"', "'"),
        '{"name": "Paris", "rivers": [{"name": "Seine", "length": "777"}],}',
    ],
)  # fmt: skip
def test_an_object_is_read_however_it_is_wrapped(text: str) -> None:
    """Preamble, fences, lists, a wrapper or broken JSON don't hide it."""
    assert read_object(Reply(text), City, AnswerRules()) == (PARIS, CheckedText(""))


@pytest.mark.parametrize(
    ("text", "why"), [("Paris.", "no JSON object"), ('{"city": "Paris"}', "name: Field required"), ("[1]", "no JSON")]
)
def test_what_is_no_object_is_an_error(text: str, why: str) -> None:
    """The error says why, quotes the reply and holds the bill."""
    with pytest.raises(LLMError, match=f"the model's reply is no City .*{why}") as caught:
        read_object(Reply(text, Usage(1, 2, 1)), City, AnswerRules())
    assert caught.value.usage == Usage(1, 2, 1)


class Strict(BaseModel):
    """A class whose validator has a fault."""

    name: Annotated[str, AfterValidator({"Rome": "Roma"}.__getitem__)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "Paris"}', "KeyError: 'Paris'"),
        ('{"name": ' + "[" * 50_000 + "]" * 50_000 + "}", "it holds no JSON object"),
    ],
    ids=["own", "deep"],
)
def test_no_reply_raises_what_is_no_error_of_synthesis(text: str, why: str, nodes: Nodes) -> None:
    """Neither what a validator raises, nor what deep nesting does."""
    with pytest.raises(SynthesisError, match=f"the model's reply is no Strict .{why}"):
        SimpleSummarize(ScriptedLLM(text), output_cls=Strict).synthesize("?", nodes)


def test_a_strict_schema_requires_all_and_allows_no_more() -> None:
    """As OpenAI's structured outputs want it; a property may be named like a keyword."""
    schema: Any = strict_schema(City)
    assert schema["required"] == ["name", "rivers", "title"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["River"]["required"] == ["name", "length"]
    assert "default" not in schema["properties"]["rivers"]
    assert strict_schema(Loose) is None


@pytest.mark.parametrize(
    ("model", "cls", "form"), [("gpt-4o-mini", City, "schema"), ("gpt-4", City, "tool"), ("gpt-4o-mini", Loose, "tool")]
)
def test_the_strictest_form_that_fits_is_asked_for(model: str, cls: type[BaseModel], form: str, serve: Serve) -> None:
    """A strict JSON schema, else a tool call."""
    server = serve(JSON if cls is City else '{"facts": {"a": 1}}')
    language_model = LanguageModel(server.llm(model), CallbackManager)
    reply = run(ObjectAsker().ask(language_model, [ChatMessage("?")], cls, deadline=None))
    assert isinstance(read_object(reply, cls, AnswerRules())[0], cls)
    (chat,) = server.chats
    assert (chat.response_format is not None, chat.forced_tool is not None) == (form == "schema", form == "tool")


def test_a_model_without_forms_is_asked_in_words(nodes: Nodes) -> None:
    """The schema stands at the end of the prompt."""
    llm = ScriptedLLM(JSON)
    assert AnswerSynthesis(llm, output_cls=City).synthesize("?", nodes).response == PARIS
    assert '"rivers"' in (llm.calls[0][-1].content or "")


def test_a_refused_form_gives_way_to_a_plainer_one_for_good(serve: Serve) -> None:
    """First a schema, then a tool, then words, and these at once the next time; unless words were refused as well."""
    refused = Fault.status(400)
    server = serve([refused] * 5 + [JSON, JSON])
    asker, model = ObjectAsker(), LanguageModel(server.llm(max_retries=0), CallbackManager)
    with pytest.raises(Exception, match="400"):
        run(asker.ask(model, [ChatMessage("?")], City, deadline=None))
    for _ in range(2):
        assert run(asker.ask(model, [ChatMessage("?")], City, deadline=None)).text == JSON
    assert [bool(chat.response_format) for chat in server.chats] == [True, False, False, True, False, False, False]


def test_a_tool_that_is_not_called_may_still_be_answered(serve: Serve) -> None:
    """Some models write the arguments as text."""
    server = serve(Sent(JSON))
    assert AnswerSynthesis(server.llm("gpt-4"), output_cls=City).get_response("?", ["a"]) == PARIS


def test_a_cut_object_is_mended_and_warned_of(nodes: Nodes, serve: Serve) -> None:
    """What ran out of tokens may be incomplete."""
    synthesizer = AnswerSynthesis(
        serve(Fault.length('{"name": "Paris", "rivers": [{"name": "Sei')).llm(), output_cls=City
    )
    made = run(synthesizer.synthesis(QueryBundle("?"), nodes))
    assert made.output == City(name="Paris", rivers=[River(name="Sei")])
    assert made.warnings == ["the model stopped before it was done; its reply is cut"]
