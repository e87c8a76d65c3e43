"""Closed classes of words that change what a sentence says: negation, opposites, hedges, and common synonyms.

Closed classes are listed in full. Opposites and synonyms are the frequent ones of English that relations are told with
(being born, founding, winning, ...): a download-free floor, no thesaurus. Words are given as they stand in a text and
compared by their stems.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ANTONYMS",
    "BE_FORMS",
    "COUNTRIES",
    "GRADED",
    "HEDGES",
    "IRREGULAR",
    "NEGATIONS",
    "NEGATION_PREFIXES",
    "PRONOUNS",
    "SYNONYMS",
]


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in text.strip().splitlines())


NEGATIONS: Final = _set(
    "not n't no never none neither nor nobody nothing nowhere without cannot hardly scarcely barely rarely seldom "
    "fail fails failed failing lack lacks lacked lacking unable refuse refuses refused decline declines declined "
    "absence absent deny denies denied "
    "nicht kein keine keinen keinem keiner keines nie niemals niemand nichts ohne weder "
    "ne pas jamais aucun aucune sans rien ni "
    "nunca jamás ningún ninguna sin nadie "
    "non mai nessun nessuna senza"
)
"""Words that turn what follows them into its opposite."""
NEGATION_PREFIXES: Final = ("un", "in", "im", "ir", "il", "dis", "non", "mis")
"""Prefixes that do so with their word."""

HEDGES: Final = _set(
    "may might could possibly perhaps allegedly reportedly rumored rumoured supposedly probably likely purportedly "
    "suggested believed thought claimed speculated planned proposed expected intended hoped "
    "vielleicht möglicherweise angeblich vermutlich wohl könnte soll"
)
"""Words that keep a sentence from asserting."""

BE_FORMS: Final = _set("is are was were be been being am 's get gets got wurde wurden wird werden ist war sind waren")
PRONOUNS: Final = _set(
    "he she it they him her his hers its them their theirs this that these those who which whose "
    "er sie es ihr ihm ihn ihnen ihre sein seine dieser diese dieses"
)
_OPPOSITES: Final = """\
increase rise grow gain climb expand higher up upward > decrease decline fall drop shrink
increase rise grow gain climb expand higher up upward > reduce lower down downward fell
first earliest initial opening > last latest final closing
before earlier prior preceding ahead > after later following subsequent behind
north northern > south southern
east eastern > west western
win won victory victor winner beat defeated > lose lost loss defeat loser
accept accepted approve approved agree agreed pass passed support supported > reject rejected refuse refused oppose
accept accepted approve approved agree agreed pass passed support supported > opposed disagree disapprove veto vetoed
begin began start started open opened launch launched > end ended stop stopped close
begin began start started open opened launch launched > closed finish finished cease ceased
large larger largest big bigger biggest great greater > small smaller smallest little tiny minor
more most majority > less least fewer fewest minority
high tall > low short
long longer longest > short shorter shortest
old older oldest elder > young younger youngest new newer newest
hot warm warmer > cold cool cooler
fast faster quick rapid > slow slower
major > minor
male man men boy father son husband brother king > female woman women girl mother daughter wife sister queen
positive > negative
legal lawful permit permitted allow allowed > illegal unlawful forbid forbidden prohibit prohibited ban banned
public > private
alive living survive survived > dead died killed
success successful succeed succeeded > failure unsuccessful fail failed
include included including > exclude excluded excluding
always every all > never
internal inside inner > external outside outer
import > export
buy bought purchase acquire > sell sold
early > late
rich wealthy > poor
true correct right > false incorrect wrong
strong stronger > weak weaker
domestic national > foreign international
present > absent
above over exceed exceeded > below under
maximum > minimum
best better > worst worse
easy simple > difficult hard complex
common frequent popular > rare uncommon unpopular
ally allied > enemy
urban > rural
ancient > modern
professional > amateur
enable > disable prevent
safe > dangerous unsafe
free > paid
full > empty
arrive arrived enter entered join joined > leave left depart departed
"""
ANTONYMS: Final = tuple(
    tuple(frozenset(side.split()) for side in line.split(" > ")) for line in _OPPOSITES.splitlines()
)
"""Pairs of sets: a word of one side says the opposite of a word of the other."""

SYNONYMS: Final = _groups(
    """
    born birth native
    die died death dead deceased demise killed
    found founded establish established create created form formed set built
    found started start begin began launch launched originate inaugurated
    film movie picture feature
    buy bought purchase purchased acquire acquired acquisition takeover
    sell sold sale
    win won winner victory victorious triumph champion
    beat defeat defeated overcame vanquished
    lose lost loss
    write wrote written author authored penned writer
    direct directed director filmmaker helmed
    compose composed composer
    marry married wife husband spouse wed marriage wedding
    child children son daughter offspring kid
    father mother parent
    brother sister sibling
    country nation state
    city town municipality
    village settlement hamlet community
    population inhabitants residents people
    big large huge great enormous
    small little tiny
    company firm corporation business enterprise
    job occupation profession work career
    live lived reside resided home
    release released issue issued publish published publication appear appeared came out premiere premiered debut
    record recorded album
    song track single tune
    build built construct constructed construction erected
    locate located situated lie lies stands found sits
    play played perform performed player
    actor actress star starred
    leader head chief chairman boss president lead led
    king ruler monarch sovereign
    school college university academy institution
    study studied attend attended educated education graduate graduated student
    teach taught teacher professor instructor
    help aid assist assistance support
    use used utilize employ employed
    make made produce produced producer production manufacture manufactured
    begin began start started commence commenced
    end ended finish finished conclude concluded terminate terminated
    show demonstrate indicate reveal
    important significant major key notable
    famous known renowned noted celebrated
    kill killed murder murdered slain assassinated
    fight battle war combat conflict
    get obtain receive received gain earn earned
    give gave provide provided supply offer grant
    contain contains include includes comprise consist hold
    area region zone district
    increase rise grow growth climb
    decrease decline fall drop reduce reduction
    cost price expense
    money funds cash
    pay paid payment
    car automobile vehicle
    doctor physician
    lawyer attorney
    soldier officer military army
    politician statesman
    named called titled known entitled dubbed
    near close adjacent next
    quick fast rapid
    choose chosen select selected elect elected pick
    move moved relocate relocated transfer transferred
    travel journey trip
    replace replaced succeed succeeded successor
    year annual annually yearly
    need require required must necessary
    allow permit enable let
    stop halt prevent cease
    speak said say state stated tell told announce announced report reported declare declared add added note noted
    belief believe think thought
    measure size dimension
    seat seats hold holds accommodate capacity
    spectator spectators people fans
    patient patients participant participants volunteer volunteers subject subjects
    resign resigned quit step
    vehicle car truck
    like similar
    rough roughly about
    executive ceo chief
    likelihood likely probability chance risk
    accord agree agreement deal pact treaty
    show display exhibit
    happen happened occur occurred take
    hit struck strike
    guy man person
    reason cause because
    fix repair mend correct
    delete remove erase
    error fault bug
    praise praised positive acclaim acclaimed
    close shut
    weight weigh weighs mass
    length long
    height high tall
    depth deep
    width wide
    age old aged
    date day
    war conflict
    join joined enlist enlisted enter entered
    serve served service
    design designed designer architect
    invent invented inventor invention
    discover discovered discovery found
    game match
    team club side squad
    sport athletic athlete
    language tongue
    origin original come came derive derived
    type kind sort form
    part portion section component piece
    also too additionally
    reach reached arrive arrived
    about approximately around nearly roughly
    """
)
"""Words that may stand for each other where a relation is told."""

_GRADED: Final = _set(
    "deep large big high tall long short old young new early late fast slow strong weak rich poor small great wide "
    "narrow heavy light hot cold warm cool bright dark loud quiet safe clean dirty cheap near far thick thin low hard "
    "soft easy simple deadly wealthy healthy happy busy steep dry wet noble close broad sharp smart"
)
GRADED: Final = {
    form: word
    for word in _GRADED
    for stem in (word, word.removesuffix("e"), word.removesuffix("y") + "i", word + word[-1])
    for form in (stem + "est",)
} | {"best": "good", "worst": "bad", "farthest": "far", "furthest": "far"}
"""Superlatives, and what each is one of ("biggest": "big")."""

_COUNTRIES: Final = """\
us usa america american americans|uk gb britain british briton britons|netherlands dutch holland|france french
germany german germans|spain spanish spaniard spaniards|greece greek greeks|denmark danish dane danes
poland polish pole poles|turkey turkish turk turks türkiye|switzerland swiss|wales welsh|england english
scotland scottish scots scot|ireland irish|sweden swedish swede swedes|finland finnish finn finns
iceland icelandic icelander|china chinese prc|japan japanese|portugal portuguese|thailand thai|cyprus cypriot
philippines filipino filipina philippine|norway norwegian|czech czechia bohemian|ussr soviet soviets
hungary hungarian|peru peruvian|israel israeli|iraq iraqi|pakistan pakistani|eu european europe
deutschland deutsch deutsche|frankreich französisch|england englisch"""
COUNTRIES: Final = {
    word: group.split()[0] for group in "|".join(_COUNTRIES.splitlines()).split("|") for word in group.split()
}
"""Names of countries and of their people that don't begin alike, and one of them for each."""

_IRREGULAR: Final = """
arise arose arisen|bear bore borne|beat beaten|become became|begin began begun|bend bent|bind bound|bite bit
bitten|blow blew blown|break broke broken|bring brought|build built|burn burnt|buy bought|catch caught|choose chose
chosen|come came|cut cuts|deal dealt|dig dug|do did done|draw drew drawn|drink drank drunk|drive drove driven|eat
ate eaten|fall fell fallen|feed fed|feel felt|fight fought|find found|fly flew flown|forbid forbade forbidden|forget
forgot forgotten|freeze froze frozen|get got gotten|give gave given|go went gone|grow grew grown|hang hung|hear
heard|hide hid hidden|hold held|keep kept|know knew known|lay laid|lead led|leave left|lend lent|lose lost|make
made|mean meant|meet met|overcome overcame|pay paid|ride rode ridden|ring rang rung|rise rose risen|run ran|say
said|see saw seen|seek sought|sell sold|send sent|shake shook shaken|shine shone|shoot shot|show showed shown|shrink
shrank shrunk|sing sang sung|sink sank sunk|sit sat|sleep slept|speak spoke spoken|spend spent|spring sprang
sprung|stand stood|steal stole stolen|stick stuck|strike struck|swear swore sworn|swim swam swum|take took
taken|teach taught|tear tore torn|tell told|think thought|throw threw thrown|understand understood|wake woke
woken|wear wore worn|win won|withdraw withdrew withdrawn|write wrote written|man men|woman women|child
children|person people|foot feet|life lives|wife wives|country countries|good better best|bad worse worst
"""
IRREGULAR: Final = {
    form: forms.split()[0] for forms in " ".join(_IRREGULAR.split()).split("|") for form in forms.split()[1:]
}
"""Irregular forms of English, and the word that each is a form of."""
