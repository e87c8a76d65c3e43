"""The page at ``/``: a conversation with a knowledge base, in plain files without a build step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from llama_index_agentic_kb.errors import NotFoundError
from llama_index_agentic_kb.server.context import ServerContext

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
