"""Known attacks on libraries like this one, by the numbers under which they were made known."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import chromadb
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ChatResponseAsyncGen
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import ImageNode, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, RetrievalRequest, parse_odata, to_odata
from llama_index_agentic_kb.search.embedding import EmbeddingCache
from llama_index_agentic_kb.sources.search import MAX_FOLLOWED
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from tests.sources.test_source_search import Tree

MINE: Final = "It rains on tower alpha."
THEIRS: Final = "It rains on tower beta: CANARY-7731"
CANARY: Final = "CANARY-7731"
_names = itertools.count()
_client = chromadb.EphemeralClient()


class Store:
    """A real collection of Chroma with a document of each of two tenants."""

    def __init__(self) -> None:
        self.collection = _client.create_collection(f"known-attacks-{next(_names)}")
        self.vectors = ChromaVectorStore(chroma_collection=self.collection)
        context = StorageContext.from_defaults(vector_store=self.vectors)
        nodes = [
            TextNode(id_="mine", text=MINE, metadata={"tenant": "A", "year": 1}),
            TextNode(id_="theirs", text=THEIRS, metadata={"tenant": "B", "year": 1}),
        ]
        self.index = VectorStoreIndex(nodes, storage_context=context, embed_model=HashEmbedding())

    def forge(self, node_id: str, flat: dict[str, Any], content: Any, kind: str = "IndexNode") -> None:
        """Write a row as somebody who may write metadata, and no more, would."""
        forged = {
            **flat,
            "_node_type": kind,
            "_node_content": content if isinstance(content, str) else json.dumps(content),
        }
        vector: Any = HashEmbedding().get_text_embedding("rains on tower")
        self.collection.add(ids=[node_id], embeddings=[vector], documents=["It rains."], metadatas=[forged])

    def ask(self, **fields: Any) -> str:
        """Ask under a mandatory filter, and give all that comes of it as text; an error counts as nothing."""
        source = KnowledgeSource("docs", index=self.index, filters=Condition(key="tenant", value="A"), hybrid=False)
        kb = KnowledgeBase([source], effort="minimal")
        try:
            return kb.retrieve("Where does it rain on a tower?", **fields).to_json()
        except AgenticKBError as error:
            return str(error)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    _client.delete_collection(made.collection.name)


def narrowed(**params: Any) -> dict[str, Any]:
    return {"knowledge_source_params": [{"knowledgeSourceName": "docs", **params}]}


KEYS = (
    "tenant') OR ('1'='1", "tenant' OR '1'='1' --", 'tenant" OR "1"="1', "$or", "$and", "$ne", "#document",
    "_node_content",
    "_node_type", "tenant]] eq 'B' or [tenant", "tenant eq 'B' or tenant", "json_extract(metadata,'$.tenant')", "a.b",
    "\x00",
    "\ud800", "tenant;DROP TABLE embeddings",
)  # fmt: skip
VALUES = (
    "A' OR '1'='1", "A') or tenant ne ('", "' or tenant eq 'B", "A\x00", "\ud800", "%", "*", "$ne", "{'$ne': ''}",
    "A'; DELETE FROM embedding_metadata; --", "B' /*", "\\' or 1 eq 1 or '",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_filters_key_is_no_code(store: Store, key: str) -> None:
    """CVE-2025-8709, CVE-2025-67644 (langgraph): what is asked as a key never widens the mandatory filter."""
    for operator, value in (("ne", "nothing"), ("eq", "B"), ("exists", True)):
        condition = {"key": key, "operator": operator, "value": value}
        assert CANARY not in store.ask(**narrowed(filters=condition))
        either = {"logic": "or", "filters": [condition, {"key": "tenant", "value": "B"}]}
        assert CANARY not in store.ask(**narrowed(filters=either))
    text = f"[{key.replace(']', ']]')}] ne 'x' or tenant eq 'B'"
    assert CANARY not in store.ask(**narrowed(filterAddOn=text))
    assert store.collection.count() == 2
    assert MINE in store.ask()


@pytest.mark.parametrize("value", VALUES)
def test_a_filters_value_is_no_code(store: Store, value: str) -> None:
    """CVE-2026-22730 (Spring AI) and CVE-2025-1793 (llama-index): a value stays a value, in every form of a filter."""
    for operator, given in (("eq", value), ("ne", value), ("in", [value, "B"])):
        assert CANARY not in store.ask(**narrowed(filters={"key": "tenant", "operator": operator, "value": given}))
    quoted = value.replace("'", "''")
    for text in (f"tenant eq '{quoted}'", f"tenant ne '{value}'", f"search.in(tenant, '{quoted},B')"):
        assert CANARY not in store.ask(**narrowed(filterAddOn=text))
    condition = Condition(key="tenant", value=value)
    assert parse_odata(to_odata(condition)) == condition
    mandatory = KnowledgeSource("docs", index=store.index, filters=condition, hybrid=False)
    assert "It rains" not in KnowledgeBase([mandatory], effort="minimal").retrieve("Does it rain?").to_json()
    assert store.collection.count() == 2


@pytest.mark.parametrize(
    ("flat", "content"),
    [
        # A filter matches the flat metadata; the node inside says it is another tenant's.
        ({"tenant": "A"}, {"id_": "f", "text": CANARY, "index_id": "x", "metadata": {"tenant": "B"}}),
        # What an index node stands for is in no store.
        (
            {"tenant": "A"},
            {
                "id_": "f", "text": "It rains.", "index_id": "x", "metadata": {"tenant": "A"},
                "obj": {"class_name": "TextNode", "__class_name__": "TextNode", "id_": "g", "text": CANARY},
            },
        ),
        ({"tenant": "B"}, {"id_": "f", "text": CANARY, "metadata": {"tenant": "A"}}),
        ({"tenant": "A"}, {"class_name": "Document", "__import__": "os", "text": None, "metadata": "B"}),
        ({"tenant": "A"}, "no JSON"),
        ({"tenant": "A"}, "[" * 50_000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["IndexNode", "TextNode", "ImageNode", "os.system"])
def test_a_stored_node_can_not_be_forged(store: Store, flat: dict[str, Any], content: Any, kind: str) -> None:
    """CVE-2025-68664's class, with LlamaIndex's reserved metadata: who writes these gets nothing past a filter."""
    store.forge("forged", flat, content, kind)
    assert CANARY not in store.ask()
    source = KnowledgeSource("docs", index=store.index, permissions=Permissions(tenant="tenant"), hybrid=False)
    kb = KnowledgeBase([source], effort="minimal")
    try:
        told = kb.retrieve("Where does it rain on a tower?", principal=Principal(tenant="A")).to_json()
    except AgenticKBError as error:
        told = str(error)
    assert CANARY not in told


TEMPLATES = (
    "{x.__class__}", "{context_str}", "{query_str}", "{0.__class__.__mro__}", "{", "}}", "{{7*7}}", "{% for x in y %}",
    "%s %(a)s", "${HOME}", "{question.__init__.__globals__}", "{ref_id!r:>9999}", "$query_str", "<% 7*7 %>",
)  # fmt: skip


@pytest.mark.parametrize("mode", ["answerSynthesis", "extractiveData"])
def test_text_is_no_template(mode: str) -> None:
    """CVE-2025-65106 (attributes by a template), CVE-2024-41950 (Jinja): signs of templates stay text everywhere."""
    hostile = " ".join(TEMPLATES)
    plan = json.dumps({"sub_queries": [{"id": "q1", "query": f"Rain {hostile}", "sources": ["docs"]}]})

    def reply(messages: list[ChatMessage]) -> str:
        return plan if "sub_queries" in str(messages) else f"It rains {hostile} [ref_id:0]."

    llm = ScriptedLLM(reply)
    node = TextNode(text=f"Rain {hostile}", metadata={"title": f"T {hostile}", "note": hostile, "url": "{x.__class__}"})
    source = KnowledgeSource("docs", f"Rain {hostile}", retriever=MemoryRetriever([node]))
    kb = KnowledgeBase([source], llm=llm, output_mode=mode)
    for asked in (f"Rain {hostile}?", *TEMPLATES[:3]):
        response = kb.retrieve(f"Does it rain {asked}", include_activity=True)
        told = response.to_json()
        prompts = "\n".join(str(message.content) for call in llm.calls for message in call)
        assert response.references
        for text in (told, prompts):
            assert "<class" not in text
            assert "49" not in text.replace(node.node_id, "").split()
        assert "{x.__class__}" in prompts
        assert "{context_str}" in prompts


def test_a_serialised_object_stays_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-68664 (langchain): ``{"lc": 1, "type": "secret"}`` builds nothing, nor reads the environment."""
    monkeypatch.setenv("SOME_SECRET", CANARY)
    forged = {"lc": 1, "type": "secret", "id": ["SOME_SECRET"], "kwargs": {}, "class_name": "OpenAI"}
    node = TextNode(text=f"Rain {json.dumps(forged)}", metadata={"title": json.dumps(forged), "more": forged})
    llm = ScriptedLLM(
        json.dumps({"sub_queries": [{"id": forged, "query": "Rain", "sources": ["docs"], "more": forged}]})
    )
    kb = KnowledgeBase([KnowledgeSource("docs", "Rain.", retriever=MemoryRetriever([node]))], llm=llm)
    response = kb.retrieve("Rain?", **narrowed(lc=1, type="secret", id=["SOME_SECRET"]))
    prompts = "\n".join(str(message.content) for call in llm.calls for message in call)
    assert CANARY not in response.to_json() + prompts
    assert RetrievalRequest.parse({"messages": [{"role": "user", "content": "x"}], **narrowed()}).question == "x"
    with pytest.raises(InvalidRequestError, match="lc"):
        RetrievalRequest.parse({"messages": [{"role": "user", "content": "x"}], **forged})


class Endless(ScriptedLLM):
    """A model whose streams neither say anything nor end."""

    _begun: list[int] = PrivateAttr(default_factory=list)

    async def astream_chat(self, messages: Any, **_: Any) -> ChatResponseAsyncGen:
        self._begun.append(len(messages))

        async def say() -> ChatResponseAsyncGen:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                await asyncio.sleep(0.01)
                yield ChatResponse(message=ChatMessage(role="assistant", content=""), delta="")

        return say()


@pytest.mark.parametrize("effort", ["minimal", "low"])
async def test_a_stream_without_a_token_or_an_end_is_given_up(effort: str) -> None:
    """CVE-2024-12704 (llama-index): a stream that never says anything and never ends is left at the deadline."""
    llm = Endless(replies="late")
    source = KnowledgeSource("docs", "Rain.", retriever=MemoryRetriever(["It rains in Paris."]))
    kb = KnowledgeBase([source], llm=llm, effort=effort, max_runtime_in_seconds=0.8)
    began = time.monotonic()
    response: Any = await kb.as_query_engine(streaming=True).aquery("Does it rain in Paris?")
    assert "It rains in Paris." in "".join([delta async for delta in response.async_response_gen()])
    assert time.monotonic() - began < 20
    assert response.account.status_code == 206
    assert len(llm._begun) == (1 if effort == "minimal" else 2)


_OPENED: list[str] = []
_listening = False


def _listen(event: str, arguments: Any) -> None:
    if _listening and event in ("open", "socket.connect", "subprocess.Popen"):
        _OPENED.append(f"{event} {arguments!r}")


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """What is opened meanwhile; an audit hook can't be taken away, so that it is told when to listen."""
    global _listening  # noqa: PLW0603
    if not hasattr(sys, "_known_attacks_hook"):
        sys.addaudithook(_listen)
        sys._known_attacks_hook = True  # type: ignore[attr-defined]
    _OPENED.clear()
    _listening = True
    yield _OPENED
    _listening = False


def test_a_nodes_files_are_never_opened(tmp_path: Path, opened: list[str]) -> None:
    """CVE-2025-6209 (encode_image), CVE-2025-2828 (SSRF): paths and addresses that a node names are not followed."""
    secret = tmp_path / "secret.png"
    secret.write_text(CANARY)
    opened.clear()
    nodes = [
        ImageNode(text="Rain one", image_path="/etc/passwd"),
        ImageNode(text="Rain two", image_path=str(secret)),
        ImageNode(text="Rain three", image_url=secret.as_uri()),
        ImageNode(text="Rain four", image_url="http://127.0.0.1:9/latest/meta-data"),
        TextNode(
            text="Rain five", metadata={"file_path": str(secret), "url": "http://127.0.0.1:9/x", "image": str(secret)}
        ),
    ]
    llm = ScriptedLLM("Rain [ref_id:0].")
    source = KnowledgeSource("docs", "Rain.", retriever=MemoryRetriever(nodes, similarity_top_k=9))
    for mode in ("answerSynthesis", "extractiveData"):
        response = KnowledgeBase([source], llm=llm, output_mode=mode, effort="minimal").retrieve("Rain?")
        assert response.references
        assert CANARY not in response.to_json()
    prompts = "\n".join(str(message.content) for call in llm.calls for message in call)
    assert CANARY not in prompts
    assert "root:" not in prompts
    touched = ("passwd", "secret.png", "meta-data", "socket.connect ", "127.0.0.1")
    assert [one for one in opened if any(name in one for name in touched)] == []


def test_cache_keys_never_collide() -> None:
    """CVE-2026-35030 (litellm, a cut token as key): who differs in anything finds nothing of another's."""
    cache = EmbeddingCache()
    long = "a" * 5_000
    owners = [
        None,
        *(Principal(tenant=a, user=b) for a, b in (("a", "b"), ("ab", None), (None, "ab"), ('a", "b', "c"))),
    ]
    owners += [Principal(tenant="a", user="b", groups=[one]) for one in ("g", "h", 'g", "h', "g,h")]
    owners += [Principal(tenant="a", user="b", groups=["g", "h"]), Principal(tenant="A", user="b")]
    keys = [
        (owner, identity, text)
        for owner in owners
        for identity, text in (("m", "x"), ("mx", ""), ("", "mx"), ("m", f"{long}1"), ("m", f"{long}2"), ("1:m", "x"))
    ]
    for number, (owner, identity, text) in enumerate(keys):
        cache.put(identity, text, [float(number)], owner)
    found = [cache.get(identity, text, owner) for owner, identity, text in keys]
    assert found == [[float(number)] for number in range(len(keys))]


def test_index_nodes_are_not_followed_without_end() -> None:
    """CVE-2025-1752's class: a node that stands for itself, and ten on each of six levels (LlamaIndex: 48 s)."""
    loop = Tree([])
    loop.children = [loop, loop]
    grown: list[Tree] = [leaf := Tree([TextNode(text="rain at the bottom")])]
    for _ in range(5):
        grown.append(Tree([grown[-1]] * 10))
    wide: list[Tree] = []

    def grow(levels: int) -> Any:
        wide.append(Tree([grow(levels - 1) for _ in range(10)] if levels else []))
        return wide[-1]

    grow(3)
    for root in (loop, grown[-1], wide[-1]):
        source = KnowledgeSource("docs", retriever=root)
        well = KnowledgeSource("well", retriever=MemoryRetriever(["It rains in Oslo."]))
        response = KnowledgeBase([source, well], effort="minimal").retrieve("Where does it rain?")
        assert "It rains in Oslo." in response.to_json()
    assert loop.calls <= 2
    assert leaf.calls <= 1
    assert sum(tree.calls for tree in wide) <= MAX_FOLLOWED + 1
