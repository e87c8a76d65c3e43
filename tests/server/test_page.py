"""The page at ``/`` in a headless Chromium."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, ScriptedLLM
from tests.server.serving import QUERY, chroma_index, client_of, define, indexes, reply, served, source_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUESTION = "How tall was the Saturn V?"
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> The pump [a](javascript:pwned) is red.'

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of this module."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Gate:
    """A model's replies, the answer held back until the test has seen what is shown before it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def __call__(self, request: ChatRequest) -> str:
        """Reply; a passage about a pump is answered with markup."""
        if "You plan searches" not in request.text:
            self.open.wait(60)
        if "pump" in request.text:
            return reply(request) if "You plan searches" in request.text else f"{HOSTILE} [ref_id:0] [ref_id:77]"
        return reply(request)


@pytest.fixture(scope="module")
def gate() -> Gate:
    """The gate of the shared model."""
    return Gate()


@pytest.fixture(scope="module")
def site(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the tests' knowledge bases, and one over a hostile document."""
    hostile = partial(KnowledgeSource, index=chroma_index({"pump": HOSTILE}, {"title": "<b>Pump</b>"}))
    with LoopbackOpenAI(gate) as model:
        service = KnowledgeService(
            tmp_path_factory.mktemp("page") / "server.db",
            indexes={**indexes(), "hostile": hostile},
            models={"gpt-4o-mini": model.llm()},
        )
        with served(service, requests_per_minute=None) as url:
            with client_of(url) as client:
                define(client)
                base = {"name": "pumps", "knowledgeSources": [{"name": "hostile"}], "models": ["gpt-4o-mini"]}
                define(client, {"/knowledgesources/hostile": source_of("hostile"), "/knowledgebases/pumps": base})
            yield url


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """The page with a key, of a new visitor; any error of a script fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(site)
    opened.fill("#key", QUERY)
    opened.click("#key-dialog button")
    expect(opened.locator("#base option")).to_have_count(3)
    opened.select_option("#base", "space")
    yield opened
    context.close()
    assert not errors


def ask(page: Page, question: str = QUESTION) -> None:
    """Ask, and wait for the end of the answer."""
    page.fill("#question", question)
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last.locator(".request")).to_be_visible(timeout=60_000)


@contextlib.contextmanager
def running(page: Page, gate: Gate) -> Iterator[None]:
    """Ask, and hold the answer back until the block ends."""
    gate.open.clear()
    try:
        page.fill("#question", QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator(".bar.running")).to_have_count(1, timeout=60_000)
        yield
    finally:
        gate.open.set()


def test_the_plan_and_its_searches_are_seen_before_the_answer(page: Page, gate: Gate) -> None:
    """While the model writes, rows and bars of the plan are there; then the answer, its support and its source."""
    with running(page, gate):
        expect(page.locator(".rows")).to_contain_text("height of the Saturn V")
        expect(page.locator(".bar.done").first).to_be_visible()
        expect(page.locator("#send")).to_have_text("Stop")
    claim = page.locator(".claim.supported").first
    expect(claim).to_have_text("The Saturn V was 110.6 m tall", timeout=60_000)
    expect(page.locator(".bar.running")).to_have_count(0)
    expect(page.locator("#send")).to_have_text("Ask")
    claim.hover()
    expect(page.locator("#hint")).to_contain_text("The Saturn V rocket was 110.6 m tall and launched Apollo 11.")
    claim.click()
    expect(page.locator("#passage mark")).to_have_text("The Saturn V rocket was 110.6 m tall and launched Apollo 11.")
    page.keyboard.press("Escape")
    expect(page.locator("#passage")).to_be_hidden()
    expect(claim).to_be_focused()


def test_a_stopped_question_says_so(page: Page, gate: Gate) -> None:
    """The button of a running question cancels it."""
    with running(page, gate):
        page.click("#send")
        expect(page.locator(".problem")).to_have_text("Stopped.")


def test_filters_effort_and_mode_go_with_the_request(page: Page) -> None:
    """A filter that nothing matches finds nothing; passages are shown without an answer."""
    page.select_option("#effort", "minimal")
    page.select_option("#mode", "extractiveData")
    page.fill("#filter", "kind eq 'text'")
    ask(page)
    expect(page.locator(".extract").first).to_contain_text("Saturn V")
    page.fill("#filter", "kind eq 'none'")
    ask(page)
    expect(page.locator(".turn").last.locator(".extract")).to_have_count(0)
    page.locator(".turn").last.locator(".request summary").click()
    sent = json.loads(page.locator(".turn").last.locator(".request code").inner_text())
    assert sent["retrievalReasoningEffort"] == {"kind": "minimal"}
    sources = {(one["kind"], one["filterAddOn"]) for one in sent["knowledgeSourceParams"]}
    assert sources == {("searchIndex", "kind eq 'none'")}
    page.fill("#filter", "kind eq")
    ask(page)
    expect(page.locator(".problem.failed")).to_contain_text("filterAddOn")


def test_a_conversation_is_resumed_after_a_reload(page: Page) -> None:
    """The sidebar keeps conversations; an opened one shows its answers, and goes with the next question."""
    ask(page)
    page.reload()
    expect(page.locator("#base option")).to_have_count(3)
    page.locator("#session-list button").first.click()
    expect(page.locator(".claim.supported").first).to_be_visible()
    ask(page, "And the Soyuz?")
    page.locator(".request summary").last.click()
    sent = json.loads(page.locator(".request code").last.inner_text())
    assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "user"]
    page.locator("#session-list .remove").click()
    expect(page.locator("#session-list li")).to_have_count(0)


def test_text_of_documents_and_models_is_never_markup(page: Page) -> None:
    """A script, an image, a link and a forged citation stay text."""
    page.select_option("#base", "pumps")
    ask(page, "Which colour is the pump?")
    expect(page.locator(".answer")).to_contain_text("script> The pump [a] (link removed) is red.")
    page.locator(".answer .ref").first.click()
    expect(page.locator("#passage-text")).to_contain_text('<img src=x onerror="window.pwned=1">')
    expect(page.locator("#passage-title")).to_contain_text("<b>Pump</b>")
    assert page.locator(".turn img, .turn script, #passage img, #passage script, .answer a").count() == 0
    assert page.locator(".answer .ref").all_inner_texts() == ["1"]
    assert page.evaluate("window.pwned") is None


def test_a_citation_leads_to_its_passage(page: Page, site: str) -> None:
    """The citation URL of a reference opens the page at the passage; an unknown passage says so."""
    with client_of(site) as client:
        body = {"intents": [{"type": "semantic", "search": "Saturn V"}], "outputMode": "extractiveData"}
        found = client.post("/knowledgebases/space/retrieve", json=body).json()["references"][0]
    page.goto(found["citationUrl"])
    expect(page.locator("#passage-text")).to_contain_text(found["sourceData"]["content"])
    page.goto(f"{site}/#kb=space&source=rockets&passage=none")
    expect(page.locator("#passage-text")).to_contain_text("there is none of this id")


def test_the_copied_request_works_in_the_azure_sdk(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python code on the page prints the answer."""
    ask(page)
    page.locator(".request summary").click()
    page.get_by_role("button", name="Azure SDK").click()
    code = page.locator(".request code").inner_text()
    monkeypatch.setenv("API_KEY", QUERY)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "page", "exec"), {})
    assert out.getvalue() == "The Saturn V was 110.6 m tall [ref_id:0].\n"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_the_page_is_accessible_and_fits(page: Page, scheme: Any, width: int) -> None:
    """Axe finds nothing serious, with and without an open passage; nothing is wider than the window."""
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    ask(page)
    page.locator(".timeline summary").click()
    for open_passage in (False, True):
        if open_passage:
            page.locator(".answer .ref").first.click()
            expect(page.locator("#passage")).to_be_visible()
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_responses_show_is_accessible(browser: Browser, tmp_path: Path, scheme: Any) -> None:
    """Axe finds nothing serious in a saved response, nor in what a notebook shows of one and of its knowledge base."""
    answer = "# Height\n\nIt was **110.6 m** tall [ref_id:0].\n\n- It was green.\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    source = KnowledgeSource("docs", "manuals", retriever=MemoryRetriever(["The Saturn V was 110.6 m tall."]))
    kb = KnowledgeBase([source], llm=ScriptedLLM(answer), effort="minimal")
    response = kb.retrieve(QUESTION)
    shown = f"<main><h1>Cells</h1>{response._repr_html_()}{kb._repr_html_()}</main>"
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f'<!doctype html><html lang="en"><title>Cells</title><body>{shown}</body></html>', "utf-8")
    for path in (response.save(tmp_path / "answer.html"), notebook):
        page = browser.new_page(color_scheme=scheme, bypass_csp=True)
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        found = Axe().run(page).response["violations"]
        page.close()
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


def test_files_beside_the_page_are_not_served(site: str) -> None:
    """Only the page's own files are served, under a policy that allows no other script."""
    with client_of(site, None) as client:
        policy = client.get("/").headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert client.get("/page/bases").status_code == 401
        names = [path.name for path in Path("llama_index_agentic_kb/server/static").iterdir()]
        assert {client.get(f"/page/{name}").status_code for name in names} == {200}
        for name in ("app.py", "%2e%2e%2fapp.py", "..%2f..%2fcli.py"):
            assert client.get(f"/page/{name}").status_code == 404
