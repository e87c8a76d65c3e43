"""The passages of one prompt of the planning model: chosen, numbered, and shortened around the queries' words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._text import excerpt, normalize, sentence_spans
from llama_index_agentic_kb.evidence.candidates import Candidate, Fusion, best_of, shown_metadata
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.prompts import Passage, format_passages
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key

MAX_PASSAGES: Final = 30  # in one prompt, whatever the number of sub-queries
PASSAGES_PER_QUERY: Final = 5  # the answer to a well-worded query is nearly always in the top five

# Words to which a passage is shortened, around the sub-query's words: usually (a paragraph); if it supports a finding;
# if the model asked for its full text, which may be a whole file. Up to WHOLE_WORDS it is not shortened at all.
PASSAGE_WORDS: Final = 110
PROOF_WORDS: Final = 400
ASKED_WORDS: Final = 2_000
WHOLE_WORDS: Final = 150

CUT: Final = "[...]"  # marker for omitted text in a passage
_HYPHEN: Final = re.compile(r"(?<=[^\W\d_])[-\u2010-\u2015](?=[^\W\d_])")  # a hyphen inside a word
_BREAK: Final = re.compile(
    r"\s+(?:[-\u2010-\u2015]\s+)?|(?<=\w)[-\u2010-\u2015](?=\w)|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])"
)
"""A place in a name where texts write a space, a hyphen, both or nothing: "B-29", "B - 29", "B29"."""


@dataclass(frozen=True, slots=True)
class ShownPassage:
    """A passage as shown to the model."""

    ref: int
    node: NodeWithScore
    source: KnowledgeSource
    title: str
    content: str
    metadata: str = ""

    def says(self, value: str) -> bool:
        """Return whether the passage or its title contains the value as whole words, whatever its spaces and hyphens.

        A qualifier after the name may be absent.
        """
        text = normalize(f"{self.title}\n{self.content}\n{self.source.source_data(self.node).content}")
        text += "\n" + _HYPHEN.sub("", text)
        form = normalize(value)
        name = form.split("(", maxsplit=1)[0].split(",", maxsplit=1)[0].strip() or form
        whole, *parts = (_pattern(one).search(text) is not None for one in (form, *name.split()))
        return whole or all(parts)


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern of a name in other spellings; two of its numbers never run together ("2-1" is not "21")."""
    first, *rest = _BREAK.split(name)
    pattern = re.escape(first)
    for before, part in pairwise([first, *rest]):
        apart = "+" if before[-1:].isdigit() and part[:1].isdigit() else "*"
        pattern += rf"[\s\-\u2010-\u2015]{apart}{re.escape(part)}"
    return re.compile(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])")


class PassageSet:
    """The passages of one prompt, numbered from 0: at most ``per_query`` of each query, cut to ``words`` by node id."""

    def __init__(self, per_query: int = PASSAGES_PER_QUERY, words: Mapping[str, int] = MappingProxyType({})) -> None:
        self.passages: dict[int, ShownPassage] = {}
        self._per_query = per_query
        self._words = words
        self._seen: set[NodeKey] = set()

    def add(self, query: str, found: Sequence[Candidate]) -> None:
        """Add the passages that a query found, best first, each shortened around the query's words."""
        for candidate in found[: self._per_query]:
            node, source = candidate.node, candidate.search.source
            key = node_key(node.node)
            if key in self._seen or len(self.passages) >= MAX_PASSAGES:
                continue
            self._seen.add(key)
            ref, data = len(self.passages), source.source_data(node)
            shown = passage_excerpt(data.content, query, self._words.get(node.node_id, PASSAGE_WORDS))
            metadata = shown_metadata(node, source.permissions, (data.title, data.content, data.url))
            self.passages[ref] = ShownPassage(ref, node, source, data.title, shown, metadata)

    def as_prompt(self, spotlight: Spotlight = PLAIN) -> str:
        """Return the passages as prompt text, marked as data by ``spotlight``."""
        return format_passages(
            Passage(one.ref, one.title, one.content, one.source.name, spotlight=spotlight, metadata=one.metadata)
            for one in self.passages.values()
        )

    def refs(self) -> dict[str, int]:
        """Return the number of each passage by node id."""
        return {passage.node.node_id: ref for ref, passage in self.passages.items()}


def passage_excerpt(text: str, query: str, words: int) -> str:
    """Return the sentences of a text that best match a query, in the text's order, with ``CUT`` for omitted text.

    The first is preferred, as it usually names the subject. A query word weighs more if fewer sentences contain it.
    """
    count = len(text.split())
    if count <= max(words, WHOLE_WORDS):
        return text
    spans = sentence_spans(text)
    sentences = [text[start:end] for start, end in spans]
    held = [{*re.findall(r"\w{3,}", normalize(sentence))} for sentence in sentences]
    wanted = {word: sum(word in own for own in held) for word in re.findall(r"\w{3,}", normalize(query))}
    scores = [sum(1 / wanted[word] for word in wanted if word in own) for own in held]
    best = scores.index(max(scores))
    order = sorted(range(len(sentences)), key=lambda at: (at > 0, -scores[at], abs(at - best), -at))
    room, chosen = words, dict[int, str]()
    for at in order:
        length = len(sentences[at].split())
        if length <= room:
            chosen[at] = sentences[at]
        elif not chosen or (len(chosen) == 1 and scores[at] and room > words // 2):
            chosen[at] = excerpt(sentences[at], query, room // 2)
            length = room // 2
        else:
            continue
        room -= length
    parts, last = [], -1
    for at in sorted(chosen):
        parts += [CUT] if at > last + 1 else []
        parts.append(chosen[at].strip())
        last = at
    return " ".join([*parts, CUT] if last < len(sentences) - 1 else parts)


def best_passages(
    searches: Sequence[SourceSearch],
    per_query: Mapping[str, int],
    fusion: Fusion,
    *,
    proof: Sequence[str],
    in_full: Iterable[str],
    known: Iterable[str],
    whole: int = 0,
) -> PassageSet:
    """Return the passages for a prompt: those of ``proof`` (node ids), then ``per_query`` of each search.

    A page whose title is a ``known`` value in the search's query comes before its others. ``in_full`` are passages that
    the model asked for; the ``whole`` best of each search are shortened as proof is.
    """
    by_query: dict[str, list[SourceSearch]] = {}
    for search in searches:
        by_query.setdefault(search.sub_query.id, []).append(search)
    best: dict[str, tuple[str, list[Candidate]]] = {}
    for name, found in by_query.items():
        query = found[0].sub_query.query
        values, ranked = {value for value in known if value in normalize(query)}, best_of(found, fusion)
        if values:
            ranked.sort(key=lambda one: normalize(one.search.source.source_data(one.node).title) not in values)
        best[name] = (query, ranked)
    shown = [(best[name][0], best[name][1][:count]) for name, count in per_query.items() if name in best]
    supports = [*proof, *(one.node.node_id for _, found in shown for one in found[:whole])]
    words = {**dict.fromkeys(supports, PROOF_WORDS), **dict.fromkeys(in_full, ASKED_WORDS)}
    passages = PassageSet(words=words)
    by_id = {one.node.node.node_id: (query, [one]) for query, found in [*best.values(), *shown[::-1]] for one in found}
    for query, ranked in [*(by_id[node_id] for node_id in proof if node_id in by_id), *shown]:
        passages.add(query, ranked)
    return passages
