"""Selection of the sources that a request may search, with their parameters and effective filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode

from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, InvalidRequestError
from llama_index_agentic_kb.guard.permissions import current_principal
from llama_index_agentic_kb.schema import FilterNode, RetrievalRequest, SourceParams, all_of, matcher, parse_odata
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.shards import ShardedSource


@dataclass(frozen=True, slots=True)
class SelectedSource:
    """A source that a request may search, with the request's parameters for it."""

    source: KnowledgeSource
    params: SourceParams
    filters: FilterNode | None
    """The effective filter without a planner's filter."""
    calibrated: bool = False
    """Whether a calibrated reranker scores its documents."""
    caller: FilterNode | None = None
    """The combined filter of principal, caller and request, without the source's mandatory filter."""
    denied: str | None = None
    """Why the principal may not search the source; None if it may."""
    whole: KnowledgeSource | None = None
    """The source whose shard this is."""

    @property
    def name(self) -> str:
        """The name that plans use."""
        return (self.whole or self.source).name

    def top_k(self, default: int) -> int:
        """Return the number of documents per search: the source's own, else that of its whole, else the default."""
        whole = None if self.whole is None else self.whole.similarity_top_k
        return self.source.similarity_top_k or whole or default

    @property
    def shards(self) -> list[SelectedSource]:
        """The shards of the source, with the same filters, which they share; empty if it has none."""
        if not isinstance(self.source, ShardedSource):
            return []
        return [replace(self, source=shard, whole=self.source) for shard in self.source.shards]

    def filters_for(self, planner: FilterNode | None) -> FilterNode | None:
        """Return the effective filter of a sub-query: mandatory AND caller AND planner."""
        return self.filters if planner is None else self.source.effective_filter(self.caller, planner)

    @property
    def warning(self) -> str | None:
        """A warning that names its ignored parameters; None if there are none."""
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
    """Return the sources that a request allows, by name, with the effective filter of each.

    A source that denies the request's principal (``current_principal``) is marked as denied; the others are searched.

    Args:
        sources: All sources, in declaration order.
        request: The request, whose ``knowledgeSourceParams`` configure sources and may exclude them.
        filters: A caller's filter for every source.
        calibrated: Whether a calibrated reranker scores the results.

    Raises:
        InvalidRequestError: A parameter names an unknown source or the wrong kind, its ``filterAddOn`` is not valid
            OData, its filter uses a permission field, or no source remains.
        DeniedError: The principal may search none of the sources. The error contains the reason for each.
    """
    for params in request.knowledge_source_params:
        name, source = params.knowledge_source_name, sources.get(params.knowledge_source_name)
        if source is None:
            known = ", ".join(sources)
            raise InvalidRequestError(f"knowledgeSourceParams: no source is named {name!r}; there are: {known}")
        if params.kind not in (None, source.kind):
            raise InvalidRequestError(
                f"knowledgeSourceParams: {name!r} is of kind {source.kind!r}, not {params.kind!r}"
            )
    selected = _allowed(sources, request, filters, calibrated=calibrated)
    reasons = {name: chosen.denied for name, chosen in selected.items() if chosen.denied is not None}
    if len(reasons) == len(selected):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        causes = {name: DeniedError(reason) for name, reason in reasons.items()}
        raise DeniedError(f"no source may be searched: {why}", causes)
    return selected


def _allowed(
    sources: Mapping[str, KnowledgeSource], request: RetrievalRequest, filters: FilterNode | None, *, calibrated: bool
) -> dict[str, SelectedSource]:
    principal, selected = current_principal(), {}
    for name, source in sources.items():
        params = request.params_for(name).over(source.params)
        if reason := params.contradiction(request.results_processing):
            raise InvalidRequestError(f"knowledgeSourceParams[{name}]: {reason}")
        permitted, denied = None, None
        try:
            permitted = source.permitted(principal)
        except DeniedError as error:
            denied = str(error)
        try:
            add_on = None if params.filter_add_on is None else parse_odata(params.filter_add_on)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"knowledgeSourceParams[{name}].filterAddOn: {error}") from error
        source.refuse_hidden(all_of(params.filters, add_on))
        caller = all_of(permitted, filters, params.filters, add_on)
        if not params.never_query_source:
            effective = source.effective_filter(caller)
            selected[name] = SelectedSource(source, params, effective, calibrated, caller, denied)
    if not selected:
        raise InvalidRequestError("knowledgeSourceParams: neverQuerySource leaves no source to search")
    return selected


def passing(selected: Mapping[str, SelectedSource], found_by: Mapping[str, str]) -> Callable[[BaseNode], bool]:
    """Return a predicate that checks whether a node returned by a postprocessor may be shown, by its metadata.

    - A node that a search found must pass the effective filter of its source.
    - A node that no search found must pass the effective filter of any source; if some sources have permissions, of
      any source with permissions. The same applies to a node with permission fields of a source without permissions.

    A source without a filter accepts every node.

    Args:
        selected: The selected sources of the request, by name.
        found_by: The source name of each node that a search found, by node ID.
    """
    declared = {name: kept for name, chosen in selected.items() if (kept := chosen.source.permissions) is not None}
    checks: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        name: (lambda _: True) if chosen.filters is None else matcher(chosen.filters)
        for name, chosen in selected.items()
        if chosen.denied is None
    }
    others = [check for name, check in checks.items() if not declared or name in declared]

    def may_be_shown(node: BaseNode) -> bool:
        source = found_by.get(node.node_id, "")
        own = checks.get(source)
        theirs = source not in declared and any(
            kept.declares(key) for kept in declared.values() for key in node.metadata
        )
        asked = others if own is None or theirs else [own]
        return not selected or any(check(node.metadata) for check in asked)

    return may_be_shown


def by_name(sources: Sequence[KnowledgeSource]) -> dict[str, KnowledgeSource]:
    """Return sources by name, in declaration order.

    Raises:
        ConfigurationError: No source is given, an item is not a ``KnowledgeSource``, or two have the same name.
    """
    if not sources:
        raise ConfigurationError("sources: give at least one KnowledgeSource")
    named: dict[str, KnowledgeSource] = {}
    for source in sources:
        if not isinstance(source, KnowledgeSource):
            raise ConfigurationError(
                f"sources: expected KnowledgeSource, got {type(source).__name__}; "
                "from_defaults takes indexes and retrievers"
            )
        named[source.name] = source
    names = Counter(part.name for source in sources for part in (source, *getattr(source, "shards", ())))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(f"sources: {twice[0]} is given twice; names must differ")
    return named


def as_source(given: object, position: int) -> KnowledgeSource:
    """Return an index or a retriever as a source named ``source_<position>``; a source is returned unchanged."""
    name = f"source_{position}"
    if isinstance(given, KnowledgeSource):
        return given
    if isinstance(given, BaseIndex):
        return KnowledgeSource(name, index=given)
    if isinstance(given, BaseRetriever):
        return KnowledgeSource(name, retriever=given)
    raise ConfigurationError(f"sources: can't search a {type(given).__name__}; give a source, an index or a retriever")
