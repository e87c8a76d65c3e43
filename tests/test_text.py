from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._text import cut_to_fit, excerpt, know_secrets, one_line, redacted, sentence_spans
from llama_index_agentic_kb.store.sql import parsed_url
from llama_index_agentic_kb.testing import count_tokens

TEXTS = st.text(st.sampled_from("abc .!?\n\tÄß…"), max_size=200)
PROSE = "Dr. Smith went home. He slept well! Did he? Yes, at 5 p.m. he did. The end."


def test_odd_secrets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lone surrogate of a damaged environment, and with a run of backslashes, which takes linear time."""
    monkeypatch.setattr(_text, "_KNOWN", {})
    know_secrets(["hidden-\udcff-words", "\\" * 40 + "key1"])
    assert redacted("say hidden-\udcff-words") == "say ***"
    assert "key1" not in redacted("\\" * 40 + "key1" + " and " + "\\" * 200 + "key2")


def test_passwords_of_a_url_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its user and those of its query, wherever they stand later."""
    monkeypatch.setattr(_text, "_KNOWN", {})
    parsed_url("postgresql://kb:first-hush@h/db?sslmode=require-all&password=hush-hush-8&sslpassword=quiet-quiet")
    assert redacted("first-hush hush-hush-8 quiet-quiet require-all") == "*** *** *** require-all"
    names = ["pass", "PASSWD", "pwd", "secret", "token"]
    names += ["ssl_key_password", "private_key_passphrase", "access_token", "api_key"]
    parsed_url(
        "postgresql://h/d?passfile=/home/pgpass1&" + "&".join(f"{one}=hush-{at}-hush" for at, one in enumerate(names))
    )
    assert redacted(" ".join(f"hush-{at}-hush" for at in range(len(names)))) == " ".join(["***"] * len(names))
    assert redacted("/home/pgpass1") == "/home/pgpass1"


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(1, 50))
def test_one_line(text: str, limit: int) -> None:
    """One line, no longer than asked, with an ellipsis where it was cut."""
    line = one_line(text, limit)
    assert "\n" not in line
    assert len(line) <= limit
    assert line == " ".join(text.split()) or line.endswith("…")


@settings(max_examples=50, deadline=None)
@given(TEXTS)
@example(" ??\na")
def test_spans_cover_the_text(text: str) -> None:
    """Spans follow each other, and leave out nothing but white space at the end."""
    position = 0
    for start, end in sentence_spans(text):
        assert start == position <= end
        position = end
    assert not text[position:].strip()


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(-1, 60))
def test_what_is_cut_fits(text: str, limit: int) -> None:
    """A cut counts at most the limit and is a start of the text, whole where it fits."""
    cut = cut_to_fit(text, limit, len)
    assert len(cut) <= max(0, limit)
    assert text.startswith(cut.removesuffix("…"))
    if len(text) <= limit:
        assert cut == text


@pytest.mark.parametrize("limit", [1, 5, 9, 14, 20, 1_000])
def test_cuts_are_at_sentence_ends(limit: int) -> None:
    """Whole sentences where one fits, else whole words and an ellipsis."""
    cut = cut_to_fit(PROSE, limit, count_tokens)
    assert count_tokens(cut) <= limit
    if limit >= 9:
        assert cut[-1] in ".!?"


def test_a_long_text_is_not_counted_whole() -> None:
    """Cutting a text of a million words takes a moment, not as long as counting it again and again."""
    text = "The moon is far away. " * 200_000
    counted = [0]

    def count(part: str) -> int:
        counted[0] += len(part)
        return count_tokens(part)

    cut = cut_to_fit(text, 100, count)
    assert cut.endswith(".")
    assert count_tokens(cut) <= 100
    assert counted[0] < 100_000


def test_an_excerpt_is_the_part_around_the_words() -> None:
    """Far from the start, the best part is shown, with ellipses where text was left out; the earliest of equal ones."""
    text = "Rain fell. " * 100 + "Neil Armstrong was born in Wapakoneta, Ohio. " + "Snow fell. " * 100
    cut = excerpt(text, "Where was Armstrong born?", 20)
    assert "Armstrong was born in Wapakoneta" in cut
    assert cut.startswith("… ")
    assert cut.endswith(" …")
    assert len(cut.split()) <= 22
    assert excerpt(text, "nothing of it", 20).startswith("Rain fell.")
    assert excerpt("short enough", "anything", 2) == "short enough"


def test_an_excerpt_of_a_book_takes_a_moment() -> None:
    """A text of two million characters, or one word of as many, is cut in a few seconds at most."""
    started = time.monotonic()
    assert "Wapakoneta" in excerpt("Rain fell. " * 100_000 + "Wapakoneta " + "Snow. " * 100_000, "Wapakoneta", 50)
    assert len(excerpt("x" * 2_000_000, "Wapakoneta", 50)) < 1_000
    assert time.monotonic() - started < 15
