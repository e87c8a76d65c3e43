"""Faults that bring keys to light: servers that repeat what they are sent, clients that quote addresses and headers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb import ActivityCallbackHandler, KnowledgeBase, KnowledgeSource, RetrieverOptions
from llama_index_agentic_kb.errors import AgenticKBError, RetrievalError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.faults.registry import fault
from tests.openai_embedding import OpenAIEmbedding
from tests.security.canaries import KEYS, Echo, Witness, assert_clean, told_of

NOWHERE = "its key is in no log, activity, error, event or page"
QUOTING = (
    f"GET http://me:{KEYS['password']}@db:8000/search?api_key={KEYS['query']} failed, "
    f"headers {{'x-chroma-token': '{KEYS['chroma']}', 'Authorization': 'Bearer {KEYS['key']}'}}"
)
TEXTS = ["Rain in Paris.", "Rain in Oslo."]


def docs(name: str = "docs", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever(TEXTS, **fields))


def model(address: str) -> OpenAI:
    """The real client, with keys wherever it takes some."""
    headers = {"x-chroma-token": KEYS["header"]}
    return OpenAI(model="gpt-4o-mini", api_key=KEYS["key"], api_base=address, default_headers=headers)


def base(witness: Witness, *sources: KnowledgeSource, **fields: Any) -> KnowledgeBase:
    manager = CallbackManager([witness.handler, ActivityCallbackHandler()])
    quick = RetryPolicy(first_wait=0.01, max_wait=0.02)
    options = RetrieverOptions(retries=quick)
    settings = {"effort": "minimal", "options": options, "callback_manager": manager, **fields}
    return KnowledgeBase(list(sources) or [docs()], **settings)


def failing(work: Callable[[], Any], kind: type[AgenticKBError]) -> str:
    """Do what must fail, and give all that the error says by itself."""
    try:
        work()
    except kind as error:
        return told_of(error)
    raise AssertionError(f"no {kind.__name__}")


@fault(
    "secrets", "a model's server fails (500) while planning and repeats the key", f"evidence is given, and {NOWHERE}"
)
def failed_planning() -> None:
    witness = Witness()
    with Echo(500) as server, witness.watching():
        kb = base(witness, llm=model(server.address), effort="low", output_mode="extractiveData")
        response = kb.retrieve("rain")
        witness.shown(response)
        assert server.told
    assert response.references
    assert "status 500" in witness.text
    assert_clean(witness.text)


@fault("secrets", "a model's address with a password in it answers nobody", NOWHERE)
def nobody_there() -> None:
    witness = Witness()
    with Echo() as gone:
        address = gone.address
    with witness.watching():
        response = base(witness, llm=model(address)).retrieve("rain")
        witness.shown(response)
        assert response.status_code == 206
    assert "connection" in witness.text
    assert_clean(witness.text)


@fault("secrets", "a source's client quotes address, headers and key in its error", f"the others answer, and {NOWHERE}")
def quoting_client() -> None:
    witness = Witness()
    with witness.watching():
        faulty = docs("bad", fault=ConnectionError(QUOTING))
        kb = base(witness, faulty, docs("well"), output_mode="extractiveData")
        response = asyncio.run(kb.aretrieve("rain"))
        for _ in range(6):  # until the circuit breaker tells of it, too
            witness.shown(kb.retrieve("rain"))
        witness.told += [repr(faulty.health), repr(faulty)]
        alone = base(witness, docs("bad", fault=RuntimeError(QUOTING)))
        witness.told.append(failing(lambda: alone.retrieve("rain"), RetrievalError))
    assert response.status_code == 206
    assert {one.knowledge_source_name for one in response.references} == {"well"}
    assert "circuit open" in witness.text
    assert_clean(witness.text)


@fault("secrets", "the embedding model's server repeats its headers while documents are stored", NOWHERE)
def refused_while_storing() -> None:
    with tempfile.TemporaryDirectory() as folder, Echo() as server:
        Path(folder, "docs").mkdir()
        Path(folder, "docs", "rain.md").write_text(TEXTS[0], encoding="utf-8")
        embed_model = OpenAIEmbedding(api_base=server.address)

        def work() -> None:
            with KnowledgeStore.open(Path(folder, "kb"), embed_model=embed_model, create=True) as store:
                ingest([Path(folder, "docs")], store)

        told = failing(work, AgenticKBError)
        assert server.told
    assert_clean(told)


class _Quoting(BaseCallbackHandler):
    def __init__(self) -> None:
        super().__init__([], [])

    def on_event_start(self, *_: Any, **__: Any) -> str:
        raise RuntimeError(QUOTING)

    def on_event_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(QUOTING)

    def start_trace(self, trace_id: str | None = None) -> None:
        pass

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        pass


@fault("secrets", "a callback handler fails and quotes its key", f"the query is answered; {NOWHERE}, tracebacks too")
def quoting_handler() -> None:
    witness = Witness()
    with witness.watching():
        response = base(witness, callback_manager=CallbackManager([_Quoting()])).retrieve("rain")
    assert response.references
    assert "Traceback" in witness.text
    assert_clean(witness.text)


@fault("secrets", "somebody pastes a key into a question", "the log of the activity shows it as ***")
def pasted_key() -> None:
    witness = Witness()
    with witness.watching():
        kb = base(witness, callback_manager=CallbackManager([ActivityCallbackHandler()]))
        kb.retrieve(f"rain with api_key={KEYS['query']} and {KEYS['key']}?")
        witness.told = [line for line in witness.told if not line.startswith("event ")]  # they hold what was asked
    assert "rain with api_key=***" in witness.text
    assert_clean(witness.text)
