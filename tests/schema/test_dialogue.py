from __future__ import annotations

import pytest

from llama_index_agentic_kb import DialogueStage, DialogueState, InvalidRequestError, RetrievalRequest
from llama_index_agentic_kb.schema import PendingWrite, TopicShift

STATE = DialogueState(
    turn=3,
    stage=DialogueStage.CONFIRMING,
    tool="returns",
    slots={"order": "A-4711", "items": 2},
    pending=PendingWrite(token="t", tool="returns", arguments={"order": "A-4711"}, asked_of="x"),
    shift=TopicShift(from_tool="orders", to_tool="returns", kept=("order",)),
)


def test_callers_can_not_send_a_state() -> None:
    """It comes from the program that keeps the conversation, like the principal, and is kept as JSON."""
    messages = [{"role": "user", "content": "yes"}]
    with pytest.raises(InvalidRequestError, match="dialogue can't be sent in a request"):
        RetrievalRequest.parse({"messages": messages, "dialogue": STATE.to_dict()})
    assert DialogueState.parse(STATE.to_json()) == STATE == DialogueState.parse(STATE.to_dict())
    request = RetrievalRequest.parse({"messages": messages, "dialogue": STATE})
    assert request.dialogue == STATE
    assert "dialogue" not in request.to_dict()
