"""A passage by its id, for readers who follow a citation: only what the caller's principal may see."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from llama_index.core.schema import BaseNode, NodeWithScore
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import NotFoundError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import Principal, Reference, RetrievalResponse, all_of, matches
from llama_index_agentic_kb.server.context import ServerContext
from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource


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
    if found is not None:
        principal = base.retriever.resolve_principal(principal)
        visible = all_of(found.effective_filter(found.permitted(principal)), base.retriever.filters)
        node = await Call(sync=lambda: _node(found, node_id), what=f"passage of source {source!r}")
        if node is not None and (visible is None or matches(visible, node.metadata)):
            data = found.source_data(NodeWithScore(node=node)).to_dict()
            return {"knowledgeSourceName": source, "nodeId": node_id, **data}
    raise NotFoundError("passage: there is none of this id in this source")


def _node(source: KnowledgeSource, node_id: str) -> BaseNode | None:
    if isinstance(source, ShardedSource):
        return next(filter(None, (_node(shard, node_id) for shard in source.shards)), None)
    if source.index is None:
        return None
    found: BaseNode | None = source.index.docstore.get_node(node_id, raise_error=False)
    store = getattr(source.index, "vector_store", None)
    if found is None and store is not None:
        try:
            found = next(iter(store.get_nodes(node_ids=[node_id])), None)
        except NotImplementedError:  # the store finds nodes by their vectors only
            return None
    return found
