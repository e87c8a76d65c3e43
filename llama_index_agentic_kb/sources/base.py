"""A knowledge source: one thing that can be searched, its fields, its filters, and how its calls are made.

This is the one place where the effective filter of a search is computed (mandatory AND caller AND planner); each
returned node is checked against it again (``sources.search``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters
from pydantic_core import to_jsonable_python

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, InvalidRequestError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, CallProgress, Health, Resilience, ResilientCalls
from llama_index_agentic_kb.schema import FilterNode, Principal, SourceData, all_of
from llama_index_agentic_kb.search.lexical import LexicalSearch
from llama_index_agentic_kb.sources.filters import FilterField, FilterLike, conditions, declared_fields, lower, to_tree
from llama_index_agentic_kb.sources.index import index_retriever, refusal, traits_of
from llama_index_agentic_kb.sources.lexical import lexical_for
from llama_index_agentic_kb.sources.search import PreparedSource, bounded, own_recursion, search_source

RetrieverFactory: TypeAlias = Callable[[MetadataFilters | None], BaseRetriever]
MetadataReader: TypeAlias = Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]
"""Returns the document's id and the metadata of each chunk of a source, a document's chunks one after the other."""

DEFAULT_RESILIENCE: Final = Resilience()

_INTERNAL: Final = "agentic_kb"
"""The key of our provenance marks; it and keys that begin with "_" are no fields of a document."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata keys of a source's documents.

    Args:
        title: Of the title; the file name stands in for a missing one.
        content: Of the content to cite; None is the node's text.
        url: Of the URL.
        key: Of the document's key; None is the source document's id.
        terms: Of the document's terms, one key or several; None shows none.
    """

    title: str = "title"
    content: str | None = None
    url: str = "url"
    key: str | None = None
    terms: str | Sequence[str] | None = None

    def data(self, node: NodeWithScore, permissions: Permissions | None = None) -> SourceData:
        """Return a node's document under uniform keys, without those that ``permissions`` declares."""
        inner = node.node
        metadata = inner.metadata
        content = metadata.get(self.content) if self.content else None
        key = metadata.get(self.key) if self.key else None
        if key is None or key == "":
            key = inner.ref_doc_id or inner.node_id
        title = metadata.get(self.title) or metadata.get("file_name") or key
        url = metadata.get(self.url)
        terms: list[str] = []
        for name in [self.terms] if isinstance(self.terms, str) else self.terms or ():
            value = metadata.get(name)
            terms += map(str, value) if isinstance(value, (list, tuple)) else [str(value)] if value else []
        shown = metadata if permissions is None else permissions.without(metadata)
        return SourceData(
            doc_key=without_surrogates(str(key)),
            title=without_surrogates(str(title)),
            content=str(content) if content else inner.get_content(metadata_mode=MetadataMode.NONE),
            url=str(url) if url else None,
            terms=", ".join(terms) or None,
            metadata={
                name: value if type(value) in (int, bool) else _as_json(value)
                for name, value in shown.items()
                if not name.startswith("_") and name != _INTERNAL
            },
        )


def _as_json(value: object) -> Any:
    """Return a value of the metadata as JSON has it, without lone surrogates; what JSON does not have as text."""
    if isinstance(value, str):
        return without_surrogates(value)
    try:
        made = to_jsonable_python(value, fallback=str, inf_nan_mode="null")
        text = json.dumps(made, ensure_ascii=False)
    except ValueError:  # it holds itself, or bytes that are no text
        return without_surrogates(str(value))
    clean = without_surrogates(text)
    return made if clean is text else json.loads(clean)


class KnowledgeSource(NotPickled):
    """Something to search: an index, a retriever, or a function from filters to a retriever.

    Args:
        name: Unique in a knowledge base. Planner, activity and references call the source by it.
        description: What is in it, for the planner to choose by.
        index: Any LlamaIndex index. Its retriever is made anew for each effective filter.
        retriever: Any LlamaIndex retriever. It can't take filters: a search under one is denied.
        retriever_factory: Takes ``MetadataFilters`` or None and returns a retriever that applies them; called for each
            search.
        retriever_kwargs: Further arguments of the index's ``as_retriever`` (``vector_store_query_mode``, ...); its
            ``filters`` join the mandatory filter, its ``similarity_top_k`` stands in for this class's own.
        filters: The mandatory filter. No request, plan or parameter can widen it.
        permissions: The metadata fields that say who may see a document. Each request then needs a ``Principal``, and
            finds what that one may see; without one the source is denied.
        filterable: The metadata fields that a planner may filter on, by name; None lets it make no filters.
        metadata_reader: Reads the metadata of what the source holds, for facets and lists; None reads them from the
            index where it keeps its nodes.
        fields: The metadata keys of its documents' title, URL, ...
        weight: How much its results count in fusion beside those of others. Above 0. Default 1.
        similarity_top_k: Documents of each search; None is the effort's own number.
        resilience: Its timeout, concurrency, retries and circuit breaker, and how long it is waited for when the
            others have answered.
        native_async: Whether ``aretrieve`` really awaits; None finds out as far as it can. A source that blocks the
            event loop in its async method should be given False. An async-only retriever raises NotImplementedError
            from ``_retrieve``: sync calls then take its async way.
        hybrid: Whether each search asks a lexical index (BM25) beside the source, with a ranked list of its own: one
            that is given here (it has to apply filters; what it returns is checked again), or one that is made in
            memory (``sources.lexical``). None makes one where that is cheap, True demands it, False forgoes it.

    Raises:
        ConfigurationError: Not exactly one of index, retriever and retriever_factory is given, an argument is unusable,
            or ``hybrid`` is True where no lexical index can be made.
    """

    kind = "searchIndex"
    """The ``type`` of its references and activity records."""

    def __init__(
        self,
        name: str,
        description: str = "",
        *,
        index: BaseIndex[Any] | None = None,
        retriever: BaseRetriever | None = None,
        retriever_factory: RetrieverFactory | None = None,
        retriever_kwargs: Mapping[str, Any] | None = None,
        filters: FilterLike = None,
        permissions: Permissions | None = None,
        filterable: Mapping[str, FilterField] | None = None,
        metadata_reader: MetadataReader | None = None,
        fields: Fields = Fields(),
        weight: float = 1.0,
        similarity_top_k: int | None = None,
        resilience: Resilience = DEFAULT_RESILIENCE,
        native_async: bool | None = None,
        hybrid: bool | LexicalSearch | None = None,
    ) -> None:
        further = dict(retriever_kwargs or {})
        similarity_top_k = similarity_top_k or further.pop("similarity_top_k", None)
        if not name.strip():
            raise ConfigurationError("a source's name must not be empty")
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigurationError(f"source {name!r}: weight must be above 0, got {weight}")
        if similarity_top_k is not None and similarity_top_k <= 0:
            raise ConfigurationError(f"source {name!r}: similarity_top_k must be above 0, got {similarity_top_k}")
        if sum(over is not None for over in (index, retriever, retriever_factory)) != 1:
            raise ConfigurationError(f"source {name!r}: give exactly one of index, retriever and retriever_factory")
        kind = type(permissions).__name__
        if not isinstance(permissions, Permissions | None):
            raise ConfigurationError(f"source {name!r}: permissions: expected Permissions, got {kind}")
        self.name = name
        self.description = description
        self.mandatory = all_of(to_tree(filters), to_tree(further.pop("filters", None)))
        self.permissions = permissions
        self.filterable = declared_fields(name, filterable)
        hidden = [key for key in self.filterable if permissions is not None and permissions.hides(key)]
        if hidden:
            raise ConfigurationError(f"source {name!r}: filterable: {hidden[0]!r} says whom documents are shared with")
        self.metadata_reader = metadata_reader
        self.fields = fields
        self.weight = weight
        self.similarity_top_k = similarity_top_k
        self.resilience = resilience
        self.index = index
        self._retriever = retriever
        self._factory = retriever_factory
        self._retriever_kwargs = further
        self._native_async = native_async
        self._calls = ResilientCalls(f"source {name!r}", resilience)
        unretried = replace(resilience, retries=NO_RETRIES)
        self._lexical_calls = ResilientCalls(f"lexical search of source {name!r}", unretried)
        self._lexical = lexical_for(name, index, hybrid=hybrid, retriever_kwargs=further)

    def __repr__(self) -> str:
        """Return the source's name and what it is over."""
        over = self.index or self._retriever or self._factory
        return f"{type(self).__name__}({self.name!r}, {type(over).__name__})"

    # -- filters ---------------------------------------------------------------------------------------------------

    def effective_filter(
        self, caller: FilterNode | None = None, planner: FilterNode | None = None
    ) -> FilterNode | None:
        """Return the filter of a search: mandatory AND caller AND planner. None where none is set."""
        return all_of(self.mandatory, caller, planner)

    def permitted(self, principal: Principal | None) -> FilterNode | None:
        """Return the filter of what a principal may see; None where the source has no permissions declared.

        Raises:
            DeniedError: It has, and there is no principal, or one that lacks what they ask for.
        """
        return None if self.permissions is None else self.permissions.filter_for(principal)

    def refuse_hidden(self, filters: FilterNode | None) -> None:
        """Raise where a caller's filter names what says whom else documents are shared with.

        Raises:
            InvalidRequestError: It does: by counting what passes, a caller could find out.
        """
        if filters is None or self.permissions is None:
            return
        for condition in conditions(filters):
            if self.permissions.hides(condition.key):
                raise InvalidRequestError(
                    f"source {self.name!r}: {condition.key!r} says whom documents are shared with, and can't be "
                    "filtered on"
                )

    # -- health ----------------------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """How the source stands: searches at work, waiting and abandoned, and the state of its circuit breaker."""
        return self._calls.health

    @property
    def usual_seconds(self) -> float | None:
        """How long its last answers took, the middle one; None before the first."""
        return self._calls.median_seconds

    # -- searching -------------------------------------------------------------------------------------------------

    @property
    def has_factory(self) -> bool:
        """Whether ``prepare`` calls the user's code, which may take its time."""
        return self._factory is not None

    def prepared(self, filters: FilterNode | None, top_k: int) -> PreparedSource:
        """Return what searches under an effective filter (``sources.search``); not for a source with a factory.

        Args:
            filters: What ``effective_filter`` returned.
            top_k: Documents of a search, unless the source has a number of its own.

        Raises:
            DeniedError: The filter can't be applied to this source.
        """
        reason = None if filters is None else "a plain retriever can't take filters; use retriever_factory"
        if self.index is not None:
            reason = refusal(self.index, filters)
        if reason is not None:
            raise DeniedError(f"source {self.name!r} was not searched: its filter can't be applied ({reason})")
        if self.index is not None:
            made = index_retriever(self.index, filters, self.similarity_top_k or top_k, self._retriever_kwargs)
            return self._prepared(own_recursion(made, self.name), filters)
        assert self._retriever is not None
        return self._prepared(bounded(self._retriever, self.name), filters)

    async def prepare(
        self, filters: FilterNode | None, top_k: int, progress: CallProgress | None = None
    ) -> PreparedSource:
        """Return what searches under an effective filter, made by the factory where there is one; see ``prepared``.

        Args:
            filters: What ``effective_filter`` returned.
            top_k: Documents of a search, unless the source has a number of its own.
            progress: Notes a factory's calls.

        Raises:
            DeniedError: The filter can't be applied to this source.
            DeadlineExceededError: The factory did not return in time.
            SourceUnavailableError: The factory was not called: it failed too often lately, or too many wait for it.
        """
        if self._factory is None:
            return self.prepared(filters, top_k)
        make = partial(self._factory, None if filters is None else lower(filters))
        call = Call(sync=make, what=f"retriever factory of source {self.name!r}")
        return self._prepared(bounded(await self._calls.call(call, progress), self.name), filters)

    def _prepared(self, retriever: BaseRetriever, filters: FilterNode | None) -> PreparedSource:
        traits = traits_of(retriever, self._native_async)
        # A retriever that turns out to search in a way of its own is left to it.
        lexical = self._lexical if self.index is None or traits.kind == "dense" else None
        calls, private = (self._calls, self._lexical_calls), self.permissions is not None
        return PreparedSource(self.name, retriever, traits, filters, *calls, lexical, is_private=private)

    async def warm_up(self) -> None:
        """Load what the first search would have to load: embedding model and store. What fails is left to it."""
        if self.index is None or refusal(self.index, self.mandatory) is not None:
            return
        prepared, bundle = self.prepared(self.mandatory, 1), QueryBundle("warm up")
        model = prepared.traits.embed_model

        async def embedded() -> QueryBundle:
            if model is not None:
                warm = partial(model.get_query_embedding, bundle.query_str)
                bundle.embedding = await self._calls.bulkhead.call(Call(sync=warm, what="embedding model"))
            return bundle

        await search_source(prepared, bundle.query_str, embedded, limit=1, progress=CallProgress())

    def source_data(self, node: NodeWithScore) -> SourceData:
        """Return a node's document under uniform keys, without whom it is shared with."""
        return self.fields.data(node, self.permissions)
