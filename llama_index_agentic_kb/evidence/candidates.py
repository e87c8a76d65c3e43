"""What searches found: candidates with provenance, ranked lists of them, and the arrangement of the selected ones.

Nodes from sources are never changed: evidence consists of copies with their provenance in the metadata under
``PROVENANCE_KEY``. That key is hidden from language models and embedding models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple, TypeAlias

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeRelationship, NodeWithScore, TextNode

from llama_index_agentic_kb._aio import outside_loop
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import Reference, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, merge_by_score, relative_score_fusion
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey

PROVENANCE_KEY: Final = "agentic_kb"
"""Metadata key of a node's provenance, a dictionary.

    source            name of the source that found the node (the first, if there are several)
    activity          id of that search's activity record
    searches          all searches that found the node: activity, source, sub_query, query, list, rank, score
    best_for          ids of the sub-queries for which the node is the best evidence
    proof             findings that the node supports: step (or "verdict"), finding, and rank in the chain
    reranker_score    score of 0 to 4, if a calibrated reranker scored the node
    source_score      the source's score, if the node's ``score`` is a reranker's
    parts             chunks of a joined node: node_id, start, end (character positions in its text), score
"""

CHUNK_INDEX: Final = "chunk_index"  # metadata key of a chunk's position in its document

MAX_METADATA_VALUE: Final = 100  # maximum number of characters of one metadata value in a prompt


def provenance(node: NodeWithScore) -> JsonObject | None:
    """Return the provenance of a node; None if it has none, as no search found it."""
    mark = node.node.metadata.get(PROVENANCE_KEY)
    return mark if isinstance(mark, dict) else None


def drop_provenance(node: NodeWithScore) -> NodeWithScore:
    """Return a node of the evidence, a copy that a request has made, after removing its provenance in place."""
    if node.node.metadata.pop(PROVENANCE_KEY, None) is not None:
        for keys in (node.node.excluded_llm_metadata_keys, node.node.excluded_embed_metadata_keys):
            if PROVENANCE_KEY in keys:
                keys.remove(PROVENANCE_KEY)
    return node


def shown_metadata(node: NodeWithScore, permissions: Permissions | None, known: Collection[str | None] = ()) -> str:
    """Return the metadata that LlamaIndex shows to a language model (``MetadataMode.LLM``), on one line.

    Permission fields, and values that are ``known`` from the prompt (such as the title), are left out.
    """
    hidden = {PROVENANCE_KEY, CHUNK_INDEX, *node.node.excluded_llm_metadata_keys}
    parts = []
    for key, value in node.node.metadata.items():
        text = " ".join(str(value).split())[:MAX_METADATA_VALUE]
        if key in hidden or key.startswith("_") or not isinstance(value, str | int | float) or not text:
            continue
        if str(value) not in known and not (permissions is not None and permissions.declares(key)):
            parts.append(f"{key}: {text}")
    return "; ".join(parts)


def references(nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]) -> list[Reference]:
    """Return the references of the evidence, by position; sources with ``includeReferences: false`` get none."""
    made = []
    for position, node in enumerate(nodes):
        mark = provenance(node)
        chosen = selected.get(mark["source"]) if mark else None
        if mark is None or chosen is None or not chosen.params.include_references:
            continue
        data = chosen.source.source_data(node)
        data.metadata.pop(PROVENANCE_KEY, None)
        made.append(
            Reference(
                type=chosen.source.kind,
                id=str(position),
                activity_source=mark["activity"],
                knowledge_source_name=chosen.source.name,
                doc_key=data.doc_key,
                title=data.title,
                url=data.url,
                citation_url=data.url,
                node_id=node.node.node_id,
                score=mark.get("source_score", node.score),
                reranker_score=mark.get("reranker_score"),
                source_data=None if chosen.params.include_reference_source_data is False else data,
            )
        )
    return made


# -- candidates -------------------------------------------------------------------------------------------------------

LEXICAL: Final = "lexical"

Fusion: TypeAlias = Callable[[Sequence[Ranked[NodeKey]]], list[Fused[NodeKey]]]
"""A function that fuses ranked lists: ``interleave``, ``reciprocal_rank_fusion`` or a custom one."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A passage that supports a step's finding or a verdict on the evidence, and is therefore ranked first."""

    node_id: str
    step: str  # the id of the supported step, or "verdict"
    finding: str | None = None


@dataclass(slots=True)
class Candidate:
    """A found node with its searches and scores."""

    node: NodeWithScore  # the node as its source returned it
    search: SourceSearch  # the search that found it first
    score: float | None = None  # the highest comparable score from a source; None if there is none
    found: list[tuple[SourceSearch, str, int, float | None]] = field(default_factory=list)
    """All searches that found the node, each with the kind of its list, and the node's rank and score there."""
    best_for: list[str] = field(default_factory=list)  # ids of the sub-queries for which this node is the best evidence
    proof: list[JsonObject] = field(default_factory=list)
    """The findings that the node supports: step, finding, and rank in the chain."""
    reranked: float | None = None
    """The reranked score: the calibrated score of 0 to 4, else the reranker's own; None if not reranked."""
    reranker_score: float | None = None  # the score of 0 to 4; None unless a calibrated reranker scored the node
    unjudged: bool = False  # whether the reranker scored other candidates but not this one

    def evidence(self) -> NodeWithScore:
        """Return a copy of the node with its provenance; its score is the reranker's, else the source's."""
        node, judged, searches = self.node.node, self.reranked is not None or self.unjudged, list[JsonObject]()
        for search, kind, rank, score in self.found:
            asked = {"sub_query": search.sub_query.id, "query": search.sub_query.query}
            where = {"activity": search.number, "source": search.source.name}
            searches.append({**where, **asked, "list": kind, "rank": rank, "score": score})
        mark = {"source": self.search.source.name, "activity": self.search.number, "searches": searches}
        if self.best_for:
            mark["best_for"] = self.best_for
        if self.proof:
            mark["proof"] = self.proof
        if self.reranker_score is not None:
            mark["reranker_score"] = self.reranker_score
        if judged:
            mark["source_score"] = self.score
        copy = node.model_copy(
            update={
                "metadata": {**node.metadata, PROVENANCE_KEY: mark},
                "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, PROVENANCE_KEY],
                "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, PROVENANCE_KEY],
            }
        )
        return NodeWithScore(node=copy, score=self.reranked if judged else self.score)


@dataclass(frozen=True, slots=True)
class CandidateList:
    """The candidate keys of one sub-query, or of one of its searches, best first."""

    sub_query: SubQuery
    searches: Sequence[SourceSearch]
    ranked: Ranked[NodeKey]
    processed: bool = True  # whether the list may be reranked
    judged: bool = False  # whether the list is in a reranker's order


def collect(searches: Sequence[SourceSearch]) -> dict[NodeKey, Candidate]:
    """Return all found nodes without duplicates (by id and text), each with all searches that found it.

    A candidate's score is the highest that a source returned. Beside similarities, BM25 scores do not count, as they
    can't be compared: what only BM25 found has the score None (and ``SimilarityPostprocessor`` drops it).
    """
    found: dict[NodeKey, Candidate] = {}
    for search in searches:
        for ranked in search.lists:
            compares = ranked.kind != LEXICAL or len(search.lists) == 1
            for rank, (key, node) in enumerate(zip(ranked.keys, ranked.nodes, strict=True)):
                score, known = node.score, found.get(key)
                if known is None:
                    known = found[key] = Candidate(node, search)
                known.found.append((search, ranked.kind, rank, score))
                if compares and score is not None and (known.score is None or score > known.score):
                    known.node, known.score = node, score
    return found


def best_of(searches: Sequence[SourceSearch], fusion: Fusion) -> list[Candidate]:
    """Return one sub-query's candidates of all sources, best first; ``fusion`` fuses lists of different corpora."""
    candidates = collect(searches)
    return [candidates[key] for one in lists_by_sub_query(searches, fusion) for key in one.ranked.keys]


def lists_by_sub_query(searches: Sequence[SourceSearch], fusion: Fusion) -> list[CandidateList]:
    """Return one list per sub-query, in the plan's order.

    Searches with comparable dense scores are of one corpus: their dense lists are merged by score, their lexical ones
    interleaved, because BM25 scores depend on the word frequencies of their own index. Both are fused by relative
    scores (``search.fusion`` has the measurement), and the lists of several corpora by ``fusion``.
    """
    by_sub_query: dict[str, dict[Hashable, list[SourceSearch]]] = {}
    for search in searches:
        corpus: Hashable = ("search", search.number)
        for one in reversed(search.lists):
            corpus = corpus if one.scale is None or one.scores is None else one.scale
        by_sub_query.setdefault(search.sub_query.id, {}).setdefault(corpus, []).append(search)
    made = []
    for corpora in by_sub_query.values():
        lists, members = list(map(_corpus_list, corpora.values())), list(chain.from_iterable(corpora.values()))
        if len(lists) == 1:
            fused = Ranked(lists[0].keys, scores=lists[0].scores)
        else:
            with outside_loop():  # a custom function may start its own event loop
                fused = _as_ranked(fusion(lists))
        sub_query = members[0].sub_query
        is_processed = sub_query.origin is not SubQueryOrigin.TOOL  # a reranker can't judge a result by arguments
        made.append(CandidateList(sub_query, members, fused, is_processed))
    return made


def lists_by_search(searches: Sequence[SourceSearch], unprocessed: Collection[str]) -> list[CandidateList]:
    """Return one list per search, to be interleaved; ``unprocessed`` names the sources that must not be reranked."""
    return [
        CandidateList(one.sub_query, [one], Ranked(_corpus_list([one]).keys), one.source.name not in unprocessed)
        for one in searches
    ]


def _corpus_list(searches: Sequence[SourceSearch]) -> Ranked[NodeKey]:
    """Fuse the dense and lexical lists of one corpus; the weight is the highest of the sources with results.

    Lists of one kind are merged first: by score if their scores are comparable, else by interleaving.
    """
    if len(searches) == 1 and len(searches[0].lists) == 1:
        [found] = searches[0].lists
        return Ranked(found.keys, searches[0].source.weight if found.nodes else 1.0, found.scores)
    kinds: dict[Hashable, list[Ranked[NodeKey]]] = {}
    weights = []
    for search in searches:
        for position, found in enumerate(search.lists):
            shared = found.kind == LEXICAL or (found.scale is not None and found.scores is not None)
            key = found.kind if shared else (search.number, position)
            kinds.setdefault(key, []).append(Ranked(found.keys, search.source.weight, found.scores))
            weights += [search.source.weight] if found.nodes else []
    lists = []
    for kind, group in kinds.items():
        one = group[0]
        if len(group) > 1 and kind == LEXICAL:
            one = Ranked(list(map(attrgetter("key"), interleave(group))))
        elif len(group) > 1:
            scored = [list(zip(each.keys, each.scores or (), strict=True)) for each in group]
            best = dict(sorted(chain.from_iterable(scored), key=itemgetter(1)))  # of a key's scores the highest stays
            keys = merge_by_score(scored, list(map(attrgetter("weight"), group)))
            one = Ranked(keys, scores=list(map(best.__getitem__, keys)))
        lists.append(Ranked(one.keys, scores=one.scores))  # the weight is that of the corpus
    fused = lists[0] if len(lists) == 1 else _as_ranked(relative_score_fusion(lists))
    return Ranked(fused.keys, max(weights, default=1.0), fused.scores)


def _as_ranked(fused: Sequence[Fused[NodeKey]]) -> Ranked[NodeKey]:
    return Ranked(list(map(attrgetter("key"), fused)), scores=list(map(attrgetter("score"), fused)))


# -- arrangement ------------------------------------------------------------------------------------------------------

MAX_CHARACTERS: Final = 6_000
"""Maximum number of characters of a joined node: about 1,500 tokens, under a third of the default budget."""

MIN_OVERLAP: Final = 20
"""Minimum number of shared characters for two texts of unknown position to count as overlapping: repeated text is
harmless, lost text is not."""

MAX_SPAN: Final = 120_000
"""Maximum number of characters of its document from which a chunk was made to be joined by its position: a
postprocessor may have shortened its text, but its keys are one per ``MAX_CHARACTERS``."""

MAX_GAP: Final = 2  # maximum number of characters between two adjacent chunks: whitespace that a splitter removed

_Part: TypeAlias = tuple[int, NodeWithScore]  # a node's rank (0 is best) and the node
_Document: TypeAlias = tuple[str, str]  # the source's name and the document's id


class Arrangement(NamedTuple):
    """The selected evidence, and the number of ranked nodes in it: more than its own if neighbours were joined."""

    nodes: list[NodeWithScore]
    used: int


@dataclass(slots=True, eq=False)
class _Piece:
    """The chunks that become one reference, in document order; none if the piece was merged into another."""

    document: _Document
    parts: list[_Part]
    keys: set[Hashable]  # of its chunks, see ``_keys``
    sought: set[Hashable]  # of its first chunk
    number: int = 0  # its place among the pieces

    @property
    def length(self) -> int:
        return sum(len(node.node.get_content()) for _, node in self.parts)


def arrange(
    nodes: Iterable[NodeWithScore], limit: int, *, joining: bool = True, max_per_document: int | None = None
) -> Arrangement:
    """Select at most ``limit`` pieces of evidence from ranked nodes, each a node or several joined neighbours.

    A node whose document already has ``max_per_document`` pieces is moved to the end, unless it is proof or a
    sub-query's best evidence.
    """
    pieces, waiting = _Pieces(), list[_Piece]()
    for part in enumerate(nodes):
        node, mark = part[1].node, provenance(part[1]) or {}
        # a node without a source document counts as its own document
        document = mark.get("source", ""), node.ref_doc_id or f"node {node.node_id}"
        piece = _Piece(document, [part], *(_keys(node) if joining else (set(), set())))
        if not pieces.near.keys().isdisjoint(piece.sought) and pieces.join(piece):
            continue
        is_full = max_per_document is not None and pieces.per_document[document] >= max_per_document
        if is_full and not (mark.get("best_for") or mark.get("proof")):
            waiting.append(piece)
        elif len(pieces.kept) < limit:
            pieces.add(piece)
        else:
            break
    for piece in waiting:
        if len(pieces.kept) < limit and not pieces.join(piece):
            pieces.add(piece)
    made, used = list[NodeWithScore](), 0
    for piece in pieces.kept.values():
        made.append(piece.parts[0][1] if len(piece.parts) == 1 else join(piece.parts))
        used += len(piece.parts)
    return Arrangement(made, used)


def _keys(node: BaseNode) -> tuple[set[Hashable], set[Hashable]]:
    """Return a node's keys, and the keys of which each node that is ``_adjacent`` to it has at least one.

    Chunks of a document are found by their numbers, or by the stretches of the document in which they lie: to seek
    among all of its chunks would be quadratic.
    """
    keys: set[Hashable] = {node.node_id}
    if not node.relationships:
        return keys, keys
    links, number, document = (node.next_node, node.prev_node), node.metadata.get(CHUNK_INDEX), node.ref_doc_id
    for linked in links:
        if linked is not None:
            keys.add(linked.node_id)
    if document is not None and isinstance(number, int):
        keys |= {(document, number), (document, number + 1)}
    span = _span(node)
    if document is None or None not in links or span is None or span[1] - span[0] > MAX_SPAN:
        return keys, keys  # it is not joined to any by its position
    places = range(span[0] // MAX_CHARACTERS, (span[1] + MAX_GAP) // MAX_CHARACTERS + 1)
    numbered, others = set(product(["numbered"], [document], places)), set(product(["others"], [document], places))
    return (keys | numbered, keys | others) if isinstance(number, int) else (keys | others, keys | numbered | others)


@dataclass(slots=True)
class _Pieces:
    """The pieces that were made so far, also by their keys: comparing all would be quadratic."""

    kept: dict[int, _Piece] = field(default_factory=dict)
    made: int = 0  # the number of all pieces, also of those merged into others
    per_document: defaultdict[_Document, int] = field(default_factory=partial(defaultdict, int))
    near: defaultdict[Hashable, set[_Piece]] = field(default_factory=partial(defaultdict, set))

    def add(self, piece: _Piece) -> None:
        """Add a piece at the end."""
        self.made += 1
        piece.number = self.made
        self.kept[piece.number] = piece
        self.per_document[piece.document] += 1
        for key in piece.keys:
            self.near[key].add(piece)

    def join(self, one: _Piece) -> bool:
        """Join a node to adjacent pieces if the length allows (merging two of them); return whether it was joined."""
        after, before = self._beside(one)
        around = sorted(filter(None, (after, before)), key=attrgetter("number"))
        if after and before and after.length + one.length + before.length <= MAX_CHARACTERS:
            better, worse = around
            better.parts, worse.parts = [*after.parts, *one.parts, *before.parts], []
            del self.kept[worse.number]
            self.per_document[worse.document] -= 1
            self._grow(better, one.keys | worse.keys)
            return True
        for piece in around:
            if piece.length + one.length <= MAX_CHARACTERS:
                piece.parts = piece.parts + one.parts if piece is after else one.parts + piece.parts
                self._grow(piece, one.keys)
                return True
        return False

    def _beside(self, one: _Piece) -> tuple[_Piece | None, _Piece | None]:
        """Return the best pieces after which, and before which, a node comes in its document."""
        found = set().union(*(self.near.get(key, ()) for key in one.sought))
        [(_, node)] = one.parts
        best_first = sorted((piece for piece in found if piece.parts), key=attrgetter("number"))
        after = next((piece for piece in best_first if follows(piece.parts[-1][1].node, node.node)), None)
        others = (piece for piece in best_first if piece is not after)
        return after, next((piece for piece in others if follows(node.node, piece.parts[0][1].node)), None)

    def _grow(self, piece: _Piece, keys: Collection[Hashable]) -> None:
        piece.keys.update(keys)
        for key in keys:
            self.near[key].add(piece)


# -- adjacency -----------------------------------------------------------------------------------------------------


def follows(first: BaseNode, second: BaseNode) -> bool:
    """Return whether ``second`` comes directly after ``first`` in their document and can be joined to it.

    Both must be plain text of one source with equal metadata, because a joined node has only one set of metadata (a
    page, an audience). Adjacency is decided by LlamaIndex's links, else by ``chunk_index``, else by positions.
    """
    if first.node_id == second.node_id or not _adjacent(first, second):
        return False
    compared, sources = [], []
    for node in (first, second):
        if not isinstance(node, TextNode) or isinstance(node, IndexNode | ImageNode):
            return False
        compared.append({k: v for k, v in node.metadata.items() if k not in (PROVENANCE_KEY, CHUNK_INDEX)})
        sources.append((node.metadata.get(PROVENANCE_KEY) or {}).get("source"))
    return compared[0] == compared[1] and sources[0] == sources[1]


def _adjacent(first: BaseNode, second: BaseNode) -> bool:
    following, previous = first.next_node, second.prev_node
    if getattr(following, "node_id", None) == second.node_id or getattr(previous, "node_id", None) == first.node_id:
        return True
    if first.ref_doc_id is None or first.ref_doc_id != second.ref_doc_id:
        return False
    one, two = first.metadata.get(CHUNK_INDEX), second.metadata.get(CHUNK_INDEX)
    if isinstance(one, int) and isinstance(two, int):
        return two == one + 1
    start, end = _span(first), _span(second)
    if following is not None or previous is not None or start is None or end is None:  # linked to others, or unknown
        return False
    return start[0] < end[0] <= start[1] + MAX_GAP and start[1] < end[1]


def _span(node: BaseNode) -> tuple[int, int] | None:
    if not isinstance(node, TextNode) or node.start_char_idx is None or node.end_char_idx is None:
        return None
    return node.start_char_idx, node.end_char_idx


# -- joining -------------------------------------------------------------------------------------------------------


def join(parts: Sequence[_Part]) -> NodeWithScore:
    """Return one node made of adjacent chunks in document order, with the id and metadata of the best of them.

    It has no embedding, as none was computed for its text.
    """
    best = min(parts, key=itemgetter(0))[1]
    nodes = list(map(itemgetter(1), parts))
    chunks = list(map(attrgetter("node"), nodes))
    text, spans = _joined_text(chunks)
    places = list(filter(None, map(_span, chunks)))
    is_known = len(places) == len(chunks) and all(one[0] < two[0] for one, two in pairwise(places))
    links = dict(best.node.relationships)  # the links at both ends of the joined node
    for key, end in ((NodeRelationship.PREVIOUS, chunks[0]), (NodeRelationship.NEXT, chunks[-1])):
        links.pop(key, None)
        if key in end.relationships:
            links[key] = end.relationships[key]
    copy = best.node.model_copy(
        update={
            "text": text,
            "embedding": None,
            "metadata": {**best.node.metadata, PROVENANCE_KEY: _joined_provenance(best, nodes, spans)},
            "relationships": links,
            "start_char_idx": places[0][0] if is_known else None,
            "end_char_idx": places[-1][1] if is_known else None,
        }
    )
    return NodeWithScore(node=copy, score=max((node.score for node in nodes if node.score is not None), default=None))


def _joined_text(nodes: Sequence[BaseNode]) -> tuple[str, list[tuple[int, int]]]:
    """Return the combined text of adjacent chunks, and the (start, end) position of each chunk in it."""
    text = nodes[0].get_content()
    spans = [(0, len(text))]
    for before, node in pairwise(nodes):
        own, one, two = node.get_content(), _span(before), _span(node)
        gap = None if one is None or two is None else two[0] - one[1]  # negative if they overlap
        shared = _overlap(before.get_content(), own, gap)
        if not shared and gap != 0:
            text += " " if gap == 1 else "\n"
        start = len(text) - shared
        text += own[shared:]
        spans.append((start, len(text)))
    return text, spans


def _overlap(one: str, two: str, gap: int | None) -> int:
    """Return the length of the overlap between the end of one text and the start of the next."""
    if gap is not None and gap >= 0:
        return 0
    if gap is not None and -gap < len(two) and one.endswith(two[:-gap]):
        return -gap
    longest = min(len(one), len(two) - 1)
    return next((size for size in range(longest, MIN_OVERLAP - 1, -1) if one.endswith(two[:size])), 0)


def _joined_provenance(
    best: NodeWithScore, nodes: Sequence[NodeWithScore], spans: Sequence[tuple[int, int]]
) -> JsonObject:
    marks = [provenance(node) or {} for node in nodes]
    made = dict(provenance(best) or {})
    made["searches"] = _all_of(marks, "searches")
    for key in ("reranker_score", "source_score"):
        values = [mark[key] for mark in marks if mark.get(key) is not None]
        if values:
            made[key] = max(values)
    if served := _all_of(marks, "best_for"):
        made["best_for"] = list(dict.fromkeys(served))
    if proof := _all_of(marks, "proof"):
        made["proof"] = proof
    made["parts"] = [
        {"node_id": node.node.node_id, "start": start, "end": end, "score": node.score}
        for node, (start, end) in zip(nodes, spans, strict=True)
    ]
    return made


def _all_of(marks: Sequence[JsonObject], key: str) -> list[object]:
    return [one for mark in marks for one in mark.get(key, [])]
