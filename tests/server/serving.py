"""A real server on loopback: uvicorn in a thread, Chroma sources, a loopback language model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import chromadb
import httpx
import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.server.access import Limits
from llama_index_agentic_kb.server.app import create_app
from llama_index_agentic_kb.server.catalog import ApiKey, hash_of
from llama_index_agentic_kb.server.service import Index, KnowledgeService
from llama_index_agentic_kb.testing import ChatRequest, HashEmbedding

ADMIN, QUERY = "admin-key-of-the-tests-0123456789", "query-key-of-the-tests-0123456789"
_MADE = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = {hash_of(ADMIN): ApiKey("1", "admin", "admin", _MADE), hash_of(QUERY): ApiKey("2", "query", "query", _MADE)}
ROCKETS = {
    "saturn": "The Saturn V rocket was 110.6 m tall and launched Apollo 11.",
    "titan": "The Titan IVB rocket launched Cassini-Huygens and was 56 m tall.",
    "soyuz": "The Soyuz rocket carries three people and is 46 m tall.",
}
MOONS = {
    "moon": "Titan is a moon of Saturn and is 5,150 km wide.",
    "europa": "Europa is a moon of Jupiter with an ocean.",
}
PERMITTED = Permissions(tenant="tenant", users="acl_user_")
_numbers = count()


def chroma_index(texts: Mapping[str, str], metadata: Mapping[str, Any] = {}) -> VectorStoreIndex:
    """An index in a Chroma collection of its own."""
    collection = chromadb.EphemeralClient().create_collection(f"served-{next(_numbers)}", embedding_function=None)
    storage = StorageContext.from_defaults(vector_store=ChromaVectorStore(chroma_collection=collection))
    nodes = [
        TextNode(id_=key, text=text, metadata={"title": key.title(), "kind": "text", **metadata})
        for key, text in texts.items()
    ]
    return VectorStoreIndex(nodes, storage_context=storage, embed_model=HashEmbedding())


def indexes() -> dict[str, Index]:
    """Two open indexes, and one that only a tenant's user may search."""
    secret = PERMITTED.stamp({}, tenant="acme", users=["alice"])
    secrets = chroma_index({"plan": "The secret plan is to launch the rocket on Monday."}, secret)
    return {
        "rockets": partial(KnowledgeSource, index=chroma_index(ROCKETS)),
        "moons": partial(KnowledgeSource, index=chroma_index(MOONS)),
        "secrets": partial(KnowledgeSource, index=secrets, permissions=PERMITTED),
    }


def reply(request: ChatRequest) -> str:
    """A plan of two searches, and an answer that cites the first passage."""
    if "You plan searches" in request.text:
        return json.dumps(
            {"sub_queries": [{"id": "q1", "query": "height of the Saturn V"}, {"id": "q2", "query": "moon"}]}
        )
    return "The Saturn V was 110.6 m tall [ref_id:0]."


def source_of(name: str, index: str = "", **fields: Any) -> dict[str, Any]:
    """A definition of a source over an index, by default that of its name."""
    return {"name": name, "kind": "searchIndex", "searchIndexParameters": {"searchIndexName": index or name}, **fields}


DEFINITIONS: dict[str, dict[str, Any]] = {
    **{
        f"/knowledgesources/{name}": source_of(name, description=f"about {name}")
        for name in ("rockets", "moons", "secrets")
    },
    "/knowledgebases/space": {
        "name": "space",
        "knowledgeSources": [{"name": "rockets"}, {"name": "moons"}],
        "models": ["gpt-4o-mini"],
    },
    "/knowledgebases/private": {
        "name": "private",
        "knowledgeSources": [{"name": "secrets"}],
        "outputMode": "extractiveData",
    },
}
"""The tests' definitions, by their paths."""


class Served:
    """A server that listens on a port of its own until the ``with`` block ends."""

    def __init__(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        """Start, and return the URL."""
        self._thread.start()
        while not self._server.started:  # uvicorn announces it in no other way
            assert self._thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def served(
    service: KnowledgeService, *, verifier: Any = None, cors_origins: Sequence[str] = (), **limits: Any
) -> Iterator[str]:
    """Serve a service with the tests' keys; ``limits`` are those of ``Limits``."""
    options: dict[str, Any] = {"verifier": verifier, "cors_origins": cors_origins}
    with Served(create_app(service, keys=KEYS, limits=Limits(**limits), **options)) as url:
        yield url


def client_of(url: str, key: str | None = QUERY, **headers: str) -> httpx.Client:
    """A client with a key, whatever proxies the environment names."""
    sent = headers if key is None else {"api-key": key, **headers}
    return httpx.Client(base_url=url, headers=sent, trust_env=False, timeout=120)


@contextmanager
def served_client(
    service: KnowledgeService, key: str | None = QUERY, headers: Mapping[str, str] = {}, **options: Any
) -> Iterator[httpx.Client]:
    """Serve a service (see ``served``), and yield a client of it."""
    with served(service, **options) as url, client_of(url, key, **headers) as client:
        yield client


def space_service(database: Path | str, llm: Any, **options: Any) -> KnowledgeService:
    """A service over the tests' indexes and one model."""
    return KnowledgeService(database, indexes=indexes(), models={"gpt-4o-mini": llm}, **options)


def define(client: httpx.Client, definitions: Mapping[str, Any] = DEFINITIONS) -> None:
    """Store definitions by a client."""
    for path, body in definitions.items():
        client.put(path, json=body, headers={"api-key": ADMIN}).raise_for_status()


ISSUER, AUDIENCE = "https://issuer.test", "agentic-kb"


class Issuer:
    """Signs tokens; ``jwks`` is the file with its public key."""

    def __init__(self, folder: Path, kid: str = "k1") -> None:
        self._key, self._kid, self.jwks = ec.generate_private_key(ec.SECP256R1()), kid, folder / "jwks.json"
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key()))
        self.jwks.write_text(json.dumps({"keys": [{**public, "kid": kid, "alg": "ES256", "use": "sig"}]}))

    def token(self, **claims: Any) -> str:
        """A token that holds for a minute, with changed or further claims; None leaves one out."""
        whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "app", **claims}
        kept = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(kept, self._key, algorithm="ES256", headers={"kid": self._kid})
