"""What is read inside of one transaction on the sessions' tables: all of one moment."""

from __future__ import annotations

from sqlalchemy import Connection, select

from llama_index_agentic_kb.errors import NotFoundError
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.request import Message
from llama_index_agentic_kb.schema.sessions import Session, SessionPage, SessionQuery
from llama_index_agentic_kb.store.session_keys import SessionKey, its_labels, labels_of, session_row, storable
from llama_index_agentic_kb.store.session_listing import after_page, filter_clause, next_token, order_of, ordering
from llama_index_agentic_kb.store.session_tables import (
    TURN_COLUMNS,
    read_answer,
    read_session,
    read_turn,
    sessions,
    turns,
)

__all__ = ["load", "load_answer", "messages", "page"]


def load(key: SessionKey, connection: Connection, *, include_answers: bool) -> Session:
    """Give a session with its turns."""
    row = session_row(connection, key)
    columns = (*TURN_COLUMNS, turns.c.answer) if include_answers else TURN_COLUMNS
    found = connection.execute(
        select(*columns).where(turns.c.owner == key.owner, turns.c.session_id == key.id).order_by(turns.c.number)
    )
    return read_session(row, its_labels(connection, key), map(read_turn, found))


def load_answer(key: SessionKey, answer_id: str, connection: Connection) -> Answer:
    """Give an answer."""
    session_row(connection, key)
    where = (turns.c.owner == key.owner, turns.c.session_id == key.id, turns.c.answer_id == storable(answer_id))
    text = connection.execute(select(turns.c.answer).where(*where)).scalar()
    if text is None:
        raise NotFoundError("answer: the session has no answer of this name")
    return read_answer(text)


def messages(key: SessionKey, last: int | None, connection: Connection) -> list[Message]:
    """Give a session's turns as messages, oldest first; see ``SessionStore.session_messages`` for those left out."""
    session_row(connection, key)
    newest = (
        select(*TURN_COLUMNS, turns.c.answer)
        .where(turns.c.owner == key.owner, turns.c.session_id == key.id)
        .order_by(turns.c.number.desc())
        .limit(last)
    )
    conversation = []
    for turn in map(read_turn, reversed(connection.execute(newest).all())):
        if turn.answer is not None and turn.answer.is_kept_from_prompts:
            continue
        conversation.append(Message.model_validate({"role": "user", "content": turn.query}))
        conversation.append(
            Message.model_validate({"role": "assistant", "content": turn.answer.text if turn.answer else ""})
        )
    return conversation


def page(owner: str, query: SessionQuery, connection: Connection) -> SessionPage:
    """Give a page of an owner's sessions."""
    found = connection.execute(
        select(sessions)
        .where(sessions.c.owner == owner, filter_clause(query.filters), after_page(query))
        .order_by(*ordering(order_of(query)))
        .limit(query.page_size + 1)
    ).all()
    shown = found[: query.page_size]
    token = next_token(query, shown[-1]) if len(found) > len(shown) else None
    by_session = labels_of(connection, owner, [row.id for row in shown])
    return SessionPage(sessions=[read_session(row, by_session.get(row.id, ())) for row in shown], next_page_token=token)
