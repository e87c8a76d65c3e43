"""A process that stores turns until it is killed, and tells each one that is stored.

python -m tests.kills_sessions.writer URL SESSION FIRST
"""

from __future__ import annotations

import random
import sys

from llama_index_agentic_kb.schema.answer import Answer, ChunkReference
from llama_index_agentic_kb.store.sessions import SessionStore

OWNER = "alice"


def payload(number: int) -> Answer:
    """The answer of a number, always the same; some are long enough for many pages of the database."""
    words = random.Random(number)
    text = " ".join(str(words.random()) for _ in range(words.choice((1, 50, 3000))))
    return Answer(id=f"a{number}", text=text, references=[ChunkReference(chunk=str(number), content=text[::-1])])


def main(url: str, session_id: str, first: int) -> None:
    """Store turn after turn; a line is printed once it is stored."""
    store = SessionStore(url, timeout=60.0)
    number = first
    while True:
        turn = store.add_turn(OWNER, session_id, f"question {number}", payload(number))
        print(number, turn.number, flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
