"""A named fact-checking or NLI model as scorer, through sentence-transformers.

The meaning of the labels is read from the model's configuration; a model without it is refused. No code is loaded with
weights: the user loads models that need ``trust_remote_code``, and their ``predict`` is called.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.features import passage_sentences
from llama_index_agentic_kb.grounding.scorers.base import ClaimScore, Evidence, Premise, Rival, verdict_of
from llama_index_agentic_kb.grounding.scorers.lexical import bearing_spans, nearest_premises, softmax
from llama_index_agentic_kb.schema.grounding import ConflictKind

_PASSAGES: Final = 8  # maximum number of passages that a claim is checked against: those with most of its words
_BATCH: Final = 16  # number of pairs in one batch
_MAX_TOKENS: Final = 512  # maximum tokens of a pair if the model does not specify it; most models accept 512
_NO_LIMIT: Final = 100_000  # maximum plausible limit: tokenizers report 1e30 if they have no limit
_CHARACTERS: Final = 3  # minimum characters of a token, for models without a tokenizer
_SPARE: Final = 8  # tokens reserved for the special tokens of a pair
_TWO: Final = 2
_SUPPORTS: Final = re.compile(r"^(?:entail\w*|support\w*|consistent|factual\w*|faithful|grounded|true)$")
_DENIES: Final = re.compile(r"^contradict|^refut")
_SURELY: Final = 0.9  # minimum probability at which a passage contradicts a claim


class PairModel(Protocol):
    """A model that scores text pairs: sentence-transformers' ``CrossEncoder``, HHEM's ``predict(pairs)``, etc."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return one score per text pair, or one per pair and label; the pairs are the first argument."""
        ...


class CrossEncoderScorer:
    """Scores claims with a classifier that reads passage and claim together.

        CrossEncoderScorer("cross-encoder/nli-deberta-v3-base")

    Args:
        model: A loaded model, or the name or folder of one. Nothing is downloaded; pickles and code are refused. Its
            ``config.id2label`` says which label's probability is the score, and which one contradicts.

    Raises:
        ConfigurationError: The meaning of the model's labels is unknown, or the model cannot be loaded.
    """

    def __init__(self, model: PairModel | str) -> None:
        loaded: Any = _load(model) if isinstance(model, str) else model
        if not callable(getattr(loaded, "predict", None)):
            raise ConfigurationError(f"model: expected a CrossEncoder, got {type(loaded).__name__}")
        config = getattr(loaded, "config", None)
        name = getattr(config, "_name_or_path", None) or type(loaded).__name__
        self.model = loaded
        self.name = f"cross-encoder {str(name).rsplit('/', 1)[-1]}"
        labels: Mapping[Any, Any] = getattr(config, "id2label", None) or {}
        self.entailment, self.contradiction = _labels(labels, self.name)
        # A tokenizer fails when two threads use it, and the model takes all cores anyway.
        self._pool = WorkerPool("claim-scorer", max_workers=1)
        self._options = _options(loaded.predict)
        tokenizer = getattr(loaded, "tokenizer", None)
        self._tokenize: Callable[[str], Sequence[object]] | None = getattr(tokenizer, "tokenize", None)
        self._end = getattr(tokenizer, "eos_token", None) or "</s>"
        limits = (
            getattr(holder, limit, None)
            for holder in (loaded, tokenizer)
            for limit in ("max_seq_length", "max_length", "model_max_length")
        )
        known = (limit for limit in limits if isinstance(limit, int) and 0 < limit <= _NO_LIMIT)
        self._longest = next(known, _MAX_TOKENS)

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims on the model's one thread; ``RetrievalError`` if it returns no finite number for a pair."""
        work = partial(self.judge, [claim.said for claim in claims], premises, deadline=deadline)
        scores: list[ClaimScore] = await Call(sync=work, deadline=deadline, pool=self._pool, what=self.name)
        return scores

    def judge(
        self, claims: Sequence[str], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Return the scores of claims, computed in the calling thread; see ``score``."""
        waiting = (
            (claim, number, window)
            for claim, numbers in enumerate(nearest_premises(claims, premises, _PASSAGES))
            for number in numbers
            for window in self._windows(premises[number], claims[claim])
        )
        best: list[dict[int, tuple[float, float]]] = [{} for _ in claims]
        while batch := list(islice(waiting, _BATCH)):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"{self.name}: late")
            rows = self._predicted([(window, claims[claim]) for claim, _, window in batch])
            for (claim, number, _), row in zip(batch, rows, strict=True):
                supports, denies = self._read(row)
                known = best[claim].get(number, (0.0, 0.0))
                best[claim][number] = (max(known[0], supports), max(known[1], denies))
        return [_claim_score(claim, found, premises) for claim, found in zip(claims, best, strict=True)]

    def _predicted(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        """Return the model's output for each pair as a row of numbers, from numpy, torch or Python."""
        asked: list[Any] = list(pairs)
        if "minicheck" in self.name.casefold():  # it takes one text: the passage, its end mark, the claim
            asked = [f"{window}{self._end}{claim}" for window, claim in pairs]
        given = self.model.predict(asked, **self._options)
        listed = given.tolist() if hasattr(given, "tolist") else list(given)
        rows = [list(map(float, row)) if isinstance(row, (list, tuple)) else [float(row)] for row in listed]
        if len(rows) != len(pairs) or not all(row and all(map(math.isfinite, row)) for row in rows):
            raise RetrievalError(f"{self.name}: expected {len(pairs)} finite scores, got {len(rows)} rows")
        return rows

    def _read(self, row: list[float]) -> tuple[float, float]:
        """Return the probabilities of entailment and of contradiction for a row of the model's output."""
        logits = "activation_fn" in self._options
        if len(row) == 1:
            if not logits and not 0 <= row[0] <= 1:
                raise RetrievalError(f"{self.name}: expected a probability, got {row[0]}")
            return (softmax([0.0, row[0]])[1] if logits else row[0]), 0.0
        if self.entailment is None or max(self.entailment, self.contradiction or 0) >= len(row):
            raise ConfigurationError(f"{self.name} has {len(row)} labels; its config.id2label must name them")
        shares = softmax(row) if logits or not math.isclose(sum(row), 1.0, abs_tol=1e-3) else row
        return shares[self.entailment], 0.0 if self.contradiction is None else shares[self.contradiction]

    def _windows(self, premise: Premise, claim: str) -> Iterator[str]:
        """Yield overlapping windows of sentences within the model's limit, each with title and attributes in front."""
        head = "\n".join(part for part in (premise.title, *map(str, premise.attributes.values())) if part)
        room = max(32, self._longest - self._count(claim) - self._count(head) - _SPARE)
        window: list[str] = []
        used = 0
        for sentence in self._pieces(premise.text, room):
            count = self._count(sentence)
            if window and used + count > room:
                yield "\n".join(filter(None, (head, " ".join(window))))
                last = self._count(window[-1])  # the next window begins with it if both fit
                window, used = (window[-1:], last) if last + count <= room else ([], 0)
            window.append(sentence)
            used += count
        if window or head:
            yield "\n".join(filter(None, (head, " ".join(window))))

    def _pieces(self, text: str, room: int) -> Iterator[str]:
        """Yield the sentences of a passage, split if they are too long."""
        for start, end in passage_sentences(text):
            sentence = text[start:end]
            while (count := self._count(sentence)) > room and len(sentence) > 1:
                size = max(1, len(sentence) * room // (count + 1))
                yield sentence[:size]
                sentence = sentence[size:]
            yield sentence

    def _count(self, text: str) -> int:
        return len(text) // _CHARACTERS + 1 if self._tokenize is None else len(self._tokenize(text))


def _load(name: str) -> PairModel:
    """Load a cross-encoder from a folder, or from the local cache by its name."""
    try:
        from sentence_transformers import CrossEncoder  # noqa: PLC0415 (takes seconds, for those who use it)

        folder = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        loaded: PairModel = CrossEncoder(folder, local_files_only=True, model_kwargs={"use_safetensors": True})
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(f"scorer {name!r} could not be loaded: {error}; download it first") from error
    return loaded


def _options(predict: Callable[..., object]) -> dict[str, Any]:
    """Return the options that this model's ``predict`` accepts, among them one for raw logits if possible."""
    try:
        known = inspect.signature(predict).parameters
    except (TypeError, ValueError):
        return {}
    options: dict[str, Any] = {"show_progress_bar": False} if "show_progress_bar" in known else {}
    if "activation_fn" in known:
        from torch import nn  # noqa: PLC0415 (a model that takes it brings torch)

        options["activation_fn"] = nn.Identity()
    return options


def _labels(names: Mapping[Any, Any], model: str) -> tuple[int | None, int | None]:
    """Return the indices of the labels for entailment and for contradiction. None if a label is unknown."""
    labels = {int(number): re.sub(r"[\s-]+", "_", str(label)).casefold() for number, label in names.items()}
    if len(labels) < _TWO:  # one number for each pair, or no label names
        return None, None
    said = next((number for number, label in labels.items() if _SUPPORTS.match(label)), None)
    if said is None and len(labels) == _TWO and "minicheck" in model.casefold():  # no, yes
        return 1, None
    if said is None:
        named = ", ".join(sorted(labels.values()))
        raise ConfigurationError(f"{model}: its labels ({named}) do not say which one entails; name them in id2label")
    return said, next((number for number, label in labels.items() if _DENIES.match(label)), None)


def _claim_score(claim: str, found: dict[int, tuple[float, float]], premises: Sequence[Premise]) -> ClaimScore:
    ranked = sorted(found, key=lambda number: (-found[number][0], number))
    evidence = [Evidence(number, found[number][0], bearing_spans(claim, premises[number])) for number in ranked]
    score = evidence[0].score if evidence else 0.0
    rivals = []
    for one in evidence:
        strength = found[one.premise][1]
        if one.spans and strength >= _SURELY:
            quote = one.spans[0].of(premises[one.premise].text)
            rivals.append(Rival(ConflictKind.OTHER, claim, quote, one.premise, one.spans[0], strength))
    return ClaimScore(score, verdict_of(score, contradicted=bool(rivals)), evidence, rivals)
