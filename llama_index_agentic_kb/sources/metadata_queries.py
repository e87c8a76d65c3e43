"""What can be asked of a source's metadata without a question: facets, counts, groups and lists of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from llama_index_agentic_kb._aio import arun, deadline_after, run
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import FilterNode, Principal, all_of
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.facets import (
    Facet,
    FacetBucket,
    OrderBy,
    SourceDocument,
    ValueGroup,
    count_units,
    facet_buckets,
    list_documents,
    sort_key,
    value_groups,
)
from llama_index_agentic_kb.sources.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.metadata import MetadataRow, Per, over_metadata

__all__ = ["MetadataQueries"]

T = TypeVar("T")


class MetadataQueries:
    """Facets, counts, groups and lists over the metadata of index sources; a part of ``KnowledgeBase``.

    Every method reads all rows that pass the source's mandatory filter, the knowledge base's own and the caller's:
    what they hide is neither listed nor counted. Time is linear in the number of chunks; memory is bounded by what is
    returned and by the number of different values.

    Every method raises:
        DeniedError: The principal may not see the source, or there is none where one is needed.
        InvalidRequestError: There is no such source, it can't list what it holds, or an argument can't be used.
        RetrievalError: Reading failed.
        DeadlineExceededError: It took longer than the knowledge base's ``max_runtime_in_seconds``.
    """

    @property
    def sources(self) -> Mapping[str, KnowledgeSource]:
        """The sources by name."""
        raise NotImplementedError

    def _standing(self) -> tuple[FilterNode | None, float | None]:
        """Return the filter that stands beside every caller's, and the seconds that a query may take."""
        raise NotImplementedError

    def _resolve_principal(self, given: Principal | None) -> Principal | None:
        """Return who asks, where a principal is given, bound, or of the context."""
        raise NotImplementedError

    def facets(
        self,
        source: str,
        fields: str | Facet | Sequence[str | Facet],
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        principal: Principal | None = None,
    ) -> dict[str, list[FacetBucket]]:
        """Count the values of fields, or how many fall into ranges; see the class for what is raised.

            kb.facets("films", ["genre", Facet("year", interval=10)], filters="country eq 'IT'")

        Args:
            source: The source's name.
            fields: Metadata keys, or a ``Facet`` for ranges; each once.
            filters: What is counted; a filter, or OData text.
            limit: Values of each field. Default 10.
            per: Whether documents or chunks are counted. Default "document".
            principal: Who asks; see ``KnowledgeBase.retrieve``.

        Returns:
            The buckets of each field: values by count, the smaller first among equals; ranges ascending.
        """
        return run(self.afacets(source, fields, filters=filters, limit=limit, per=per, principal=principal))

    async def afacets(
        self,
        source: str,
        fields: str | Facet | Sequence[str | Facet],
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        principal: Principal | None = None,
    ) -> dict[str, list[FacetBucket]]:
        """Count the values of fields; see ``facets``."""
        _check(limit=limit, per=per)
        given: list[Any] = [fields] if isinstance(fields, (str, Facet)) else list(fields)
        facets: list[Any] = [Facet(one) if isinstance(one, str) else one for one in given]
        if not facets or not all(isinstance(one, Facet) and one.field for one in facets):
            raise InvalidRequestError(f"fields: expected metadata keys or Facet, got {fields!r}")
        if len({one.field for one in facets}) < len(facets):
            raise InvalidRequestError("fields: a field is given twice; ask for its other facet in a second call")
        work = partial(facet_buckets, facets=facets, limit=limit, per=per)
        return await self._over(source, work, filters, principal)

    def count(
        self, source: str, *, filters: FilterLike = None, per: Per = "document", principal: Principal | None = None
    ) -> int:
        """Count the documents or chunks that pass a filter; see ``facets`` for the arguments."""
        return run(self.acount(source, filters=filters, per=per, principal=principal))

    async def acount(
        self, source: str, *, filters: FilterLike = None, per: Per = "document", principal: Principal | None = None
    ) -> int:
        """Count the documents or chunks that pass a filter; see ``facets`` for the arguments."""
        _check(per=per)
        counted: int = await self._over(source, partial(count_units, per=per), filters, principal)
        return counted

    def group_by(
        self,
        source: str,
        field: str,
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        hits: int = 3,
        order_by: OrderBy = (),
        principal: Principal | None = None,
    ) -> list[ValueGroup]:
        """Group documents by the values of a field: the most frequent values, each with its first documents.

        Args:
            source: The source's name.
            field: The metadata key; a document stands in the group of each item of a list.
            filters: What is grouped; a filter, or OData text.
            limit: Values to give, the most frequent first. Default 10.
            per: Whether documents or chunks are counted. Default "document".
            hits: Documents to give of each value. Default 3; 0 only counts.
            order_by: The documents' order; see ``documents``.
            principal: Who asks; see ``KnowledgeBase.retrieve``.
        """
        options: Any = {"limit": limit, "per": per, "hits": hits, "order_by": order_by, "principal": principal}
        return run(self.agroup_by(source, field, filters=filters, **options))

    async def agroup_by(
        self,
        source: str,
        field: str,
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        hits: int = 3,
        order_by: OrderBy = (),
        principal: Principal | None = None,
    ) -> list[ValueGroup]:
        """Group documents by the values of a field; see ``group_by``."""
        _check(limit=limit, per=per, hits=hits)
        order = sort_key(order_by)
        work = partial(value_groups, field=field, limit=limit, per=per, hits=hits, order=order)
        return await self._over(source, work, filters, principal)

    def documents(
        self,
        source: str,
        *,
        filters: FilterLike = None,
        order_by: OrderBy = (),
        limit: int = 100,
        offset: int = 0,
        principal: Principal | None = None,
    ) -> list[SourceDocument]:
        """List documents, a page at a time.

        Args:
            source: The source's name.
            filters: Which documents; a filter, or OData text.
            order_by: Fields, the first first: "year", "year desc", or ("year", "desc"). Truths come before numbers,
                numbers before text, documents without the field last. Ties, and no order, are by id.
            limit: Documents to give. Default 100.
            offset: Documents to leave out before.
            principal: Who asks; see ``KnowledgeBase.retrieve``.
        """
        options: Any = {"order_by": order_by, "limit": limit, "offset": offset, "principal": principal}
        return run(self.adocuments(source, filters=filters, **options))

    async def adocuments(
        self,
        source: str,
        *,
        filters: FilterLike = None,
        order_by: OrderBy = (),
        limit: int = 100,
        offset: int = 0,
        principal: Principal | None = None,
    ) -> list[SourceDocument]:
        """List documents, a page at a time; see ``documents``."""
        _check(limit=limit, offset=offset)
        work = partial(list_documents, order=sort_key(order_by), limit=limit, offset=offset)
        return await self._over(source, work, filters, principal)

    async def _over(
        self,
        source: str,
        work: Callable[[Iterator[MetadataRow]], T],
        filters: FilterLike,
        principal: Principal | None,
    ) -> T:
        if source not in self.sources:
            raise InvalidRequestError(f"no source is named {source!r}; there are: {', '.join(self.sources)}")
        standing, seconds = self._standing()
        caller, asking = all_of(standing, to_tree(filters)), self._resolve_principal(principal)
        deadline = deadline_after(seconds)
        return await arun(over_metadata(self.sources[source], work, caller, principal=asking, deadline=deadline))


def _check(*, limit: int = 1, offset: int = 0, hits: int = 0, per: str = "document") -> None:
    numbers: tuple[tuple[str, Any, int], ...] = (("limit", limit, 1), ("offset", offset, 0), ("hits", hits, 0))
    for name, value, least in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidRequestError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if per not in get_args(Per):
        raise InvalidRequestError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
