"""Runs the user's node postprocessors with a deadline.

A postprocessor may be an access filter or remove personal data. One that misses the deadline is therefore never
skipped: its nodes are withheld, and the response reports that with status 206. An exception of a postprocessor ends the
request, as in LlamaIndex. A reranker only orders nodes and may be skipped, so it has its own argument, ``reranker=``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance
from llama_index_agentic_kb.llm import metered
from llama_index_agentic_kb.schema import MissingPart, Outcome
from llama_index_agentic_kb.sources.search import node_key
from llama_index_agentic_kb.sources.selection import SelectedSource, passing

_POOL: Final = WorkerPool("postprocessors")
"""Separate thread pool, so that postprocessors that hang block no other work."""


@dataclass(frozen=True, slots=True)
class PostprocessedNodes:
    """The nodes after postprocessing, with the numbers of removed and added ones; ``missing`` is what was withheld."""

    nodes: list[NodeWithScore]
    dropped: int = 0
    added: int = 0
    missing: MissingPart | None = None


async def postprocess(
    nodes: list[NodeWithScore],
    postprocessors: Sequence[BaseNodePostprocessor],
    bundle: QueryBundle,
    deadline: float | None,
    selected: Mapping[str, SelectedSource],
) -> PostprocessedNodes:
    """Apply postprocessors in order; each gets the output of the previous one.

    The postprocessor that runs at the deadline is abandoned, and its nodes are withheld. Nodes that a postprocessor
    creates must pass the filters of the ``selected`` sources.
    """
    if not postprocessors:
        return PostprocessedNodes(nodes)
    dropped = added = 0
    shown = _showing(nodes, selected)
    for postprocessor in postprocessors:
        before, name = len(nodes), type(postprocessor).__name__
        try:
            with metered(postprocessor, only_core=True) as counted:
                work = partial(counted.postprocess_nodes, nodes, query_bundle=bundle)
                made = await Call(sync=work, deadline=deadline, pool=_POOL, what=f"node postprocessor {name}")
        except DeadlineExceededError as late:
            reason = f"{late}; its nodes are withheld"
            missing = MissingPart(what=f"node postprocessor {name}", outcome=Outcome.TIMEOUT, reason=reason)
            return PostprocessedNodes([], dropped + before, added, missing)
        nodes = [allowed for node in made if (allowed := shown(node)) is not None]
        if len(nodes) < len(made):
            logger.warning("%d nodes that %s brought do not pass the sources' filters", len(made) - len(nodes), name)
        dropped += max(0, before - len(nodes))
        added += max(0, len(nodes) - before)
    return PostprocessedNodes(nodes, dropped, added)


def _showing(
    found: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]
) -> Callable[[NodeWithScore], NodeWithScore | None]:
    """Return a function that returns a node if it may be shown; ``found`` are the nodes before all postprocessors.

    Forged provenance in a new node's metadata is replaced by that of the found node with its id.
    """
    known = {node_key(node.node) for node in found}
    marks = {node.node.node_id: mark for node in found if (mark := provenance(node)) is not None}
    passes = passing(selected, {name: str(mark["source"]) for name, mark in marks.items()})

    def shown(node: NodeWithScore) -> NodeWithScore | None:
        mark = marks.get(node.node.node_id)
        if node_key(node.node) in known:
            return node
        if not passes(node.node):
            return None
        if provenance(node) == mark:
            return node
        metadata = {key: value for key, value in node.node.metadata.items() if key != PROVENANCE_KEY}
        metadata |= {} if mark is None else {PROVENANCE_KEY: mark}
        return NodeWithScore(node=node.node.model_copy(update={"metadata": metadata}), score=node.score)

    return shown
