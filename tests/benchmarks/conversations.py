"""How well a question is found in its conversation without a model: ``python -m tests.benchmarks.conversations SET``.

SET is a folder in BEIR form whose questions have ``history``, ``rewrite`` and ``source`` (MTRAG's human conversations).
Besides the questions in their own conversations, each that stands alone (a first question, or a rewrite) is asked after
other conversations, of the same source and of others: a change of topic. Conversations are halved by source; constants
were chosen on the first half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.retrievers import QueryFusionRetriever, VectorIndexRetriever
from rich.table import Table

from llama_index_agentic_kb import default_embed_model
from llama_index_agentic_kb.chat_engine import MEMORY_TOKENS
from llama_index_agentic_kb.evaluation import CorpusIndex, Dataset, EvaluationQuery, read_dataset
from llama_index_agentic_kb.evaluation.runner import METRICS
from llama_index_agentic_kb.planning import contraction
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import Message, RetrievalRequest, ScopeState
from llama_index_agentic_kb.search.prototypes import ScopeIndex, unit_rows
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.vectors import scope_indexes
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.benchmarks.measure import show

Turns = tuple[tuple[str, str], ...]
DEPTH: Final = 10
SHIFTS: Final = 2
"""Number of other conversations of each kind after which a question is asked."""
ARTICLE_THRESHOLD: Final = 0.6
SCOPE: Final = ("kept", "evidence", "contraction")  # of a result


@dataclass(frozen=True)
class Case:
    """A question after a conversation."""

    kind: str
    text: str
    rewrite: str
    history: Turns
    query: EvaluationQuery
    half: int

    @property
    def slices(self) -> list[str]:
        """The names of the slices that the case counts for."""
        if self.kind != "continuing":
            return [self.kind]
        alone = self.text.strip().casefold() == self.rewrite.strip().casefold()
        return [self.kind, f"of {self.query.fields['source']}", "as the rewrite" if alone else "not as the rewrite"]


def conversation_of(query: EvaluationQuery) -> str:
    """Return the id of a question's conversation."""
    return query.id.split("<")[0]


def cases_of(dataset: Dataset) -> list[Case]:
    """Return the questions in their own conversations, and those that stand alone after others."""
    drawn, halves, seen = random.Random(0), dict[str, int](), defaultdict[str, int](int)
    for query in sorted(dataset.queries, key=conversation_of):
        if conversation_of(query) not in halves:
            source = str(query.fields["source"])
            halves[conversation_of(query)] = seen[source] % 2
            seen[source] += 1
    made = []
    for query in dataset.queries:
        half, rewrite = halves[conversation_of(query)], str(query.fields.get("rewrite") or query.text)
        made.append(Case("continuing" if query.history else "first", query.text, rewrite, query.history, query, half))
        alone = rewrite if query.history else query.text
        if query.history and not query.fields.get("rewrite"):
            continue
        others = [
            one
            for one in dataset.queries
            if len(one.history) > 2 and conversation_of(one) != conversation_of(query)
            if halves[conversation_of(one)] == half
        ]
        for kind, same in (("shift, same source", True), ("shift, other source", False)):
            pool = [one for one in others if (one.fields["source"] == query.fields["source"]) is same]
            for other in drawn.sample(pool, min(SHIFTS, len(pool))):
                made.append(Case(kind, alone, alone, other.history, query, half))
    return made


@dataclass
class Result:
    """What one system found for one case."""

    documents: list[str]
    kept: float | None = None
    """Share of the documents in the scope; None without a scope."""
    evidence: float | None = None
    """Share of the evidence in the scope."""
    milliseconds: float = 0.0
    contraction: float | None = None


class Bench:
    """The systems, over one corpus; scopes are recorded as they are made."""

    def __init__(self, corpus: CorpusIndex, dataset: Dataset) -> None:
        self._dataset, self._model = dataset, corpus.embed_model
        sources = corpus.sources()
        self.indexes: Mapping[str, ScopeIndex] = scope_indexes(sources)
        make: dict[str, Any] = {"effort": "minimal", "similarity_top_k": DEPTH}
        self._plain = AgenticRetriever(sources, **make)
        self._scoped = AgenticRetriever(sources, **make, options=RetrieverOptions(scope=self.indexes))
        self._rewrite = ""
        llm = ScriptedLLM(lambda _: self._rewrite)
        planned = ScriptedLLM(lambda _: json.dumps({"sub_queries": [{"id": "q1", "query": self._rewrite}]}))
        self._planned = AgenticRetriever(sources, llm=planned, effort="low", similarity_top_k=DEPTH)
        dense = [VectorIndexRetriever(index, similarity_top_k=DEPTH) for index in map(_index_of, sources)]
        fused = QueryFusionRetriever(dense, llm=llm, num_queries=1, similarity_top_k=DEPTH, use_async=False)  # type: ignore[arg-type]
        engine = RetrieverQueryEngine(fused, response_synthesizer=CompactAndRefine(llm=llm))
        self._condensing = partial(CondenseQuestionChatEngine.from_defaults, engine, llm=llm)
        self._scopes: list[contraction.Contraction] = []
        self._states: dict[Turns, ScopeState] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the scopes."""
        original = contraction.contract

        def recorded(indexes: Mapping[str, ScopeIndex], views: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
            del asked  # the documents found; the whole scope is measured
            every = {name: index.documents for name, index in indexes.items()}
            self._scopes.append(original(indexes, views, every, *args, **kwargs))
            return self._scopes[-1]

        contraction.contract = recorded
        try:
            yield
        finally:
            contraction.contract = original

    async def _ask(
        self, retriever: AgenticRetriever, turns: Turns, state: ScopeState | None = None
    ) -> tuple[Result, Any]:
        messages = [Message.model_validate({"role": role, "content": text}) for role, text in turns]
        self._scopes.clear()
        started = time.perf_counter()
        found = await retriever.retrieval(RetrievalRequest(messages=messages, scope_state=state))
        elapsed = 1000 * (time.perf_counter() - started)
        documents = [node.node.ref_doc_id or node.node.node_id for node in found.nodes]
        return Result(list(dict.fromkeys(documents)), milliseconds=elapsed), found

    async def plain(self, turns: Turns) -> Result:
        """Search a conversation without a scope."""
        return (await self._ask(self._plain, turns))[0]

    async def condensed(self, case: Case) -> Result:
        """Ask LlamaIndex's CondenseQuestionChatEngine over dense retrievers; the gold rewrite is the model's reply."""
        self._rewrite = case.rewrite
        history = [ChatMessage(role=role, content=text) for role, text in case.history]
        memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=MEMORY_TOKENS)
        answer = await self._condensing(memory=memory).achat(case.text)
        return Result(list(dict.fromkeys(node.node.ref_doc_id or node.node.node_id for node in answer.source_nodes)))

    async def planned(self, case: Case) -> Result:
        """Search the conversation at low effort; the gold rewrite is the plan's only sub-query."""
        self._rewrite = case.rewrite
        return (await self._ask(self._planned, (*case.history, ("user", case.text))))[0]

    async def article(self, case: Case) -> Result:
        """Search the last message within documents whose vectors are near to the text of the whole conversation."""
        found = await self.plain((("user", case.text),))
        if not case.history:
            return found
        text = " [SEP] ".join(text for _, text in (*case.history, ("user", case.text)))
        vector = unit_rows(np.asarray([await self._model.aget_query_embedding(text)], np.float32))
        every = [
            (document, score)
            for index in self.indexes.values()
            for document, score in zip(index.documents, index.similarities(vector)[:, 0], strict=True)
        ]
        near = {document for document, score in every if score >= ARTICLE_THRESHOLD} or {one for one, _ in every}
        found.documents = [one for one in found.documents if one in near]
        found.kept, found.evidence = len(near) / len(every), self._share(case, near)
        return found

    async def scoped(self, case: Case) -> Result:
        """Search the conversation with a scope, and the state that its earlier turns have left."""
        state = await self._state(case.history)
        made, found = await self._ask(self._scoped, (*case.history, ("user", case.text)), state)
        if self._scopes and self._scopes[-1].reason is None:
            scope = self._scopes[-1]
            made.kept = scope.size / scope.total
            made.evidence = self._share(case, {document for _, document in scope.documents})
        if found.scope_state is not None and found.scope_state.last is not None:
            made.contraction = found.scope_state.last.scope_ms
        return made

    async def _state(self, history: Turns) -> ScopeState:
        """Return the state after a conversation, turn by turn."""
        if not history:
            return ScopeState()
        if history not in self._states:
            at = max(at for at, (role, _) in enumerate(history) if role == "user")
            _, found = await self._ask(self._scoped, history[: at + 1], await self._state(history[:at]))
            self._states[history] = found.scope_state
        return self._states[history]

    def _share(self, case: Case, documents: set[str]) -> float:
        gold = self._dataset.relevant[case.query.id]
        return len(gold.keys() & documents) / len(gold)


def _index_of(source: KnowledgeSource) -> VectorStoreIndex:
    index = source.index
    assert isinstance(index, VectorStoreIndex)
    return index


def scores_of(results: Sequence[tuple[Result, Mapping[str, float]]]) -> list[str]:
    """Return R@5, R@10, nDCG@10, documents and evidence kept in percent, and milliseconds: means, medians of times."""
    metrics = [("R", 5), ("R", 10), ("nDCG", 10)]
    values = [100 * fmean(METRICS[name](one.documents, gold, k) for one, gold in results) for name, k in metrics]
    known = [[value for one, _ in results if (value := getattr(one, name)) is not None] for name in SCOPE]
    shares = [f"{100 * fmean(part):.1f}" if part else "" for part in known[:2]]
    spent = f"{median(known[2]):.1f}" if known[2] else ""
    return [
        *(f"{value:.1f}" for value in values),
        *shares,
        f"{median(one.milliseconds for one, _ in results):.1f}",
        spent,
    ]


async def run(bench: Bench, cases: Sequence[Case], dataset: Dataset) -> dict[tuple[str, str], list[str]]:
    """Ask every system every case, and return their scores by slice (with the number of its cases) and system."""

    def previous(case: Case) -> str:
        """Return the last two messages of the user as one text."""
        return " ".join([*[text for role, text in case.history if role == "user"][-1:], case.text])

    systems: dict[str, Callable[[Case], Awaitable[Result]]] = {
        "last message": lambda case: bench.plain((("user", case.text),)),
        "previous + last": lambda case: bench.plain((("user", previous(case)),)),
        "gold rewrite": lambda case: bench.plain((("user", case.rewrite),)),  # a perfect CondenseQuestion prompt's
        "CondenseQuestion, gold reply": bench.condensed,
        "the article's": bench.article,
        "ours": lambda case: bench.plain((*case.history, ("user", case.text))),
        "ours, scope": bench.scoped,
        "ours, low, gold plan": bench.planned,
    }
    made: dict[tuple[str, str], list[tuple[Result, Mapping[str, float]]]] = defaultdict(list)
    with bench.recording():
        for case in cases:
            for name, ask in systems.items():
                result = await ask(case)
                for part in case.slices:
                    made[part, name].append((result, dataset.relevant[case.query.id]))
    return {(f"{part} ({len(found)})", name): scores_of(found) for (part, name), found in made.items()}


def main() -> None:
    """Read the arguments, run, and print one table for each half."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.conversations", description=__doc__)
    parser.add_argument("set", type=Path, help="a folder in BEIR form with histories and rewrites")
    parser.add_argument("--vectors", type=Path, default=Path("build/vectors"), help="where the vectors are kept")
    parser.add_argument("--half", type=int, choices=(0, 1), action="append", help="only this half")
    arguments = parser.parse_args()
    dataset = read_dataset(arguments.set)
    every = cases_of(dataset)
    columns = ["R@5", "R@10", "nDCG@10", "documents kept", "evidence kept", "ms", "scope ms"]
    with closing(CorpusIndex(dataset, default_embed_model(), arguments.vectors, source_field="source")) as corpus:
        bench = Bench(corpus, dataset)
        for half in arguments.half or (0, 1):
            scores = asyncio.run(run(bench, [case for case in every if case.half == half], dataset))
            table = Table("slice", "system", *columns, title=f"half {half + 1} of {arguments.set.name}")
            for part, names in groupby(sorted(scores, key=itemgetter(0)), key=itemgetter(0)):
                for key in names:
                    table.add_row(part, key[1], *scores[key])
                table.add_section()
            show(table)


if __name__ == "__main__":
    main()
