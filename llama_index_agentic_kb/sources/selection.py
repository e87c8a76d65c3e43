"""Which sources a request may search, and what each is asked to keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema import FilterNode, RetrievalRequest, SourceParams, all_of, parse_odata
from llama_index_agentic_kb.sources.base import KnowledgeSource

__all__ = ["SelectedSource", "as_source", "by_name", "select"]


@dataclass(frozen=True, slots=True)
class SelectedSource:
    """A source that a request may search, with what the request says about it."""

    source: KnowledgeSource
    params: SourceParams
    filters: FilterNode | None
    """The effective filter, before any planner's."""
    calibrated: bool = False
    """Whether a calibrated reranker scores its documents."""
    caller: FilterNode | None = None
    """What the caller and the request add to the source's mandatory filter."""

    @property
    def always(self) -> bool:
        """Whether each sub-query goes to it, whatever the planner chose."""
        return self.source.always_query or self.params.always_query_source

    def filters_for(self, planner: FilterNode | None) -> FilterNode | None:
        """Give the effective filter of a sub-query: mandatory AND caller AND planner."""
        return self.filters if planner is None else self.source.effective_filter(self.caller, planner)

    @property
    def warning(self) -> str | None:
        """Which of its parameters are not acted on."""
        ignored = [*self.params.ignored]
        if self.params.reranker_threshold is not None and not self.calibrated:
            ignored.append("rerankerThreshold (no calibrated reranker scores this source)")
        return f"ignored parameters: {', '.join(ignored)}" if ignored else None


def select(
    sources: Mapping[str, KnowledgeSource],
    request: RetrievalRequest,
    filters: FilterNode | None,
    *,
    calibrated: bool = False,
) -> dict[str, SelectedSource]:
    """Give the sources that a request allows, by name, with the effective filter of each.

    Args:
        sources: All sources, in declaration order.
        request: Its ``knowledgeSourceParams`` configure sources and may rule them out.
        filters: A caller's filter for every source.
        calibrated: Whether a calibrated reranker scores what they find.

    Raises:
        InvalidRequestError: A parameter names no source, or the wrong kind, or has a ``filterAddOn`` that is no OData
            filter, or no source is left.
    """
    for params in request.knowledge_source_params:
        _check(params, sources)
    selected = {}
    for name, source in sources.items():
        params = request.params_for(name)
        caller = all_of(filters, params.filters, _filter_add_on(params))
        if not params.never_query_source:
            selected[name] = SelectedSource(source, params, source.effective_filter(caller), calibrated, caller)
    if not selected:
        raise InvalidRequestError("knowledgeSourceParams: neverQuerySource leaves no source to search")
    return selected


def _filter_add_on(params: SourceParams) -> FilterNode | None:
    if params.filter_add_on is None:
        return None
    try:
        return parse_odata(params.filter_add_on)
    except InvalidRequestError as error:
        where = f"knowledgeSourceParams[{params.knowledge_source_name}].filterAddOn"
        raise InvalidRequestError(f"{where}: {error}") from error


def _check(params: SourceParams, sources: Mapping[str, KnowledgeSource]) -> None:
    name = params.knowledge_source_name
    if name not in sources:
        raise InvalidRequestError(
            f"knowledgeSourceParams: no source is named {name!r}; there are: {', '.join(sources)}"
        )
    if params.kind is not None and params.kind != sources[name].kind:
        raise InvalidRequestError(
            f"knowledgeSourceParams: {name!r} is of kind {sources[name].kind!r}, not {params.kind!r}"
        )


def by_name(sources: Sequence[KnowledgeSource]) -> dict[str, KnowledgeSource]:
    """Give sources by name, in declaration order.

    Raises:
        ConfigurationError: There is none, one is no source, or two have one name.
    """
    if not sources:
        raise ConfigurationError("sources: give at least one KnowledgeSource")
    for source in sources:
        if not isinstance(source, KnowledgeSource):
            raise ConfigurationError(
                f"sources: expected KnowledgeSource, got {type(source).__name__}; "
                "from_defaults takes indexes and retrievers"
            )
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"sources: {', '.join(twice)} is given twice; names must differ")
    return {source.name: source for source in sources}


def as_source(one: Any, position: int) -> KnowledgeSource:
    """Make a source named ``source_<position>`` of an index or a retriever; a source is itself."""
    name = f"source_{position}"
    if isinstance(one, KnowledgeSource):
        return one
    if isinstance(one, BaseIndex):
        return KnowledgeSource(name, index=one)
    if isinstance(one, BaseRetriever):
        return KnowledgeSource(name, retriever=one)
    raise ConfigurationError(f"sources: can't search a {type(one).__name__}; give a source, an index or a retriever")
