"""The library's loggers; secrets and terminal control characters are removed from their records."""

from __future__ import annotations

import io
import logging
import traceback
from typing import Final

from llama_index_agentic_kb._text import printable, redacted


class _Redacting(logging.Filter):
    """Removes secrets from the message and the traceback of a log record before any handler gets it.

    A traceback is always replaced by redacted text: handlers could read the client's headers from ``exc_info``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record in place, and return True."""
        message = record.getMessage()
        clean = "\\n".join(printable(redacted(message)).splitlines())  # prevents log injection: one line per record
        if clean != message:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None:
            written = io.StringIO()
            traceback.print_exception(record.exc_info[1], file=written)
            lines = printable(redacted(written.getvalue())).splitlines()
            record.exc_text = "\n".join(f"  {line}" for line in lines)  # no line of an error looks like a record
            record.exc_info = None
        return True


def redacted_leaves(value: object) -> object:
    """Return data of dicts, lists and scalars with all strings redacted, except for the keys of dicts."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_leaves(inner) for key, inner in value.items()}
    return [redacted_leaves(inner) for inner in value] if isinstance(value, list) else value


logger: Final = logging.getLogger("llama_index_agentic_kb")
activity_logger: Final = logging.getLogger("llama_index_agentic_kb.activity")
"""Logger of activity records as lines of JSON; strings are redacted one by one, so that the JSON stays valid."""

if not any(type(one).__name__ == _Redacting.__name__ for one in logger.filters):  # once, also after a reload
    logger.addFilter(_Redacting())
