"""A state machine that stores, shares, deletes, asks, lists and chats, and looks for secrets in all that is shown."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb import DeniedError, KnowledgeBase, KnowledgeSource, Principal, RetrievalResponse, acting_as
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema import SourceActivity, SourceParams, all_of
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.injection.attacks import QUICK
from tests.leaks import world
from tests.leaks.world import CHUNKS, DOCUMENTS, FIELDS, PLANS, PRINCIPALS, QUESTIONS, WORDS, World, own_keys
from tests.sources.conftest import search

_SECRET: Final = re.compile(r"SECRET\d{5}X")
_KEY: Final = re.compile(r"acl_(?:user|group)_\w+")
_PERSON: Final = st.integers(0, 2)
_FIELDS: Final = st.sampled_from(["topic", "code", "title", "owner", "tenant", "acl_user_alice", "acl_public", "size"])


class LeakError(AssertionError):
    """Something of one principal was shown to another."""


@dataclass
class Tally:
    cases: int = 0
    refused: int = 0
    secrets: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            self.lines.append("".join(traceback.format_exception(record.exc_info[1])))


class LeakMachine(RuleBasedStateMachine):
    tally = Tally()
    kinds: ClassVar[tuple[str, ...]] = world.KINDS
    """The kinds of world that are made."""

    @initialize(
        number=st.integers(0, 5),
        people=st.lists(PRINCIPALS, min_size=3, max_size=3),
        given=st.lists(DOCUMENTS, min_size=2, max_size=5),
    )
    def begin(self, number: int, people: list[Principal], given: list[dict[str, Any]]) -> None:
        """Make a world, and three people, who may be one and the same."""
        self.world = World(self.kinds[number % len(self.kinds)])
        self.people = people
        self.plan = "{}"
        self.prompts: list[str] = []
        self.heard = _Heard()
        logging.getLogger("llama_index_agentic_kb").addHandler(self.heard)
        self.kb = KnowledgeBase(self.world.sources(), llm=ScriptedLLM(self._say), grounding=QUICK)
        self.kb.retriever.similarity_top_k = 20
        self.alone = KnowledgeSource("alone", index=self.world.index, permissions=FIELDS, hybrid=False)
        self.number = 0
        self.chats: dict[tuple[str | None, str | None], Any] = {}
        self.read: dict[tuple[str | None, str | None], set[str]] = {}
        self.store(given)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            logging.getLogger("llama_index_agentic_kb").removeHandler(self.heard)
            self.world.close()

    def _say(self, messages: list[ChatMessage]) -> str:
        """Obey: plan as told, and answer with all that was shown."""
        prompt = "\n".join(str(message.content) for message in messages)
        self.prompts.append(prompt)
        if prompt.startswith("You plan searches"):
            return self.plan
        if prompt.startswith("You read what"):
            return json.dumps({"step": "q1", "answers": [{"value": "beta", "ref": 0, "confidence": "stated"}]})
        if prompt.startswith("You judge whether"):
            items = json.loads(self.plan).get("sub_queries", [])
            return json.dumps({"sufficient": not items, "gaps": ["beta"], "sub_queries": items})
        return f"{prompt[-20_000:]} [ref_id:0] [ref_id:7]"

    @rule(given=st.lists(DOCUMENTS, min_size=1, max_size=3))
    def store(self, given: list[dict[str, Any]]) -> None:
        for one in given:
            self.world.put(world.Document(self.number, **one))
            self.number += 1

    @precondition(lambda self: self.world.documents)
    @rule(data=st.data(), given=DOCUMENTS)
    def share(self, data: st.DataObject, given: dict[str, Any]) -> None:
        """Store a document again, for others to see: what it says is another secret from then on."""
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.documents))))
        self.store([given])

    @precondition(lambda self: self.world.documents)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.documents))))

    @rule(person=_PERSON, groups=PRINCIPALS.map(lambda who: who.groups))
    def move(self, person: int, groups: frozenset[str]) -> None:
        before = self.people[person]
        self.people[person] = Principal(tenant=before.tenant, user=before.user, groups=groups)

    @rule(person=_PERSON, filters=st.none() | world.TREES)
    def find(self, person: int, filters: dict[str, Any] | None) -> None:
        """Search with room for no more than one may see: nothing else takes a place, and what is listed is the same."""
        who = self.people[person]
        source, visible = self.alone, self.world.visible(who)

        def asked() -> Any:
            given = SourceParams.parse({"knowledgeSourceName": "alone", "filters": filters}).filters
            source.refuse_hidden(given)
            both = all_of(source.permitted(who), given)
            nodes = search(source, "rain", both, top_k=max(1, CHUNKS * len(visible))).nodes
            listed = self.kb.documents("docs", filters=given, principal=who)
            facets = self.kb.facets("docs", ["code"], filters=given, principal=who, limit=50)
            return [nodes, listed, self.kb.count("docs", filters=given, principal=who), facets]

        answer = self._check(asked, who, json.dumps(filters), [], "find")
        if answer is None or self.world.kind not in world.SHARED_KINDS:  # graphs may miss one
            return
        nodes, listed, count, facets = answer
        codes = {node.metadata["code"] for node in nodes}
        if (
            codes != {one.metadata["code"] for one in listed}
            or codes != {bucket.value for bucket in facets["code"]}
            or len(codes) != count
            or (not filters and codes != visible)
        ):
            raise LeakError(f"{who} may see {sorted(visible)}, finds {sorted(codes)}, and counts {count}: {filters}")

    @rule(person=_PERSON, name=st.sampled_from(["docs", "again"]), fields=_FIELDS, filters=st.none() | world.WRITTEN)
    def list_all(self, person: int, name: str, fields: str, filters: str | None) -> None:
        who = self.people[person]

        def asked() -> Any:
            given: dict[str, Any] = {"filters": filters, "principal": who}
            return [
                self.kb.count(name, **given),
                self.kb.count(name, per="chunk", **given),
                self.kb.facets(name, ["topic", fields] if fields != "topic" else fields, **given),
                self.kb.group_by(name, fields, order_by=[fields], **given),
                self.kb.documents(name, order_by=[fields], **given),
            ]

        found = self._check(asked, who, f"{fields} {filters}", [], "lists")
        if found is None:
            return
        seen = len(self.world.visible(who))
        documents, chunks, *_ = found
        if documents > seen or chunks > CHUNKS * seen or (filters is None and documents != seen):
            raise LeakError(f"{who} may see {seen} documents, and counts {documents} and {chunks} chunks")

    def _check(
        self,
        asked: Callable[[], Any],
        who: Principal | None,
        typed: str,
        records: list[Any],
        kind: str,
        past: set[str] | None = None,
    ) -> Any:
        """Ask, and look through all that came of it: answer or error, records, prompts and the log."""
        self.prompts.clear()
        self.heard.lines.clear()
        answer: Any
        try:
            answer = asked()
        except AgenticKBError as error:
            answer = error
        allowed = self.world.visible(who) | (past or set())
        self._look(answer, who, typed, allowed, kind)
        self._search([records, self.prompts, self.heard.lines], who, typed, allowed)
        return None if isinstance(answer, AgenticKBError) else answer

    def _look(self, answer: Any, who: Principal | None, typed: str, allowed: set[str], kind: str) -> None:
        tally = self.tally
        tally.cases += 1
        tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
        tally.refused += isinstance(answer, AgenticKBError)
        if isinstance(answer, BaseException) and not isinstance(answer, AgenticKBError):
            raise answer
        tally.secrets += self._search(answer, who, typed, allowed)
        if isinstance(answer, RetrievalResponse):
            self._count(answer, who)

    def _search(self, shown: Any, who: Principal | None, typed: str, allowed: set[str]) -> int:
        """Look for what must not be there, and count the secrets that may."""
        text = _text(shown)
        found = set(_SECRET.findall(text))
        if found - allowed:
            place = text.find(min(found - allowed))
            raise LeakError(
                f"{who} was shown {sorted(found - allowed)}: ...{text[max(0, place - 300) : place + 100]}..."
            )
        keys = set(_KEY.findall(text)) - set(_KEY.findall(_where_permissions_may_stand(shown)))
        asked = _KEY.findall(typed)  # an error may show the beginning of what was typed
        told = {key for key in keys - own_keys(who) if not any(one.startswith(key) for one in asked)}
        if told:
            raise LeakError(f"{who} was told whom documents are shared with: {sorted(told)}")
        return len(found)

    def _count(self, answer: RetrievalResponse, who: Principal | None) -> None:
        """What a principal may not see must not be counted either."""
        most = CHUNKS * len(self.world.visible(who)) + len(WORDS)
        for record in answer.activity or []:
            if isinstance(record, SourceActivity) and (record.candidates or 0) > 2 * most:
                raise LeakError(f"{who} may see {most} chunks, and was told of {record.candidates} candidates")
            if isinstance(record, SourceActivity) and record.dropped_by_filter:
                raise LeakError(f"{who} was told that {record.dropped_by_filter} chunks were hidden")

    @rule(
        person=_PERSON,
        question=QUESTIONS,
        history=world.HISTORIES,
        params=world.PARAMS,
        plan=PLANS,
        native=st.booleans(),
        in_context=st.booleans(),
    )
    def ask(
        self, person: int, question: str, history: Any, params: Any, plan: str, native: bool, in_context: bool
    ) -> None:
        """Send a request, with whatever fields a client may think of."""
        who, self.plan = self.people[person], plan
        wire = {"messages": [*history, {"role": "user", "content": question}], **params}
        typed = json.dumps(wire) + plan
        records: list[Any] = []

        def asked() -> Any:
            call = self.kb.aretrieve if native else self.kb.retrieve
            with_principal = {} if in_context else {"principal": who}
            return call(wire, on_activity=records.append, **with_principal)

        def acting() -> Any:
            if native:
                return asyncio.run(_awaited(asked, who if in_context else None))
            if not in_context:
                return asked()
            with acting_as(who):
                return asked()

        self._check(acting, who, typed, records, "ask")

    @rule(person=_PERSON, question=QUESTIONS, plan=PLANS, way=st.integers(0, 3))
    def use_parts(self, person: int, question: str, plan: str, way: int) -> None:
        """Ask by what LlamaIndex apps are made of: retrievers, engines, streams, tools."""
        who, self.plan = self.people[person], plan

        def asked() -> Any:
            if way == 0:
                return self.kb.as_retriever(principal=who).retrieve(question)
            if way == 1:
                told = self.kb.as_tool(principal=who).call(question)
                return [told.content, told.raw_output]
            with acting_as(who):
                if way == 2:
                    return self.kb.as_query_engine("refine").query(question)
                streaming: Any = self.kb.as_query_engine("answerSynthesis", streaming=True).query(question)
            return ["".join(streaming.response_gen), streaming]

        self._check(asked, who, question + plan, [], "parts")

    @rule(person=_PERSON, question=QUESTIONS, plan=PLANS, in_engine=st.booleans())
    def bring(self, person: int, question: str, plan: str, in_engine: bool) -> None:
        """Ask where a node postprocessor brings everything there is."""
        who, self.plan = self.people[person], plan
        given: Any = {"principal": who, "node_postprocessors": [world.Brings(world=self.world)]}

        def asked() -> Any:
            if in_engine:
                return self.kb.as_query_engine("extractiveData", **given).query(question)
            return asyncio.run(self.kb.as_retriever(**given).aretrieve(question))

        self._check(asked, who, question + plan, [], "bring")

    @rule(question=QUESTIONS, plan=PLANS)
    def all_at_once(self, question: str, plan: str) -> None:
        self.plan = plan

        async def together() -> list[Any]:
            calls = [self.kb.aretrieve(question, principal=who) for who in self.people]
            return list(await asyncio.gather(*calls, return_exceptions=True))

        for who, answer in zip(self.people, asyncio.run(together()), strict=True):
            self._look(answer, who, question + plan, self.world.visible(who), "at once")

    @rule(person=_PERSON, question=QUESTIONS, plan=PLANS, native=st.booleans())
    def chat(self, person: int, question: str, plan: str, native: bool) -> None:
        """Go on in one's own conversation: it holds what one could read before."""
        who, self.plan = self.people[person], plan
        key = who.tenant, who.user
        engine = self.chats.setdefault(key, self.kb.as_chat_engine())

        def asked() -> Any:
            with acting_as(who):
                answer = asyncio.run(engine.achat(question)) if native else engine.chat(question)
                return [answer, engine.chat_history]

        past = self.read.setdefault(key, set())
        self._check(asked, who, f"{question} {plan} {' '.join(_FIELD_NAMES)}", [], "chat", past)
        past |= self.world.visible(who)

    @precondition(lambda self: len({(who.tenant, who.user) for who in self.people}) > 1 and self.chats)
    @rule(data=st.data(), question=QUESTIONS)
    def eavesdrop(self, data: st.DataObject, question: str) -> None:
        """Speak in, and read, a conversation of another's."""
        owner = data.draw(st.sampled_from(sorted(self.chats, key=str)))
        others = [who for who in self.people if (who.tenant, who.user) != owner]
        if others:
            self.listen(data.draw(st.sampled_from(others)), owner, question)

    def listen(self, who: Principal, owner: tuple[str | None, str | None], question: str) -> None:
        """Speak in, and read, the conversation of a certain one."""
        self.plan = "{}"

        def asked() -> Any:
            with acting_as(who):
                try:
                    history = self.chats[owner].chat_history
                except DeniedError as denied:
                    history = denied
                return [history, self.chats[owner].chat(question)]

        if self._check(asked, who, question, [], "eavesdrop") is not None:
            raise LeakError(f"{who} could speak in a conversation of {owner}")

    @rule(question=QUESTIONS, params=world.PARAMS)
    def nobody(self, question: str, params: Any) -> None:
        """Ask without a principal: only what is everybody's may be found."""
        wire, self.plan = {"messages": [{"role": "user", "content": question}], **params}, "{}"
        self._check(lambda: self.kb.retrieve(wire), None, json.dumps(wire), [], "nobody")


_FIELD_NAMES: Final = sorted(FIELDS.stamp({}, tenant="x"))


async def _awaited(asked: Callable[[], Awaitable[Any]], who: Principal | None) -> Any:
    if who is None:
        return await asked()
    with acting_as(who):
        return await asked()


def _text(shown: Any) -> str:
    """Give everything that is in something, as text."""
    if isinstance(shown, (list, tuple)):
        return "\n".join(map(_text, shown))
    if isinstance(shown, dict):
        return "\n".join(f"{key}: {_text(value)}" for key, value in shown.items())
    if isinstance(shown, BaseException):
        further = [getattr(shown, name, None) for name in ("causes", "failures", "partial")]
        # Of the traceback only what was said: its lines of code hold no data.
        told = [shown, shown.__cause__, shown.__context__, *further]
        return "\n".join(str(one) for one in told if one is not None)
    if hasattr(shown, "model_dump_json"):
        return str(shown.model_dump_json(fallback=str))
    nodes = [(one.node.node_id, one.node.get_content()) for one in getattr(shown, "source_nodes", None) or []]
    return f"{shown}\n{nodes}\n{json.dumps(_account(shown), default=str)}"


def _account(shown: Any) -> dict[str, Any]:
    return dict((getattr(shown, "metadata", None) or {}).get("agentic_kb") or {})


def _where_permissions_may_stand(shown: Any) -> str:
    """Give the text of nodes that programs are given, and of references to sources that have no permissions.

    The outer knowledge base knows nothing of the nested one's; and ``Brings`` makes everything of what is open.
    """
    if isinstance(shown, (list, tuple)):
        return "\n".join(map(_where_permissions_may_stand, shown))
    if isinstance(shown, NodeWithScore):
        return _text(shown)
    references = map(str, getattr(shown, "references", None) or _account(shown).get("references", []))
    return "\n".join(one for one in references if "'nested'" in one or "'open'" in one)


_SETTINGS: Final = settings(
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def run_machine(machine: type[LeakMachine], *, examples: int, steps: int) -> None:
    """Run a machine on freshly generated worlds; the first leak is raised as it was found."""
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=examples, stateful_step_count=steps))


def run_searches(kind: str, cases: int, number: int = 0) -> Tally:
    """Search one world whose documents change, without a model, for many principals."""
    machine: Any = type("LeakMachine", (LeakMachine,), {"kinds": (kind,), "tally": Tally()})()
    machine.begin(number=0, people=[], given=[])

    @seed(number)
    @settings(_SETTINGS, max_examples=cases)
    @given(PRINCIPALS, DOCUMENTS, st.none() | world.TREES)
    def look(who: Principal, document: dict[str, Any], tree: dict[str, Any] | None) -> None:
        machine.store([document])
        if len(machine.world.documents) > 12:
            machine.world.remove(min(machine.world.documents))
        machine.people = [who]
        machine.find(0, tree)

    try:
        look()
    finally:
        machine.teardown()
    return cast("Tally", machine.tally)
