"""Node postprocessors of the user's, each with the deadline.

A postprocessor may be what keeps a document, or a name in it, from the answer. One that has not answered by the
deadline is therefore never passed by: the nodes that it was given are withheld, the response says so, and its status
is 206. One that raises ends the request with its error, as in LlamaIndex. A reranker, which orders nodes and keeps none
from anybody, may be passed by: it is given as ``reranker=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._flow import Call, Flow, WorkerPool
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.schema import MissingPart, Outcome

__all__ = ["Postprocessed", "postprocess"]

_POOL: Final = WorkerPool("postprocessors")
"""Of their own: those that hang take no thread from anything else."""


@dataclass(frozen=True, slots=True)
class Postprocessed:
    """What postprocessors left.

    Args:
        nodes: The nodes.
        dropped: How many they dropped.
        added: How many they brought.
        missing: Why nodes were withheld; None where none were.
    """

    nodes: list[NodeWithScore]
    dropped: int = 0
    added: int = 0
    missing: MissingPart | None = None


def postprocess(
    nodes: list[NodeWithScore],
    postprocessors: Sequence[BaseNodePostprocessor],
    bundle: QueryBundle,
    deadline: float | None,
) -> Flow[Postprocessed]:
    """Apply postprocessors in order.

    Args:
        nodes: What they are given.
        postprocessors: The first is given the nodes, each next one what the one before it left.
        bundle: The question.
        deadline: ``time.monotonic()`` at which the one under way is given up, and its nodes withheld.
    """
    dropped = added = 0
    for postprocessor in postprocessors:
        before, name = len(nodes), type(postprocessor).__name__
        work = partial(postprocessor.postprocess_nodes, nodes, query_bundle=bundle)
        try:
            nodes = yield Call(sync=work, deadline=deadline, pool=_POOL, what=f"node postprocessor {name}")
        except DeadlineExceededError as late:
            reason = f"{late}; what it was given is withheld"
            missing = MissingPart(what=f"node postprocessor {name}", outcome=Outcome.TIMEOUT, reason=reason)
            return Postprocessed([], dropped + before, added, missing)
        dropped += max(0, before - len(nodes))
        added += max(0, len(nodes) - before)
    return Postprocessed(nodes, dropped, added)
