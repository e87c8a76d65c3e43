"""Requests as people and SDKs send them, at the door: what is not given, what is refused, and what follows."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import (
    ConfigurationError,
    InvalidRequestError,
    KnowledgeBase,
    KnowledgeSource,
    RetrievalRequest,
)
from llama_index_agentic_kb.schema import SourceParams
from llama_index_agentic_kb.sources import Fields
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM

FACT = "The keeper of the north tower is Ada Lund."
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Who keeps the north tower?"}]}


def base(*texts: str, kind: str = "searchIndex") -> KnowledgeBase:
    """A knowledge base over these texts, whose source is of a kind."""
    nodes = [
        TextNode(text=text, metadata={"title": f"T{number}", "url": f"https://x.example/{number}"})
        for number, text in enumerate(texts or (FACT,))
    ]
    source = KnowledgeSource("docs", index=VectorStoreIndex(nodes, embed_model=HashEmbedding()))
    source.kind = kind
    return KnowledgeBase([source], llm=None)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"maxOutputSize": 5, "maxOutputSizeInTokens": None}, {"max_output_size_in_tokens": 5}),
        ({"maxOutputSize": None, "maxOutputSizeInTokens": 6}, {"max_output_size_in_tokens": 6}),
        ({"maxOutputSize": 5, "maxOutputSizeInTokens": 6}, {"max_output_size_in_tokens": 6}),
        ({"max_output_size": 5}, {"max_output_size_in_tokens": 5}),
        ({"includeActivity": None, "knowledgeSourceParams": None}, {"include_activity": True}),
        ({"retrievalReasoningEffort": None, "intents": None}, {"retrieval_reasoning_effort": None}),
    ],
)
def test_null_is_not_given(sent: dict[str, Any], read: dict[str, Any]) -> None:
    """As data and as JSON text; a null takes nothing away that another name of it set."""
    for form in ({**USER, **sent}, json.dumps({**USER, **sent})):
        request = RetrievalRequest.parse(form)
        assert {name: getattr(request, name) for name in read} == read


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("includeActivity", "yes"),
        ("includeActivity", 1),
        ("maxOutputDocuments", "5"),
        ("maxOutputDocuments", True),
        ("maxOutputDocuments", 2.5),
        ("maxOutputSize", "5"),
        ("maxRuntimeInSeconds", "5"),
        ("maxRuntimeInSeconds", True),
        ("knowledgeSourceParams", [{"knowledgeSourceName": "docs", "failOnError": "no"}]),
        ("knowledgeSourceParams", [{"knowledgeSourceName": "docs", "rerankerThreshold": "2.5"}]),
    ],
)
def test_types_are_strict(field: str, value: Any) -> None:
    """A text is neither a number nor a truth value; the error names the field."""
    sent = {**USER, field: value}
    for read in (base().retrieve, lambda data: RetrievalRequest.parse(json.dumps(data))):
        with pytest.raises(InvalidRequestError, match=field):
            read(sent)


def test_a_number_of_documents_alone_sets_no_limit_of_tokens() -> None:
    """The default budget of extracted data counts where neither is given; a size counts beside a number."""
    kb = base(*(f"Tower {n}. " + "A long way up the stairs. " * 200 for n in range(8)))
    found = {
        name: len(kb.retrieve({**USER, **limits}).extracts)
        for name, limits in {
            "none": {},
            "documents": {"maxOutputDocuments": 8},
            "both": {"maxOutputDocuments": 8, "maxOutputSize": 1500},
        }.items()
    }
    assert found["documents"] == 8
    assert found["both"] < found["none"] < 8


@pytest.mark.parametrize("params", [{"includeReferenceSourceData": False}, {"includeReferences": False}], ids=str)
def test_a_source_whose_text_is_not_wanted_shows_none_of_it(params: dict[str, bool]) -> None:
    """Neither in references nor as quotes of the proof; the verdicts stay."""
    secret = "Ada Lund of Bergen keeps the north tower since 1961."
    source = KnowledgeSource("docs", retriever=MemoryRetriever([secret]))
    kb = KnowledgeBase([source], llm=ScriptedLLM("Ada Lund keeps the north tower [ref_id:0]."))
    asked = {**USER, "outputMode": "answerSynthesis", "retrievalReasoningEffort": "minimal"}
    open_ = kb.retrieve(asked)
    closed = kb.retrieve({**asked, "knowledgeSourceParams": [{"knowledgeSourceName": "docs", **params}]})
    assert secret in open_.to_json()
    assert not any(words in closed.to_json() for words in ("Bergen", "since 1961"))  # times have such digits, too
    assert closed.grounding is not None
    assert open_.grounding is not None
    assert [one.verdict for one in closed.grounding.claims] == [one.verdict for one in open_.grounding.claims]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("azureBlob", "blobUrl", "https://x.example/0"),
        ("indexedSharePoint", "docUrl", "https://x.example/0"),
        ("remoteSharePoint", "webUrl", "https://x.example/0"),
        ("file", "docName", "T0"),
        ("mcpServer", "toolName", "docs"),
    ],
)
def test_a_reference_has_its_kinds_own_field(kind: str, name: str, value: str) -> None:
    """Under the name that Azure's SDK reads; ours reads it back."""
    response = base(kind=kind).retrieve(USER)
    (written,) = response.to_dict()["references"]
    assert written[name] == value
    assert type(response).parse(response.to_json()) == response


def test_terms_may_stand_under_several_keys() -> None:
    """Those that a document has are joined, lists item by item."""
    node = TextNode(text=FACT, metadata={"tags": ["a", "b"], "topic": "towers"})
    index = VectorStoreIndex([node], embed_model=HashEmbedding())
    source = KnowledgeSource("docs", index=index, fields=Fields(terms=["tags", "topic", "none"]))
    assert KnowledgeBase([source], llm=None).retrieve(USER).extracts[0].terms == "a, b, towers"


EDGES = """
import json, sys
import chromadb
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.search.lexical import LexicalDocument, LexicalIndex
from llama_index_agentic_kb.testing import HashEmbedding

nodes = [TextNode(text="rain in Oslo", metadata={"year": 2001}), TextNode(text="snow", metadata={"year": 2002})]
store = ChromaVectorStore(chromadb.EphemeralClient().create_collection("edges"))
options = {"storage_context": StorageContext.from_defaults(vector_store=store), "embed_model": HashEmbedding()}
kb = KnowledgeBase([
    KnowledgeSource("chroma", index=VectorStoreIndex(nodes, **options)),
    KnowledgeSource("simple", index=VectorStoreIndex(nodes, embed_model=HashEmbedding())),
], llm=None)
words = LexicalIndex()
words.update([LexicalDocument(str(n), "rain", {"year": n}) for n in range(3)])
edges = sorted({sign * (2**power + step) for power in (0, 7, 15, 31, 32, 53, 63, 64)
                for sign, step in ((1, -1), (1, 0), (-1, 0), (-1, 1))} | {10_000, 10_001})
numbers = [*edges, 1e308, 5e-324, 0.5]
outcomes = {"answered": 0, "refused": 0}
def params(**fields):
    return {"knowledge_source_params": [{"knowledgeSourceName": name, **fields} for name in ("chroma", "simple")]}
for number in numbers:
    tries = [
        {"max_output_documents": number}, {"max_output_size_in_tokens": number}, params(maxOutputDocuments=number),
        {"max_runtime_in_seconds": number} if number > 1 else {}, params(rerankerThreshold=number),
        params(filters={"key": "year", "operator": "lt", "value": number}), params(filterAddOn=f"year ge {number!r}"),
    ]
    for fields in tries:
        try:
            kb.retrieve("rain in Oslo", **fields)
            outcomes["answered"] += 1
        except AgenticKBError:
            outcomes["refused"] += 1
    if isinstance(number, int):
        assert len(words.search("rain", number)) == max(0, min(number, 3)), number
print(json.dumps(outcomes))
"""


def test_no_number_ends_the_process() -> None:
    """Numbers at the edges of native types, in every field, over real stores: answered or refused, nothing else."""
    done = subprocess.run([sys.executable, "-c", EDGES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert min(outcomes.values()) > 30


def test_control_characters_steer_neither_log_nor_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """What a source says is one line of the log without escapes; JSON escapes every control character."""
    hostile = "\x9b31mred\x1b[2J\x7f\nWARNING forged"
    source = KnowledgeSource("docs", retriever=MemoryRetriever([f"rain {hostile}"]))
    response = KnowledgeBase([source], llm=None).retrieve("rain")
    text = response.to_json()
    assert not any(character in text for character in "\x9b\x1b\x7f\n")
    assert json.loads(text) == response.to_dict()
    with caplog.at_level(logging.WARNING, "llama_index_agentic_kb"):
        logging.getLogger("llama_index_agentic_kb").warning("a source failed: %s", hostile)
    assert caplog.messages == ["a source failed: 31mred[2J\\nWARNING forged"]


@pytest.mark.parametrize(
    ("sent", "warning"),
    [
        ({"intents": [{"search": f"tower {number}"} for number in range(30)]}, "30 intents were cut to 4"),
        ({**USER, "maxOutputDocuments": 1}, "1 documents were left out by maxOutputDocuments"),
        (
            {**USER, "knowledgeSourceParams": [{"knowledgeSourceName": "docs", "maxOutputDocuments": 1}]},
            "1 documents were left out by their source's maxOutputDocuments",
        ),
        (
            {
                "messages": [
                    {"content": [{"type": "text", "text": "Who keeps it?"}, {"type": "image", "image": {"url": "u"}}]}
                ]
            },
            "1 images in the messages were not read",
        ),
        (
            {"messages": [{"content": "Who keeps it?"}, {"role": "assistant", "content": "Ada"}]},
            "1 messages after the last question were not read",
        ),
    ],
)
def test_what_is_cut_is_named(sent: dict[str, Any], warning: str) -> None:
    """By a warning of the evidence's record, a field of the SDK's class; intents among the missing parts too."""
    response = base(FACT, "The keeper of the south tower is Nils Berg.").retrieve(sent)
    (record,) = [one for one in response.activity or [] if one.type == "agenticReasoning"]
    assert warning in (record.warning or "")
    assert [part.what for part in response.missing] == (["intents"] if "intents" in sent else [])


def test_stored_parameters_reach_the_search() -> None:
    """Those of the source count where a request is silent; a contradiction between both is refused."""
    stored = SourceParams(knowledge_source_name="docs", include_references=False)
    source = KnowledgeSource("docs", retriever=MemoryRetriever([FACT]), params=stored)
    kb = KnowledgeBase([source], llm=None)
    assert kb.retrieve(USER).references == []
    shown = {"knowledgeSourceName": "docs", "includeReferences": True}
    assert len(kb.retrieve({**USER, "knowledgeSourceParams": [shown]}).references) == 1
    wanted = {"knowledgeSourceName": "docs", "includeReferenceSourceData": True}
    with pytest.raises(InvalidRequestError, match="includeReferenceSourceData needs includeReferences"):
        kb.retrieve({**USER, "knowledgeSourceParams": [wanted]})
    with pytest.raises(ConfigurationError, match="params: they have no filters"):
        KnowledgeSource(
            "docs",
            retriever=MemoryRetriever([FACT]),
            params=SourceParams(knowledge_source_name="docs", filter_add_on="a eq 1"),
        )


@pytest.mark.parametrize(
    ("stored", "sent", "always", "never"),
    [
        ({"always_query_source": True}, {}, True, False),
        ({"always_query_source": True}, {"alwaysQuerySource": None}, True, False),
        ({"always_query_source": True}, {"alwaysQuerySource": False}, False, False),
        ({"always_query_source": True}, {"neverQuerySource": True}, False, True),
        ({"never_query_source": True}, {"alwaysQuerySource": True}, True, False),
    ],
)
def test_what_a_request_sets_overrides_what_is_stored(
    stored: dict[str, bool], sent: dict[str, Any], always: bool, never: bool
) -> None:
    """A false too; a null is not given."""
    params = SourceParams.parse({"knowledgeSourceName": "docs", **sent}).over(
        SourceParams(knowledge_source_name="docs", **stored)
    )
    assert (params.always_query_source, params.never_query_source) == (always, never)
