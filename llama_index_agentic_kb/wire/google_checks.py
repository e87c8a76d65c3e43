"""Google's CheckGrounding and Rank (Discovery Engine v1): requests in, a ledger or ranked records out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from llama_index_agentic_kb.errors import InvalidAnswerError, InvalidRequestError
from llama_index_agentic_kb.schema.answer_claims import CITATION_THRESHOLD, ledger_supports
from llama_index_agentic_kb.schema.checks import (
    MAX_ANSWER_TOKENS,
    MAX_FACT_CHARACTERS,
    MAX_FACTS,
    MAX_RECORDS,
    Fact,
    GroundingQuery,
    RankQuery,
    RankRecord,
    answer_tokens,
)
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger
from llama_index_agentic_kb.wire.google_fields import Flag, Int32, Labels, Number, Text, WireMessage, at_most, load
from llama_index_agentic_kb.wire.google_names import parse_config_name
from llama_index_agentic_kb.wire.google_values import Utf8Offsets, clean, float32, message

__all__ = ["decode_check_grounding", "decode_rank", "encode_check_grounding", "encode_rank"]

DEFAULT_RANKER: Final = "semantic-ranker-512@latest"


class _GroundingFact(WireMessage):
    fact_text: Annotated[Text, at_most(MAX_FACT_CHARACTERS)] = ""
    attributes: dict[Text, Text] = Field(default_factory=dict)


class _CheckGroundingSpec(WireMessage):
    citation_threshold: Annotated[Number, Field(ge=0, le=1)] | None = None
    enable_claim_level_score: Flag | None = None


class _CheckGroundingRequest(WireMessage):
    grounding_config: Text = ""
    answer_candidate: Text = ""
    facts: Annotated[list[_GroundingFact], Field(max_length=MAX_FACTS)] = Field(default_factory=list)
    grounding_spec: _CheckGroundingSpec = Field(default_factory=_CheckGroundingSpec)
    user_labels: Labels = Field(default_factory=dict)


class _RankingRecord(WireMessage):
    id: Text = ""
    title: Text = ""
    content: Text = ""
    score: Number = 0.0


class _RankRequest(WireMessage):
    ranking_config: Text = ""
    model: Text = ""
    top_n: Annotated[Int32, Field(ge=0)] = 0
    query: Text = ""
    records: Annotated[list[_RankingRecord], Field(max_length=MAX_RECORDS)] = Field(default_factory=list)
    ignore_record_details_in_response: Flag = False
    user_labels: Labels = Field(default_factory=dict)


def decode_check_grounding(body: Any, *, grounding_config: str | None = None) -> GroundingQuery:
    """Read the request of ``:check``.

    Args:
        body: JSON text, or its data.
        grounding_config: The resource name in the request's path.

    Raises:
        InvalidRequestError: It is no such request, or is beyond Google's limits: 200 facts of 10,000 characters, an
            answer of 4,096 tokens.
    """
    sent = _CheckGroundingRequest.parse(load(body))
    if name := grounding_config or sent.grounding_config:
        parse_config_name(name, "groundingConfig")
    if not sent.answer_candidate.strip():
        raise InvalidRequestError("answerCandidate: an answer to check is needed")
    tokens = answer_tokens(sent.answer_candidate)
    if tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequestError(f"answerCandidate: {tokens} tokens; at most {MAX_ANSWER_TOKENS} are checked")
    threshold = sent.grounding_spec.citation_threshold
    return GroundingQuery(
        answer=sent.answer_candidate,
        facts=[Fact(text=fact.fact_text, attributes=fact.attributes) for fact in sent.facts],
        citation_threshold=CITATION_THRESHOLD if threshold is None else threshold,
        claim_scores=bool(sent.grounding_spec.enable_claim_level_score),
    )


def encode_check_grounding(query: GroundingQuery, ledger: GroundingLedger) -> dict[str, Any]:
    """Give the response of ``:check``.

    Args:
        query: What was asked.
        ledger: The claims of its answer, of ``grounding.check.grounding_ledger``; a support's ``reference_id`` is the
            index of the fact.

    Raises:
        InvalidAnswerError: A claim does not stand in the answer where the ledger says.
    """
    ids = [str(position) for position in range(len(query.facts))]
    supports = ledger_supports(ledger, ids, threshold=query.citation_threshold)
    chunks: dict[tuple[int, str], int] = {}
    offsets = Utf8Offsets(query.answer)
    claims = []
    for position, (claim, support) in enumerate(zip(ledger.claims, supports, strict=True)):
        if claim.span.of(query.answer) != claim.text:
            raise InvalidAnswerError(f"claims[{position}].startPos: the answer does not say {claim.text[:60]!r} there")
        cited = [chunks.setdefault((source, _quote(claim, source)), len(chunks)) for source in support.sources]
        fields = {"claimText": clean(claim.text), "citationIndices": cited}
        present = {
            "startPos": offsets.byte(claim.span.start),
            "endPos": offsets.byte(claim.span.end),
            "groundingCheckRequired": claim.check_required,
            "score": claim.score if query.claim_scores else None,
        }
        claims.append(message(fields, present))
    cited_chunks = [{"chunkText": clean(quote), "source": str(source)} for source, quote in chunks]
    return message({"citedChunks": cited_chunks, "claims": claims}, {"supportScore": float32(ledger.grounding_score)})


def _quote(claim: GroundedClaim, source: int) -> str:
    return next(one.quote for one in claim.supports if one.reference_id == str(source))


def decode_rank(body: Any, *, ranking_config: str | None = None) -> RankQuery:
    """Read the request of ``:rank``.

    Raises:
        InvalidRequestError: It is no such request, has none or more than 200 records, or one of them has neither title
            nor content.
    """
    sent = _RankRequest.parse(load(body))
    if name := ranking_config or sent.ranking_config:
        parse_config_name(name, "rankingConfig")
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


def encode_rank(query: RankQuery, records: Sequence[RankRecord]) -> dict[str, Any]:
    """Give the response of ``:rank``.

    Args:
        query: What was asked.
        records: Its records, best first, with their scores, of ``grounding.rank``.
    """
    return message({"records": [_record(one, details=not query.ids_only) for one in records[: query.top_n]]})


def _record(record: RankRecord, *, details: bool) -> dict[str, Any]:
    fields = {"id": clean(record.id), "score": float32(record.score)}
    told = {"title": clean(record.title), "content": clean(record.content)} if details else {}
    return message({**fields, **told})
