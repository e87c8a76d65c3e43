"""Real vector stores of LlamaIndex's adapters, each empty and on this machine."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import chromadb
import numpy as np
import psycopg
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.database import Chunk, StoredDocument
from llama_index_agentic_kb.store.vectors import StoreVectorStore
from llama_index_agentic_kb.testing import HashEmbedding
from tests.chroma_server import ChromaServer
from tests.kills_sessions.postgres import PostgresServer
from tests.stores.elastic import ElasticServer, elasticsearch_store, opensearch_store

__all__ = ["DIMENSIONS", "KINDS", "PAGE", "Opened", "index_over", "read_table"]

DIMENSIONS: Final = 16

MakeStore = Callable[..., BasePydanticVectorStore]


def index_over(store: BasePydanticVectorStore) -> VectorStoreIndex:
    """Return an index over a store."""
    embed_model = HashEmbedding(dimensions=DIMENSIONS)
    if isinstance(store, SimpleVectorStore):
        context = StorageContext.from_defaults(vector_store=store)
        return VectorStoreIndex([], storage_context=context, embed_model=embed_model)
    return VectorStoreIndex.from_vector_store(store, embed_model=embed_model)


def _name() -> str:
    return f"t{uuid.uuid4().hex}"


@contextmanager
def _simple() -> Iterator[MakeStore]:
    yield lambda dimensions: SimpleVectorStore()


@contextmanager
def _chroma(client: Any) -> Iterator[MakeStore]:
    def make(dimensions: int) -> BasePydanticVectorStore:
        return ChromaVectorStore(chroma_collection=client.create_collection(_name()))

    yield make


@contextmanager
def _chroma_server() -> Iterator[MakeStore]:
    with ChromaServer() as server, _chroma(chromadb.HttpClient(port=server.port)) as make:
        yield make


@cache
def _server() -> PostgresServer:
    """Return one server for all databases of this process."""
    server = PostgresServer()
    atexit.register(server.__exit__)
    return server


@contextmanager
def _postgres() -> Iterator[MakeStore]:
    from llama_index.vector_stores.postgres import PGVectorStore  # noqa: PLC0415 (seconds)

    made: list[PGVectorStore] = []

    def make(dimensions: int, **settings: Any) -> BasePydanticVectorStore:
        where: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": str(_server().port),
            "user": "postgres",
            "password": "none",
        }
        store = PGVectorStore.from_params(
            **where, database="postgres", table_name=_name(), embed_dim=dimensions, hybrid_search=True, **settings
        )
        made.append(store)
        return store

    yield make
    for store in made:
        if store.client is not None:
            store.client.dispose()
            asyncio.run(store.close())


def _sparse(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
    """Return each text's words as a sparse vector."""
    words = [sorted({zlib.crc32(word.encode()) for word in text.lower().split()}) for text in texts]
    return words, [[1.0] * len(own) for own in words]


@contextmanager
def _qdrant() -> Iterator[MakeStore]:
    from llama_index.vector_stores.qdrant import QdrantVectorStore  # noqa: PLC0415 (seconds)
    from qdrant_client import QdrantClient  # noqa: PLC0415

    client = QdrantClient(location=":memory:")
    settings: dict[str, Any] = {"client": client, "index_doc_id": False, "enable_hybrid": True}
    settings |= {"sparse_doc_fn": _sparse, "sparse_query_fn": _sparse}
    yield lambda dimensions: QdrantVectorStore(collection_name=_name(), **settings)
    client.close()


@contextmanager
def _lance() -> Iterator[MakeStore]:
    from llama_index.vector_stores.lancedb import LanceDBVectorStore  # noqa: PLC0415 (seconds)

    def make(dimensions: int) -> BasePydanticVectorStore:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the adapter's own
            return LanceDBVectorStore(uri=folder, table_name=_name())

    with tempfile.TemporaryDirectory() as folder:
        yield make


@contextmanager
def _duckdb() -> Iterator[MakeStore]:
    import duckdb  # noqa: PLC0415 (seconds)
    from llama_index.vector_stores.duckdb import DuckDBVectorStore  # noqa: PLC0415

    class Offline(DuckDBVectorStore):
        """Without the download of an extension which the adapter does not use."""

        @classmethod
        def _initialize_table(cls, conn: Any, table_name: str, embed_dim: int | None) -> None:
            columns = f"node_id VARCHAR PRIMARY KEY, text TEXT, embedding FLOAT[{embed_dim}], metadata_ JSON"
            conn.execute(f"CREATE TABLE IF NOT EXISTS {table_name} ({columns})")

    connection = duckdb.connect()
    settings: dict[str, Any] = {"client": connection}
    yield lambda dimensions: Offline(table_name=_name(), embed_dim=dimensions, **settings)
    connection.close()


@contextmanager
def _milvus(*, with_words: bool = False) -> Iterator[MakeStore]:
    from llama_index.vector_stores.milvus import MilvusVectorStore  # noqa: PLC0415 (seconds)
    from llama_index.vector_stores.milvus.utils import BM25BuiltInFunction  # noqa: PLC0415

    made: list[MilvusVectorStore] = []

    def make(dimensions: int) -> BasePydanticVectorStore:
        settings: dict[str, Any] = {"similarity_metric": "COSINE", "use_async_client": False}
        if with_words:
            settings |= {"enable_sparse": True, "sparse_embedding_function": BM25BuiltInFunction()}
        uri = str(Path(folder, "milvus.db"))
        made.append(MilvusVectorStore(uri=uri, collection_name=_name(), dim=dimensions, **settings))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        yield make
        for store in made:
            store.client.close()


@contextmanager
def _elastic(*, opensearch: bool = False) -> Iterator[MakeStore]:
    server = ElasticServer(opensearch=opensearch)
    make = opensearch_store if opensearch else elasticsearch_store
    yield lambda dimensions: make(server.url, _name(), dimensions)
    server.close()


class _Ingested(StoreVectorStore):
    """A source of a knowledge store in PostgreSQL, whose documents come as nodes."""

    _store: KnowledgeStore = PrivateAttr()
    _source: str = PrivateAttr()

    def __init__(self, store: KnowledgeStore, source: str) -> None:
        store.documents.put_source(source)
        super().__init__(store.vectors(source), store.lexical(source), partial(store.metadata, source))
        self._store, self._source = store, source

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        for path, own in groupby(nodes, key=lambda node: node.ref_doc_id or ""):
            document = StoredDocument(self._source, path, "/o", "/r", uuid.uuid4().hex, "settings")
            pieces = []
            for at, node in enumerate(own):
                metadata = {**node.metadata, "title": "", "document_id": f"{self._source}/{path}"}
                made = Chunk(node.node_id, at, node.get_content(), metadata, uuid.uuid4().hex, 0, 1)
                pieces.append((made, np.array(node.get_embedding(), np.float32)))
            self._store.documents.put_document(document, pieces)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        self._store.documents.delete_document(self._source, ref_doc_id)


@contextmanager
def _ingested() -> Iterator[MakeStore]:
    with ExitStack() as opened:

        def make(dimensions: int) -> BasePydanticVectorStore:
            with psycopg.connect(_server().url, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {(name := _name())}")
            url, model = f"{_server().url.rpartition('/')[0]}/{name}", HashEmbedding(dimensions=dimensions)
            return _Ingested(opened.enter_context(KnowledgeStore.open(url, embed_model=model, create=True)), name)

        yield make


KINDS: Final[dict[str, Callable[[], AbstractContextManager[MakeStore]]]] = {
    "in memory": _simple,
    "Chroma": lambda: _chroma(chromadb.EphemeralClient()),
    "Chroma server": _chroma_server,
    "PostgreSQL": _postgres,
    "Qdrant": _qdrant,
    "LanceDB": _lance,
    "DuckDB": _duckdb,
    "Milvus Lite": _milvus,
    "Elasticsearch": _elastic,
    "OpenSearch": lambda: _elastic(opensearch=True),
    "agentic-kb": _ingested,
}
"""Opens a kind of store: a function that makes an empty one of it."""


class Opened:
    """The kinds that were opened so far, each once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[str, MakeStore] = {}

    def make(self, kind: str, *, dimensions: int = DIMENSIONS, **settings: Any) -> BasePydanticVectorStore:
        """Return an empty store of a kind, or of Milvus with BM25; PostgreSQL takes further settings."""
        if kind not in self._open:
            open_kind = KINDS[kind] if kind in KINDS else partial(_milvus, with_words=True)
            self._open[kind] = self._stack.enter_context(open_kind())
        return self._open[kind](dimensions, **settings)

    def close_store(self, store: Any) -> None:
        """Remove one store that is not used again."""
        if type(store).__name__ == "PGVectorStore" and store.client is not None:
            with store.client.begin() as connection:
                store._table_class.__table__.drop(connection)
            asyncio.run(store.close())
        elif type(store).__name__ == "QdrantVectorStore":
            store.client.delete_collection(store.collection_name)

    def close(self) -> None:
        """End what was opened."""
        self._stack.close()


PAGE: Final = Path(__file__).parents[2] / "docs" / "stores.md"


def read_table() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the documentation's table: an operator, and what each kind can do with it."""
    first = PAGE.read_text().partition("| filter |")
    lines = "".join(first[1:]).partition("\n\n")[0].splitlines()
    _, *kinds = _cells(lines[0])
    for line in lines[2:]:
        operator, *said = _cells(line)
        yield operator, dict(zip(kinds, said, strict=True))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
