"""Which language a text is in, told by its script and its function words: cheap, and enough to choose a stemmer.

Names of languages are those of the Snowball stemmers. The lists are the most frequent articles, pronouns, prepositions,
conjunctions, auxiliaries and question words of each language, as texts have them after ``casefold``.
"""

# ruff: noqa: RUF001 (the Turkish letter without a dot is one)
from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

__all__ = ["DEFAULT_LANGUAGE", "FUNCTION_WORDS", "LANGUAGES", "detect_language"]

DEFAULT_LANGUAGE: Final = "english"
"""What a text is taken for that shows nothing else: names, numbers, lists, single words."""

_SAMPLE: Final = 150
"""How many words of a text are looked at."""

_ENOUGH: Final = 2
"""Function words that the default language lacks and another one has, for a text to be taken for that one."""

_LISTS: Final = {
    "danish": (
        "af alle alt at blev blive bliver da de dem den denne der deres det dette dig din disse du efter eller en "
        "end er et for fra få ham han hans har havde have hende hendes her hos hun hvad hvem hver hvilken hvis "
        "hvor hvordan hvorfor hvornår i ikke ind jeg kan kom kunne man mange med meget men mig min mod når og også "
        "om op os over på sin skal skulle som til ud under var ved vi vil ville være været"
    ),
    "dutch": (
        "aan al alles als altijd andere ben bij daar dan dat de der deze die dit doch doen door dus een er had heb "
        "hebben heeft hem het hier hij hoe hun iemand iets ik in is ja je kan kon kunnen maar me meer men met mij "
        "mijn moet na naar niet niets nog nu of om omdat onder ons ook op over te tegen toch toen tot u uit van "
        "veel voor waar waarom wanneer want waren was wat wel welke werd werden wie wij wil worden wordt zal ze "
        "zelf zich zij zijn zo zonder zou"
    ),
    "english": (
        "a about after again all also am an and any are as at be because been before being between both but by can "
        "could d did do does doing during each few for from further had has have having he her here hers him his "
        "how i if in into is it its itself just ll m me more most my no nor not now of off on once only or other "
        "our ours out over own re s same she should so some such t than that the their theirs them then there "
        "these they this those through to too under until up ve very was we were what when where which while who "
        "whom whose why will with would you your yours"
    ),
    "finnish": (
        "ei eivät emme en et ette että he hän hänen häntä ja jo joka jonka jos jossa jotka kaikki kanssa koska "
        "kuin kuinka kuka kun me mihin miksi mikä milloin minkä minun minä missä mistä miten mitkä mitä mutta muut "
        "myös ne niiden niin niitä nyt nämä olen olet oli olivat olla ollut on ovat poikki se sekä sen sillä sinä "
        "sitä tai te tuo tämä tämän tätä vaan vai vain vuonna"
    ),
    "french": (
        "a ai au aussi aux avait avant avec ce ceci cela ces cet cette chez combien comme comment d dans de depuis "
        "des donc dont du elle elles en entre est et eu eux fait fut il ils j je l la le les leur leurs lui mais "
        "me mes moi mon même n ne nos notre nous on ont ou où par pas plus pour pourquoi qu quand que quel quelle "
        "quelles quels qui quoi s sa sans se ses si son sont sous sur ta te tes toi ton tous tout très tu un une "
        "vos votre vous y à ça était été être"
    ),
    "german": (
        "aber alle als also am an andere auch auf aus bei bin bis da damit dann das dass dein dem den denn der "
        "deren des dessen die dies diese diesem diesen dieser dieses doch dort du durch ein eine einem einen einer "
        "eines er es für gegen hat hatte hatten hier ich ihm ihn ihnen ihr ihre ihrem ihren ihrer im in ist ja "
        "jede jeder jedes kann kein keine können man mehr mein mit muss nach nicht noch nun nur ob oder ohne sehr "
        "sein seine seinem seinen seiner seit sich sie sind so soll sowie um und uns unter vom von vor wann war "
        "waren warum was weil welche welchem welchen welcher welches wenn wer werden wie wieder wir wird wo wurde "
        "wurden während zu zum zur zwischen über"
    ),
    "hungarian": (
        "a ahhoz ahogy aki akik akkor az azok azon azonban azt aztán be csak de e ebben egy egyik egyéb el ennek "
        "ez ezek ezt fel hanem hiszen hogy hogyan hol honnan hány igen ill ilyen is itt kell ki kik két le lehet "
        "lenne lesz lett meg mely mert mi mikor milyen mint mit miért már más még míg nagy nem olyan ott pedig s "
        "sem szerint szinte számára több ugyan után vagy vagyis valamint van vannak volna volt voltak át én és "
        "össze úgy ő ők"
    ),
    "italian": (
        "a ad agli ai al alla alle allo anche avere aveva c che chi ci come con cosa cui d da dagli dai dal dalla "
        "dalle de degli dei del della delle dello di dopo dove e ed era erano essere fu furono gli ha hanno i il "
        "in io l la le lei lo loro lui ma mi mia mio ne negli nei nel nella nelle no noi non nostro o per perché "
        "più prima qual quale quali quando quanto quella quelle quello questa queste questi questo se sei si sia "
        "sono sta stata stato su sua sue sui sul sulla suo suoi tra tu tutti tutto un una uno vi voi è"
    ),
    "norwegian": (
        "alle at av ble bli blir da de deg dem den denne der deres det dette disse du eller en er et etter for fra "
        "før ha hadde han hans har henne hennes her hun hva hvem hver hvilke hvilken hvis hvor hvordan hvorfor i "
        "ikke inn jeg kan kom kunne man mange med meg men mer min mot mye noe noen nå når og også om opp oss over "
        "på samme seg selv sin skal skulle som så til under ut var ved vi vil ville være vært år"
    ),
    "portuguese": (
        "a ao aos aquela aquele as até com como da das de dela dele depois do dos e ela elas ele eles em entre era "
        "eram essa esse esta estava este está estão eu foi for foram há isso isto já lhe mais mas me mesmo meu "
        "minha muito na nas nem no nos nossa nosso não nós o onde os ou para pela pelas pelo pelos por porque "
        "quais qual quando quanto que quem se seja sem ser seu seus sobre sua suas são só também te tem tinha um "
        "uma umas uns você vocês à às é"
    ),
    "romanian": (
        "a acea aceasta această acest acesta aceste aceștia ai al ale am ar are as asta au ca care ce cei cel cele "
        "cine cu cum când cât câte câți că către da dar de deci decât despre din după ea ei el ele era este eu fi "
        "fie fost iar la le lor lui mai mea meu mi mult ne nici nu o ori pe pentru prin sa sau se sunt să său te "
        "toate tot tu un una unde unei unor unui va voi vă îi îl îmi în își și"
    ),
    "spanish": (
        "a al algo ante antes aquel aquella como con contra cual cuales cuando cuál cuáles cuándo cuánto cómo de "
        "del desde donde dos durante dónde e el ella ellas ellos en entre era eran es esa ese eso esta estaba este "
        "esto está están fue fueron ha había han hasta hay la las le les lo los me mi mientras mucho muy más nada "
        "ni no nos nosotros o os otra otro para pero poco por porque que quien quienes quién qué se sea ser si sin "
        "sobre son su sus sí también tanto te tenía tiene todo todos tu un una unas uno unos y ya yo él"
    ),
    "swedish": (
        "alla allt att av blev bli blir de dem den denna deras dess det detta dig din du där då efter ej eller en "
        "er ett från för ha hade han hans har henne hennes hon honom hur här i icke ingen inom inte jag ju kan "
        "kunde man med mellan men mig min mot mycket ni nu när någon något några och om oss på sedan sig sin sina "
        "sitta själv skulle som så till under upp ut utan vad var varför varit varje vart vem vi vid vilka vilken "
        "vilket vill vår än är åt över"
    ),
    "turkish": (
        "ama ancak bana bazı ben beni bir biri birkaç birçok biz bize bu buna bunda bundan bunlar bunu bunun böyle "
        "da daha de değil diye dolayı en gibi göre hangi hem hep hepsi her hiç ile ise için içinde kadar karşı "
        "kendi kendisi ki kim kime kimin mi mu mü mı nasıl ne neden nedir nerede neye niye o olan olarak oldu "
        "olduğu olsa ona onlar onların onu onun sen siz tarafından tüm var ve veya ya yani yapılan yok çok şey şu"
    ),
}

FUNCTION_WORDS: Final = MappingProxyType({name: frozenset(words.split()) for name, words in _LISTS.items()})
"""The function words of each language that is told by them."""

_SCRIPTS: Final = {"CYRILLIC": "russian", "GREEK": "greek", "ARABIC": "arabic", "TAMIL": "tamil"}

LANGUAGES: Final = (*sorted(FUNCTION_WORDS), *sorted(_SCRIPTS.values()))
"""Every language that a text may be taken for."""


def _holders() -> dict[str, tuple[str, ...]]:
    holders: dict[str, list[str]] = {}
    for language, words in FUNCTION_WORDS.items():
        for word in words:
            holders.setdefault(word, []).append(language)
    return {word: tuple(languages) for word, languages in holders.items() if len(word) > 1}  # letters may be initials


_HOLDERS: Final = _holders()
"""The languages of each function word."""
_FOREIGN: Final = frozenset(word for word, languages in _HOLDERS.items() if DEFAULT_LANGUAGE not in languages)


def detect_language(words: Sequence[str]) -> str:
    """Tell the language of a text.

    Args:
        words: Its words, casefolded.

    Returns:
        One of ``LANGUAGES``: that of the script that most words are in; among those of the Latin script the one whose
        function words are most, ``DEFAULT_LANGUAGE`` unless another is plainly ahead.
    """
    sample = set(words[:_SAMPLE])
    scripted = _script_language([word for word in sample if not word.isascii()], of=len(sample))
    if scripted is not None:
        return scripted
    if len(_FOREIGN & sample) < _ENOUGH:  # most texts: no need to count
        return DEFAULT_LANGUAGE
    counts: dict[str, int] = {}
    own: dict[str, float] = {}
    told = _HOLDERS.keys() & sample
    for word in told:
        holders = _HOLDERS[word]
        for language in holders:
            counts[language] = counts.get(language, 0) + 1
            own[language] = own.get(language, 0.0) + 1 / len(holders)
    best = max(sorted(counts), key=lambda language: (counts[language], own[language]))
    ahead = counts[best] > counts.get(DEFAULT_LANGUAGE, 0)
    own_words = sum(best in _HOLDERS[word] and word in _FOREIGN for word in told)
    return best if ahead and own_words >= _ENOUGH else DEFAULT_LANGUAGE


def _script_language(words: Iterable[str], *, of: int) -> str | None:
    counts: dict[str, int] = {}
    for word in words:
        language = _SCRIPTS.get(unicodedata.name(word[0], "").partition(" ")[0])
        if language is not None:
            counts[language] = counts.get(language, 0) + 1
    best = max(sorted(counts), key=lambda language: counts[language], default=None)
    return best if best is not None and 2 * counts[best] > of else None
