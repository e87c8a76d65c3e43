"""A knowledge base as a tool of agents: its citations keep their meaning in whatever the agent writes.

A query engine's markers, ``[ref_id:N]``, count the passages of one answer. An agent joins several answers, so that a
tool's markers name the tool and the passage itself, ``[space:1f0c9a3e]``, and its text ends with the list of sources.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.tools import RetrieverTool, ToolOutput

from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb.chat_engine import readable
from llama_index_agentic_kb.grounding.citations import cited_ids
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.synthesis import AgenticResponse

_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")
_PASSAGE: Final = re.compile(r"\[[^\[\]\s]{1,80}:([0-9a-f]{8})\]")
_UNSAFE: Final = re.compile(r"[^\w.-]+")


class ToolQueryEngine(AgenticQueryEngine):
    """The query engine of a tool; its responses' text has markers of the tool, and a list of the cited sources.

    ``account`` and ``source_nodes`` of a response are those of any query engine. Streamed responses are not changed.
    """

    tool_name = "knowledge_base"

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self._marked(super()._query(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self._marked(await super()._aquery(query_bundle))

    def _marked(self, response: RESPONSE_TYPE) -> RESPONSE_TYPE:
        if isinstance(response, AgenticResponse):
            nodes, text = response.source_nodes, readable(response.response or "")
            named = [number for number in cited_ids(text) if number < len(nodes)]
            markers = {number: _marker(self.tool_name, nodes[number]) for number in named}
            text = _MARKER.sub(lambda found: markers.get(int(found[1]), ""), text)
            references = response.account.references
            lines = [f"{marker} {_source(references[number])}" for number, marker in markers.items()]
            response.response = "\n".join([text, "", "Sources:", *lines]) if lines else text
        return response


class PassageTool(RetrieverTool):
    """LlamaIndex's ``RetrieverTool``, with a marker before each passage by which an agent can cite it."""

    def call(self, *args: object, **kwargs: object) -> ToolOutput:
        """Search for the arguments' text, and return the passages."""
        asked = ", ".join(map(str, (*args, *kwargs.values())))  # core's own tool would search for "input is ..."
        return self._output(asked, self.retriever.retrieve(asked))

    async def acall(self, *args: object, **kwargs: object) -> ToolOutput:
        """Search for the arguments' text, and return the passages."""
        asked = ", ".join(map(str, (*args, *kwargs.values())))
        return self._output(asked, await self.retriever.aretrieve(asked))

    def _output(self, asked: str, nodes: list[NodeWithScore]) -> ToolOutput:
        name = self.metadata.get_name()
        passages = [f"{_marker(name, node)}\n{node.node.get_content(MetadataMode.LLM)}" for node in nodes]
        content = "\n\n".join(passages) or "Nothing was found."
        return ToolOutput(content=content, tool_name=name, raw_input={"input": asked}, raw_output=nodes)


def cited_nodes(text: str, outputs: Iterable[object]) -> list[NodeWithScore]:
    """Return the passages that an agent's text cites by the markers of tools, in order of first citation.

    ``outputs`` are what the tools returned (``ToolOutput``, ``ToolCallResult``, ``Response`` or nodes of LlamaIndex),
    for example ``tool_calls`` of an agent's result.
    """
    known = {}
    for output in outputs:
        tool_output = getattr(output, "tool_output", output)
        made = getattr(tool_output, "raw_output", tool_output)
        nodes = made if isinstance(made, list) else getattr(made, "source_nodes", ())
        known.update({_digest(node): node for node in nodes if isinstance(node, NodeWithScore)})
    return [known[digest] for digest in dict.fromkeys(_PASSAGE.findall(text)) if digest in known]


def _marker(name: str, node: NodeWithScore) -> str:
    return f"[{_UNSAFE.sub('_', name)}:{_digest(node)}]"


def _digest(node: NodeWithScore) -> str:
    return hashlib.sha256(node.node.node_id.encode()).hexdigest()[:8]


def _source(reference: Reference) -> str:
    where = reference.url or reference.citation_url or reference.knowledge_source_name
    return f"{printable(one_line(reference.title, 200))} ({printable(one_line(where, 300))})"
