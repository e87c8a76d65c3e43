"""What a model says to questions on space flight, whole and in pieces: one plan, one answer."""

from __future__ import annotations

import json

from llama_index_agentic_kb.testing import ChatRequest, Reply

ANSWER = "It was 110.6 m tall [ref_id:0]."


def reply(request: ChatRequest) -> Reply:
    if "You plan searches" in request.text:
        return Reply(json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V rocket"}]}))
    return Reply(ANSWER, chunk_size=6)
