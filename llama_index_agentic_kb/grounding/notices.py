"""The text that stands in place of a withheld answer, in the question's language."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language

_NOTHING: Final = {SkippedReason.NO_RELEVANT_CONTENT, SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED}
_SUPPORT: Final = {SkippedReason.LOW_GROUNDED_ANSWER}

# By language: nothing was found; what was found supports no answer; any other reason, with or without a search.
_TEXTS: Final = {
    "arabic": ("لم يُعثر على ما يتعلق بالسؤال.", "المصادر التي عُثر عليها لا تدعم إجابة.", "لا تُقدَّم إجابة."),
    "chinese": ("没有找到与问题相关的内容。", "找到的来源不足以支持答案。", "不提供答案。"),
    "dutch": (
        "Er is niets gevonden dat bij de vraag past.",
        "De gevonden bronnen onderbouwen geen antwoord.",
        "Er wordt geen antwoord gegeven.",
    ),
    "english": (
        "Nothing relevant to the question was found.",
        "The sources found do not support an answer.",
        "No answer is given.",
    ),
    "french": (
        "Rien de pertinent n'a été trouvé pour la question.",
        "Les sources trouvées n'étayent aucune réponse.",
        "Aucune réponse n'est donnée.",
    ),
    "german": (
        "Zu der Frage wurde nichts Passendes gefunden.",
        "Die gefundenen Quellen belegen keine Antwort.",
        "Es wird keine Antwort gegeben.",
    ),
    "italian": (
        "Non è stato trovato nulla di pertinente alla domanda.",
        "Le fonti trovate non sostengono alcuna risposta.",
        "Non viene data alcuna risposta.",
    ),
    "japanese": (
        "質問に関連するものは見つかりませんでした。",
        "見つかった資料は回答を裏付けていません。",
        "回答はありません。",
    ),
    "korean": (
        "질문과 관련된 내용을 찾지 못했습니다.",
        "찾은 자료가 답변을 뒷받침하지 않습니다.",
        "답변을 제공하지 않습니다.",
    ),
    "portuguese": (
        "Não foi encontrado nada relevante para a pergunta.",
        "As fontes encontradas não sustentam uma resposta.",
        "Nenhuma resposta é dada.",
    ),
    "russian": (
        "По этому вопросу ничего подходящего не найдено.",
        "Найденные источники не подтверждают ответа.",
        "Ответ не даётся.",
    ),
    "spanish": (
        "No se encontró nada relevante para la pregunta.",
        "Las fuentes encontradas no respaldan ninguna respuesta.",
        "No se da ninguna respuesta.",
    ),
}
_CODES: Final = {
    "ar": "arabic",
    "de": "german",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "nl": "dutch",
    "pt": "portuguese",
    "ru": "russian",
    "zh": "chinese",
}
_SCRIPTS: Final = (
    (re.compile("[\u3041-\u30ff]"), "japanese"),
    (re.compile("[\u1100-\u11ff\uac00-\ud7ff]"), "korean"),
    (re.compile("[\u3400-\u9fff]"), "chinese"),
)


def withheld_text(reasons: Collection[SkippedReason], question: str, language: str | None = None) -> str:
    """Return the text in place of a withheld answer; it says no more than its reasons do.

    Args:
        reasons: The reasons why the answer is withheld.
        question: The question, whose language the text has if it is one of twelve; else it is English.
        language: The language tag that was asked for, such as "de"; it takes precedence.
    """
    name = _language_of(question) if language is None else _CODES.get(language[:2].lower(), DEFAULT_LANGUAGE)
    nothing, support, other = _TEXTS.get(name, _TEXTS[DEFAULT_LANGUAGE])
    given = set(reasons)
    if given and given <= _NOTHING:
        return nothing
    return support if given and given <= _SUPPORT else other


def _language_of(question: str) -> str:
    script = next((name for pattern, name in _SCRIPTS if pattern.search(question)), None)
    return script or detect_language(re.findall(r"[^\W\d_]+", question.casefold()))
