"""Faults of permissions and keys: whoever asks, plans, brings or repeats what, nobody is shown what is another's."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import chromadb
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import MetadataFilters
from llama_index.llms.openai import OpenAI
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import (
    ActivityCallbackHandler,
    AgenticRetriever,
    DeniedError,
    FilterField,
    KnowledgeBase,
    KnowledgeSource,
    Permissions,
    Principal,
    RetrievalRequest,
    RetrievalResponse,
    RetrieverOptions,
    acting_as,
)
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from tests.faults.registry import failing, fault, searches
from tests.openai_embedding import OpenAIEmbedding
from tests.security.canaries import KEYS, Echo, Witness, assert_clean, told_of

AREA: Final = "permissions"
FIELDS: Final = Permissions(tenant="tenant", groups="acl_group_", public="acl_public")
ALICE: Final = Principal(tenant="acme", user="alice")
BOB: Final = Principal(tenant="beta", user="bob")
OWN: Final = {"rain in acme", "rain for the managers of acme"}
MANAGER: Final = Principal(tenant="acme", user="carol", groups=["managers"])
_numbers = itertools.count()


def everybodys() -> list[TextNode]:
    texts: dict[str, dict[str, Any]] = {
        "rain in acme": {"tenant": "acme", "public": True},
        "rain for the managers of acme": {"tenant": "acme", "groups": ["managers"]},
        "rain in beta": {"tenant": "beta", "public": True},
        "more rain in beta": {"tenant": "beta", "groups": ["managers"]},
    }
    return [
        TextNode(id_=f"n{place}", text=text, metadata=FIELDS.stamp({"title": text}, **access))
        for place, (text, access) in enumerate(texts.items())
    ]


@functools.cache
def chroma() -> VectorStoreIndex:
    """The texts in Chroma; read only."""
    return _in_chroma()


def _in_chroma() -> VectorStoreIndex:
    collection = chromadb.EphemeralClient().create_collection(f"permission-faults-{next(_numbers)}")
    context = StorageContext.from_defaults(vector_store=ChromaVectorStore(chroma_collection=collection))
    return VectorStoreIndex(everybodys(), storage_context=context, embed_model=HashEmbedding())


def base(*, source: dict[str, Any] | None = None, further: tuple[KnowledgeSource, ...] = (), **fields: Any) -> Any:
    """A knowledge base over a source under permissions."""
    over: dict[str, Any] = {"index": chroma(), "permissions": FIELDS, **(source or {})}
    return KnowledgeBase([KnowledgeSource("docs", **over), *further], **{"effort": "minimal", **fields})


def texts(response: RetrievalResponse) -> set[str]:
    return {extract.content for extract in response.extracts}


def shown(kb: KnowledgeBase, who: Principal | None = ALICE, **params: Any) -> set[str]:
    """What a principal is shown of a source under further parameters."""
    told: Any = {"knowledge_source_params": [{"knowledgeSourceName": "docs", **params}]} if params else {}
    return texts(kb.retrieve("rain", principal=who, **told))


def refused(kind: type[AgenticKBError], ask: Callable[[], Any], words: str) -> None:
    """An error of a kind is raised, and tells nothing of beta."""
    assert "beta" not in str(failing(kind, re.escape(words), ask))


@fault(AREA, "no principal is given", "denied, 403; no source is searched and no model asked")
def nobody() -> None:
    asked: list[Any] = []

    def reply(messages: Any) -> str:
        asked.append(messages)
        return "{}"

    llm = ScriptedLLM(reply)
    factory = MemoryRetriever(["rain in acme"])
    kb = base(source={"index": None, "retriever_factory": lambda _: factory}, llm=llm, effort="low")
    for ask in (lambda: kb.retrieve("rain"), lambda: kb.as_chat_engine().chat("rain"), lambda: kb.count("docs")):
        refused(DeniedError, ask, "no principal was given")
    assert DeniedError.status_code == 403
    assert (asked, factory.queries) == ([], [])


@fault(AREA, "a principal lacks the tenant that documents are by", "denied; another source answers, status 206")
def half_a_principal() -> None:
    public = KnowledgeSource("public", retriever=MemoryRetriever(["rain for everybody"]))
    response = base(further=(public,)).retrieve("rain", principal=Principal(user="alice", groups=["managers"]))
    assert texts(response) == {"rain for everybody"}
    assert response.status_code == 206
    assert [part.what for part in response.missing] == ["docs"]


@fault(AREA, "working out what a principal may see fails", "the whole request fails, with no part of an answer")
def evaluation_fails() -> None:

    class Broken(Permissions):
        def filter_for(self, principal: Principal | None) -> FilterNode:
            raise TimeoutError("the directory of groups did not answer")

    public = KnowledgeSource("public", retriever=MemoryRetriever(["rain for everybody"]))
    kb = base(source={"permissions": Broken(tenant="tenant")}, further=(public,))
    failing(TimeoutError, "the directory of groups", lambda: kb.retrieve("rain", principal=ALICE))


@fault(AREA, "a planner that was taken over writes filters", "its OR, != and foreign tenants only narrow")
def hostile_plan() -> None:
    fields = {"tenant": FilterField("string"), "title": FilterField("string")}
    for written in (
        "tenant eq 'beta'",
        "tenant eq 'beta' or tenant eq 'acme'",
        "tenant ne 'x' or acl_public eq false",
        "not (tenant eq 'x')",
        "tenant eq 'acme') or (tenant eq 'beta'",
    ):
        step = {"id": "q1", "query": "rain in beta", "sources": ["docs"], "depends_on": [], "filter": written}
        llm = ScriptedLLM(json.dumps({"sub_queries": [step]}))
        kb = base(source={"filterable": fields}, llm=llm, effort="low", output_mode="extractiveData")
        assert shown(kb) == {"rain in acme"}
        assert "rain in beta" not in str(llm.calls)


@fault(AREA, "a caller's filter is an OR over everything", "it only narrows, at searches, counts and facets")
def caller_or() -> None:
    everything = "tenant eq 'beta' or tenant eq 'acme'"
    kb = base()
    assert shown(kb, filterAddOn=everything) == {"rain in acme"}
    assert kb.count("docs", filters=everything, principal=ALICE) == 1
    assert kb.facets("docs", "title", filters=everything, principal=MANAGER)["title"][0].count == 1
    trees = [{"key": "tenant", "value": tenant} for tenant in ("acme", "beta")]
    assert shown(kb, filters={"logic": "or", "filters": trees}) == {"rain in acme"}
    refused(InvalidRequestError, lambda: shown(kb, filterAddOn=f"{everything} or acl_public eq false"), "acl_public")


@fault(AREA, "'ne' on a key that documents lack", "rows without the key are nobody's find, though Chroma gives them")
def not_equal() -> None:
    index = _in_chroma()
    index.insert_nodes([TextNode(id_="bare", text="rain for whom?", metadata={"title": "bare"})])
    kb = base(source={"index": index})
    for written in ("owner ne 'x'", "tenant ne 'x'", "not (nothing eq 1)"):
        assert shown(kb, filterAddOn=written) <= {"rain in acme"}
    assert shown(base(source={"index": index, "permissions": None}), filterAddOn="owner ne 'x'") == set()


@fault(AREA, "filters that are empty", "refused with the field's name, never taken for 'everything'")
def empty_filters() -> None:
    kb = base()
    trees: list[dict[str, Any]] = [{"filters": []}, {"filters": [{"filters": []}]}, {}]
    for tree in trees:
        refused(InvalidRequestError, functools.partial(shown, kb, filters=tree), "filters")
    refused(InvalidRequestError, functools.partial(shown, kb, filterAddOn=" "), "filter")
    refused(InvalidRequestError, lambda: base(source={"filters": MetadataFilters(filters=[])}), "filters")


@fault(AREA, "filter keys and values that are operators of the store", "refused: {'$ne': ''}, '$or', '_node_content'")
def operators() -> None:
    kb = base()
    for tree in (
        {"key": "tenant", "value": {"$ne": ""}},
        {"key": "$or", "value": "x"},
        {"key": "$and", "operator": "in", "value": ["x"]},
        {"key": "_node_content", "value": "x"},
        {"key": "_node_type", "operator": "ne", "value": "x"},
    ):
        refused(InvalidRequestError, functools.partial(shown, kb, filters=tree), "filters")
    refused(ConfigurationError, lambda: Permissions(tenant="_node_content"), "stores write themselves")


@fault(AREA, "a store ignores the filter", "every node is checked again; what was hidden is not even counted")
def careless_store() -> None:
    all_of_it = MemoryRetriever(everybodys(), similarity_top_k=10)
    kb = base(source={"index": None, "retriever_factory": lambda _: all_of_it})
    response = kb.retrieve("rain", principal=ALICE)
    assert texts(response) == {"rain in acme"}
    (record,) = searches(response)
    assert (record.candidates, record.dropped_by_filter) == (1, 0)


@fault(
    AREA, "a principal has 300 groups", "Chroma's limits are kept, all metadata are read; nothing is widened or lost"
)
def many_groups() -> None:
    groups = [*(f"group {number}" for number in range(300)), "managers"]
    many = Principal(tenant="acme", user="carol", groups=groups)
    assert shown(base(), many) == OWN
    assert base().count("docs", principal=many) == len(OWN)


@fault(AREA, "a wire request brings a principal", "refused: only Python code can give one")
def wire_principal() -> None:
    kb = base()
    wire = {"messages": [{"role": "user", "content": "rain"}], "principal": {"tenant": "acme", "user": "alice"}}
    refused(InvalidRequestError, lambda: kb.retrieve(wire), "principal can't be sent in a request")
    text = json.dumps({**wire, "principal": "alice"})
    refused(InvalidRequestError, lambda: RetrievalRequest.parse(text), "principal can't be sent in a request")
    assert "principal" not in kb.request("rain", principal=ALICE).to_json()


@fault(AREA, "a bound retriever is asked for somebody else", "denied: two principals are none, whichever is wider")
def two_principals() -> None:
    kb = base(principal=ALICE)
    refused(DeniedError, lambda: kb.retrieve("rain", principal=BOB), "two principals")
    refused(DeniedError, lambda: kb.documents("docs", principal=BOB), "two principals")
    with acting_as(BOB):
        refused(DeniedError, lambda: kb.as_query_engine().query("rain"), "two principals")
    assert shown(kb, None) == {"rain in acme"}


class _Brings(BaseNodePostprocessor):
    """Brings everybody's nodes, among them one that claims to be of a public source."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        mark = {"agentic_kb": {"source": "public", "activity": 0}}
        forged = TextNode(id_="forged", text="rain forged in beta", metadata=mark)
        swap = {"text": "rain stolen in beta", "metadata": everybodys()[2].metadata}
        stolen = [node.node.model_copy(update=swap) for node in nodes]
        return [*nodes, *(NodeWithScore(node=node, score=9.0) for node in (forged, *stolen, *everybodys()))]


@fault(AREA, "a postprocessor brings others' nodes", "they are checked too: what doesn't pass is dropped")
def foreign_postprocessor() -> None:
    public = KnowledgeSource("public", retriever=MemoryRetriever(["rain for everybody"]))
    kb = base(further=(public,), principal=ALICE)
    for made in (
        kb.as_retriever(node_postprocessors=[_Brings()]).retrieve("rain"),
        kb.as_query_engine(node_postprocessors=[_Brings()]).query("rain").source_nodes,
    ):
        assert {node.node.get_content() for node in made} == {"rain in acme", "rain for everybody"}


@fault(AREA, "a source is narrowed by doc_ids", "Chroma ignores them: denied, with the remedy")
def ignored_ids() -> None:
    kb = base(source={"retriever_kwargs": {"doc_ids": ["d1"]}, "hybrid": False, "permissions": None})
    refused(DeniedError, lambda: kb.retrieve("rain"), "Chroma ignores doc_ids")


@fault(AREA, "somebody speaks in another's conversation", "denied, and what was said in it is not shown")
def eavesdropping() -> None:
    chat = base().as_chat_engine()
    with acting_as(ALICE):
        assert "rain in acme" in str(chat.chat("rain"))
    with acting_as(BOB):
        refused(DeniedError, lambda: chat.chat("What was said?"), "another principal's")
        refused(DeniedError, lambda: chat.chat_history, "another principal's")
        refused(DeniedError, chat.reset, "another principal's")
    with acting_as(ALICE):
        chat.reset()
    with acting_as(BOB):
        assert "acme" not in str(chat.chat("rain"))


@fault(AREA, "a knowledge base stands inside of another", "the inner one is asked for the same principal")
def nested() -> None:
    inner: BaseRetriever = AgenticRetriever(
        [KnowledgeSource("docs", index=chroma(), permissions=FIELDS)], effort="minimal"
    )
    kb = KnowledgeBase([KnowledgeSource("inner", retriever=inner)], effort="minimal")
    assert texts(kb.retrieve("rain", principal=ALICE)) == {"rain in acme"}
    refused(DeniedError, lambda: kb.retrieve("rain"), "no principal was given")


# -- keys -------------------------------------------------------------------------------------------------------------

NOWHERE = "its key is in no log, activity, error, event or page"
RAIN = ["Rain in Paris.", "Rain in Oslo."]


def docs(name: str = "docs", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever(RAIN, **fields))


def watched(witness: Witness, *sources: KnowledgeSource, **fields: Any) -> KnowledgeBase:
    manager = CallbackManager([witness.handler, ActivityCallbackHandler()])
    quick = RetryPolicy(first_wait=0.01, max_wait=0.02)
    options = RetrieverOptions(retries=quick)
    settings = {"effort": "minimal", "options": options, "callback_manager": manager, **fields}
    return KnowledgeBase(list(sources) or [docs()], **settings)


@fault("secrets", "a model's address with a password in it answers nobody", NOWHERE)
def nobody_there() -> None:
    witness = Witness()
    with Echo() as gone:
        headers = {"x-chroma-token": KEYS["header"]}  # the real client, with keys wherever it takes some
        llm = OpenAI(model="gpt-4o-mini", api_key=KEYS["key"], api_base=gone.address, default_headers=headers)
    with witness.watching():
        response = watched(witness, llm=llm).retrieve("rain")
        witness.shown(response)
        assert response.status_code == 206
    assert "connection" in witness.text
    assert_clean(witness.text)


@fault("secrets", "the embedding model's server repeats its headers while documents are stored", NOWHERE)
def refused_while_storing() -> None:
    with tempfile.TemporaryDirectory() as folder, Echo() as server:
        Path(folder, "docs").mkdir()
        Path(folder, "docs", "rain.md").write_text(RAIN[0], encoding="utf-8")
        embed_model = OpenAIEmbedding(api_base=server.address)

        def work() -> None:
            with KnowledgeStore.open(Path(folder, "kb"), embed_model=embed_model, create=True) as store:
                ingest([Path(folder, "docs")], store)

        told = told_of(failing(AgenticKBError, "", work))
        assert server.told
    assert_clean(told)


@fault("secrets", "somebody pastes a key into a question", "the log of the activity shows it as ***")
def pasted_key() -> None:
    witness = Witness()
    with witness.watching():
        kb = watched(witness, callback_manager=CallbackManager([ActivityCallbackHandler()]))
        kb.retrieve(f"rain with api_key={KEYS['query']} and {KEYS['key']}?")
        witness.told = [line for line in witness.told if not line.startswith("event ")]  # they hold what was asked
    assert "rain with api_key=***" in witness.text
    assert_clean(witness.text)
