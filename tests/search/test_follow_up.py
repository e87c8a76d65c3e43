from __future__ import annotations

import math

import pytest

from llama_index_agentic_kb.search.follow_up import MAX_EARLIER, FollowUp, leans, names_of

USER, REPLY = "user", "assistant"


LEANING = (
    "How tall was it?|When did she die?|Why?|And in Europe?|When was the film released?|Tell me more about this|"
    "Which actors star in the film?|What about Germany?|Can I use it?|Wo wurde er geboren?|¿Dónde nació ella?|"
    "Où est-elle née ?|That's interesting. How does it spread?|Okay. Give me some examples."
)
STANDING = (
    "What are the grounds for lodging an appeal?|Where is the Eiffel Tower?|How tall was the Saturn V rocket?|"
    "What is the typical down payment amount for a mortgage?|Where can people report a scam that they lost money to?|"
    "Are there any awards for amateur photography in Finland?|My son wants an old diesel car. How long does it last?|"
    "Where can people with a low income report scams that their neighbours tried on them?"
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


def test_a_definite_end_expands_the_vector_alone() -> None:
    """Often enough it refers to nothing: keyword search would lose more than it gains."""
    made = FollowUp.of("Which actors star in the film?", [(USER, "Tell me about Yaadein"), (REPLY, "A film.")])
    assert made.expanded == "Which actors star in the film? yaadein"
    assert made.words == made.question


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
    vectors = {made.question: [0.3, 0.4]}
    assert made.vector(vectors.__getitem__) == [0.3, 0.4]


def test_vectors_are_weighted() -> None:
    """The expanded text counts twice as much as the message; an older message half as much as the next one."""
    made = FollowUp("it", "it moon", ("new", "old"))
    vectors = {"it": [2.0, 0.0, 0.0], "it moon": [0.0, 3.0, 0.0], "new": [1.0, 0.0, 0.0], "old": [0.0, 1.0, 0.0]}
    assert made.texts == ["it", "it moon", "new", "old"]
    assert made.vector(vectors.__getitem__) == [0.5, 1.0, 0.0]
    long = FollowUp("big red dog", "it moon")
    assert long.vector({**vectors, "big red dog": [2.0, 0.0, 0.0]}.__getitem__) == [1.5, 1.0, 0.0]
    assert made.history(vectors.__getitem__) == pytest.approx([1 / math.sqrt(1.25), 0.5 / math.sqrt(1.25), 0.0])


LIVER = [(USER, "What does the liver do?"), (REPLY, "It stores iron. Iron is old. Iron, as ferritin, is kept.")]


@pytest.mark.parametrize(
    ("message", "drift", "expanded", "words", "has_reply"),
    [
        ("Who is at high risk?", 0.3, True, "Who is at high risk?", False),
        ("Who is at high risk?", 0.15, False, "Who is at high risk?", False),
        ("Why?", 0.12, True, "Why? liver iron", True),
        ("Why?", 0.05, True, "Why? liver", False),
        ("Why?", -0.1, True, "Why? liver", False),
        ("Does it really hurt?", -0.1, False, "Does it really hurt?", False),
        ("Does it really hurt at night?", 0.04, False, "Does it really hurt at night?", False),
        ("Who is at high risk of a stroke at night?", 0.9, False, "Who is at high risk of a stroke at night?", False),
    ],
)
def test_the_drift_settles_what_words_leave_open(
    message: str, drift: float, words: str, *, expanded: bool, has_reply: bool
) -> None:
    """A short message is expanded near the earlier ones; the reply, and what it repeats, counts there too."""
    made = FollowUp.of(message, LIVER)
    vectors = {text: [1.0, 0.0] for text in made.texts} | {message: [drift, math.sqrt(1 - drift**2)]}
    assert made.drift(vectors.__getitem__) == pytest.approx(drift)
    settled = made.settled(vectors.__getitem__)
    assert (settled.expanded == f"{message} liver") is expanded
    assert settled.words == words
    assert bool(settled.reply) is has_reply


def test_a_reply_is_part_of_the_vector() -> None:
    """Beside the message and its expanded text, whose sum has unit length."""
    made = FollowUp("it", "it moon", ("new",), reply="A rock.")
    vectors = {"it": [1.0, 0.0], "it moon": [1.0, 0.0], "A rock.": [0.0, 2.0]}
    assert made.texts == ["it", "it moon", "A rock.", "new"]
    assert made.vector(vectors.__getitem__) == pytest.approx([1.0, 0.3])


def test_only_the_latest_messages_are_compared() -> None:
    """Newest first, each once; other roles and empty messages are ignored."""
    history = [(USER, f"message {number}") for number in range(9)]
    made = FollowUp.of("And now?", [*history, ("system", "Be brief."), (USER, " "), (USER, "message 8")])
    assert made.earlier == ("message 8", "message 7", "message 6")
    assert len(made.earlier) == MAX_EARLIER
