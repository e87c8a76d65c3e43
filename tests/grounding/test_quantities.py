"""Numbers, dates and quantities are read in many forms, and compared by what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.grounding.alignment.agreement import agree
from llama_index_agentic_kb.grounding.alignment.quantities import read_facts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 March 1969", "1969-03-03"),
        ("March 3, 1969", "the 3rd of March 1969"),
        ("Mar. 3, 1969", "3. März 1969"),
        ("1969年3月3日", "3 March 1969"),
        ("5 km", "5,000 m"),
        ("5-kilometre", "5,000 metres"),
        ("twenty-one", "21"),
        ("two hundred and five", "205"),
        ("$1.2 billion", "1,200,000,000 dollars"),
        ("12%", "12 percent"),
        ("33rd", "33rd"),
        ("third", "3rd"),
        ("a dozen", "12"),
        ("90 minutes", "1.5 hours"),
        ("70 °F", "about 21 °C"),
        ("3.1 miles", "about 5 km"),
        ("12161300000", "12,161,300,000"),
        ("forty-fourth", "44th"),
        ("Q4", "fourth"),
        ("$3.24B", "$3.24 billion"),
        ("3:15 pm", "15:15"),
        ("12 a.m.", "0:00"),
        ("half", "50%"),
        ("two thirds", "67 percent"),
        ("one in five", "20%"),
        ("ein Drittel", "33 Prozent"),
        ("aged 54", "54 years"),
    ],
)
def test_same(one: str, other: str) -> None:
    """Two forms of one value agree, both ways."""
    [first], [second] = list(read_facts(one)), list(read_facts(other))
    assert agree(first, second) > 0.8
    assert agree(second, first) > 0.8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5 km", "5 m"),
        ("5 km", "5 kg"),
        ("5 percent", "5"),
        ("5 million", "5 billion"),
        ("3 March 1969", "4 March 1969"),
        ("3 March 1969", "3 March 1970"),
        ("1969", "1970"),
        ("third", "3"),
        ("1960s", "1971"),
        ("70 °F", "70 °C"),
        ("283", "284"),
        ("29,036 ft", "29,029 feet"),
        ("9,003 kg", "9,000 kg"),
        ("3:15 am", "15:15"),
        ("a third of", "third"),
        ("one in five", "5"),
        ("Q3", "fourth"),
    ],
)
def test_different(one: str, other: str) -> None:
    """Values that differ in number, unit, rank or date don't agree."""
    [first], [second] = list(read_facts(one)), list(read_facts(other))
    assert agree(first, second) == agree(second, first) == 0.0


@pytest.mark.parametrize(
    ("claimed", "told", "least", "most"),
    [
        ("1969", "3 March 1969", 1.0, 1.0),
        ("March 1969", "3 March 1969", 1.0, 1.0),
        ("3 March 1969", "1969", 0.4, 0.6),
        ("the 19th century", "1848", 1.0, 1.0),
        ("1848", "the 19th century", 0.4, 0.6),
        ("the 1960s", "1969", 1.0, 1.0),
        ("$3.2 billion", "$3.24 billion", 0.9, 0.9),
        ("$3.24 billion", "$3.2 billion", 0.0, 0.0),
        ("$3.3 billion", "$3.24 billion", 0.0, 0.0),
    ],
)
def test_less_and_more_exact(claimed: str, told: str, least: float, most: float) -> None:
    """What is claimed less exactly than told is borne out; what is claimed more exactly is only in part."""
    [first], [second] = list(read_facts(claimed)), list(read_facts(told))
    assert least <= agree(first, second) <= most


@pytest.mark.parametrize("text", ["18 to 65 years", "aged 18 to 65", "18-65 years"])
def test_ranges_have_one_unit(text: str) -> None:
    """Of a range, the unit of one end is the other's as well."""
    [least], [_] = list(read_facts("18 years")), list(read_facts("65 years"))
    first, last = read_facts(text)
    assert first.dimension == last.dimension == "time"
    assert first.value == least.value


def test_german_decimals() -> None:
    """In German a comma marks decimals, and a point thousands."""
    [one, other] = [fact.value for fact in read_facts("3,5 und 1.234.567", german=True)]
    assert (one, other) == (3.5, 1_234_567)


@pytest.mark.parametrize("text", ["", "one of them", "the first time", "Mayor May may march", "no numbers"])
def test_words_that_count_nothing(text: str) -> None:
    """Words that only look like numbers and months are none."""
    assert list(read_facts(text)) == []


@given(st.text(alphabet="0123456789.,-/ %$km年月日thousandmillion°F", max_size=40))
@settings(max_examples=150, deadline=None)
def test_reads_any_text(text: str) -> None:
    """Whatever the figures, facts stand in order inside of the text, and agree with themselves."""
    position = 0
    for fact in read_facts(text):
        assert position <= fact.start < fact.end <= len(text)
        position = fact.end
        assert agree(fact, fact) == 1.0
