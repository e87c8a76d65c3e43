"""The ways a language model's server fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from llama_index_agentic_kb.testing._replies import Reply

__all__ = ["Fault", "FaultKind"]

_SPOKEN = "This answer is cut before it is told in full."
_REFUSAL = "I'm sorry, but I can't help with that."


class FaultKind(StrEnum):
    """The kinds of :class:`Fault`, each made by the constructor of the same name."""

    STATUS = "status"
    HANG = "hang"
    RESET = "reset"
    CUT = "cut"
    HTML = "html"
    BAD_JSON = "bad_json"
    ERROR_BODY = "error_body"
    NO_CHOICES = "no_choices"
    NULL_CONTENT = "null_content"
    REFUSAL = "refusal"
    CONTENT_FILTER = "content_filter"
    LENGTH = "length"
    DRIP = "drip"
    STREAM_CUT = "stream_cut"
    STREAM_HANG = "stream_hang"
    STREAM_RESET = "stream_reset"


@dataclass(frozen=True)
class Fault:
    """One failure, to be given where a reply could be. Use the constructors below, not this one.

    Only ``null_content``, ``refusal``, ``content_filter`` and ``length`` are answers and billed in full; ``drip`` is
    billed if it arrives, and of a broken stream what was sent before it broke. The others cost nothing.

    Args:
        kind: What goes wrong.
        code: The HTTP status of ``status``.
        retry_after: The ``Retry-After`` header of ``status``: seconds, an HTTP date, or None for no header.
        seconds: How long a hang lasts (None: until the server stops), or the pause between two bytes of a drip.
        content: The text told in part or in full.
        latency: Seconds before anything happens; see :meth:`after`.
    """

    kind: FaultKind
    code: int = 200
    retry_after: float | str | None = None
    seconds: float | None = None
    content: str = _SPOKEN
    latency: float = 0.0

    def after(self, seconds: float) -> Fault:
        """Return the same fault, happening so many seconds after the request arrived."""
        return replace(self, latency=seconds)

    @classmethod
    def status(cls, code: int, retry_after: float | str | None = None) -> Fault:
        """Answer with an HTTP error and OpenAI's JSON error body, such as 429, 500 or 503."""
        return cls(FaultKind.STATUS, code=code, retry_after=retry_after)

    @classmethod
    def hang(cls, seconds: float | None = None) -> Fault:
        """Send nothing, then close the connection: after so many seconds, or None when the server stops."""
        return cls(FaultKind.HANG, seconds=seconds)

    @classmethod
    def reset(cls) -> Fault:
        """Reset the connection (TCP RST) without a byte of answer."""
        return cls(FaultKind.RESET)

    @classmethod
    def cut(cls) -> Fault:
        """Close the connection (TCP FIN) midway through the body, plain or streamed."""
        return cls(FaultKind.CUT)

    @classmethod
    def html(cls) -> Fault:
        """Answer 200 with a web page, as a captive portal or a proxy does."""
        return cls(FaultKind.HTML)

    @classmethod
    def bad_json(cls) -> Fault:
        """Answer 200 with half a JSON object; in a stream, one event holds it."""
        return cls(FaultKind.BAD_JSON)

    @classmethod
    def error_body(cls) -> Fault:
        """Answer 200 with ``{"error": ...}`` in the body; in a stream, one event holds it."""
        return cls(FaultKind.ERROR_BODY)

    @classmethod
    def no_choices(cls) -> Fault:
        """Answer 200 with a completion whose ``choices`` are empty."""
        return cls(FaultKind.NO_CHOICES)

    @classmethod
    def null_content(cls) -> Fault:
        """Answer with ``"content": null`` and nothing else, finished by "stop"."""
        return cls(FaultKind.NULL_CONTENT)

    @classmethod
    def refusal(cls, content: str = _REFUSAL) -> Fault:
        """Refuse: the words stand in ``refusal``, the content is null, finished by "stop"."""
        return cls(FaultKind.REFUSAL, content=content)

    @classmethod
    def content_filter(cls, content: str = "") -> Fault:
        """Answer what the provider's filter left over, finished by "content_filter"."""
        return cls(FaultKind.CONTENT_FILTER, content=content)

    @classmethod
    def length(cls, content: str = _SPOKEN) -> Fault:
        """Answer a text that was cut off at the token limit, finished by "length"."""
        return cls(FaultKind.LENGTH, content=content)

    @classmethod
    def drip(cls, seconds: float = 0.3, content: str = _SPOKEN) -> Fault:
        """Send a good answer one byte at a time, so many seconds apart: no read timeout ever fires."""
        return cls(FaultKind.DRIP, seconds=seconds, content=content)

    @classmethod
    def stream_cut(cls, content: str = _SPOKEN) -> Fault:
        """End a stream cleanly after half the text, without finish reason or ``[DONE]``; a plain body: as ``cut``."""
        return cls(FaultKind.STREAM_CUT, content=content)

    @classmethod
    def stream_hang(cls, seconds: float | None = None, content: str = _SPOKEN) -> Fault:
        """Go silent after half the text, or half the plain body; ``seconds`` as in :meth:`hang`."""
        return cls(FaultKind.STREAM_HANG, seconds=seconds, content=content)

    @classmethod
    def stream_reset(cls, content: str = _SPOKEN) -> Fault:
        """Reset the connection (TCP RST) after half the text, or half the plain body."""
        return cls(FaultKind.STREAM_RESET, content=content)

    def as_reply(self) -> Reply | None:
        """Return the reply this fault is on the wire, or None when it is no well-formed reply."""
        match self.kind:
            case FaultKind.NULL_CONTENT:
                return Reply(None, latency=self.latency)
            case FaultKind.REFUSAL:
                return Reply(None, refusal=self.content, latency=self.latency)
            case FaultKind.CONTENT_FILTER | FaultKind.LENGTH:
                return Reply(self.content, finish_reason=self.kind.value, latency=self.latency)
            case _:
                return None
