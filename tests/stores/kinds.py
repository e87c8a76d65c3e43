"""Real vector stores of LlamaIndex's adapters, each empty and on this machine."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import chromadb
import numpy as np
import psycopg
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb.store.database import Chunk, StoredDocument
from llama_index_agentic_kb.store.postgres import PostgresStore, PostgresVectors
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


@cache
def _server() -> PostgresServer:
    """Return one server for all databases of this process."""
    server = PostgresServer()
    atexit.register(server.__exit__)
    return server


# Each of the following opens a kind of store, to be closed with the stack: it returns what makes an empty one of it.


def _simple(_opened: ExitStack) -> MakeStore:
    return lambda dimensions: SimpleVectorStore()


def _chroma(opened: ExitStack, *, on_server: bool = False) -> MakeStore:
    client: Any = chromadb.EphemeralClient()
    if on_server:
        client = chromadb.HttpClient(port=opened.enter_context(ChromaServer()).port)
    return lambda dimensions: ChromaVectorStore(chroma_collection=client.create_collection(_name()))


def _postgres(opened: ExitStack) -> MakeStore:
    from llama_index.vector_stores.postgres import PGVectorStore  # noqa: PLC0415 (seconds)

    where: dict[str, Any] = {"host": "127.0.0.1", "port": str(_server().port), "database": "postgres"}
    where |= {"user": "postgres", "password": "none", "hybrid_search": True}

    def close(store: PGVectorStore) -> None:
        if store.client is not None:
            store.client.dispose()
            asyncio.run(store.close())

    def make(dimensions: int, **settings: Any) -> BasePydanticVectorStore:
        store = PGVectorStore.from_params(**where, table_name=_name(), embed_dim=dimensions, **settings)
        opened.callback(close, store)
        return store

    return make


def _sparse(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
    """Return each text's words as a sparse vector."""
    words = [sorted({zlib.crc32(word.encode()) for word in text.lower().split()}) for text in texts]
    return words, [[1.0] * len(own) for own in words]


def _qdrant(opened: ExitStack) -> MakeStore:
    from llama_index.vector_stores.qdrant import QdrantVectorStore  # noqa: PLC0415 (seconds)
    from qdrant_client import QdrantClient  # noqa: PLC0415

    client = QdrantClient(location=":memory:")
    opened.callback(client.close)
    settings: dict[str, Any] = {"client": client, "index_doc_id": False, "enable_hybrid": True}
    settings |= {"sparse_doc_fn": _sparse, "sparse_query_fn": _sparse}
    return lambda dimensions: QdrantVectorStore(collection_name=_name(), **settings)


def _lance(opened: ExitStack) -> MakeStore:
    from llama_index.vector_stores.lancedb import LanceDBVectorStore  # noqa: PLC0415 (seconds)

    folder = opened.enter_context(tempfile.TemporaryDirectory())

    def make(dimensions: int) -> BasePydanticVectorStore:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the adapter's own
            return LanceDBVectorStore(uri=folder, table_name=_name())

    return make


def _duckdb(opened: ExitStack) -> MakeStore:
    import duckdb  # noqa: PLC0415 (seconds)
    from llama_index.vector_stores.duckdb import DuckDBVectorStore  # noqa: PLC0415

    class Offline(DuckDBVectorStore):
        """Without the download of an extension which the adapter does not use."""

        @classmethod
        def _initialize_table(cls, conn: Any, table_name: str, embed_dim: int | None) -> None:
            columns = f"node_id VARCHAR PRIMARY KEY, text TEXT, embedding FLOAT[{embed_dim}], metadata_ JSON"
            conn.execute(f"CREATE TABLE IF NOT EXISTS {table_name} ({columns})")

    settings: dict[str, Any] = {"client": opened.enter_context(duckdb.connect())}
    return lambda dimensions: Offline(table_name=_name(), embed_dim=dimensions, **settings)


def _milvus(opened: ExitStack, *, with_words: bool = False) -> MakeStore:
    from llama_index.vector_stores.milvus import MilvusVectorStore  # noqa: PLC0415 (seconds)
    from llama_index.vector_stores.milvus.utils import BM25BuiltInFunction  # noqa: PLC0415

    uri = str(Path(opened.enter_context(tempfile.TemporaryDirectory()), "milvus.db"))
    settings: dict[str, Any] = {"similarity_metric": "COSINE", "use_async_client": False, "uri": uri}

    def make(dimensions: int) -> BasePydanticVectorStore:
        if with_words:
            settings.update(enable_sparse=True, sparse_embedding_function=BM25BuiltInFunction())
        store = MilvusVectorStore(collection_name=_name(), dim=dimensions, **settings)
        opened.callback(store.client.close)
        return store

    return make


def _elastic(opened: ExitStack, *, opensearch: bool = False) -> MakeStore:
    server = ElasticServer(opensearch=opensearch)
    opened.callback(server.close)
    make = opensearch_store if opensearch else elasticsearch_store
    return lambda dimensions: make(server.url, _name(), dimensions)


class _Ingested(PostgresVectors):
    """A source of a knowledge store in PostgreSQL, whose documents come as nodes."""

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        for path, own in groupby(nodes, key=lambda node: node.ref_doc_id or ""):
            document = StoredDocument(self._source, path, "/o", "/r", uuid.uuid4().hex, "settings")
            pieces = []
            for at, node in enumerate(own):
                metadata = {**node.metadata, "title": "", "document_id": f"{self._source}/{path}"}
                made = Chunk(node.node_id, at, node.get_content(), metadata, uuid.uuid4().hex, 0, 1)
                pieces.append((made, np.array(node.get_embedding(), np.float32)))
            self._store.put_document(document, pieces)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        self._store.delete_document(self._source, ref_doc_id)


def _ingested(opened: ExitStack) -> MakeStore:
    def make(dimensions: int) -> BasePydanticVectorStore:
        with psycopg.connect(_server().url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {(name := _name())}")
        url, model = f"{_server().url.rpartition('/')[0]}/{name}", HashEmbedding(dimensions=dimensions)
        store = opened.enter_context(PostgresStore.open(url, embed_model=model, create=True))
        store.put_source(name)
        return _Ingested.over(store, name)

    return make


KINDS: Final[dict[str, Callable[[ExitStack], MakeStore]]] = {
    "in memory": _simple,
    "Chroma": _chroma,
    "Chroma server": partial(_chroma, on_server=True),
    "PostgreSQL": _postgres,
    "Qdrant": _qdrant,
    "LanceDB": _lance,
    "DuckDB": _duckdb,
    "Milvus Lite": _milvus,
    "Elasticsearch": _elastic,
    "OpenSearch": partial(_elastic, opensearch=True),
    "agentic-kb": _ingested,
}


class Opened(ExitStack):
    """The kinds that were opened so far, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, MakeStore] = {}

    def make(self, kind: str, *, dimensions: int = DIMENSIONS, **settings: Any) -> BasePydanticVectorStore:
        """Return an empty store of a kind, or of Milvus with BM25; PostgreSQL takes further settings."""
        if kind not in self._open:
            open_kind = KINDS[kind] if kind in KINDS else partial(_milvus, with_words=True)
            self._open[kind] = open_kind(self)
        return self._open[kind](dimensions, **settings)

    def close_store(self, store: Any) -> None:
        """Remove one store that is not used again."""
        if type(store).__name__ == "PGVectorStore" and store.client is not None:
            with store.client.begin() as connection:
                store._table_class.__table__.drop(connection)
            asyncio.run(store.close())
        elif type(store).__name__ == "QdrantVectorStore":
            store.client.delete_collection(store.collection_name)


PAGE: Final = Path(__file__).parents[2] / "docs" / "stores.md"


def read_table() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the documentation's table: an operator, and what each kind can do with it."""
    lines = PAGE.read_text().partition("| filter |")[2].partition("\n\n")[0].splitlines()
    kinds, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    for operator, *said in rows:
        yield operator, dict(zip(kinds, said, strict=True))
