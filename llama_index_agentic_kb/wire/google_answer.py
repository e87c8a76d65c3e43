"""Google's Answer method and its relatives (Discovery Engine v1, JSON): the codec's front.

    query = decode_answer_query(body, serving_config=path)
    ...
    body = encode_answer_response(answer, parent=config.parent, session=session, enum_as_int=True)

``google_stream.AnswerStream`` writes the same as it comes about. What is written is strictly v1, and checked
(``validate_answer``) before it goes out.
"""

from __future__ import annotations

from typing import Any

from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.sessions import Session
from llama_index_agentic_kb.wire.google_answer_request import decode_answer_query
from llama_index_agentic_kb.wire.google_answer_resource import encode_answer
from llama_index_agentic_kb.wire.google_errors import encode_error
from llama_index_agentic_kb.wire.google_names import Parent
from llama_index_agentic_kb.wire.google_sessions import answer_name, encode_session
from llama_index_agentic_kb.wire.google_stream import AnswerStream, stream_answer
from llama_index_agentic_kb.wire.google_validation import validate_answer
from llama_index_agentic_kb.wire.google_values import clean, message

__all__ = [
    "AnswerStream",
    "decode_answer_query",
    "encode_answer",
    "encode_answer_response",
    "encode_error",
    "encode_session",
    "stream_answer",
    "validate_answer",
]


def encode_answer_response(
    answer: Answer,
    *,
    parent: Parent | None = None,
    session: Session | None = None,
    token: str = "",
    enum_as_int: bool = False,
) -> dict[str, Any]:
    """Give the response of ``:answer``.

    Args:
        answer: The answer; its name is built from the session's and its ``id``.
        parent: What was asked; needed with a session.
        session: The session as it is after this turn; None is sessionless, and nothing is named then.
        token: The ``answerQueryToken``.
        enum_as_int: Whether enums are numbers (the client asks by ``$alt=json;enum-encoding=int``).

    Raises:
        InvalidAnswerError: The answer breaks a rule of the contract.
    """
    told = None
    if session is not None and parent is not None:
        told = encode_session(session, parent, enum_as_int=enum_as_int)
    name = answer_name(answer, parent, session)
    return message(
        {"answerQueryToken": clean(token)},
        {"answer": encode_answer(answer, name=name, enum_as_int=enum_as_int), "session": told},
    )
