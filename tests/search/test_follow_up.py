from __future__ import annotations

import math

import pytest

from llama_index_agentic_kb.search.follow_up import MAX_EARLIER, FollowUp, leans, names_of

USER, REPLY = "user", "assistant"
LIVER = [(USER, "What does the liver do?"), (REPLY, "It stores iron. Iron is old. Iron, as ferritin, is kept.")]


LEANING = (
    "How tall was it?|When did she die?|Why?|And in Europe?|Tell me more about this|Not payment|"
    "What about Germany?|Can I use it?|Wo wurde er geboren?|¿Dónde nació ella?|"
    "Où est-elle née ?|That's interesting. How does it spread?|Okay. Give me some examples.|"
    "Explain that chemical process|Describe that second step in detail"
)
STANDING = (
    "What are the grounds for lodging an appeal?|Where is the Eiffel Tower?|How tall was the Saturn V rocket?|"
    "What is the typical down payment amount for a mortgage?|Where can people report a scam that they lost money to?|"
    "Are there any awards for amateur photography in Finland?|My son wants an old diesel car. How long does it last?|"
    "Where can people with a low income report scams that their neighbours tried on them?|"
    "That's interesting. What is lung cancer?|How would we know that we live in a simulation?|Who is at high risk?"
)


@pytest.mark.parametrize("message", [*LEANING.split("|"), *STANDING.split("|")])
def test_a_message_leans_on_the_conversation(message: str) -> None:
    """Judged by its pronouns, its openings and the number of its content words."""
    assert leans(message) is (message in LEANING)


@pytest.mark.parametrize(
    ("history", "message", "expanded"),
    [
        ([(USER, "Who directed Cochin Express?"), (REPLY, "M. Krishnan Nair.")], "Who is his son?", "M. Krishnan Nair"),
        ([(USER, "Who directed Alien?"), (REPLY, "Ridley Scott.")], "When was it released?", "directed alien"),
        ([(USER, "Who was Ada Lovelace?"), (REPLY, "She knew Babbage well.")], "When did she die?", "ada lovelace"),
        ([(USER, "When did Saturn V fly?"), (REPLY, "In November 1967.")], "How tall was it?", "saturn v fly"),
        ([(USER, "Tell me about Saturn V"), (REPLY, "A rocket."), (USER, "Who built it?")], "Why?", "built saturn v"),
        ([(USER, "Saturn V"), (REPLY, "A rocket.")], "How tall was the Ariane 5 rocket in metres?", None),
        ([(REPLY, "Hello, I am a bot.")], "How tall was it?", None),
        ([], "How tall was it?", None),
    ],
)
def test_a_leaning_message_is_expanded(history: list[tuple[str, str]], message: str, expanded: str | None) -> None:
    """By the name that the reply gave to a question for a name, else by the words of earlier messages."""
    made = FollowUp.of(message, history)
    assert made.expanded == (None if expanded is None else f"{message} {expanded}")
    assert made.words == (made.expanded or message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Tell me more about the tango.", "Tell me more about the tango."),
        ("Tell me more about this tango.", "Tell me more about this tango. liver iron"),
        ("Why?", "Why? liver iron"),
        ("What about Germany?", "What about Germany? liver iron"),
    ],
)
def test_a_single_word_that_may_stand_alone_is_searched_alone_by_keywords(message: str, words: str) -> None:
    """Its vector is expanded; keyword search would lose what it finds. What the reply repeats counts for the others."""
    made = FollowUp.of(message, LIVER)
    assert made.expanded == f"{message} liver"
    assert made.words == words


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("According to the sources, the answer is Fred Niblo. Ask me more.", ["Fred Niblo"]),
        ("Tokyo.", ["Tokyo"]),
        ("Rockets are tall machines that fly.", []),
        (" ".join(["word"] * 30) + " Paris.", []),
        ("", []),
    ],
)
def test_names_open_a_reply(reply: str, expected: list[str]) -> None:
    """Only those of its first sentence, if that is short."""
    assert names_of(reply) == expected


def test_a_message_that_stands_alone_keeps_its_vector() -> None:
    """History never changes it, whatever came before."""
    made = FollowUp.of("How tall was the Ariane 5 rocket in metres?", [(USER, "Is it a bird?"), (REPLY, "Yes.")])
    compared = made.compared({made.question: [0.3, 0.4], "Is it a bird?": [1.0, 0.0]})
    assert compared.query == [0.3, 0.4]
    assert compared.drift == pytest.approx(0.6)


def test_vectors_are_weighted() -> None:
    """The expanded text counts twice as much as a short message; an older message half as much as the next one."""
    made = FollowUp("it", "it moon", "", ("new", "old"))
    vectors = {"it": [2.0, 0.0, 0.0], "it moon": [0.0, 3.0, 0.0], "new": [1.0, 0.0, 0.0], "old": [0.0, 1.0, 0.0]}
    assert made.texts == ["it", "it moon", "new", "old"]
    assert made.compared(vectors).query == [0.5, 1.0, 0.0]
    assert made.compared(vectors).expanded == "it moon"
    assert made.compared(vectors).history == pytest.approx([1 / math.sqrt(1.25), 0.5 / math.sqrt(1.25), 0.0])
    assert FollowUp.of("Does it hurt the big red dog?", LIVER).own_weight == 3 * made.own_weight


@pytest.mark.parametrize(
    ("message", "drift", "expanded"),
    [
        ("Who is at high risk?", 0.25, True),
        ("Who is at high risk?", 0.15, False),
        ("Why?", -0.5, True),
        ("Who is at high risk in Norway?", 0.9, False),
        ("Who is at high risk of a stroke at night?", 0.9, False),
    ],
)
def test_the_drift_decides_where_words_say_nothing(message: str, drift: float, *, expanded: bool) -> None:
    """Of a short message without a name, the vector alone is expanded, if it is near the earlier ones."""
    made = FollowUp.of(message, LIVER)
    vectors = {text: [1.0, 0.0] for text in made.texts} | {message: [drift, math.sqrt(1 - drift**2)]}
    compared = made.compared(vectors)
    assert compared.drift == pytest.approx(drift)
    assert compared.expanded == (f"{message} liver" if expanded else None)
    assert (compared.query != vectors[message]) is expanded
    assert made.words == (message if message != "Why?" else "Why? liver iron")


def test_only_the_latest_messages_are_compared() -> None:
    """Newest first, each once; other roles and empty messages are ignored."""
    history = [(USER, f"message {number}") for number in range(9)]
    made = FollowUp.of("And now?", [*history, ("system", "Be brief."), (USER, " "), (USER, "message 8")])
    assert made.earlier == ("message 8", "message 7", "message 6")
    assert len(made.earlier) == MAX_EARLIER
