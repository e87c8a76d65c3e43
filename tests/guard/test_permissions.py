from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import chromadb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import (
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.tools import QueryEngineTool
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import (
    AgenticQueryEngine,
    AgenticRetriever,
    ConfigurationError,
    DeniedError,
    FilterField,
    InvalidRequestError,
    KnowledgeBase,
    KnowledgeSource,
    Permissions,
    Principal,
    RetrievalResponse,
    RetrieverOptions,
    acting_as,
)
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.guard.permissions import current_principal
from llama_index_agentic_kb.schema import SourceActivity, matches
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM

FIELDS: Final = Permissions(tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public")
ALICE: Final = Principal(tenant="acme", user="alice")
MANAGER: Final = Principal(tenant="acme", user="bob", groups=["managers"])
BETA: Final = Principal(tenant="beta", user="alice", groups=["managers"])
DOCUMENTS: Final[dict[str, dict[str, Any]]] = {
    "rain for acme's managers": {"tenant": "acme", "groups": ["managers"]},
    "rain for alice of acme": {"tenant": "acme", "owner": "alice"},
    "rain shared with bob of acme": {"tenant": "acme", "users": ["bob"]},
    "rain for all of acme": {"tenant": "acme", "public": True},
    "rain for nobody of acme": {"tenant": "acme"},
    "rain for all of beta": {"tenant": "beta", "public": True},
}
SEEN: Final = {
    ALICE: {"rain for alice of acme", "rain for all of acme"},
    MANAGER: {"rain for acme's managers", "rain shared with bob of acme", "rain for all of acme"},
    BETA: {"rain for all of beta"},
}


def nodes() -> list[TextNode]:
    return [
        TextNode(
            id_=f"n{number}", text=text, metadata=FIELDS.stamp({"title": text, "acl_group_managers": True}, **access)
        )
        for number, (text, access) in enumerate(DOCUMENTS.items())
    ]


def memory_source(**fields: Any) -> KnowledgeSource:
    return KnowledgeSource("docs", index=VectorStoreIndex(nodes(), embed_model=HashEmbedding()), **fields)


@contextmanager
def in_chroma() -> Iterator[VectorStoreIndex]:
    client = chromadb.EphemeralClient()
    store = ChromaVectorStore(chroma_collection=client.create_collection("permissions"))
    context = StorageContext.from_defaults(vector_store=store)
    yield VectorStoreIndex(nodes(), storage_context=context, embed_model=HashEmbedding())
    client.delete_collection("permissions")


@pytest.fixture(params=["chroma", "chroma dense", "memory", "memory dense"])
def index_source(request: pytest.FixtureRequest) -> Iterator[KnowledgeSource]:
    """A source over each kind of store, with and without a lexical side."""
    hybrid = None if " " not in request.param else False
    if request.param.startswith("memory"):
        yield memory_source(permissions=FIELDS, hybrid=hybrid)
    else:
        with in_chroma() as index:
            yield KnowledgeSource("docs", index=index, permissions=FIELDS, hybrid=hybrid)


def texts(response: RetrievalResponse) -> set[str]:
    return {extract.content for extract in response.extracts}


def test_each_sees_their_own(index_source: KnowledgeSource) -> None:
    """Dense and lexical search, counts, facets and lists show a principal what is theirs, and nothing else."""
    kb = KnowledgeBase([index_source], effort="minimal")
    for principal, expected in SEEN.items():
        response = kb.retrieve("rain", principal=principal)
        assert texts(response) == expected
        assert kb.count("docs", principal=principal) == len(expected)
        assert {one.metadata["title"] for one in kb.documents("docs", principal=principal)} == expected
        (buckets,) = kb.facets("docs", "title", principal=principal).values()
        assert {bucket.value for bucket in buckets} == expected
        assert {group.value for group in kb.group_by("docs", "title", principal=principal)} == expected


HIDDEN = ["owner eq 'bob'", "owner gt 'm'", "acl_public eq true", "not (acl_group_managers eq true or title eq 'x')"]


@pytest.mark.parametrize("filters", HIDDEN)
def test_whom_a_document_is_shared_with_can_not_be_found_out(index_source: KnowledgeSource, filters: str) -> None:
    """No caller may filter on it, in a search, a count or a list; a planner's fields may not declare it."""
    kb = KnowledgeBase([index_source], effort="minimal")
    params = [{"knowledgeSourceName": "docs", "filterAddOn": filters}]
    with pytest.raises(InvalidRequestError, match="says whom documents are shared with"):
        kb.retrieve("rain", principal=ALICE, knowledge_source_params=params)
    given: Any = {"filters": filters, "principal": ALICE}
    for ask in (kb.count, kb.documents, lambda name, **given: kb.facets(name, "title", **given)):
        with pytest.raises(InvalidRequestError, match="says whom documents are shared with"):
            ask("docs", **given)
    assert kb.facets("docs", "acl_group_managers", principal=ALICE) == {"acl_group_managers": []}
    with pytest.raises(ConfigurationError, match="says whom documents are shared with"):
        memory_source(permissions=FIELDS, filterable={"acl_group_hr": FilterField("boolean")})


def shared(node: TextNode) -> TextNode:
    """A chunk of a document: its relationships hold the document's metadata too."""
    made = FIELDS.protect(node, tenant="acme", owner="alice", users=["ceo"], groups=["hr", "managers"], public=True)
    source = RelatedNodeInfo(node_id="doc", metadata=dict(made.metadata))
    return made.model_copy(update={"relationships": {NodeRelationship.SOURCE: source}})


async def test_readers_never_see_whom_else_a_document_is_shared_with() -> None:
    """Not in nodes, prompts, responses or metadata, whoever asks: our engines, LlamaIndex's own, tools."""
    index = VectorStoreIndex([shared(TextNode(text="rain", metadata={"title": "t"}))], embed_model=HashEmbedding())
    kb = KnowledgeBase([KnowledgeSource("docs", index=index, permissions=FIELDS)], effort="minimal")
    llm, retriever = ScriptedLLM("Rain [ref_id:0]."), kb.as_retriever(principal=ALICE)
    own = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=ResponseMode.REFINE)
    chat = ContextChatEngine.from_defaults(retriever, llm=llm, memory=ChatMemoryBuffer.from_defaults(llm=llm))
    engine = AgenticQueryEngine(retriever, llm=llm)
    tool = QueryEngineTool.from_defaults(own)
    shown: list[object] = [
        [node.model_dump() for node in retriever.retrieve("rain")],
        [node.model_dump() for node in await retriever.aretrieve("rain")],
        [node.get_content(MetadataMode.ALL) for node in retriever.retrieve("rain")],
        kb.retrieve("rain", principal=ALICE).to_json(),  # its account has the filter: of what ALICE herself is
    ]
    for response in (own.query("rain"), engine.query("rain"), chat.chat("rain"), tool("rain").raw_output):
        shown += [[node.model_dump() for node in response.source_nodes], str(getattr(response, "metadata", ""))]
    found = str([*shown, *(message.content for call in llm.calls for message in call)])
    assert "rain" in found
    assert not [key for key in ("acl_group_", "ceo", "managers", "'owner'") if key in found]


def test_two_principals_are_none() -> None:
    """A request of one is refused in another's context, and so is a context inside of another's."""
    kb = KnowledgeBase([memory_source(permissions=FIELDS)], effort="minimal")
    bound = AgenticQueryEngine(kb.as_retriever(principal=ALICE))
    with pytest.raises(DeniedError, match="two principals"):
        run(bound.answer(kb.request("rain", principal=BETA)))
    with acting_as(ALICE):
        with pytest.raises(DeniedError, match="two principals"), acting_as(BETA):
            pass
        with pytest.raises(DeniedError, match="two principals"):
            kb.retrieve("rain", principal=BETA)
        with acting_as(ALICE):
            assert texts(kb.retrieve("rain", principal=current_principal())) == SEEN[ALICE]
    with pytest.raises(ConfigurationError, match="expected a Principal, got str"), acting_as("alice"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigurationError, match="principal: expected a Principal"):
        kb.as_retriever(principal="alice")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_stream_is_read_outside(way: str) -> None:
    """A stream that was begun inside of a context is its principal's to the end."""
    llm = ScriptedLLM("It rains [ref_id:0].")
    kb = KnowledgeBase([memory_source(permissions=FIELDS)], llm=llm, effort="minimal")
    engine = kb.as_query_engine("answerSynthesis", streaming=True)
    with acting_as(ALICE):
        response: Any = engine.query("rain") if way == "sync" else await engine.aquery("rain")
    tokens = response.response_gen if way == "sync" else [token async for token in response.async_response_gen()]
    assert "".join(tokens) == "It rains [ref_id:0]."
    assert {node.node.get_content() for node in response.source_nodes} == SEEN[ALICE]
    assert "beta" not in str(llm.calls)


@pytest.mark.parametrize(
    ("fields", "principal", "why"),
    [
        (FIELDS, None, "no principal was given"),
        (FIELDS, Principal(user="alice"), "the principal has no tenant"),
        (Permissions(groups="g_"), Principal(tenant="acme", user="x"), "none of what the documents' permissions"),
        (Permissions(owner="owner"), Principal(groups=["x"]), "none of what the documents' permissions"),
    ],
    ids=["nobody", "no tenant", "no groups", "no user"],
)
def test_who_lacks_what_is_asked_for_is_denied(fields: Permissions, principal: Principal | None, why: str) -> None:
    """Alone the source is a ``DeniedError``, not counted either; its model is not asked."""
    kb = KnowledgeBase([memory_source(permissions=fields)], llm=(llm := ScriptedLLM("{}")))
    for ask in (lambda: kb.retrieve("rain", principal=principal), lambda: kb.count("docs", principal=principal)):
        with pytest.raises(DeniedError, match=why):
            ask()
    assert llm.calls == []


def test_a_principal_may_be_required() -> None:
    """``require_principal`` denies the whole request, also where no source has permissions."""
    kb = KnowledgeBase([memory_source()], effort="minimal", options=RetrieverOptions(require_principal=True))
    for ask in (lambda: kb.retrieve("rain"), lambda: kb.as_retriever().retrieve("rain"), lambda: kb.count("docs")):
        with pytest.raises(DeniedError, match="no principal was given"):
            ask()
    assert len(texts(kb.retrieve("rain", principal=ALICE))) == len(DOCUMENTS)


def test_functions_that_ask_for_the_principal_can_be_sent() -> None:
    """To another process, by name; and a key that is no text is nobody's."""
    assert pickle.loads(pickle.dumps(current_principal)) is current_principal
    assert not FIELDS.declares(5)


def test_a_document_cannot_grant_itself() -> None:
    """Keys that a document brought of its own are removed before it is stamped; others stay."""
    brought = {"title": "t", "tenant": "beta", "acl_group_x": True, "acl_user_y": 1, "acl_public": True, "owner": "eve"}
    stamped = FIELDS.stamp(brought, tenant="acme", groups=["managers"])
    assert stamped == {"title": "t", "tenant": "acme", "acl_group_managers": True, "acl_public": False}
    assert brought["tenant"] == "beta"


NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@given(NAMES, NAMES)
def test_keys_are_injective_and_plain(one: str, other: str) -> None:
    """No group is taken for another, whatever its name; keys are names that OData and every store take."""
    fields = Permissions(groups="g_")
    (stamped,) = fields.stamp({}, groups=[one])
    assert stamped.isascii()
    assert stamped.isidentifier()
    assert matches(fields.filter_for(Principal(groups=[other])), fields.stamp({}, groups=[one])) is (one == other)


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ({}, "tenant: a document without a tenant would be seen by nobody"),
        ({"tenant": "acme", "groups": [""]}, "Principal.groups"),
        ({"tenant": "acme", "users": ["a\x00"]}, "Principal.user"),
        ({"tenant": "acme", "owner": " "}, "Principal.user"),
    ],
    ids=["no tenant", "empty group", "control", "blank owner"],
)
def test_stamps_that_cannot_be(access: dict[str, Any], message: str) -> None:
    """A stamp that would hide a document for ever, or names nobody can have, are refused."""
    with pytest.raises(ConfigurationError, match=message):
        FIELDS.stamp({}, **access)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "declare at least one field"),
        ({"tenant": "a b"}, "'a b' is no plain name"),
        ({"tenant": "$or"}, "is no plain name"),
        ({"groups": ""}, "is no plain name"),
        ({"tenant": 3}, "Permissions.tenant: 3 is no plain name"),
        ({"tenant": "_node_content"}, "is a key that stores write themselves"),
        ({"owner": "document_id"}, "is a key that stores write themselves"),
        ({"tenant": "x", "owner": "x"}, "must be different keys"),
        ({"owner": "acl", "users": "acl"}, "Permissions.owner: 'acl' begins with the prefix of users"),
        ({"groups": "acl_", "tenant": "acl_"}, "Permissions.tenant: 'acl_' begins with the prefix of groups"),
        ({"tenant": "acl_tenant", "groups": "acl_"}, "begins with the prefix of groups"),
        ({"users": "acl_", "groups": "acl_group_"}, "begins with the prefix of users"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_declarations_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    """Fields of which two could be one key, and names that no store takes, are refused."""
    with pytest.raises(ConfigurationError, match=message):
        Permissions(**fields)


def test_a_query_embedded_for_one_is_embedded_for_another() -> None:
    """The cache of query vectors has a part for each principal."""
    model = HashEmbedding()
    index = VectorStoreIndex(nodes(), embed_model=model)
    kb = KnowledgeBase([KnowledgeSource("docs", index=index, permissions=FIELDS, hybrid=False)], effort="minimal")
    for principal in (ALICE, ALICE, BETA, ALICE):
        kb.retrieve("whether it rains", principal=principal)
    assert [texts for kind, texts in model.calls if kind == "query"] == [["whether it rains"]] * 2


def test_what_is_hidden_is_not_counted(index_source: KnowledgeSource) -> None:
    """A search's record is the same however much there is that its principal may not see."""
    records = []
    for foreign in (0, 30):
        further = [
            TextNode(id_=f"f{n}", text=f"rain {n}", metadata=FIELDS.stamp({}, tenant="beta", groups=["x"]))
            for n in range(foreign)
        ]
        if further:
            index_source.index.insert_nodes(further)  # type: ignore[union-attr]
        response = KnowledgeBase([index_source], effort="minimal").retrieve("rain", principal=MANAGER)
        (record,) = (one for one in response.activity or [] if isinstance(one, SourceActivity))
        lanes = [(lane.kind, lane.count, lane.candidates, lane.note) for lane in record.lanes or []]
        records.append((record.count, record.candidates, record.dropped_by_filter, lanes))
    assert records[0] == records[1]


async def test_an_outer_source_may_have_the_permissions_of_the_inner_one() -> None:
    """Each document is checked by both, and a reader sees the permission fields of neither."""

    def inner(filters: Any) -> AgenticRetriever:
        return AgenticRetriever([memory_source(permissions=FIELDS)], effort="minimal", filters=filters)

    outer = KnowledgeSource("outer", retriever_factory=inner, permissions=FIELDS)
    kb = KnowledgeBase([outer], effort="minimal")
    for response in (kb.retrieve("rain", principal=MANAGER), await kb.aretrieve("rain", principal=MANAGER)):
        assert texts(response) == SEEN[MANAGER]
    seen = AgenticRetriever([outer], effort="minimal", principal=ALICE).retrieve("rain")
    assert {node.node.get_content() for node in seen} == SEEN[ALICE]
    assert not any(FIELDS.declares(key) for node in seen for key in node.metadata)


class Shouting(BaseNodePostprocessor):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        loud = [one.node.model_copy(update={"text": one.node.get_content().upper()}) for one in nodes]
        return [NodeWithScore(node=node, score=1.0) for node in loud]


def test_a_postprocessor_may_change_what_was_found() -> None:
    """A node of a source without permissions may come back with another text; it is still that source's."""
    public = KnowledgeSource("public", retriever=MemoryRetriever(["rain for everybody"]))
    kb = KnowledgeBase([memory_source(permissions=FIELDS), public], effort="minimal", principal=ALICE)
    shouted = kb.as_retriever(node_postprocessors=[Shouting()]).retrieve("rain")
    assert {one.node.get_content() for one in shouted} == {
        text.upper() for text in (*SEEN[ALICE], "rain for everybody")
    }


def test_a_node_can_be_protected() -> None:
    """It is stamped, and whom it is shared with is neither embedded, nor indexed, nor shown to a model."""
    node = TextNode(text="rain", metadata={"title": "t", "tenant": "eve"}, excluded_llm_metadata_keys=["title"])
    made = FIELDS.protect(node, tenant="acme", groups=["managers"])
    assert made.metadata == {"title": "t", "tenant": "acme", "acl_group_managers": True, "acl_public": False}
    assert made.get_content(MetadataMode.EMBED) == "title: t\n\nrain"
    assert made.get_content(MetadataMode.LLM) == "rain"
    assert node.metadata["tenant"] == "eve"


def test_a_conversation_goes_on_when_its_principals_groups_change() -> None:
    """What may be seen changes with them; whoever else speaks in it is denied, and so is nobody."""
    chat: Any = KnowledgeBase([memory_source(permissions=FIELDS)], effort="minimal").as_chat_engine()
    for groups, seen in (([], "rain for alice"), (["managers"], "managers")):
        with acting_as(Principal(tenant="acme", user="alice", groups=groups)):
            assert seen in str(chat.chat("rain"))
    with pytest.raises(DeniedError, match=r"no principal was given|another principal's"):
        chat.chat("What was said?")


def test_documents_that_are_not_named_are_dropped() -> None:
    """Whatever a store makes of ``doc_ids``."""
    named = TextNode(text="rain of d", relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d")})
    index = VectorStoreIndex([TextNode(text="rain of e"), named], embed_model=HashEmbedding())
    source = KnowledgeSource("docs", index=index, retriever_kwargs={"doc_ids": ["d"]}, hybrid=False)
    response = KnowledgeBase([source], effort="minimal", output_mode="extractiveData").retrieve("rain")
    assert [one.content for one in response.extracts] == ["rain of d"]
