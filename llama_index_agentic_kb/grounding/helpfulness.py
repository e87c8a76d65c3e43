"""Tells answers that say that they can't answer, without a model and without the evidence.

An answer is unhelpful if some clause of it says that there is no answer, and no clause says anything else. So a partial
answer is helpful ("It opened in 1969; the sources don't say when it closed."), and so is one that is about not knowing
("Socrates said that he knows nothing."). When in doubt an answer is helpful: withholding a good one is worse.

Known are English, German, French, Spanish, Chinese and Japanese; in other languages only empty answers and echoes of
the question are found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.grounding.claims import plain_claim, split_claims
from llama_index_agentic_kb.grounding.refusals import ASIDE, ELLIPSES, JOINTS, LEAD, PRONOUN, is_refusal

__all__ = ["Unhelpful", "unhelpful", "unhelpful_reason"]

LONGEST: Final = 4_000
"""Characters; a longer answer says something."""
LONGEST_CLAUSE: Final = 500

_SIGNS: Final = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u00b4": "'", "\u201c": '"', "\u201d": '"', "\u201e": '"'}
)
_QUOTED: Final = re.compile(r'"[^"]{1,300}"|\u00ab[^\u00bb]{1,300}\u00bb|\u300c[^\u300d]{1,300}\u300d')
_MARKS: Final = re.compile(r"\[(?:\s{0,3}ref_id\s{0,3}:[^\[\]\n]{0,120}|\^?\d[\d\s,;-]{0,40})\]", re.IGNORECASE)
_LETTERS: Final = re.compile(r"[^\W_]+")
_CONCEDING: Final = re.compile(
    r"^((?:although|though|while|even though|obwohl|bien que|aunque|si bien|虽然|尽管)[^,、]{1,200})[,、]\s*"
)
_NOTHING: Final = ("", "empty response", "none found", "null", "n a")
_ABOUT_DATA: Final = re.compile(
    r"\b(?:passages?|sources?|documents?|documentation|databases?|files?|texts?|articles?|contain|error|quellen?|"
    r"dokumente?|datei|datenbank|texte?|fichiers?|base de donnees|fuentes?|documentos?|archivos?)\b"
    r"|数据库|文件|文档|資料|文書"
)
"""A question about what holds information: that it holds none is an answer."""
_SAID_BUT: Final = re.compile(
    r",?\s{1,3}(sagen|sagt|nennen|nennt|erwähnen|erwähnt|enthalten|enthält|geben|machen)\s{1,3}(?:aber|jedoch)\s"
)


class Unhelpful(StrEnum):
    """Why an answer is unhelpful."""

    EMPTY = "empty"
    """It holds no words, or only markers, or says that it is empty."""
    ECHO = "echo"
    """It repeats the question."""
    NO_ANSWER = "noAnswer"
    """It says that it can't answer, and nothing else."""


def unhelpful(answer: str, *, question: str = "") -> bool:
    """Tell whether an answer answers nothing; see the module.

    Args:
        answer: Plain text or Markdown, with or without markers.
        question: What was asked; without it an echo is not found.
    """
    return unhelpful_reason(answer, question=question) is not None


def unhelpful_reason(answer: str, *, question: str = "") -> Unhelpful | None:
    """Give why an answer answers nothing; None where it answers something. Takes linear time.

    Args:
        answer: Plain text or Markdown, with or without markers.
        question: What was asked; without it an echo is not found.
    """
    if len(answer) > LONGEST:
        return None
    words = _words(_MARKS.sub(" ", answer))
    if words in _NOTHING:
        return Unhelpful.EMPTY
    if question and words == _words(question):
        return Unhelpful.ECHO
    if question and _ABOUT_DATA.search(normalize(question)):
        return None  # "Is the key stored in the database?" "The database does not contain the key."
    return Unhelpful.NO_ANSWER if _refuses(answer) else None


def _words(text: str) -> str:
    return " ".join(_LETTERS.findall(normalize(text)))


def _refuses(answer: str) -> bool:
    refused = False
    for sentence in _sentences(answer):
        for number, clause in enumerate(_clauses(sentence)):
            if _is_refusal(clause, later=number > 0):
                refused = True
            elif not _is_aside(clause):
                return False
    return refused


def _sentences(answer: str) -> Iterator[str]:
    """Give sentences and list items in one form; what is quoted says nothing itself, unless it is all there is."""
    claims = [claim.plain for claim in split_claims(answer)] or [plain_claim(answer)]
    for claim in claims:
        text = _MARKS.sub(" ", normalize(claim.translate(_SIGNS))).strip(" .!?")
        if _QUOTED.fullmatch(text):
            text = text[1:-1]
        yield _QUOTED.sub("X", text)


def _clauses(sentence: str) -> Iterator[str]:
    text = _CONCEDING.sub(r"\1;", _SAID_BUT.sub(r"; die quellen \1 ", sentence))
    for part in JOINTS.split(text):
        first = _LETTERS.search(part)
        if first is not None:
            yield part[first.start() :].strip(" ,.:!?\"'。、")


def _is_refusal(clause: str, *, later: bool) -> bool:
    """Whether a clause says that there is no answer; a later one of a sentence may leave out the sources' name."""
    if len(clause) > LONGEST_CLAUSE:
        return False
    if any(is_refusal(form) for form in _forms(clause)):
        return True
    rest = PRONOUN.sub("", clause, count=1)
    return later and any(is_refusal(subject + rest) for subject in ELLIPSES)


def _is_aside(clause: str) -> bool:
    if len(clause) > LONGEST_CLAUSE:
        return False
    return any(not form or ASIDE.match(form) for form in _forms(clause))


def _forms(clause: str) -> tuple[str, str]:
    """Give a clause as it is, and without what may stand before a refusal."""
    lead = LEAD.match(clause)
    return clause, clause[lead.end() :].strip(" ,") if lead else clause
