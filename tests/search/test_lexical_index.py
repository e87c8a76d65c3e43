# ruff: noqa: RUF001 (letters of many scripts are what words are about)
from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tantivy
from hypothesis import example, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from llama_index.core.schema import TextNode

from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    any_of,
    matches,
)
from llama_index_agentic_kb.search import lexical
from llama_index_agentic_kb.search.lexical import LexicalDocument, LexicalHit, LexicalIndex, lexical_document
from llama_index_agentic_kb.search.tokenizing import (
    MAX_QUERY_WORDS,
    detect_language,
    document_terms,
    query_terms,
    split_words,
)
from tests.filter_trees import conditions, trees

TEXTS = {
    "rain": "It is raining in Paris, and the rain will last.",
    "snow": "Snow in Oslo.",
    "rocket": "The Saturn V rocket was 110.6 m tall.",
    "rakete": "Die Rakete war 110 Meter hoch, und das Haus war nicht so hoch.",
    "tower": "東京タワーは高さ333メートルの塔です。",
    "wall": "长城是中国古代的防御工程。",
}


def document(node_id: str, text: str, **metadata: Any) -> LexicalDocument:
    return LexicalDocument(node_id, text, metadata)


def index_of(*documents: LexicalDocument, directory: Path | None = None, mark: str = "") -> LexicalIndex:
    made = LexicalIndex(directory)
    made.update(documents, mark=mark)
    return made


@pytest.fixture(scope="module")
def index() -> LexicalIndex:
    return index_of(*(document(node_id, text) for node_id, text in TEXTS.items()))


def ids(hits: Sequence[LexicalHit]) -> list[str]:
    return [hit.node_id for hit in hits]


def test_scores_are_bm25() -> None:
    """Robertson and Zaragoza's formula with k1 1.2 and b 0.75, written out; the commit's note is one more document."""
    texts = {"a": "rain rain wind", "b": "rain", "c": "snow falls"}
    made = index_of(*(document(node_id, text) for node_id, text in texts.items()))
    average = sum(len(text.split()) for text in texts.values()) / 4
    rarity = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))

    def score(count: int, length: int) -> float:
        return rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / average))

    found = {hit.node_id: hit.score for hit in made.search("rain", 10)}
    assert found == {"a": pytest.approx(score(2, 3)), "b": pytest.approx(score(1, 1))}


def test_equal_scores_are_in_the_order_of_ids() -> None:
    """Whatever order they came in, and also where the cut falls among them."""
    names = [f"n{(n * 7) % 50:02}" for n in range(50)]
    made = index_of(*(document(name, "rain") for name in names), document("best", "rain rain"))
    assert ids(made.search("rain", 100)) == ["best", *sorted(names)]
    assert ids(made.search("rain", 4)) == ["best", "n00", "n01", "n02"]
    assert ids(made.search("rain", 1)) == ["best"]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("Does it rain?", "rain"),
        ("How tall were the rockets?", "rocket"),
        ("Wie hoch sind die Raketen?", "rakete"),
        ("Häuser", "rakete"),
        ("東京タワーの高さは?", "tower"),
        ("中国的长城", "wall"),
        ("OSLO!", "snow"),
    ],
)
def test_one_index_holds_many_languages(index: LexicalIndex, query: str, first: str) -> None:
    """Each document is found by the words of its own language, in other forms than it has them."""
    assert ids(index.search(query, 3))[0] == first


def test_a_few_documents_of_another_language_take_no_place() -> None:
    """A word is as rare as in all languages together: stems that only one document has don't lift that document."""
    english = [document(f"e{n}", f"The director of the film number {n} directed it in Paris.") for n in range(60)]
    german = document("g", "Der Film von dem director ist nicht in Berlin und nicht in Paris gedreht.")
    alone, mixed = index_of(*english), index_of(*english, german)
    query = "film number 7 directed in Paris"
    assert ids(mixed.search(query, 5)) == ids(alone.search(query, 5))
    # and a German stem is no English word: "fort" is stemmed to "for" in French
    french = document("f", "Le fort est dans la ville de Paris et le roi est dans le fort.")
    other = index_of(document("for", "It is for you, for all of you, for ever."), french)
    assert ids(other.search("fort", 5)) == ["f"]


QUERIES = [
    "", "   ", "?!", "\0", "\ud800", '"', "OR NOT", "+rain -snow", "title:rain", "rain~2^3", "(((", "[a TO b]", "/./",
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_no_text_is_an_operator(index: LexicalIndex, query: str) -> None:
    """Whatever the text, it is words or nothing."""
    assert set(ids(index.search(query, 10))) == {word for word in ("rain", "snow") if word in query}


def test_documents_are_added_replaced_and_deleted() -> None:
    """Each update is seen by the next search; unknown ids are ignored; the note goes with the commit."""
    made = LexicalIndex()
    assert (len(made), made.mark) == (0, None)
    made.update([document("a", "rain"), document("b", "snow")], mark="1")
    assert (len(made), made.mark, made.node_ids()) == (2, "1", {"a", "b"})
    made.update([document("a", "wind")], delete=["b", "nobody"], mark="2")
    assert ids(made.search("rain snow wind", 10)) == ["a"]
    assert (len(made), made.mark, made.node_ids()) == (1, "2", {"a"})
    made.update([document("c", "hail")], clear=True)
    assert (made.node_ids(), made.mark) == ({"c"}, "")
    assert ids(made.search("wind hail", 10)) == ["c"]


def test_many_threads_search_while_one_writes() -> None:
    """A search sees the documents of one commit: all of a pair, or none."""
    made = index_of(document("left 0", "rain"), document("right 0", "rain"))
    done = threading.Event()

    def search(_: int) -> None:
        while not done.is_set():
            (left, right) = ids(made.search("rain", 10))
            assert left.split()[1] == right.split()[1]

    with ThreadPoolExecutor(6) as threads:
        begun = threads.map(search, range(6))
        for n in range(1, 15):
            pair = [document(f"left {n}", "rain"), document(f"right {n}", "rain")]
            made.update(pair, delete=[f"left {n - 1}", f"right {n - 1}"])
        done.set()
        list(begun)


VALUES = st.one_of(
    st.sampled_from(["a", "b", "", "1", "true", "é"]),
    st.sampled_from([0, 1, 2, -1, 1.0, 1.5, 2**53, float(2**53)]),
    st.booleans(),
)
METADATA = st.dictionaries(
    st.sampled_from(["x", "y", 'k"ey: odd']),
    st.one_of(
        VALUES, st.none(), st.lists(VALUES, max_size=3), st.just({"nested": 1}), st.just(math.nan), st.just("z" * 500)
    ),
    max_size=3,
)
KEYS = st.sampled_from(["x", "y", 'k"ey: odd', "absent"])
ONE = Condition(key="x", value=1)
TREES = trees(conditions(KEYS, st.one_of(VALUES, st.just("z" * 500))), max_leaves=5)


@example([{"x": 1}, {}, {"x": "b"}], [any_of(Condition(key="x", operator=FilterOperator.IS_EMPTY, value=True), ONE)])
@given(st.lists(METADATA, min_size=1, max_size=12), st.lists(TREES, min_size=1, max_size=12))
@given_settings(max_examples=60, deadline=None)
def test_a_filter_lets_through_what_matches(metadata: list[dict[str, Any]], trees: list[FilterNode]) -> None:
    """Exactly that, for every tree, value and list; the best of it, where less is wanted."""
    made = index_of(*(LexicalDocument(f"n{n:02}", "rain", one) for n, one in enumerate(metadata)))
    for tree in trees:
        expected = [f"n{n:02}" for n, one in enumerate(metadata) if matches(tree, one)]
        assert ids(made.search("rain", 50, tree)) == expected
        assert ids(made.search("rain", 2, tree)) == expected[:2]


@pytest.mark.parametrize("most", [0, 10_000], ids=["by looking", "by asking"])
def test_what_passes_is_found_however_far_down(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of hundreds, whether the index is asked for the values or each hit is looked at."""
    monkeypatch.setattr(lexical, "_MAX_VALUES", most)
    made = index_of(*(document(f"n{n:03}", "rain " * (n + 1), year=n) for n in range(400)))
    assert ids(made.search("rain", 3, Condition(key="year", operator=FilterOperator.LT, value=2))) == ["n001", "n000"]
    negative = FilterGroup(logic=FilterLogic.NOT, filters=[Condition(key="year", operator=FilterOperator.GE, value=1)])
    assert ids(made.search("rain", 3, negative)) == ["n000"]
    assert made.search("rain", 3, Condition(key="year", operator=FilterOperator.GT, value=400)) == []


def test_a_directory_keeps_it(tmp_path: Path) -> None:
    """Another index over the directory finds the same, and sees later commits when it is refreshed."""
    first = index_of(document("a", "rain in Paris", year=2001), directory=tmp_path / "new" / "index", mark="7")
    second = LexicalIndex(tmp_path / "new" / "index")
    assert (second.mark, second.search("rain", 5)) == ("7", first.search("rain", 5))
    first.update([document("b", "rain")], mark="8")
    assert second.mark == "7"
    second.refresh()
    assert (second.mark, second.node_ids()) == ("8", {"a", "b"})
    second.update(delete=["a"], mark="9")
    first.refresh()
    assert first.node_ids() == {"b"}


def test_an_update_that_was_killed_before_its_commit_is_done_again(tmp_path: Path) -> None:
    """All its files are written by then; the next update, with the same operations, gives its own the same names."""
    index = index_of(document("rain", TEXTS["rain"]), document("snow", TEXTS["snow"]), directory=tmp_path, mark="1")
    committed = (tmp_path / "meta.json").read_bytes()
    for _ in range(2):
        index.update([document("rocket", TEXTS["rocket"])], delete=["rain"], mark="2")
        assert (index.mark, index.node_ids()) == ("2", {"snow", "rocket"})
        (tmp_path / "meta.json").write_bytes(committed)
        index = LexicalIndex(tmp_path)
        assert (index.mark, index.node_ids()) == ("1", {"rain", "snow"})


def test_a_panic_is_an_error_like_others(index: LexicalIndex, capfd: pytest.CaptureFixture[str]) -> None:
    """Tantivy's panics are no ``Exception``: they would end more than the search. Others of the kind pass."""
    with pytest.raises(RetrievalError, match=r"can't be read: .*Limit must be greater than 0"), index._errors("read"):
        index._view.searcher.search(tantivy.Query.all_query(), limit=0)
    with pytest.raises(KeyboardInterrupt), index._errors("read"):
        raise KeyboardInterrupt
    capfd.readouterr()


def test_a_node_is_indexed_as_its_embedding_model_sees_it() -> None:
    """With its metadata but for what is hidden from the model; title and file name are never hidden."""
    node = TextNode(id_="n", text="It flew.", metadata={"title": "Saturn V", "year": 1967, "secret": "xyzzy"})
    node.excluded_embed_metadata_keys = ["secret"]
    assert lexical_document(node) == ("n", "title: Saturn V\nyear: 1967\n\nIt flew.", node.metadata)
    node.excluded_embed_metadata_keys = ["secret", "title", "year"]
    assert lexical_document(node).text == "Saturn V\nIt flew."
    file = TextNode(text="It flew.", metadata={"file_name": "saturn.txt"}, excluded_embed_metadata_keys=["file_name"])
    assert lexical_document(file).text == "saturn.txt\nIt flew."
    assert lexical_document(TextNode(text="Bare.")).text == "Bare."


# -- words and terms --------------------------------------------------------------------------------------------------

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
    assert document_terms(ENGLISH)[1].split()[1:4] == ["rocket", "were", "launch"]
    language, terms = document_terms(GERMAN)
    assert language == "german"
    assert {"kust~ge", "haus~ge", "flog~ge"} <= set(terms.split())


def test_function_words_of_the_query_are_left_out_if_others_remain() -> None:
    """Those of the query's own language; a query of nothing else keeps them."""
    assert query_terms("Who was the director of the film?", ["english"]) == [("director",), ("film",)]
    assert query_terms("Who was it?", ["english"]) == [("who",), ("was",), ("it",)]
    assert query_terms("Wie hoch war die Rakete?", ["german"]) == [("hoch~ge",), ("rak~ge",)]
    assert query_terms("die", ["english", "german"]) == [("die", "die~ge")]


def test_long_queries_are_cut() -> None:
    """Distinct words count, and only so many; an endless word is one."""
    assert len(query_terms("rain " * 2_000, ["english"])) == 1
    assert len(query_terms(" ".join(f"w{n}" for n in range(2_000)), ["english"])) == MAX_QUERY_WORDS
    ((term,),) = query_terms("a1" * 5_000, ["english"])
    assert len(term) == 255
    assert document_terms("a1" * 5_000)[1] == term
