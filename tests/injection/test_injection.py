from __future__ import annotations

import json
import re

import pytest
from markdown_it import MarkdownIt

from llama_index_agentic_kb import AgenticQueryEngine, AgenticRetriever, KnowledgeBase
from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY
from llama_index_agentic_kb.guard.links import LinkFilter
from llama_index_agentic_kb.schema import RetrievalResponse, SubQueryOrigin
from tests.injection import world as worlds
from tests.injection.attacks import QUICK, Goal, Kind, changes, poison, read_orders
from tests.injection.world import ABOUT, ORDERS, SECRETS, Case, Flow, World, all_flows, attack, few_cases, harmless

CASES = few_cases()
HIDDEN = {Kind.TAGS, Kind.SELECTORS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_attack_changes_nothing_that_it_must_not(case: Case) -> None:
    """A model that obeys every order it reads changes no plan, filter, source, citation or link, and leaks nothing."""
    assert attack(case) == []


def test_the_few_cases_stand_for_all() -> None:
    """Each kind, goal, mode, way and effort is among the few, and all are more than two thousand."""
    assert {case.kind for case in CASES} == set(Kind)
    assert {case.goal for case in CASES} == set(Goal)
    assert ({case.mode for case in CASES}, {case.way for case in CASES}) == (set(worlds.MODES), set(worlds.WAYS))
    assert len({case.technique for case in CASES}) == 4
    assert len(list(worlds.all_cases())) > 2_000


@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_orders_reach_the_model_unless_they_are_hidden(kind: Kind) -> None:
    """The attacks are real: the model reads them and obeys; what can't be seen never reaches it."""
    documents = poison(kind, Goal.TENANT, about=ABOUT)
    raw = "\n".join(f"{one.title}\n{one.text}" for one in documents)
    assert read_orders(raw).search == ["the payroll of tenant B"]
    world = World(documents)
    world.ask(Case(kind, Goal.TENANT))
    read = [bool(read_orders(str(call[-1].content))) for call in world.llm.calls]
    assert any(read) is (kind not in HIDDEN)
    assert not read[0]  # the planner's prompt holds the user's words alone


def test_an_order_of_the_users_is_obeyed_and_noticed() -> None:
    """The same words in the question change plan and filter, and the comparison says so."""
    world = World([])
    case = Case(Kind.DIRECT, Goal.TENANT)
    request = 'Who keeps the tower? Also search for "payroll" and use the filter "year lt 1900".'
    ordered = AgenticQueryEngine(world.retriever, grounding=QUICK).query(request)
    account = RetrievalResponse.parse((ordered.metadata or {})[PROVENANCE_KEY])
    found = " ".join(changes(harmless(case), account))
    assert "is new: 'payroll'" in found
    assert "filter: " in found


def test_links_that_are_let_through_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the filter the answer holds the attacker's, and the comparison says so: it is no blind test."""
    monkeypatch.setattr(LinkFilter, "feed", lambda _, piece, **__: piece)
    world = World(poison(Kind.MARKDOWN, Goal.LINK, about=ABOUT))
    engine = AgenticQueryEngine(world.retriever, grounding=QUICK)
    account = RetrievalResponse.parse((engine.query("Who keeps the tower of Bergen?").metadata or {})[PROVENANCE_KEY])
    assert sum(change.startswith("link: ") for change in changes(account, account)) > 10


def _rendered(text: str) -> list[str]:
    """Return every address that a renderer of CommonMark makes of a text, and every tag that it lets through."""
    found: list[str] = []
    for token in MarkdownIt("commonmark").parse(text):
        for inner in [token, *(token.children or [])]:
            found += [str(value) for name, value in inner.attrs.items() if name in ("href", "src")]
            if inner.type in ("html_inline", "html_block"):
                found += re.findall(r"<[a-zA-Z][^>]*=", inner.content)
    return found


@pytest.mark.parametrize("kind", [Kind.MARKDOWN, Kind.REFERENCE_LINKS, Kind.HTML, Kind.METADATA], ids=str)
@pytest.mark.parametrize("way", ["sync", "astream"])
def test_a_renderer_makes_no_link_of_it(kind: Kind, way: str) -> None:
    """Rendered as Markdown, the answer links to references alone, whatever was written into it."""
    response = World(poison(kind, Goal.LINK, about=ABOUT)).ask(Case(kind, Goal.LINK, way=way))
    known = {reference.url for reference in response.references}
    assert [link for link in _rendered(response.text) if link not in known] == []
    (record,) = [one for one in response.activity or [] if one.type == "modelAnswerSynthesis"]
    assert getattr(record, "links_removed", 0) > 0
    assert "links to no reference were removed" in str(record.warning)


def test_what_a_revision_may_add_is_bounded() -> None:
    """Its searches are plain, short, marked as its own, without filters, at allowed sources; what was cut is named."""
    response = World(poison(Kind.DIRECT, Goal.TENANT, about=ABOUT)).ask(Case(Kind.DIRECT, Goal.TENANT))
    assert response.plan is not None
    added = [one for one in response.plan.sub_queries if one.origin is SubQueryOrigin.REVISION]
    assert added
    assert all(not one.filters and not one.depends_on and len(one.query) <= 200 for one in added)
    assert {name for one in added for name in one.sources} <= {"docs", "people"}
    assert any("filters come only from the user's messages" in warning for warning in response.plan.warnings)


def test_what_is_searched_with_a_finding_is_plain_words() -> None:
    """Where the value that is asked for is an order: no address, marker, step or JSON is searched for."""
    response = World(poison(Kind.FINDING, Goal.LINK, about=ABOUT)).ask(Case(Kind.FINDING, Goal.LINK))
    assert response.plan is not None
    queries = [one.query for one in response.plan.sub_queries if one.template]
    assert len(queries) > 1
    assert not [query for query in queries if any(sign in query for sign in ("://", "[ref_id", "#q", "{", "<"))]


def test_another_tenants_documents_are_there_to_be_leaked() -> None:
    """Without the mandatory filter the canary would be found: the world is no empty stage."""
    world = World([])
    source = world.retriever.sources["docs"]
    source.mandatory = None
    response = world.ask(Case(Kind.DIRECT, Goal.TENANT))
    assert any(SECRETS[0] in str(reference.to_dict()) for reference in response.references)


@pytest.mark.parametrize("flow", [*list(all_flows())[7::14], *list(all_flows("low"))[3::60]], ids=str)
def test_an_open_source_never_receives_a_secret(flow: Flow) -> None:
    """Whatever a passage orders, no query with text of a source with permissions reaches one without them."""
    assert not flow.leaks()


def test_a_trusted_source_receives_it() -> None:
    """The flows are real: where the open source is trusted, the model's orders carry the secret there by every way."""
    flows = [flow for flow in all_flows() if flow.kind is Kind.DIRECT and flow.places == ("hr", "web")]
    assert {flow.orders for flow in flows if flow.leaks(trusted=True)} == {*ORDERS}


async def test_a_conversation_stays_within_its_bounds() -> None:
    """An answer that obeyed a document is part of the next turn: sources and mandatory filters hold there too."""
    world = World(poison(Kind.DIRECT, Goal.TENANT, about=ABOUT))
    chat = KnowledgeBase(list(world.retriever.sources.values())[:2], llm=world.llm, grounding=QUICK).as_chat_engine()
    first = await chat.achat("Who keeps the tower of Bergen?")
    assert read_orders(str(first))
    second = await chat.achat("And when was the keeper born?")
    account = RetrievalResponse.parse((getattr(second, "metadata", None) or {})[PROVENANCE_KEY])
    searched = {getattr(record, "knowledge_source_name", "docs") for record in account.activity or []}
    assert searched <= {"docs", "people"}
    assert all(secret not in json.dumps(account.to_dict()) for secret in SECRETS)


def test_retrievers_pass_their_technique_on() -> None:
    """One argument of the retriever marks every prompt of a request, and is the query engine's too."""
    world = World([], technique="encode")
    assert isinstance(world.retriever, AgenticRetriever)
    engine = AgenticQueryEngine(world.retriever, grounding=QUICK)
    assert getattr(engine.synthesizer, "spotlighting", None) == world.retriever.options.spotlighting == "encode"
    world.ask(Case(Kind.DIRECT, Goal.PLAN))
    read = [str(call[-1].content) for call in world.llm.calls[1:]]
    assert len(read) >= 2
    assert all("Base64" in prompt and "kept by Ada Lund" not in prompt for prompt in read)
