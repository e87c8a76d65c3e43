"""What was read flows one way: queries that are made of passages go only to sources that are trusted with them."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Outcome, RetrievalRequest
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.planning.conftest import World, line, queries_of, refs, steps
from tests.planning.test_revision import verdict

ACME, OTHER = Permissions(tenant="tenant"), Permissions(groups="acl_group_")
QUESTION = "Who is the chief of the one who keeps the tower?"
KEEPER = "The keeper of the tower is Ann, code name Heron."
KEEPER_STEP = {"query": "Who keeps the tower?", "finds": "the tower's keeper"}
REPORT_STEP = {"query": "Whom does #q1 report to?", "depends_on": ["q1"]}
OWN_WORDS = "Whom does the tower's keeper report to?"


class Sources:
    """A secret source that says who keeps the tower, and another one, which says whom a keeper reports to."""

    def __init__(
        self, trust: int | None = None, other: Permissions | None = None, other_trust: int | None = None
    ) -> None:
        access = {"tenant": "acme", "acl_group_all": True}
        secret, self.other = (
            MemoryRetriever([TextNode(id_=name, text=text, metadata={"title": name, **access})])
            for name, text in (("keeper", KEEPER), ("chief", "A keeper of a tower reports to the chief."))
        )
        self.secret = secret
        self.all = [
            KnowledgeSource("hr", retriever_factory=lambda _: secret, permissions=ACME, trust=trust),
            KnowledgeSource("web", retriever_factory=lambda _: self.other, permissions=other, trust=other_trust),
        ]

    def asked(self) -> tuple[set[str], set[str]]:
        return {*self.secret.queries}, {*self.other.queries}


def searched(sources: Sources, *planned: Any, **fields: Any) -> tuple[Retrieval, World]:
    """Search a plan whose first step is answered from the secret source."""
    world = World(
        {}, plan=steps(*planned), findings=lambda prompt: line("q1", ("Heron", refs(prompt).get("keeper"))), **fields
    )
    principal = Principal(tenant="acme", user="eve", groups=["all"])
    return world.search(QUESTION, sources=sources.all, principal=principal), world


@pytest.mark.parametrize(
    ("sources", "flows"),
    [
        (Sources(), False), (Sources(other=ACME), True), (Sources(trust=0), True),
        (Sources(trust=0, other_trust=-1), False), (Sources(other_trust=0), False), (Sources(other_trust=1), True),
        (Sources(trust=2, other=OTHER), False), (Sources(trust=2, other=OTHER, other_trust=2), True),
    ],
    ids=["none", "same", "lower", "two levels", "too low", "raised", "higher", "equal"],
)  # fmt: skip
def test_a_value_reaches_only_sources_that_are_trusted_with_it(sources: Sources, flows: bool) -> None:
    """Others get the planner's own words, which it wrote before anything was read, and the account says so."""
    made, _ = searched(sources, KEEPER_STEP, REPORT_STEP)
    hr, web = sources.asked()
    assert "Whom does Heron report to?" in hr
    assert any("Heron" in query for query in web) is flows
    assert (OWN_WORDS in web) is (queries_of(made).get("q2.2") == OWN_WORDS) is not flows
    withheld = [part for part in made.missing if part.what == "web"]
    assert [part.outcome for part in withheld] == [] if flows else [Outcome.SKIPPED]
    assert (
        flows or withheld[0].reason == "it did not get what was written for q2 after reading hr (KnowledgeSource.trust)"
    )
    assert flows or f"web: {withheld[0].reason}" in made.plan.warnings


def test_text_of_an_open_source_may_reach_a_secret_one() -> None:
    """The other direction is free."""
    sources = Sources()
    sources.secret, sources.other = sources.other, sources.secret
    sources.all = [
        KnowledgeSource("hr", retriever_factory=lambda _: sources.secret, permissions=ACME),
        KnowledgeSource("web", retriever=sources.other),
    ]
    made, _ = searched(sources, {**KEEPER_STEP, "sources": ["web"]}, {**REPORT_STEP, "sources": ["hr"]})
    assert "Whom does Heron report to?" not in sources.asked()[1]
    assert "Whom does Heron report to?" in sources.asked()[0]
    assert made.missing == []


def test_a_plan_over_open_sources_alone_goes_on_there() -> None:
    """Secret passages that only the question found are then not read, neither for steps nor for the verdict."""
    sources = Sources()
    page = TextNode(id_="page", text="The keeper of the tower is known as Heron.", metadata={"title": "keeper"})
    sources.other = MemoryRetriever([page])
    planned = [{**one, "sources": ["web"]} for one in (KEEPER_STEP, REPORT_STEP)]
    made, world = searched(sources, *planned, revision=verdict("towers"))
    assert sources.asked() == ({QUESTION}, {QUESTION, KEEPER_STEP["query"], "Whom does Heron report to?", "towers"})
    assert all("Ann" not in prompt for _, prompt in world.prompts)
    assert made.missing == []
    assert "keeper" in {node.node_id for node in made.nodes}


@pytest.mark.parametrize(("trust", "flows"), [(None, False), (1, True)])
def test_a_revision_reaches_only_sources_that_are_trusted_with_what_it_read(trust: int | None, flows: bool) -> None:
    """Its prompt offers no other source, and a search that names one is made elsewhere."""
    sources = Sources(other_trust=trust)
    made, world = searched(sources, KEEPER_STEP, revision=verdict({"query": "salary of Ann", "sources": ["web"]}))
    assert ("salary of Ann" in sources.asked()[1]) is flows
    assert ("salary of Ann" in sources.asked()[0]) is not flows
    prompt = next(text for kind, text in world.prompts if kind == "revision")
    assert ("- web" in prompt.partition("</sources>")[0]) is flows
    reason = "it did not get what was written for r1 after reading hr (KnowledgeSource.trust)"
    assert [part.reason for part in made.missing] == ([] if flows else [reason])


def test_what_no_source_may_get_is_named() -> None:
    """Two sources with different permissions may learn nothing of each other: both get the planner's words alone."""
    sources = Sources(other=OTHER)
    made, _ = searched(sources, KEEPER_STEP, REPORT_STEP, revision=verdict("salary of Ann"))
    assert sources.asked() == ({QUESTION, KEEPER_STEP["query"], OWN_WORDS},) * 2
    assert {part.what: "q2, r1 after reading" in part.reason for part in made.missing} == {"hr": True, "web": True}


@pytest.mark.parametrize(("trust", "shown"), [(None, False), (1, True)])
def test_earlier_answers_are_kept_from_a_planner_of_unequal_sources(trust: int | None, shown: bool) -> None:
    """They are made of passages; what it plans may go to every source. The user's own turns stay."""
    sources = Sources(other_trust=trust)
    world = World({}, plan=steps())
    retriever = AgenticRetriever(sources.all, llm=world.llm, principal=Principal(tenant="acme", groups=["all"]))
    turns = [("user", "Who keeps the tower?"), ("assistant", "Heron does."), ("user", QUESTION)]
    messages = [{"role": role, "content": text} for role, text in turns]
    never = {"knowledgeSourceName": "hr", "neverQuerySource": True}
    for params in ([], [never]):  # the answer may be of an earlier request, of other sources
        made = run(retriever.retrieval(RetrievalRequest.parse({"messages": messages, "knowledgeSourceParams": params})))
        assert ("assistant", "Heron does.") in made.scope.history
    for _, prompt in world.prompts:
        assert "user: Who keeps the tower?" in prompt
        assert ("Heron" in prompt) is shown


@pytest.mark.parametrize("trust", [True, "high", 0.5])
def test_a_level_is_a_whole_number(trust: Any) -> None:
    """Anything else is refused when the source is made."""
    with pytest.raises(ConfigurationError, match="trust: expected a whole number"):
        KnowledgeSource("docs", retriever=MemoryRetriever([]), trust=trust)
