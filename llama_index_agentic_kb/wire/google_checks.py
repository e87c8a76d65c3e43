"""Google's CheckGrounding and Rank (Discovery Engine v1): request parsers and response encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llama_index_agentic_kb._text import byte_offsets
from llama_index_agentic_kb.errors import InvalidAnswerError, InvalidRequestError
from llama_index_agentic_kb.schema.answer import ledger_supports
from llama_index_agentic_kb.schema.grounding import (
    CITATION_THRESHOLD,
    MAX_ANSWER_TOKENS,
    Fact,
    GroundingLedger,
    GroundingQuery,
    RankQuery,
    RankRecord,
    answer_tokens,
)
from llama_index_agentic_kb.wire._proto import Fields, read, write
from llama_index_agentic_kb.wire.google_names import check_config_name

DEFAULT_RANKER: Final = "semantic-ranker-512@latest"


def decode_check_grounding(body: object, *, grounding_config: str | None = None) -> GroundingQuery:
    """Parse a request of ``:check``; raise ``InvalidRequestError`` if invalid or beyond Google's limits."""
    sent = read("CheckGroundingRequest", body)
    if name := grounding_config or sent.grounding_config:
        check_config_name(name, "groundingConfig")
    if not sent.answer_candidate.strip():
        raise InvalidRequestError("answerCandidate: an answer to check is needed")
    tokens = answer_tokens(sent.answer_candidate)
    if tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequestError(f"answerCandidate: {tokens} tokens; at most {MAX_ANSWER_TOKENS} are checked")
    spec = sent.grounding_spec
    return GroundingQuery(
        answer=sent.answer_candidate,
        facts=[Fact(text=fact.fact_text, attributes=dict(fact.attributes)) for fact in sent.facts],
        citation_threshold=spec.citation_threshold if spec.HasField("citation_threshold") else CITATION_THRESHOLD,
        claim_scores=spec.enable_claim_level_score,
    )


def encode_check_grounding(query: GroundingQuery, ledger: GroundingLedger) -> Fields:
    """Return the response of ``:check`` as JSON data; a support's ``reference_id`` is the index of the fact.

    Raises ``InvalidAnswerError`` if the answer does not contain a claim's text at the claim's position.
    """
    facts = [str(index) for index in range(len(query.facts))]
    supports = ledger_supports(ledger, facts, threshold=query.citation_threshold)
    chunks: dict[tuple[int, str], int] = {}
    offsets = byte_offsets(query.answer)
    claims = []
    for position, (claim, support) in enumerate(zip(ledger.claims, supports, strict=True)):
        if claim.span.of(query.answer) != claim.text:
            raise InvalidAnswerError(f"claims[{position}].startPos: the answer does not say {claim.text[:60]!r} there")
        quotes = {one.reference_id: one.quote for one in reversed(claim.supports)}
        cited = [(source, quotes[str(source)]) for source in support.sources]
        claims.append(
            {
                "claimText": claim.text,
                "startPos": offsets[claim.span.start],
                "endPos": offsets[claim.span.end],
                "citationIndices": [chunks.setdefault(chunk, len(chunks)) for chunk in cited],
                "groundingCheckRequired": claim.check_required,
                "score": claim.score if query.claim_scores else None,
            }
        )
    cited_chunks = [{"chunkText": quote, "source": str(source)} for source, quote in chunks]
    fields = {"citedChunks": cited_chunks, "claims": claims, "supportScore": ledger.grounding_score}
    return write("CheckGroundingResponse", fields)


def decode_rank(body: object, *, ranking_config: str | None = None) -> RankQuery:
    """Parse a request of ``:rank``; raise ``InvalidRequestError`` if it is invalid, or has no records or empty ones."""
    sent = read("RankRequest", body)
    if name := ranking_config or sent.ranking_config:
        check_config_name(name, "rankingConfig")
    for position, record in enumerate(sent.records):
        if not record.title and not record.content:
            raise InvalidRequestError(f"records.{position}: a title or content is needed")
    if not sent.records:
        raise InvalidRequestError("records: records to rank are needed")
    return RankQuery(
        query=sent.query,
        records=[RankRecord(id=one.id, title=one.title, content=one.content) for one in sent.records],
        top_n=sent.top_n or None,
        model=sent.model or DEFAULT_RANKER,
        ids_only=sent.ignore_record_details_in_response,
    )


def encode_rank(query: RankQuery, records: Sequence[RankRecord]) -> Fields:
    """Return the response of ``:rank`` as JSON data; ``records`` have their scores, best first (``grounding.rank``)."""
    shown = {"id", "score"} if query.ids_only else {"id", "score", "title", "content"}
    return write("RankResponse", {"records": [one.model_dump(include=shown) for one in records[: query.top_n]]})
