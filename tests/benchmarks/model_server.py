"""The language model: ``LoopbackOpenAI`` in a process of its own, so that it shares no GIL with what is measured.

The process prints its address on its first line, and what it billed so far for each line that it is sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final, Self

from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, Reply
from tests.benchmarks.corpus import SOURCES, SUB_QUERIES

ANSWER: Final = (
    "Hayabusa2 and OSIRIS-REx brought back samples of Ryugu and Bennu [ref_id:0] [1], while Galileo orbited Jupiter "
    "[ref_id:1] [2]."
)

PIECE: Final = 4
"""Characters of a streamed piece: about a token."""

FINDINGS: Final = {"q1": "Hayabusa2", "q2": "Jupiter"}


def reply_to(prompt: str) -> str:
    """Answer each engine's prompt as a good model would: a plan, queries, sub-questions, or an answer."""
    if "You plan searches" in prompt:
        return json.dumps({"sub_queries": _plan(dependent="one after another" in prompt)})
    if prompt.rstrip().endswith("Findings:"):
        return "\n".join(
            json.dumps({"step": step, "answers": [{"value": value, "ref": 1, "confidence": "stated"}]})
            for step, value in FINDINGS.items()
        )
    if prompt.rstrip().endswith("Verdict:"):
        return json.dumps({"sufficient": True, "gaps": [], "sub_queries": []})
    if "generates multiple search queries" in prompt:  # QueryFusionRetriever
        return "\n".join(SUB_QUERIES)
    if "output a list of relevant sub-questions" in prompt:  # SubQuestionQueryEngine: one question to one tool
        items = [{"sub_question": query, "tool_name": name} for query in SUB_QUERIES for name in SOURCES]
        return f"```json\n{json.dumps({'items': items})}\n```"
    return ANSWER


def _plan(*, dependent: bool) -> list[dict[str, object]]:
    """Four sub-queries; where they may depend on each other, the last two need what the first two find."""
    queries = [*SUB_QUERIES[:2], "rocket that launched #q1", "size of #q2"] if dependent else SUB_QUERIES
    return [
        {
            "id": f"q{number}",
            "query": query,
            "sources": list(SOURCES),
            "depends_on": [f"q{number - 2}"] if "#" in query else [],
            "finds": f"the answer of step {number}",
        }
        for number, query in enumerate(queries, start=1)
    ]


class ModelServer:
    """The server, from the outside; a streamed reply takes so long from its first piece to its last."""

    def __init__(self, latency: float, stream_seconds: float = 0.0) -> None:
        command = [sys.executable, "-m", __name__, str(latency), str(stream_seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._base_url = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the model server ended with {self._process.returncode}")

    def llm(self) -> OpenAI:
        """Make a client of its own for a contestant, with LlamaIndex's defaults."""
        return OpenAI(model="gpt-4o-mini", api_base=self._base_url, api_key="sk-loopback-no-secret")

    def billed(self) -> tuple[int, int]:
        """Return the calls and the tokens so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        calls, tokens = json.loads(self._read())
        return calls, tokens

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the model server did not start, or ended")
        return line


def _serve(latency: float, stream_seconds: float) -> None:
    def reply(request: ChatRequest) -> Reply:
        text = reply_to(request.text)
        pieces = max(1, -(-len(text) // PIECE))
        return Reply(text, latency=latency, chunk_size=PIECE, chunk_delay=stream_seconds / pieces)

    with LoopbackOpenAI(reply) as server:
        print(server.base_url, flush=True)
        for _ in sys.stdin:
            billed = server.billed
            print(json.dumps([billed.calls, billed.total_tokens]), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]))
