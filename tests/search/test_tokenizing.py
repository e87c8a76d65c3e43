# ruff: noqa: RUF001 (letters of many scripts are what this is about)
from __future__ import annotations

import pytest

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.search.tokenizing import MAX_QUERY_WORDS, Analyzer, detect_language, split_words

ENGLISH = "The rockets were launched from the coast of Florida, and they flew to the moon."
GERMAN = "Die Raketen wurden von der Küste aus gestartet, und sie flogen bis zu den Häusern am Mond."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The director's film", "the director film"),
        ("O’Brien’s l'été", "o brien l été"),
        ("similarity_top_k GPT-4o", "similarity top k gpt 4o"),
        ("110.6 m, 1,234.5 or v1.2.3.", "110.6 m 1,234.5 or v1.2.3"),
        ("ＡＢＣ ﬁsh STRASSE Straße", "abc fish strasse strasse"),
        ("co\u00adoperate", "cooperate"),
        ("हिन्दी किताबें", "हिन्दी किताबें"),
        ("東京タワー", "東京 京タ タワ ワー"),
        ("北京2008", "北京 2008"),
        ("ﾊﾝｶｸ", "ハン ンカ カク"),
        ("A 猫 B", "a 猫 b"),
        ("ภาษา", "ภา าษ ษา"),
        ("", ""),
        ("?! \0 \ud800 … 👩‍👧", ""),
    ],
)
def test_words_are_letters_digits_and_marks(text: str, words: str) -> None:
    """Case and width don't matter; numbers are whole; scripts without spaces become overlapping pairs."""
    assert split_words(text) == words.split()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (ENGLISH, "english"),
        (GERMAN, "german"),
        ("La tour Eiffel est une tour de fer qui se trouve à Paris.", "french"),
        ("El Quijote es una novela escrita por el español Miguel de Cervantes.", "spanish"),
        ("Il Colosseo è un anfiteatro che si trova a Roma.", "italian"),
        ("A Torre de Belém é um monumento que fica em Lisboa.", "portuguese"),
        ("Amsterdam is de hoofdstad van Nederland en een grote stad.", "dutch"),
        ("Stockholm är huvudstaden i Sverige och ligger vid Mälaren.", "swedish"),
        ("København er hovedstaden i Danmark og ligger på øen Sjælland, hvor der blev bygget af kongen.", "danish"),
        ("Oslo er hovedstaden i Norge og ble grunnlagt rundt år 1000.", "norwegian"),
        ("Helsinki on Suomen pääkaupunki ja se on myös suurin kaupunki.", "finnish"),
        ("Budapest Magyarország fővárosa, és a legnagyobb város is az országban.", "hungarian"),
        ("București este capitala României și cel mai mare oraș din țară.", "romanian"),
        ("İstanbul, Türkiye'nin en kalabalık şehri ve bir liman kentidir.", "turkish"),
        ("Москва является столицей России.", "russian"),
        ("Η Αθήνα είναι η πρωτεύουσα της Ελλάδας.", "greek"),
        ("القاهرة هي عاصمة مصر", "arabic"),
        ("புத்தகங்கள் இங்கே உள்ளன", "tamil"),
        # What an English text quotes, or does not say.
        ("Justus von Dohnányi (born 1960) is a German actor, best known for his part in a film.", "english"),
        ("J. K. Rowling, vitamin C, 235 AD", "english"),
        ("東京は日本の首都です", "english"),
        ("", "english"),
    ],
)
def test_languages_are_told_apart(text: str, language: str) -> None:
    """By script and function words; names, numbers and quotes leave a text what it is."""
    assert detect_language(split_words(text)) == language


def test_documents_are_stemmed_in_their_own_language() -> None:
    """English and German words lose their endings, and terms tell whose they are."""
    assert Analyzer().document(ENGLISH)[1].split()[1:4] == ["rocket", "were", "launch"]
    language, terms = Analyzer().document(GERMAN)
    assert language == "german"
    assert {"kust~ge", "haus~ge", "flog~ge"} <= set(terms.split())


def test_a_language_can_be_set() -> None:
    """It is that of all texts, then, whatever they look like; one without a stemmer is refused."""
    assert Analyzer("german").document(ENGLISH)[0] == "german"
    with pytest.raises(ConfigurationError, match="'klingon' is unknown; known are arabic, danish"):
        Analyzer("klingon")


def test_function_words_of_the_query_are_left_out_if_others_remain() -> None:
    """Those of the query's own language; a query of nothing else keeps them."""
    analyzer = Analyzer()
    assert analyzer.query("Who was the director of the film?", ["english"]) == [("director",), ("film",)]
    assert analyzer.query("Who was it?", ["english"]) == [("who",), ("was",), ("it",)]
    assert analyzer.query("Wie hoch war die Rakete?", ["german"]) == [("hoch~ge",), ("rak~ge",)]
    assert analyzer.query("die", ["english", "german"]) == [("die", "die~ge")]


def test_long_queries_are_cut() -> None:
    """Distinct words count, and only so many; an endless word is one."""
    analyzer = Analyzer()
    assert len(analyzer.query("rain " * 2_000, ["english"])) == 1
    assert len(analyzer.query(" ".join(f"w{n}" for n in range(2_000)), ["english"])) == MAX_QUERY_WORDS
    ((term,),) = analyzer.query("a1" * 5_000, ["english"])
    assert len(term) == 255
    assert analyzer.document("a1" * 5_000)[1] == term
