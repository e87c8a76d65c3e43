"""Words, tokens and vectors of a text, the same in every double and on every machine."""

from __future__ import annotations

import hashlib
import math
import re

__all__ = ["DEFAULT_DIMENSIONS", "count_tokens", "hash_vector", "words"]

DEFAULT_DIMENSIONS = 256

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Split a text into lower-cased runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


def count_tokens(text: str) -> int:
    """Count tokens the way all doubles bill them.

    A token is a run of word characters or one punctuation mark; white space is free. ``"It's 5 km."`` has six.
    """
    return len(_TOKEN.findall(text))


def hash_vector(text: str, dimensions: int = DEFAULT_DIMENSIONS) -> list[float]:
    """Embed a text as a bag of hashed words.

    Args:
        text: Any text; one without words counts as a single empty word, so that no vector is zero.
        dimensions: The length of the vector, at least 1.

    Returns:
        ``dimensions`` floats of L2 norm 1, none negative. The cosine of two texts grows with the words they share.
    """
    vector = [0.0] * dimensions
    for word in words(text) or [""]:
        vector[_slot(word, dimensions)] += 1.0
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector]


def _slot(word: str, dimensions: int) -> int:
    # hash() differs between processes; blake2b does not.
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % dimensions
