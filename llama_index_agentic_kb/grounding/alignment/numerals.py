"""Names of months, numbers and units, and what each stands for."""

from __future__ import annotations

from typing import Final

__all__ = [
    "FRACTIONS",
    "MONEY",
    "MONTHS",
    "ONLY_AFTER_FIGURES",
    "ONLY_MONEY",
    "ORDINALS",
    "OTHER_COUNTS",
    "SCALES",
    "SMALL",
    "TENS",
    "UNITS",
]


def _numbered(words: str, start: int = 0) -> dict[str, int]:
    """Number words, several of one number joined by strokes."""
    numbered = enumerate(words.split(), start=start)
    return {word: number for number, alike in numbered for word in alike.split("/")}


MONTHS: Final = _numbered(
    "january/jan/januar/jänner/janvier/enero/gennaio february/feb/februar/février/febrero/febbraio "
    "march/mar/märz/mars/marzo april/apr/avril/abril/aprile may/mai/mayo/maggio june/jun/juni/juin/junio/giugno "
    "july/jul/juli/juillet/julio/luglio august/aug/août/agosto september/sep/sept/septembre/septiembre/settembre "
    "october/oct/oktober/okt/octobre/octubre/ottobre november/nov/novembre/noviembre "
    "december/dec/dezember/dez/décembre/diciembre/dicembre",
    start=1,
)
SMALL: Final = _numbered(
    "zero/null one/eins two/zwei three/drei four/vier five/fünf six/sechs seven/sieben eight/acht nine/neun ten/zehn "
    "eleven/elf twelve/zwölf thirteen/dreizehn fourteen/vierzehn fifteen/fünfzehn sixteen/sechzehn "
    "seventeen/siebzehn eighteen/achtzehn nineteen/neunzehn"
)
TENS: Final = {
    word: 10 * number
    for word, number in _numbered(
        "twenty/zwanzig thirty/dreißig forty/vierzig fifty/fünfzig sixty/sechzig seventy/siebzig eighty/achtzig "
        "ninety/neunzig",
        start=2,
    ).items()
}
ORDINALS: Final = _numbered(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth",
    start=1,
)
FRACTIONS: Final = {
    "half": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4, "fifth": 5,
    "fifths": 5, "sixth": 6, "eighth": 8, "tenth": 10, "tenths": 10, "hälfte": 2, "drittel": 3, "viertel": 4,
    "fünftel": 5, "zehntel": 10,
}  # fmt: skip
"""Parts of a whole, each by its denominator."""
SCALES: Final = {
    "hundred": 1e2, "hundert": 1e2, "thousand": 1e3, "tausend": 1e3, "k": 1e3, "million": 1e6, "millions": 1e6,
    "millionen": 1e6, "mio": 1e6, "mn": 1e6, "m": 1e6, "b": 1e9, "billion": 1e9, "billions": 1e9, "bn": 1e9,
    "milliarde": 1e9, "milliarden": 1e9, "mrd": 1e9, "trillion": 1e12, "dozen": 12.0, "万": 1e4, "億": 1e8, "亿": 1e8,
}  # fmt: skip
ONLY_MONEY: Final = frozenset({"k", "m", "mn", "b", "bn"})
"""Letters that multiply only behind a sum of money ("$5m")."""
OTHER_COUNTS: Final = {"twice": 2, "thrice": 3}

UNITS: Final[dict[str, tuple[str, float]]] = {}


def _unit(dimension: str, table: str) -> None:
    for entry in table.split(";"):
        names, factor = entry.rsplit("=", 1)
        for name in names.split(","):
            UNITS[name.strip()] = (dimension, float(factor))


_unit(
    "length",
    "km,kilometre,kilometres,kilometer,kilometers=1000;m,metre,metres,meter,meters=1;cm,centimetre,centimetres,"
    "centimeter,centimeters=0.01;mm,millimetre,millimetres,millimeter,millimeters=0.001;mile,miles,mi,meilen=1609.344;"
    "yard,yards,yd=0.9144;ft,foot,feet=0.3048;inch,inches=0.0254;nautical mile=1852",
)
_unit(
    "mass",
    "kg,kilogram,kilograms,kilogramme,kilogrammes,kilos,kilo=1;g,gram,grams,gramme,grammes,gramm=0.001;"
    "mg,milligram,milligrams=0.000001;t,tonne,tonnes,tonnen=1000;ton,tons=907.185;lb,lbs,pound,pounds=0.45359237;"
    "oz,ounce,ounces=0.028349523",
)
_unit(
    "time",
    "second,seconds,sec,secs,sekunde,sekunden=1;minute,minutes,min,mins,minuten=60;hour,hours,hr,hrs,stunde,"
    "stunden=3600;day,days,tag,tage,tagen=86400;week,weeks,woche,wochen=604800;month,months,monat,monate,"
    "monaten=2629746;year,years,yr,yrs,jahr,jahre,jahren,年間=31556952;decade,decades=315569520;"
    "century,centuries=3155695200",
)
_unit(
    "area",
    "km²,km2,square kilometres,square kilometers=1000000;m²,m2,square metres,square meters=1;"
    "acre,acres=4046.856;hectare,hectares,ha=10000;square miles,square mile,sq mi=2589988.11;"
    "square feet,sq ft=0.09290304",
)
_unit(
    "volume",
    "l,litre,litres,liter,liters=1;ml,millilitre,millilitres,milliliter,milliliters=0.001;gallon,gallons="
    "3.785411784;m³,cubic metres,cubic meters=1000",
)
_unit(
    "speed",
    "km/h,kmh,kph,kilometres per hour,kilometers per hour=1;mph,miles per hour=1.609344;"
    "m/s,metres per second,meters per second=3.6",
)
_unit("percent", "%,percent,per cent,prozent,percentage points=1")
_unit("data", "kb,kilobytes=0.001;mb,megabytes,megabyte=1;gb,gigabytes,gigabyte=1000;tb,terabytes,terabyte=1000000")
_unit("power", "w,watt,watts=1;kw,kilowatt,kilowatts=1000;mw,megawatt,megawatts=1000000;hp,horsepower=745.7")
_unit("dollar", "dollars,dollar,usd=1;cents,cent=0.01")
_unit("euro", "euros,euro,eur=1")
_unit("pound sterling", "gbp,pounds sterling=1")
_unit("yen", "yen,jpy=1")
_unit("celsius", "°c,degrees celsius,celsius=1")
_unit("fahrenheit", "°f,degrees fahrenheit,fahrenheit=1")
_unit("degree", "°,degrees,degree=1")
MONEY: Final = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
# A symbol that is also a word or a scale counts only right behind figures.
ONLY_AFTER_FIGURES: Final = frozenset({"m", "g", "t", "l", "w", "mi", "min", "sec", "ha", "hp", "mb", "kb"})
