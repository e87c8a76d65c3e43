"""How answers say that they can't answer, in German, French and Spanish; see ``refusals``."""

from __future__ import annotations

from typing import Final

__all__ = [
    "FRENCH",
    "FRENCH_ASIDE",
    "FRENCH_LEAD",
    "GERMAN",
    "GERMAN_ASIDE",
    "GERMAN_LEAD",
    "SPANISH",
    "SPANISH_ASIDE",
    "SPANISH_LEAD",
]

# -- German --------------------------------------------------------------------------------------------------------

_DE: Final = (
    r"(?:(?:den|die|der|das|dem|diese[nmrs]?|ihre[nmrs]?|alle[nr]?)\s+)(?:(?:bereitgestellt|gegeben|vorliegend|"
    r"vorhanden|"
    r"verfügbar|angegeben|gefunden|genannt|übergeben|hinterlegt|zur verfügung (?:gestellt|stehend)|"
    r"mir [\wäöü]+)e[nrsm]?\s+)"
    r"{0,2}(?:dokument\w*|quellen?|text\w*|unterlagen|passagen?|informationen|kontexts?|auszügen?|daten|"
    r"material\w*|"
    r"abschnitt\w*|artikeln?|wissensdatenbank|ausschnitt\w*|belegen?|angaben|dateien|fundstellen|leitlinien)\b"
)
_DE_IN: Final = (
    rf"(?:(?:in|aus|von|mit|anhand|auf (?:der )?(?:basis|grundlage)(?: von)?) {_DE}|im (?:\w+en )?(?:text|"
    rf"kontext|dokument|material))"
)
_DE_NO: Final = r"(?:keine?[nrms]?|keinerlei|nicht|nichts)\b"
_DE_SAY: Final = (
    r"(?:enthalten|enthält|nennen|nennt|geben|gibt|liefern|liefert|erwähnen|erwähnt|sagen|sagt|machen|macht|"
    r"beantworten|"
    r"beantwortet|bieten|bietet|verraten|verrät|beinhalten|beinhaltet|beschreiben|beschreibt|erlauben|reichen|"
    r"reicht)"
)
_DE_NOUN: Final = (
    r"(?:informationen?|angaben?|daten|treffer|ergebnisse?|antwort(?:en)?|auskunft|auskünfte|details|erwähnung|"
    r"einzelheiten)"
)
GERMAN: Final = (
    rf"{_DE}\s+(?:\w+\s+){{0,2}}{_DE_SAY}\b.{{0,160}}{_DE_NO}",
    rf"{_DE_SAY} {_DE}\b.{{0,160}}{_DE_NO}",
    rf"(?:\w+ ){{0,4}}(?:weiss|kann|konnte|habe|finde|fand|besitze|verfüge) ich\b.{{0,160}}{_DE_NO}",
    rf"ich (?:weiss|kann|konnte|habe|finde|fand|besitze|verfüge|bin)\b.{{0,160}}(?:{_DE_NO}|ausserstande)",
    (
        rf"(?:es|hierzu|dazu|darüber|hierüber|zu .{{1,60}}?) (?:liegen|liegt|gibt|finden|findet|sind|wurden|wurde|"
        rf"stehen|"
        rf"existieren)\b.{{0,100}}\bkeine(?:rlei)? (?:\w+ ){{0,2}}{_DE_NOUN}\b"
    ),
    rf"(?:es|hierzu|dazu|darüber) .{{0,60}}\b{_DE_IN}.{{0,60}}{_DE_NO}",
    rf"{_DE_IN}\s.{{0,160}}{_DE_NO}",
    (
        rf".{{0,160}}\b(?:lässt|lassen|kann|können|wird|werden|ist|sind|wurde|geht|"
        rf"gehen)\b.{{0,80}}{_DE_IN}.{{0,60}}{_DE_NO}"
    ),
    rf"(?:die|diese|ihre) frage (?:lässt|kann|ist)\b.{{0,100}}{_DE_NO}.{{0,20}}beantwort",
    rf"keine(?:rlei)? (?:\w+ )?{_DE_NOUN}\b.{{0,80}}$",
    r"(?:nicht (?:bekannt|angegeben|erwähnt|genannt|gefunden|beantwortbar)|unbekannt|keine ahnung)$",
)
GERMAN_ASIDE: Final = (
    r"bitte\b|(?:es )?tut mir leid|entschuldig|gerne?\b|danke\b",
    r"(?:wenn|falls) (?:sie|du)\b|(?:sie|du) (?:können|könnten|sollten|kannst|könntest)\b",
    r"(?:können|könnten|möchten) sie\b|ich (?:empfehle|würde|schlage|helfe)\b|für (?:weitere|genauere|mehr)\b",
    rf"{_DE} (?:\w+ )?(?:behandel|beschreib|handel|erwähn|themati|befass|konzentrier|bezieh|drehen)\w*\b[^0-9]*$",
    (
        r"sie (?:behandel|beschreib|handel|befass|bezieh)\w*\b.{0,40}\b(?:nur|lediglich|ausschliess\w*|"
        r"hauptsäch\w*)[^0-9]*$"
    ),
)
GERMAN_LEAD: Final = (
    r"leider|bedauerlicherweise|(?:es )?tut mir (?:sehr )?leid|entschuldigung|allerdings|jedoch|aber|daher|"
    r"obwohl|weil|da|"
    r"antwort|derzeit|momentan"
)

# -- French --------------------------------------------------------------------------------------------------------

_FR: Final = (
    r"(?:(?:les|le|la|ces|ce|cet|cette|vos|mes|des|du|de la|aux|au)\s+|l'|de l')(?:\w+\s+)?(?:documents?|"
    r"sources?|passages?|"
    r"textes?|informations?|contextes?|extraits?|éléments?|données|articles?|résultats?|base (?:de connaissances|"
    r"documentaire|de données))(?:\s+(?:fourni|disponible|donné|ci-dessus|récupéré|cité|à ma disposition|"
    r"de recherche)\w*)*"
)
_FR_NOUN: Final = (
    r"(?:informations?|mention|réponse|données?|détails?|indications?|précisions?|renseignements?|résultats?)"
)
FRENCH: Final = (
    (
        rf"{_FR},?\s+(?:ne |n')\s?(?:me )?(?:contien|mentionn|précis|dis|dit|permet|fourni|indiqu|donn|répond|"
        rf"abord|compren|"
        rf"évoqu|parl|spécifi|décri|inclu|trait|comport|offr|révèl|nomm|expliqu)\w*"
    ),
    r"je (?:ne |n')\s?(?:sais|peux|puis|dispose|trouve|ai|suis|connais|possède|vois|parviens)\b",
    rf"il n'(?:y a|existe) (?:pas|aucune?)\s?(?:assez |suffisamment )?(?:d'|de )?(?:\w+ )?{_FR_NOUN}\b",
    rf"(?:aucune?|pas (?:d'|de |assez d')) ?(?:\w+ )?{_FR_NOUN}\b",
    r"aucune? (?:des|de ces) \w+.{0,40} (?:ne |n')",
    (
        rf"(?:il est |c'est )?(?:impossible|pas possible) de répondre\b|il (?:est impossible|n'est pas possible) de"
        rf"\b.{{0,120}}{_FR}"
    ),
    (
        rf".{{0,160}}\b(?:n'(?:est|a|ont|sont|était|y)|ne (?:sont|figure\w*|se trouve\w*|peut|permet\w*|sait|"
        rf"trouve))\b.{{0,60}}"
        rf"(?:dans|par|à partir|d'après|avec|sur).{{0,4}}{_FR}"
    ),
    r"(?:la|cette|votre) question ne peut\b|informations? (?:insuffisante|non disponible|manquante)s?",
    r"(?:inconnue?|non (?:mentionné|précisé|spécifié|indiqué)e?s?|aucune idée)\b",
)
FRENCH_ASIDE: Final = (
    (
        r"désolée?|je suis (?:vraiment )?désolée?|je m'excuse|veuillez|merci|n'hésitez|si vous|je vous|pourriez|"
        r"pouvez|puis-je"
    ),
    r"pour plus|vous (?:pouvez|pourriez|devriez)|je (?:recommande|suggère|peux vous)",
    (
        rf"{_FR} (?:ne )?(?:parl|trait|décri|évoqu|mentionn|abord|port|concern|discut|se (?:concentr|"
        rf"limit))\w*\b[^0-9]*$"
    ),
)
FRENCH_LEAD: Final = (
    rf"malheureusement|(?:je suis )?désolée?|je regrette|cependant|toutefois|mais|donc|bien que|car|réponse|"
    rf"(?:d'après|selon|"
    rf"dans|à partir de|sur la base de|avec) {_FR}|à partir (?:de|des) .{{0,20}}(?:documents?|sources?)|"
    rf"actuellement|quoique"
)

# -- Spanish -------------------------------------------------------------------------------------------------------

_ES: Final = (
    r"(?:(?:los|las|el|la|estos?|estas?|este|mis?|sus?|del)\s+)(?:\w+\s+)?(?:documentos?|fuentes?|pasajes?|textos?|"
    r"información|contextos?|extractos?|materiales|datos|fragmentos?|artículos?|archivos?|resultados?|"
    r"base de (?:datos|"
    r"conocimientos?)|recursos)(?:\s+(?:proporcionad|disponibl|dad|suministrad|recuperad|anterior|facilitad|"
    r"de búsqueda)\w*)*"
)
_ES_NOUN: Final = r"(?:información|respuestas?|detalles|mención|resultados|datos (?:sobre|acerca|suficientes))"
SPANISH: Final = (
    (
        rf"{_ES} no (?:me )?(?:contien|mencion|indic|dice|especific|proporcion|ofrec|da|inclu|respond|aclar|habla|"
        rf"detall|"
        rf"describ|explic|permit|abord|tien|revel|precis|nombr|señal)\w*"
    ),
    (
        r"(?:yo )?no (?:lo )?(?:sé|puedo|dispongo|tengo|encuentro|encontré|he (?:encontrado|podido)|cuento|pude|"
        r"poseo|conozco|"
        r"estoy seguro)\b"
    ),
    rf"no (?:hay|existe|existen) (?:\w+ ){{0,2}}{_ES_NOUN}\b",
    (
        rf"no se (?:encontr|hall|encuentr|ha encontrado|proporcion|dispone|"
        rf"ofrec)\w*\s+(?:de )?(?:ninguna )?(?:\w+ )?(?:{_ES_NOUN}|"
        rf"datos|documentos)\b"
    ),
    rf"no se .{{0,120}}\b(?:en|de|con|por|según) {_ES}",
    r"no se puede (?:responder|contestar)\b",
    rf"(?:no es posible|es imposible) (?:responder|contestar)\b|(?:no es posible|es imposible)\b.{{0,120}}{_ES}",
    rf".{{0,160}}\bno (?:se |está |es |fue |ha sido |aparece|figura|puede)\w*.{{0,60}}\b(?:en|por|con|de) {_ES}",
    rf"ningun[oa] de {_ES}",
    r"(?:información|datos) insuficientes?|sin (?:información|datos|respuesta)\b|desconocid[oa]$|ni idea$",
)
SPANISH_ASIDE: Final = (
    r"lo (?:siento|lamento)|disculp|perdón|por favor|gracias|si (?:usted|tiene|puede|desea|necesita|me|quiere)",
    r"[lt]e (?:recomiendo|sugiero)|puedes?\b|podría|para (?:más|obtener)|recomiendo|sugiero",
    rf"{_ES} (?:trat|habl|describ|mencion|abord|discut|se (?:centr|refier|limit))\w*\b[^0-9]*$",
)
SPANISH_LEAD: Final = (
    rf"lamentablemente|desafortunadamente|lo (?:siento|lamento)(?: mucho)?|perdón|sin embargo|pero|aunque|"
    rf"porque|ya que|aún|"
    rf"actualmente|respuesta|(?:según|de acuerdo con|en|a partir de|con|basándo\w+ en) {_ES}"
)
