"""The offline scorers: exact features in a logistic model, alone or with the output of the shipped cross-encoder.

The models were trained on labelled claims, and their verdicts measured at a threshold of 0.6 (docs/proof.md). The
package contains the cross-encoder as an int8 ONNX file with its tokenizer and calibration. Their digests are checked
before loading. Nothing is downloaded, and the weights contain no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import normalize, without_surrogates
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import Claim, ClaimScore, Evidence, Rival, verdict_of
from llama_index_agentic_kb.grounding.features import (
    MAX_CLAIM,
    Corpus,
    Premise,
    Reading,
    Window,
    is_negated,
    numbers_of,
    words,
)
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, ConflictKind, Span, Verdict
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language, split_words

WEIGHTS: Final = Path(__file__).parent.parent / "weights"
MAX_TOKENS: Final = 128  # maximum tokens of a pair, as in training
_BATCH: Final = 256  # maximum tokens of a batch, to limit memory; the deadline is checked between batches
_RAREST: Final = 29_000  # first of the 1,000 rarest pieces; they stand for unknown characters, so that these differ
_LOADING: Final = threading.Lock()
_PAIRS: Final = 96  # maximum number of windows that are read in one check, but at least one for each claim
_MOST_WINDOWS: Final = 4  # maximum number of windows read for a claim if the best one is neutral
_WORTHWHILE: Final = 0.75  # minimum share of the best window's coverage at which the next is always read
_CLEAR: Final = 3.0  # minimum margin of a sentence by itself at which its window is not read
_WHOLE: Final = 0.999  # minimum coverage of a window that has all of a claim's terms
_READ: Final = words("english german french spanish italian dutch portuguese danish norwegian swedish finnish russian")
"""Languages whose words, endings and negation the features support."""
_UNREAD: Final = re.compile(  # scripts without spaces, or with endings and negation that the features do not support
    "[\u0530-\u06ff\u0900-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
)
_SHORT: Final = 12
_LONG: Final = 60
"""Maximum sentences of a short passage (``_SHORT``), and minimum sentences of a long document (``_LONG``)."""
_MOSTLY: Final = 0.5
_SAME: Final = 0.5  # minimum coverage at which a window has the same subject as the claim
_LIKELY: Final = 0.5
_LEAST_SHARE: Final = 1e-6
_MISSING_NUMBER: Final = 0.1  # score of a claim in an unsupported language with a number missing from the evidence
_VERBATIM: Final = 0.95
_TELLING: Final = 2  # minimum number of terms of a sentence that makes a statement, unlike "Yes."
_LEAST_VERBATIM: Final = 12
_BEFORE: Final = ("", *".!?。！？:;\n")  # noqa: RUF001 (full width)
_AFTER: Final = ("", *".!?。！？;")  # noqa: RUF001 (full width)
"""Characters that may stand before and after a whole sentence."""
_YEAR: Final = re.compile(r"(?:1[0-9]|20)\d\d")
_SPEAKER: Final = words("i me my we us our you your ich wir sie je nous vous yo nosotros io noi")
_EVIDENCE: Final = words(
    "passage passages source sources document documents evidence context information text texts "
    "quelle quellen dokument dokumente textes fuente fuentes documentos fonti"
)
"""Words with which an answer refers to its evidence."""
_GAP: Final = re.compile(
    r"(?:^(?:however, |but )?|[,;]? (?:but|and|though|although|while|yet) )(?:the|these) "
    r"(?:passage|source|document|text)s? (?:do|does)(?: not|n['\u2019]t) "
    r"(?:say|state|mention|name|tell|specify|indicate)\b(?!.*(?:[;,:(\u2013\u2014]|"
    r"\b(?:but|yet|although|though|because|while|and (?:it|he|she|they|the|this|that|there))\b))"
    r"(?P<asks> (?:(?:from|to|in|at|by|for|with|of|on|until|since) )?(?:wh|how|if))?",
    re.IGNORECASE,
)
"""A sentence, or its last clause, that says only what the evidence lacks; a clause with "that" would state more."""


Row = tuple[float, float, float]  # the logits of "contradicted", "neutral" and "supported"


class LexicalScorer:
    """Scores claims by exact features and a logistic model, offline; the same claims always get the same scores.

    It detects whether a claim's terms are in the evidence. It can't check who does what to whom, nor paraphrases that
    share few words: such claims are at best partially supported, never contradicted. It works best for English. In
    other European languages, claims need all their terms; claims in unsupported languages are ``notCheckable``.
    """

    name = "lexical"

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims on a thread; see ``ClaimScorer``."""
        work = partial(self.judge, list(map(attrgetter("said"), claims)), premises, deadline=deadline)
        return await Call(sync=work, deadline=deadline, what=f"scorer {self.name}")

    def judge(
        self, claims: Sequence[str], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Return the scores of claims, computed in the calling thread; repeated claims are scored once."""
        claims = list(map(_without_gap, claims))
        corpus = Corpus(premises)
        plain = list(map(normalize, corpus.texts))
        known: dict[str, ClaimScore] = {}
        asked: dict[str, Reading] = {}
        for claim in dict.fromkeys(claims):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"scorer {self.name}: late after {len(known.keys() | asked)} claims")
            exact = _exact(claim[:MAX_CLAIM], corpus, plain)
            if exact is not None:
                known[claim] = exact
            if exact is None or (exact.evidence and len(plain) > 1):  # other passages may contradict it
                asked[claim] = corpus.read(claim)
        rows = self._rows(asked, deadline)
        for claim, reading in asked.items():
            own = rows.get(claim)
            score = _by_features(claim, reading, corpus) if own is None else _by_model(claim, reading, own, corpus)
            if claim in known:
                _add_others(known[claim], score)
            elif _speaks_of_the_answer(claim, reading, score):
                known[claim] = ClaimScore(None, Verdict.NOT_CHECKABLE)
            else:
                known[claim] = score
        return [known[claim] for claim in claims]

    def _rows(self, asked: Mapping[str, Reading], deadline: float | None) -> dict[str, list[Row]]:
        """Return a model's logits for the windows of the claims that it reads: here of none."""
        del asked, deadline
        return {}


class SmallScorer(LexicalScorer):
    """Scores English claims by the features and ``model``, by default the shipped one, and others by the features."""

    name = "small"

    def __init__(self, model: SmallModel | None = None) -> None:
        self.model = model

    def _rows(self, asked: Mapping[str, Reading], deadline: float | None) -> dict[str, list[Row]]:
        english = {claim: reading for claim, reading in asked.items() if not _is_foreign(claim, reading)}
        with _LOADING:  # ``cache`` alone would load the model once for each thread that waits for it
            model = self.model or _shipped() if english else None
        return read_windows(model, english, deadline) if model else {}


def _add_others(exact: ClaimScore, score: ClaimScore) -> None:
    """Add other passages to the score of a claim that one passage has verbatim."""
    place = exact.evidence[0].premise
    borne = score.evidence if score.verdict is Verdict.SUPPORTED else []
    exact.evidence += [one for one in borne if one.premise != place]
    exact.rivals += [one for one in score.rivals if one.premise != place]


def read_windows(
    model: SmallModel, asked: Mapping[str, Reading], deadline: float | None = None
) -> dict[str, list[Row]]:
    """Return a model's logits for each claim's windows, best first.

    Of the best window the sentence with nearly all of the claim's terms is read first, and the whole only if that does
    not clearly support the claim; the better reading counts.
    """
    room, read = min(_MOST_WINDOWS, max(1, _PAIRS // max(1, len(asked)))), partial(_logits, model, deadline)
    found = read({claim: _first_texts(reading.windows[:room]) for claim, reading in asked.items()})
    unclear = [one for one, rows in found.items() if rows and asked[one].windows[0].alone and margin(rows[0]) < _CLEAR]
    for claim, [row] in read({claim: [asked[claim].windows[0].text] for claim in unclear}).items():
        found[claim][0] = max(found[claim][0], row, key=margin)
    # If the best window is neutral, another window may contain a paraphrase.
    neutral = [claim for claim, rows in found.items() if rows and rows[0][1] >= max(rows[0][0], rows[0][2])]
    rest = read({claim: [one.text for one in asked[claim].windows[len(found[claim]) : room]] for claim in neutral})
    return {claim: [*rows, *rest.get(claim, ())] for claim, rows in found.items()}


def _first_texts(windows: Sequence[Window]) -> list[str]:
    """Return the text of the best window, and that of the next if it has nearly as many of the claim's terms."""
    near = (one.text for one in windows[1:2] if one.coverage >= windows[0].coverage * _WORTHWHILE)
    return [*(one.alone or one.text for one in windows[:1]), *near]


def _logits(model: SmallModel, deadline: float | None, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Row]]:
    pairs = [(text, claim) for claim, texts in wanted.items() for text in texts]
    rows = iter(model.logits(pairs, deadline=deadline) if pairs else ())
    return {claim: list(islice(rows, len(texts))) for claim, texts in wanted.items()}


def bearing_spans(claim: str, premise: Premise) -> tuple[Span, ...]:
    """Return the sentences of a passage that have most of a claim's words, best first."""
    windows = Corpus([premise]).read(claim).windows
    return windows[0].spans if windows else ()


def nearest_premises(claims: Sequence[str], premises: Sequence[Premise], most: int) -> list[list[int]]:
    """Return, for each claim, the indices of the passages with most of its words."""
    if len(premises) <= most:
        return [list(range(len(premises))) for _ in claims]
    corpus = Corpus(premises)
    found = [[window.passage for window in corpus.read(claim).windows[:most]] for claim in claims]
    return [numbers or list(range(most)) for numbers in found]


# -- without a model ---------------------------------------------------------------------------------------------------


def _exact(claim: str, corpus: Corpus, plain: Sequence[str]) -> ClaimScore | None:
    """Return the score of a claim whose language is not read, or that a text of ``plain`` has verbatim; else None."""
    asked = normalize(claim).rstrip(" .。!！")  # noqa: RUF001 (full width)
    holder = _holder(asked, plain) if len(asked) >= _LEAST_VERBATIM or _UNREAD.search(asked) else None
    if holder is not None:
        spans = next((one.spans for one in corpus.read(claim).windows if one.passage == holder), ())
        return ClaimScore(_VERBATIM, Verdict.SUPPORTED, [Evidence(holder, _VERBATIM, spans)])
    letters = sum(map(str.isalpha, claim))
    is_read = len(_UNREAD.findall(claim)) * 4 <= letters and detect_language(split_words(claim)) in _READ
    if is_read and corpus.language in _READ:
        return None
    there = numbers_of(unicodedata.normalize("NFKC", "\n".join(corpus.texts)))
    if numbers_of(unicodedata.normalize("NFKC", claim)) - there:
        return ClaimScore(_MISSING_NUMBER, verdict_of(_MISSING_NUMBER))
    return ClaimScore(None, Verdict.NOT_CHECKABLE)


def _holder(asked: str, plain: Sequence[str]) -> int | None:
    """Return the place of the first text that has a sentence verbatim, as a whole one: the rest might negate it."""
    for number, text in enumerate(plain):
        before, found, after = text.partition(asked)
        if found and before.rstrip()[-1:] in _BEFORE and after.lstrip()[:1] in _AFTER:
            return number
    return None


def _without_gap(claim: str) -> str:
    """Return a claim without a last clause that says only what the evidence lacks; empty if it says nothing else."""
    gap = _GAP.search(claim[:MAX_CLAIM])
    if gap is None or (gap.start() and not gap["asks"]):
        return claim
    return f"{claim[: gap.start()]}." if gap.start() else ""


def _speaks_of_the_answer(claim: str, reading: Reading, score: ClaimScore) -> bool:
    """Return whether a claim states nothing ("Yes."), or is unsupported and about the answer ("Here you are.")."""
    if reading.telling < _TELLING and not (reading.named or (reading.telling and reading.features[0])):
        return True
    if score.score is None or score.score >= CITATION_THRESHOLD or reading.named:
        return False
    said = frozenset(split_words(claim))
    return bool(said & _SPEAKER or (is_negated(claim) and said & _EVIDENCE)) or reading.telling < _TELLING


def _is_foreign(claim: str, reading: Reading) -> bool:
    """Return whether a claim or its best window is in another language than English."""
    shown = reading.windows[0].text if reading.windows else ""
    return detect_language(split_words(f"{claim} {claim} {shown}")) != DEFAULT_LANGUAGE


def _by_features(claim: str, reading: Reading, corpus: Corpus) -> ClaimScore:
    score = _sigmoid(_logit("lexical", reading.features))
    if _is_foreign(claim, reading):
        differs = reading.features[-1] or not reading.windows or reading.windows[0].coverage < _WHOLE
        spoken = detect_language(split_words(claim))
        if (score >= CITATION_THRESHOLD and differs) or (score < CITATION_THRESHOLD and spoken != corpus.language):
            return ClaimScore(None, Verdict.NOT_CHECKABLE)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score))


# -- with a model ------------------------------------------------------------------------------------------------------


def margin(row: Row) -> float:
    """Return the margin of "supported" over "contradicted" in a model's logits; it chooses among windows."""
    return row[2] - row[0]


def _by_model(claim: str, reading: Reading, rows: Sequence[Row], corpus: Corpus) -> ClaimScore:
    """Return the score of a claim from the model's logits for its windows, best first."""
    if not rows:
        return ClaimScore(0.0, verdict_of(0.0))
    best = rows.index(max(rows, key=margin))
    scores, against = [blended(reading, row) for row in rows], denials(reading, rows)
    score, least, asked = scores[best], calibration()["contradicted"], numbers_of(claim)
    shown, rivals = [], []
    for window, strength in zip(reading.windows, against, strict=False):
        if strength >= least:
            shown.append(Evidence(window.passage, strength, window.spans))
        # The same subject without the claim's number is a conflict, not a contradiction.
        elif window.coverage < _SAME or strength < _LIKELY or not asked - numbers_of(window.text):
            continue
        rivals.append(_rival(claim, window, corpus, strength))
    # The window with most of the claim's words must contradict it as well: another may speak of something else.
    if score < CITATION_THRESHOLD and min(against[0], against[best]) >= least:
        return ClaimScore(score, Verdict.CONTRADICTED, shown, rivals)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score, scores), rivals)


def denials(reading: Reading, rows: Sequence[Row]) -> list[float]:
    """Return the probability that each window contradicts a claim; 0 if windows are a small part of their passage."""
    return [softmax(row)[0] if long_document(reading) < _MOSTLY else 0.0 for row in rows]


def support(row: Row) -> float:
    """Return the log odds of "supported" for a row of logits."""
    share = min(max(softmax(row)[2], _LEAST_SHARE), 1 - _LEAST_SHARE)
    return math.log(share / (1 - share))


def blended(reading: Reading, row: Row) -> float:
    """Return the score of a claim from the cross-encoder's logits and the features.

    In a short passage the window contains all the evidence, so the cross-encoder decides. In a long document the
    window is only a part, so features of the whole document count as well.
    """
    share = long_document(reading)
    short = _logit("small", [support(row)])
    return _sigmoid((1 - share) * short + share * _logit("long", [*reading.features, support(row)]))


def long_document(reading: Reading) -> float:
    """Return the degree to which the best window's passage is a long document, 0 to 1."""
    return min(1.0, max(0.0, math.log(max(1, reading.sentences) / _SHORT) / math.log(_LONG / _SHORT)))


def _evidence(reading: Reading, score: float, scores: Sequence[float] = ()) -> list[Evidence]:
    """Return the evidence of all passages, best first; coverage determines scores that the model did not compute."""
    found = []
    for window, own in zip_longest(reading.windows, scores):
        share = min(1.0, window.coverage / (reading.windows[0].coverage or 1.0))
        found.append(Evidence(window.passage, score * share**2 if own is None else min(score, own), window.spans))
    return sorted(found, key=lambda one: -one.score)


def _rival(claim: str, window: Window, corpus: Corpus, strength: float) -> Rival:
    """Return a window's statement that differs from a claim, with the kind of difference."""
    quote = window.spans[0].of(corpus.texts[window.passage])
    own, other = numbers_of(claim) - numbers_of(window.text), numbers_of(quote) - numbers_of(claim)
    kind = ConflictKind.OTHER
    if own and other:
        kind = ConflictKind.DATE if all(map(_YEAR.fullmatch, own)) else ConflictKind.NUMBER
    return Rival(kind, claim, quote, window.passage, window.spans[0], strength)


def _logit(name: str, values: Sequence[float]) -> float:
    """Return the log odds of one of the logistic models: "lexical", "small" or "long"."""
    model = calibration()[name]
    return math.fsum([model["bias"], *(value * weight for value, weight in zip(values, model["weights"], strict=True))])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


def softmax(row: Sequence[float]) -> list[float]:
    """Return the probabilities for a row of logits."""
    highest = max(row)
    shares = [math.exp(value - highest) for value in row]
    return [share / sum(shares) for share in shares]


# -- the shipped cross-encoder -----------------------------------------------------------------------------------------


@cache
def calibration() -> JsonObject:
    """Return the logistic models, the contradiction threshold and the digests that ``training/calibrate.py`` wrote."""
    loaded: JsonObject = json.loads((WEIGHTS / "calibration.json").read_text(encoding="utf-8"))
    return loaded


class SmallModel:
    """A model that scores pairs of evidence and claim.

    Args:
        folder: Folder with ``proof.onnx``, its weights in ``proof.onnx.data``, and ``tokenizer.json``.
        digests: SHA-256 digests of these files by name.

    Raises:
        ConfigurationError: A file is missing or has another digest.
    """

    def __init__(self, folder: Path, digests: dict[str, str]) -> None:
        for name, digest in digests.items():
            path = folder / name
            found = "missing"
            if path.is_file():
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise ConfigurationError(f"{path}: its digest is {found}, expected {digest}; install the package anew")
        # The import of 1.31 writes a device id and a database of telemetry into the user's cache, unless this is set.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime  # noqa: PLC0415 (takes 100 ms, and is needed only where claims are checked)
        from tokenizers import Tokenizer  # noqa: PLC0415 (same)

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take CPU time from other work while they wait.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_mem_pattern = False  # a plan of memory would be kept for each shape of a batch
        self._session = onnxruntime.InferenceSession(
            str(folder / "proof.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self._first: int = self._tokenizer.token_to_id("[CLS]") or 0
        self._last: int = self._tokenizer.token_to_id("[SEP]") or 0

    def logits(self, pairs: Sequence[tuple[str, str]], *, deadline: float | None = None) -> list[Row]:
        """Return the logits of each pair of evidence and claim."""
        import numpy as np  # noqa: PLC0415 (with onnxruntime)

        rows = []
        for evidence, claim in pairs:
            asked = self._pieces(claim)[: MAX_TOKENS // 2]
            there = self._pieces(evidence)[: MAX_TOKENS - 3 - len(asked)]
            rows.append([self._first, *there, self._last, *asked, self._last])
        found: dict[int, Row] = {}
        for batch in _batches(rows):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"the proof model: late after {len(found)} of {len(rows)} pairs")
            ids = np.zeros((len(batch), len(rows[batch[-1]])), dtype=np.int64)  # 0 is the padding
            for line, number in enumerate(batch):
                ids[line, : len(rows[number])] = rows[number]
            inputs = {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}
            found |= zip(batch, self._session.run(["logits"], inputs)[0].tolist(), strict=True)
        return [found[number] for number in range(len(rows))]

    def _pieces(self, text: str) -> list[int]:
        found = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return [
            _RAREST + zlib.crc32(piece.encode()) % 1_000 if one == self._unknown else one
            for one, piece in zip(found.ids, found.tokens, strict=True)
        ]


def _batches(rows: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield batches of pair indices, sorted by length, the longest last."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda one: len(rows[one])):
        if batch and (len(batch) + 1) * len(rows[number]) > _BATCH:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@cache
def _shipped() -> SmallModel:
    return SmallModel(WEIGHTS, calibration()["digests"])
