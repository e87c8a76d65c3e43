from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb.sources.search import clean_nodes


def scored(text: str = "rain", **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(text=text, **fields), score=0.5)


def test_what_is_well_is_left_as_it_is() -> None:
    """The nodes are the source's own, the wrappers are ours; looking twice changes nothing."""
    given = [scored("one", metadata={"a": [1, "b"], "c": {"d": None}}), scored("two")]
    made = clean_nodes(given, "docs")
    assert [one.node for one in made] == [one.node for one in given]
    assert all(ours.node is theirs.node and ours is not theirs for ours, theirs in zip(made, given, strict=True))
    assert (made.returned, made.unusable, made.why) == (2, 0, None)
    assert clean_nodes(made, "docs") is made


def test_mended_nodes_are_copies() -> None:
    """The source's node keeps what it had."""
    flawed = scored("a\ud800b", id_="n\udfff", metadata={"title": "\ud83d\ude00 \ud83d"})
    (mended,) = clean_nodes([flawed], "docs")
    assert mended.node.get_content() == "a\ufffdb"
    assert mended.node.node_id == "n\ufffd"
    assert mended.node.metadata == {"title": "\U0001f600 \ufffd"}
    assert flawed.node.get_content() == "a\ud800b"
    assert flawed.node.metadata["title"] == "\ud83d\ude00 \ud83d"
