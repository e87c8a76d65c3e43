"""A passage by its id, for readers who follow a citation: only what the caller's principal may see."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.vector_stores import SimpleVectorStore
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import NotFoundError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import FilterNode, Principal, Reference, RetrievalResponse, all_of, matches
from llama_index_agentic_kb.server.context import ServerContext
from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource
from llama_index_agentic_kb.sources.index import refusal
from llama_index_agentic_kb.sources.stores import kind_of


def passage_link(address: str, base: str, reference: Reference) -> str:
    """Return the URL of the server's page that shows a reference's passage.

    Args:
        address: The server's own URL, with a slash at the end.
        base: The name of the knowledge base.
        reference: The reference.
    """
    parts = {"kb": base, "source": reference.knowledge_source_name, "passage": reference.node_id}
    return f"{address}#" + "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items())


def link_passages(response: RetrievalResponse, address: str, base: str) -> None:
    """Set the citation URL of each reference."""
    for reference in response.references:
        reference.citation_url = passage_link(address, base, reference)


def passage_routes(context: ServerContext) -> APIRouter:
    """Return the route of passages."""
    router = APIRouter(tags=["knowledge bases"])

    @router.get("/knowledgebases/{name}/passage", operation_id="get_passage")
    async def get_passage(name: str, source: str, id: str, request: Request) -> Response:  # noqa: A002 (a parameter)
        """Return a passage with its document's fields."""
        caller = await context.access.caller(request)
        principal = await context.access.principal(request, caller)
        base = (await context.service.base(name)).base
        return JSONResponse(await find_passage(base, source, id, principal))

    return router


async def find_passage(base: KnowledgeBase, source: str, node_id: str, principal: Principal | None) -> dict[str, Any]:
    """Return a passage as data.

    Raises:
        DeniedError: The source needs a principal, and there is none.
        NotFoundError: There is no such passage, or the principal may not see it; the error does not reveal which.
    """
    found = base.sources.get(source)
    if found is not None and node_id.isprintable():
        principal = base.retriever.resolve_principal(principal)
        visible = all_of(found.effective_filter(found.permitted(principal)), base.retriever.filters)
        node = await Call(sync=lambda: _node(found, node_id, visible), what=f"passage of source {source!r}")
        if node is not None and (visible is None or matches(visible, node.metadata)):
            data = found.source_data(NodeWithScore(node=node)).to_dict()
            return {"knowledgeSourceName": source, "nodeId": node_id, **data}
    raise NotFoundError("passage: there is none of this id in this source")


def _node(source: KnowledgeSource, node_id: str, visible: FilterNode | None) -> BaseNode | None:
    """Return the node of a source's index with an ID, if its row in a store passes a filter."""
    if isinstance(source, ShardedSource):
        return next(filter(None, (_node(shard, node_id, visible) for shard in source.shards)), None)
    index = source.index
    if index is None or source.is_limited_to_ids or refusal(index, visible) is not None:
        return None
    if not isinstance(index, VectorStoreIndex):
        return _own_node(index, getattr(index.index_struct, "nodes", ()), node_id)
    store, kind = index.vector_store, kind_of(index.vector_store)
    if isinstance(store, SimpleVectorStore):
        found = _own_node(index, store.data.embedding_dict, node_id)
    elif not store.stores_text:
        found = _own_node(index, index.index_struct.nodes_dict.values(), node_id)
    else:
        try:
            found = next((one for one in kind.with_ids(store, [node_id]) if one.node_id == node_id), None)
        except NotImplementedError:  # the store finds nodes by their vectors only
            return None
    passes = found is not None and (visible is None or node_id in kind.passing(store, [found], visible))
    return found if passes else None


def _own_node(index: BaseIndex[Any], own: Collection[str], node_id: str) -> BaseNode | None:
    """Return a node from the document store, which other indexes may share, if it is the index's own."""
    return index.docstore.get_node(node_id, raise_error=False) if node_id in own else None
