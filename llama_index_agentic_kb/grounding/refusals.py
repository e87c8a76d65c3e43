"""How answers say that they can't answer, in English, German, French, Spanish, Chinese and Japanese.

Patterns of one clause, in lower case (casefolded, so that German has "ss"), with plain apostrophes. "Sources" stand for
whatever an answer calls its evidence. What is said of the world ("nobody knows why", "there is no evidence that") is no
refusal: a refusal speaks of the sources, of the question, or of the speaker.
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import re
from typing import Final

from llama_index_agentic_kb.grounding.refusals_european import (
    FRENCH,
    FRENCH_ASIDE,
    FRENCH_LEAD,
    GERMAN,
    GERMAN_ASIDE,
    GERMAN_LEAD,
    SPANISH,
    SPANISH_ASIDE,
    SPANISH_LEAD,
)

__all__ = ["ASIDE", "ELLIPSES", "JOINTS", "LEAD", "PRONOUN", "is_refusal"]

# -- English -------------------------------------------------------------------------------------------------------

_EN_KIND: Final = (
    r"(?:provided|given|supplied|available|retrieved|current|above|following|attached|search|source|reference|"
    r"cited|"
    r"uploaded|relevant|listed|indexed|existing|other|document|knowledge)\s+"
)
_EN_THING: Final = (
    r"(?:contexts?|documents?|passages?|sources?|evidence|information|materials?|texts?|excerpts?|articles?|"
    r"results?|"
    r"data|references?|knowledge base|files?|content|snippets?|chunks?|pages?|records?|database|corpus|facts)"
)
_EN: Final = (
    rf"(?:(?:the|these|those|this|that|your|any|all|my|our|(?:none|neither|any) of the)\s+(?:{_EN_KIND}){{0,3}}"
    rf"|(?:{_EN_KIND}){{1,3}}){_EN_THING}"
    r"(?:\s+(?:itself|provided|given|available|supplied|retrieved|above|at hand|(?:that )?(?:i|you|we) (?:have|"
    r"provided|"
    r"gave|shared|(?:was|were) given)))?"
)
_EN_NOUN: Final = (
    r"(?:information|mention|details?|data|answers?|references?|context|indication|documentation|content|knowledge|"
    r"results?|matches|documents?|passages?|sources?)"
)
_EN_SAY: Final = (
    r"(?:\w+ly\s+)?(?:contain|mention|say|state|specify|provide|include|give|offer|discuss|describe|cover|"
    r"address|answer|"
    r"indicate|tell|have|name|list|explain|reveal|disclose|refer|speak|report|show|clarify|detail|elaborate|"
    r"identify|"
    r"define|touch|make|appear|seem|allow|hold|present|supply)s?\b"
)
_EN_TELL: Final = (
    r"(?:know|have|find|see|answer|tell|determine|provide|help|assist|locate|give|say|confirm|verify|access|"
    r"possess|"
    r"comment|identify|infer|establish|retrieve)\b"
)
_ENGLISH: Final = (
    (
        rf"{_EN}\s+(?:\w+ly\s+|also\s+|alone\s+)?(?:(?:do|does|did)(?: not|n't)|can(?:not|'t)|could(?: not|"
        rf"n't))\s+{_EN_SAY}"
    ),
    rf"{_EN}\s+(?:fails?|failed) to {_EN_SAY}",
    (
        rf"{_EN}\s+(?:lacks?|(?:has|have|contains?|offers?|provides?|gives?|makes?|includes?|says?|mentions?|"
        rf"states?|holds?)"
        r"\s+(?:no|nothing|insufficient|not enough)\b)"
    ),
    rf"(?:none|neither|no) (?:one )?of {_EN}\s+{_EN_SAY}",
    rf"(?:none|neither) of the (?:{_EN_KIND}){{0,3}}{_EN_THING}\s+{_EN_SAY}",
    rf"nothing in {_EN}\s",
    rf"i\s+(?:\w+ly )?(?:do not|don't|did not|didn't|cannot|can't|could not|couldn't)\s+(?:\w+ly )?{_EN_TELL}",
    r"i(?:'m| am| was)? (?:\w+ly )?(?:unable|not able|not sure|not certain|not aware|unaware)\b",
    r"i (?:\w+ly )?(?:have no|lack|found no|found nothing|have not found|haven't found|have not been able)\b",
    (
        rf"we\s+(?:do not|don't|cannot|can't|could not|couldn't|did not|didn't)\s+(?:have (?:\w+ ){{0,2}}{_EN_NOUN}|"
        rf"find (?:\w+ ){{0,2}}{_EN_NOUN}|answer|determine)"
    ),
    (
        rf"there (?:is|are|was|were|'s)?\s?(?:currently )?(?:no|not any|not enough|insufficient|not sufficient|"
        rf"isn't any|"
        rf"aren't any) (?:\w+ ){{0,2}}{_EN_NOUN}(?: (?:about|on|regarding|concerning|available|provided|given|in {_EN}|"
        rf"to (?:answer|determine|say)|.{{0,120}}\b(?:in|by|from|within) {_EN})|$)"
    ),
    rf"there (?:is|are|was|were) (?:no|nothing)\b.{{0,120}}\b(?:in|by|from|within) {_EN}",
    (
        rf"(?:no|insufficient|not enough) (?:\w+ ){{0,2}}{_EN_NOUN}"
        r"(?: (?:was|were|is|are|has been|have been|could be|can be))?(?: (?:found|available|provided|given|retrieved|"
        r"returned|located|specified))?(?: (?:for|about|on|regarding|to|from|that|in the|in my)\b.*)?$"
    ),
    r"insufficient (?:evidence|data)\b",
    (
        rf".{{0,160}}\b(?:is|are|was|were|has|have)(?: not|n't) (?:\w+ly )?(?:been )?(?:mentioned|specified|stated|"
        rf"provided|"
        rf"given|included|covered|found|available|contained|described|addressed|discussed|disclosed|clear|"
        rf"indicated|explained|"
        rf"detailed|listed|named|answered|known|possible)\b.{{0,60}}\b(?:in|by|from|within|on|using|with) {_EN}"
    ),
    rf".{{0,160}}\b(?:cannot|can't|can not|could not) be \w+\b.{{0,60}}\b(?:in|by|from|within|on|using|with) {_EN}",
    rf"it is (?:unclear|unknown|impossible)\b.{{0,120}}\b(?:in|by|from|within|on|using|with) {_EN}",
    (
        r"(?:the|this|your|that) (?:question|query) (?:cannot|can't|can not|could not|is not|isn't) "
        r"(?:be )?(?:answer|address)"
    ),
    (
        rf"(?:it is )?(?:not|nothing) (?:mentioned|specified|stated|found|available|provided|given|answerable|"
        rf"disclosed)"
        rf"(?: (?:in|by|from) {_EN})?$"
    ),
    rf"(?:unable|not able|impossible) to {_EN_TELL}",
    r"(?:unknown|unanswerable|no idea|no answer(?: found)?|no results?(?: found)?|n/a|empty response)$",
)
_ENGLISH_ASIDE: Final = (
    r"please\b",
    r"let me know",
    r"if (?:you|there|more|further)\b",
    (
        r"you (?:may|might|could|can|should|would|'d) (?:also )?(?:want|wish|try|like|need|consider|consult|check|"
        r"refer|"
        r"contact|look|ask|visit|reach|search)\b"
    ),
    r"i(?:'d| would| can| will|'ll| could| recommend| suggest)\b",
    r"feel free",
    r"is there anything",
    r"(?:for|more|further|additional)\b.{0,30}(?:information|details|context|documents|help)\b",
    r"(?:thank|thanks|hello|try)\b",
    r"(?:can|could|would|do) you\b",
    (
        rf"(?:{_EN}|(?:it|they)(?= (?:\w+ly|only|just|instead|rather)\b))\s+(?:\w+ly\s+|only\s+|just\s+|instead\s+|"
        rf"do\s+)?"
        r"(?:mention|discuss|describe|cover|focus|talk|refer|deal|concern|address|relate|speak|appear|seem|are|is|"
        r"touch|"
        r"contain|provide|discusses)(?:e?s)?\b[^0-9]*$"
    ),
)
_ENGLISH_LEAD: Final = (
    rf"unfortunately|regrettably|(?:my )?apologies|i apologi[sz]e|(?:i(?:'m| am)? (?:\w+ )?)?(?:sorry|afraid)|"
    rf"however|but|"
    rf"and|so|thus|therefore|well|as an? (?:ai|artificial|large|language)\b[^,]{{0,60}}|currently|although|"
    rf"though|while|"
    rf"even though|because|since|as|at (?:this|the) (?:time|moment)|(?:based|relying) (?:\w+ )?(?:up)?on {_EN}|"
    rf"(?:according to|from|in|within|given|with|using|after \w+|having \w+|looking at) {_EN}|(?:final )?answer\b"
)

# -- Chinese -------------------------------------------------------------------------------------------------------

_ZH: Final = (
    r"(?:(?:提供|已有|现有|给定|所给|已知|上述|以上|检索到|这些|该|本|当前|相关|您|你|参考|目前|所)的?){0,4}"
    r"(?:文档|文件|资料|信息|上下文|段落|文本|内容|材料|来源|文中|文章|知识库|数据|语料|原文|片段|背景)(?:中|里|内|当中)?"
)
_CHINESE: Final = (
    r"我(?:们)?(?:目前|暂时|还|也|并)?(?:不知道|不清楚|不确定|不了解|无法|不能|没有|没能|未能|找不到|没找到)",
    (
        rf"(?:在|从|根据|基于|依据|仅凭)?{_ZH}(?:并|也|均|都|还)?(?:没有|没|未|无|不)(?:有|曾|能|足够|任何|明确|直接|具体)?(?:关于|提|说|"
        r"包含|包括|涉及|给|指|记载|描述|找到|写|显示|相关|回答|介绍|讨论|足够|足|法|能|与)"
    ),
    r"(?:也|并|还)?无法(?:回答|确定|作答|判断|得知|得出|提供|从|根据|找到|获取)",
    r"不能(?:回答|确定)|不(?:知道|清楚|确定)$|无法$",
    r"(?:并)?(?:没有|未)(?:能)?(?:找到|足够|提供|相关|检索到|查到|搜索到).{0,30}(?:信息|资料|内容|答案|文档|数据|结果)",
    r"暂无|找不到|查无|未(?:找到|提及|检索到)",
    r"(?:该|这个|此|您的)?问题(?:无法|不能)(?:得到)?回答",
)
_CHINESE_ASIDE: Final = (
    r"(?:很|非常|十分)?(?:抱歉|对不起|不好意思|遗憾)|请|如果[您你]|如有|如需|建议|[您你]可以|欢迎|谢谢|可以提供",
    rf"(?:根据|基于|从|依据|对于|关于)?{_ZH}(?:来看|的)?$|(?:因此|所以|因为|对此|由于)$",
    rf"{_ZH}(?:主要|只|仅)?(?:介绍|讨论|描述|讲述|提到|涉及|关于)[^0-9]*$",
)
_CHINESE_LEAD: Final = r"(?:很|非常)?(?:抱歉|遗憾)|对不起|因此|所以|因为|由于|但|虽然|尽管|答案?:|回答:"

# -- Japanese ------------------------------------------------------------------------------------------------------

_JA: Final = (
    r"(?:資料|文書|文献|本文|文章|テキスト|コンテキスト|情報|文脈|ソース|出典|抜粋|パッセージ|記事|データ|ドキュメント)"
)
_JA_NOT: Final = r"(?:ませんでした|ません|りません|りませんでした|ない|なかった|ないです)$"
_JAPANESE: Final = (
    r"(?:(?!誰|にも).){0,80}(?:分かり|わかり)(?:ません|かねます)$|(?:存じ|知り)ません$",
    r".{0,120}(?:答え|回答)(?:する)?(?:こと)?(?:は|が)?(?:でき(?:ません|ない)|(?:いた)?しかねます|られません)(?:でした)?$",
    (
        rf".{{0,120}}(?:情報|記載|記述|言及|説明|答え|回答|データ|内容|資料)(?:は|が|も|を)?(?:特に|一切|何も)?(?:含まれて(?:い|お)|"
        rf"見つか(?:り)?|見つけることができ|あり|ござい|見当たり|見当た|確認でき|提供されてい|得られ){_JA_NOT}"
    ),
    (
        rf".{{0,40}}{_JA}.{{0,100}}(?:書かれて|述べられて|記載されて|言及されて|触れられて|示されて|含まれて|説明されて|記されて|"
        rf"明記されて|提供されて)(?:い|お){_JA_NOT}"
    ),
    rf".{{0,60}}{_JA}.{{0,60}}(?:判断|特定|確認|断定|推測|判別|決定|判明|検出)(?:は|が|することは|することが)?(?:でき|され|し){_JA_NOT}",
    r"(?:十分な)?情報(?:が)?不足|.{0,40}情報が(?:不足|足り)",
    rf"(?:.{{0,40}}{_JA}.{{0,20}})?不明(?:です)?$",
)
_JAPANESE_ASIDE: Final = (
    r"(?:大変|誠に)?申し訳|すみません|ごめん|恐れ入り|残念|もし|.{0,100}(?:ください|お願いします|お願いいたします|でしょうか)$",
    rf"(?:この|その|提供された)?{_JA}(?:は|では|には).{{0,80}}(?:扱っ|説明し|述べ|触れ|ついて|関する|紹介し)[^0-9]*$",
)
_JAPANESE_LEAD: Final = r"残念ながら、|申し訳(?:ありません|ございません)が、|すみませんが、|回答:|答え:"


def _any(*patterns: str) -> re.Pattern[str]:
    """Join patterns. Runs of spaces are read up to a bound, so that a long one is no work."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined.replace(r"\s+", r"\s{1,3}").replace(r"\s*", r"\s{0,3}"))


_REFUSAL: Final = _any(*_ENGLISH, *GERMAN, *FRENCH, *SPANISH, *_CHINESE, *_JAPANESE)


def is_refusal(clause: str) -> bool:
    """Whether a clause begins with what says that there is no answer."""
    return _REFUSAL.match(clause) is not None


ASIDE: Final = _any(*_ENGLISH_ASIDE, *GERMAN_ASIDE, *FRENCH_ASIDE, *SPANISH_ASIDE, *_CHINESE_ASIDE, *_JAPANESE_ASIDE)
"""A clause that answers nothing either: an apology, an offer, what the sources are about."""

LEAD: Final = re.compile(
    rf"(?:(?:(?:{_ENGLISH_LEAD}|{GERMAN_LEAD}|{FRENCH_LEAD}|{SPANISH_LEAD})(?![\w'])|{_CHINESE_LEAD}|"
    rf"{_JAPANESE_LEAD})"
    r"[\s,:;-]*(?:(?:but|that|and|aber|dass|mais|que|pero)\s)?){1,5}"
)
"""What may stand before a refusal."""

JOINTS: Final = re.compile(
    r"\s{0,3}[;；。\n]\s{0,3}|\s{1,3}[-–—]+\s{1,3}|(?<=[㐀-鿿])\s{0,3},\s{0,3}|,?\s{1,3}(?:but|however|although|though|whereas|nevertheless|"
    r"aber|jedoch|"
    r"sondern|allerdings|doch|mais|cependant|toutefois|pourtant|pero|sin embargo|no obstante)\b,?\s{0,3}"
    r"|,\s{1,3}(?:(?:so|while|because|since|as|donc|car|por lo que|así que|ya que|porque|aunque|weil|da|daher)\s{1,3}"
    r"|and\s{1,3}(?=(?:i|it|they|we|there|he|she|you)\b))|(?:但是?|不过|然而|因此|所以)|(?<=が)、|(?<=けど)、|(?<=ものの)、"
    r"|(?<=ので)、|(?<=ため)、|(?<=から)、"
)
"""Where one clause ends and another begins."""

PRONOUN: Final = re.compile(r"(?:it|they|sie|es|ils?|elles?|estos|estas)\s+")
"""What stands for the sources in a later clause."""

ELLIPSES: Final = ("the sources ", "die quellen ", "les sources ", "las fuentes ", "资料中", "文書には")
"""What a later clause of a sentence leaves out."""
