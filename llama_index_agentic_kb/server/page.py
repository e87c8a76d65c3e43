"""The page at ``/``: a conversation with a knowledge base, in plain files without a build step; passages by their ids.

A reader who follows a citation gets a passage that the caller's principal may see, and no other.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Request
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.vector_stores import SimpleVectorStore
from starlette.responses import FileResponse, JSONResponse, Response

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import NotFoundError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import FilterNode, Principal, RetrievalResponse, all_of, matches
from llama_index_agentic_kb.server.http import ServerContext
from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource
from llama_index_agentic_kb.sources.index import refusal
from llama_index_agentic_kb.sources.stores import kind_of

FILES: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}


def page_routes(context: ServerContext) -> APIRouter:
    """Return the routes of the page, its files, and the knowledge bases that it lists."""
    router = APIRouter(tags=["page"], include_in_schema=False)
    names = {path.name for path in FILES.iterdir()}

    @router.get("/")
    async def page() -> Response:
        """Return the page."""
        return _file("index.html")

    @router.get("/page/bases")
    async def bases(request: Request) -> Response:
        """Return the names, descriptions and sources of the knowledge bases."""
        await context.access.caller(request)
        found = await context.service.list_all("knowledgeBase")
        defined = {one["name"]: one for one in await context.service.list_all("knowledgeSource")}
        shown = [
            {
                "name": base["name"],
                "description": base.get("description"),
                "sources": [
                    {
                        "name": one["name"],
                        **{key: defined.get(one["name"], {}).get(key) for key in ("kind", "description")},
                    }
                    for one in base["knowledgeSources"]
                ],
            }
            for base in found
        ]
        return JSONResponse({"value": shown})

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        """Return a file of the page."""
        if name not in names:
            raise NotFoundError(f"page: there is no file {name[:128]!r}")
        return _file(name)

    return router


def _file(name: str) -> Response:
    return FileResponse(FILES / name, headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


# -- passages ----------------------------------------------------------------------------------------------------------


def link_passages(response: RetrievalResponse, address: str, base: str) -> None:
    """Set the citation URL of each reference: the page of the server, at ``address`` with a slash, that shows it."""
    for reference in response.references:
        parts = {"kb": base, "source": reference.knowledge_source_name, "passage": reference.node_id}
        named = "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items())
        reference.citation_url = f"{address}#{named}"


def passage_routes(context: ServerContext) -> APIRouter:
    """Return the route of passages."""
    router = APIRouter(tags=["knowledge bases"])

    @router.get("/knowledgebases/{name}/passage", operation_id="get_passage")
    async def get_passage(name: str, source: str, id: str, request: Request) -> Response:  # noqa: A002 (a parameter)
        """Return a passage with its document's fields."""
        principal, _ = await context.access.asker(request)
        base = (await context.service.base(name)).base
        return JSONResponse(await find_passage(base, source, id, principal))

    return router


async def find_passage(base: KnowledgeBase, source: str, node_id: str, principal: Principal | None) -> dict[str, Any]:
    """Return a passage as data; raise ``NotFoundError`` if there is none, or none that the principal may see."""
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
