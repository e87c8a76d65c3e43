"""One commit of a lexical index, as searches see it: queries are made here, run, checked and put in order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from llama_index_agentic_kb.schema import FilterNode, matcher
from llama_index_agentic_kb.search.facts import AllOf, Asked, fact_value, key_prefixes, superset

__all__ = ["LexicalHit", "LexicalView"]

_MOST_TIES: Final = 1_000
"""Hits beyond the last one wanted that are looked at for equal scores."""

_MOST_VALUES: Final = 10_000
"""Values of a metadata key that are looked through for those that a condition lets through."""


class LexicalHit(NamedTuple):
    """A document that was found, and its BM25 score."""

    node_id: str
    score: float


class LexicalView:
    """An index as of one commit; never changes, so that any number of threads may search it.

    Args:
        schema: Tantivy's.
        searcher: Tantivy's.
        languages: Those of the documents.
        mark: What the commit noted; None before the first.
    """

    def __init__(self, schema: Any, searcher: Any, languages: tuple[str, ...], mark: str | None) -> None:
        self.searcher = searcher
        self.languages = languages
        self.mark = mark
        self._schema = schema
        self._values: dict[str, list[tuple[str, Any]] | None] = {}

    def __len__(self) -> int:
        """How many documents there are; the commit's own note is none."""
        return int(self.searcher.num_docs) - (self.mark is not None)

    def search(self, words: Sequence[tuple[str, ...]], top_k: int, filters: FilterNode | None) -> list[LexicalHit]:
        """Find documents.

        Args:
            words: The terms of each word, at least one word.
            top_k: How many documents at most. At least 1.
            filters: Each document's metadata must match it; None lets all through.

        Returns:
            The hits, best first, those of equal scores by id.
        """
        query = self._query(words, filters)
        wanted, most = top_k, self.searcher.num_docs
        while True:
            hits = self._hits(query, wanted)
            found = self._passing(hits, filters)
            if len(found) >= top_k or len(hits) < wanted or wanted >= most:
                return sorted(found, key=lambda hit: (-hit.score, hit.node_id))[:top_k]
            # As many more as the share that passed makes likely to be enough, and at least four times as many.
            wanted = min(most, max(4 * wanted, 2 * wanted * top_k // max(1, len(found))))

    def values(self, key: str) -> list[tuple[str, Any]] | None:
        """Give the terms and values of a metadata key; None where they are too many, or some are hashes."""
        if key not in self._values:
            readable, hashed = key_prefixes(key)
            found = self.searcher.terms_with_prefix("facts", readable, None, _MOST_VALUES + 1)
            unknown = len(found) > _MOST_VALUES or self.searcher.terms_with_prefix("facts", hashed, None, 1)
            self._values[key] = None if unknown else [(term, fact_value(term, readable)) for term, _ in found]
        return self._values[key]

    # -- the query -------------------------------------------------------------------------------------------------

    def _query(self, words: Sequence[tuple[str, ...]], filters: FilterNode | None) -> Any:
        from tantivy import Occur, Query  # noqa: PLC0415 (who searches no words needs none)

        scored = _any_of([self._word(forms) for forms in words])
        asked = None if filters is None else superset(filters, self.values)
        if asked is None:
            return scored
        return Query.boolean_query(
            [(Occur.Must, scored), (Occur.Must, Query.const_score_query(self._asked(asked), 0.0))]
        )

    def _word(self, forms: Sequence[str]) -> Any:
        """Give a query for a word by its stems in several languages.

        The best counts, not their sum, and each is as rare as all of them together, as with synonyms: else a word
        would weigh most in the language that the index holds least of.
        """
        from tantivy import Query  # noqa: PLC0415

        if len(forms) == 1:
            return Query.term_query(self._schema, "terms", forms[0], "freq")
        held = {form: count for form in forms if (count := self.searcher.doc_freq("terms", form))}
        rarity = self._rarity(sum(held.values()))
        terms = {form: Query.term_query(self._schema, "terms", form, "freq") for form in held}
        return Query.disjunction_max_query(
            [Query.boost_query(term, rarity / self._rarity(held[form])) for form, term in terms.items()]
        )

    def _rarity(self, held: int) -> float:
        """BM25's inverse document frequency, as tantivy has it."""
        documents = max(held, self.searcher.num_docs)
        return math.log1p((documents - held + 0.5) / (held + 0.5))

    def _asked(self, asked: Asked) -> Any:
        from tantivy import Occur, Query  # noqa: PLC0415

        if isinstance(asked, AllOf):
            return Query.boolean_query([(Occur.Must, self._asked(part)) for part in asked.parts])
        terms = [Query.term_set_query(self._schema, "facts", asked.terms)] if asked.terms else []
        return _any_of([*terms, *map(self._asked, asked.parts)])

    # -- the hits --------------------------------------------------------------------------------------------------

    def _hits(self, query: Any, wanted: int) -> list[tuple[float, Any]]:
        """Give the best hits, and those that tie with the last of them."""
        limit = wanted + 1
        while True:
            hits: list[tuple[float, Any]] = self.searcher.search(query, limit=limit, count=False).hits
            if len(hits) < limit or hits[-1][0] < hits[wanted - 1][0] or limit > wanted + _MOST_TIES:
                last = hits[wanted - 1][0] if len(hits) >= wanted else 0.0
                return [hit for hit in hits if hit[0] >= last]
            limit = wanted + 2 * (limit - wanted) + 8

    def _passing(self, hits: Iterable[tuple[float, Any]], filters: FilterNode | None) -> list[LexicalHit]:
        documents = ((score, self.searcher.doc(address)) for score, address in hits)
        passes = None if filters is None else matcher(filters)
        return [
            LexicalHit(document.get_first("id"), score)
            for score, document in documents
            if passes is None or passes(json.loads(bytes(document.get_first("metadata"))))
        ]


def _any_of(queries: Sequence[Any]) -> Any:
    from tantivy import Occur, Query  # noqa: PLC0415

    return Query.boolean_query([(Occur.Should, query) for query in queries])
