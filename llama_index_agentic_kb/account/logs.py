"""The library's loggers: what goes through them holds nothing that looks like a secret or steers a terminal."""

from __future__ import annotations

import io
import logging
import traceback
from typing import Any, Final

from llama_index_agentic_kb._text import printable, redacted


class _Redacting(logging.Filter):
    """Takes secrets out of a record before any handler sees it: of its message, its traceback and its stack.

    A record that has none is left as it is. In one that has, the message is already put together, and the traceback
    is text: handlers that look into ``exc_info`` would find the client's own exception, with its headers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: every record is logged."""
        message = record.getMessage()
        clean = "\\n".join(printable(redacted(message)).splitlines())  # one record is one line, whoever wrote its words
        if clean != message:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None:
            written = io.StringIO()
            traceback.print_exception(record.exc_info[1], file=written)
            record.exc_text = printable(redacted(written.getvalue().rstrip("\n")))
            record.exc_info = None
        return True


def redacted_leaves(value: Any) -> Any:
    """Return plain data (of dicts, lists and scalars) with every text in it redacted; keys stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_leaves(inner) for key, inner in value.items()}
    return [redacted_leaves(inner) for inner in value] if isinstance(value, list) else value


logger: Final = logging.getLogger("llama_index_agentic_kb")
activity_logger: Final = logging.getLogger("llama_index_agentic_kb.activity")
"""Its lines are JSON, whose texts are redacted one by one: over the whole line, a replacement could break it."""

if not any(type(one).__name__ == _Redacting.__name__ for one in logger.filters):  # once, also after a reload
    logger.addFilter(_Redacting())
