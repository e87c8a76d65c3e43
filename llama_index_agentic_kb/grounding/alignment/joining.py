"""Several texts as one, for claims that no single one of them bears out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Token

__all__ = ["join"]

K = TypeVar("K", str, int)


def join(analyses: Sequence[Analysis]) -> Analysis:
    """Give several texts as one, in which each keeps its own topic; sentence numbers go on from text to text."""
    whole = Analysis("", analyses[0].language, [], [], [])
    texts: list[str] = []
    shift = 0
    for one in analyses:
        known, sentences = len(whole.tokens), len(whole.sentences)
        whole.tokens += [
            Token(word, stem, start + shift, end + shift, sentence + sentences, content, name)
            for word, stem, start, end, sentence, content, name in one.tokens
        ]
        whole.sentences += [(start + shift, end + shift) for start, end in one.sentences]
        whole.items += [item._replace(first=item.first + known, last=item.last + known) for item in one.items]
        whole.topics += one.topics
        whole.sentence_of += [sentence + sentences for sentence in one.sentence_of]
        whole.firsts = [*whole.firsts[:-1], *(first + known for first in one.firsts)]
        _append(whole.places, one.places, known)
        _append(whole.concepts, one.concepts, known)
        _append(whole.prefixes, one.prefixes, known)
        texts.append(one.text)
        shift += len(one.text) + 1
    whole.text = "\n".join(texts)
    return whole


def _append(places: dict[K, list[int]], further: Mapping[K, Sequence[int]], shift: int) -> None:
    for key, found in further.items():
        places.setdefault(key, []).extend([place + shift for place in found])
