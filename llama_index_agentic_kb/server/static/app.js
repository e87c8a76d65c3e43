// The page: a conversation with a knowledge base, what was searched, and what supports each sentence.

import { legend, renderAnswer, VERDICTS } from "./answer.js";
import { button, element, safeUrl, unitOffsets } from "./dom.js";
import { requestView } from "./requests.js";
import { Sessions } from "./sessions.js";
import { ask, listBases, readPassage, ServerError } from "./stream.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const KEY = "agentic-kb-key";
const sessions = new Sessions();
const bases = new Map();
let running = null;

// -- questions --------------------------------------------------------------------------------------------------------

function requestOf(question) {
  const message = (role, text) => ({ role, content: [{ type: "text", text }] });
  const messages = [];
  for (const turn of sessions.current.turns.slice(-6)) {
    const answer = textOf(turn.response);
    messages.push(message("user", turn.question));
    if (answer) messages.push(message("assistant", answer.replace(/\s?\[ref_id:\d+\]/g, "")));
  }
  messages.push(message("user", question));
  const body = { messages };
  if ($("effort").value) body.retrievalReasoningEffort = { kind: $("effort").value };
  if ($("mode").value) body.outputMode = $("mode").value;
  const filter = $("filter").value.trim();
  if (filter) {
    const sources = bases.get($("base").value)?.sources || [];
    body.knowledgeSourceParams = sources.map(({ name, kind }) => ({
      knowledgeSourceName: name,
      kind,
      filterAddOn: filter,
    }));
  }
  return body;
}

function textOf(response) {
  return response?.response?.[0]?.content?.[0]?.text || "";
}

async function submit(question) {
  const base = $("base").value;
  if (!sessions.current || sessions.current.base !== base) newSession();
  const body = requestOf(question);
  const view = turnView(question, base, body);
  setRunning(new AbortController());
  let text = "";
  let turn = null;
  try {
    for await (const event of withKey((key) => ask(base, body, key, running.signal))) {
      if (event.name.startsWith("activity.")) view.timeline.take(event.data);
      if (event.name === "answer.delta") {
        text += event.data.delta;
        view.write(text);
      }
      if (event.name === "error") throw new ServerError(0, event.data.error.message);
      if (event.name === "response.completed") turn = { question, body, response: event.data.response };
    }
    if (!turn) throw new ServerError(0, "the connection ended before the answer was complete");
    sessions.add(turn);
    view.finish(turn.response, view.timeline.view.open && !textOf(turn.response));
    say(`Answer complete. ${view.summary()}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    view.fail(stopped ? "Stopped." : error.message, text);
    say(stopped ? "Stopped" : `Error: ${error.message}`);
  } finally {
    setRunning(null);
    listSessions();
  }
}

function setRunning(controller) {
  running = controller;
  $("send").textContent = controller ? "Stop" : "Ask";
  document.body.classList.toggle("running", Boolean(controller));
}

// Yield from a stream; ask for the API key once if the server refuses.
async function* withKey(start) {
  for (let tried = false; ; tried = true) {
    try {
      yield* start(sessionStorage.getItem(KEY));
      return;
    } catch (error) {
      if (!(error instanceof ServerError) || error.status !== 401 || tried) throw error;
      await askForKey(error.message);
    }
  }
}

function askForKey(reason) {
  const dialog = $("key-dialog");
  $("key-text").textContent = `The server asks for a key (${reason}). It is kept until this tab is closed.`;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(KEY, $("key").value);
        resolve();
      },
      { once: true },
    );
  });
}

// -- a turn -----------------------------------------------------------------------------------------------------------

function turnView(question, base, body) {
  $("welcome").hidden = true;
  const timeline = new Timeline();
  const answer = element("div", { class: "answer" });
  const after = element("div", { class: "after" });
  const turn = element("article", { class: "turn" }, element("h2", {}, question), timeline.view, answer, after);
  $("turns").append(turn);
  turn.scrollIntoView({ block: "start", behavior: "smooth" });
  let response = null;
  const actions = {
    onReference: (id) => openPassage(response, id),
    onClaim: (index) => openClaim(response, index),
    hint: (part, index) => attachHint(part, () => hintOf(response, index)),
  };
  const paint = (text, claims) => answer.replaceChildren(...renderAnswer(text, claims, actions));
  return {
    timeline,
    write: (text) => paint(text, []),
    summary: () => `${response.references.length} sources.`,
    finish(finished, keepOpen) {
      response = finished;
      timeline.finish(response, keepOpen);
      const extracts = extractsOf(response);
      if (extracts) answer.replaceChildren(...extracts.map((one) => extractView(response, one)));
      else paint(textOf(response), response.grounding?.claims || []);
      after.replaceChildren(
        ...[
          extracts ? null : legend(response.grounding?.claims || []),
          problems(response),
          extracts ? null : sourceList(response),
          requestView(base, body),
        ].filter(Boolean),
      );
    },
    fail(message, text) {
      timeline.finish(null, true);
      if (text) paint(text, []);
      after.replaceChildren(element("p", { class: "problem failed" }, message), requestView(base, body));
    },
  };
}

function extractsOf(response) {
  const text = textOf(response);
  if (!text.startsWith("[")) return null;
  try {
    const read = JSON.parse(text);
    return Array.isArray(read) && read.every((one) => typeof one === "object" && "content" in one) ? read : null;
  } catch {
    return null;
  }
}

function extractView(response, extract) {
  const id = String(extract.ref_id);
  const content = extract.content.length > 420 ? `${extract.content.slice(0, 420)}…` : extract.content;
  return element(
    "section",
    { class: "extract" },
    element("h3", {}, button(extract.title || `Source ${extract.ref_id + 1}`, () => openPassage(response, id))),
    element("p", {}, content),
  );
}

const SKIPPED = {
  noRelevantContent: "Nothing relevant was found.",
  outOfDomainQueryIgnored: "The question lies outside the subjects of the sources.",
  lowGroundedAnswer: "The answer was withheld: the sources do not support it.",
  nonAnswerSeekingQueryIgnored: "This is no question that the sources could answer.",
};

// Return what is missing or doubtful: failed sources, reasons without an answer, warnings.
function problems(response) {
  const items = [
    ...(response.missing || []).map((part) => `${part.what}: ${part.reason || part.outcome}`),
    ...(response.skippedReasons || []).map((reason) => SKIPPED[reason] || reason),
    ...(response.grounding?.warnings || []),
  ];
  for (const conflict of response.grounding?.conflicts || []) {
    items.push(`The sources disagree: ${conflict.values.map((one) => one.value).join(" / ")}`);
  }
  if (!items.length) return null;
  const list = element("ul", {}, ...items.map((text) => element("li", {}, text)));
  return element("section", { class: "problem" }, element("h3", {}, "Missing or doubtful"), list);
}

function sourceList(response) {
  if (!response.references.length) return null;
  const items = response.references.map((reference) =>
    element(
      "li",
      {},
      button(reference.title || reference.docKey, () => openPassage(response, reference.id)),
      element("small", {}, reference.knowledgeSourceName),
    ),
  );
  const list = element("ol", { class: "references" }, ...items);
  const summary = element("summary", {}, `${items.length} ${items.length === 1 ? "source" : "sources"}`);
  return element("details", { class: "found", open: items.length <= 6 }, summary, list);
}

// -- evidence ---------------------------------------------------------------------------------------------------------

function openClaim(response, index) {
  const claim = response.grounding.claims[index];
  const best = claim.supports[0];
  const id = best?.referenceId ?? claim.cited[0];
  if (id !== undefined) openPassage(response, id, claim.supports.filter((one) => one.referenceId === id));
}

let returnTo = null;
const INTERNAL = new Set(["title", "url", "source", "document_id", "file_name", "file_path", "chunk_index"]);

function openPassage(response, id, supports = null) {
  const reference = response?.references.find((one) => one.id === id);
  if (!reference) return;
  const all = (response.grounding?.claims || []).flatMap((one) => one.supports);
  const quotes = supports || all.filter((one) => one.referenceId === id);
  const title = `${Number(id) + 1}. ${reference.title || reference.docKey}`;
  showPassage({ ...reference, ...reference.sourceData, title }, quotes);
}

// Show the passage that the page's address names: the target of a citation URL.
async function openAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  if (!named.has("passage")) return;
  const start = async function* (key) {
    yield await readPassage(named.get("kb"), named.get("source"), named.get("passage"), key);
  };
  try {
    for await (const passage of withKey(start)) showPassage(passage, []);
  } catch (error) {
    showPassage({ title: "Passage", content: error.message, knowledgeSourceName: named.get("source") }, []);
  }
}

function showPassage(passage, quotes) {
  const text = passage.content || "";
  const units = unitOffsets(text);
  const marks = quotes.map(({ span }) => [units[span.start], units[span.end]]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const parts = [];
  let at = 0;
  for (const [start, end] of marks) {
    if (end === undefined || end <= at) continue;
    parts.push(text.slice(at, Math.max(at, start)), element("mark", {}, text.slice(Math.max(at, start), end)));
    at = end;
  }
  parts.push(text.slice(at));
  if (!$("passage").contains(document.activeElement)) returnTo = document.activeElement;
  $("passage-source").textContent = passage.knowledgeSourceName;
  $("passage-title").textContent = passage.title || passage.docKey;
  $("passage-text").replaceChildren(...(text ? parts : ["The server did not send the text of this passage."]));
  const data = Object.entries(passage.metadata || {}).filter(([name]) => !INTERNAL.has(name));
  $("passage-data").replaceChildren(
    ...[["document", passage.docKey || ""], ...data].flatMap(([name, value]) => [
      element("dt", {}, name),
      element("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value)),
    ]),
  );
  const url = safeUrl(passage.url);
  $("passage-link").replaceChildren(
    ...(url ? [element("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, "Open the document")] : []),
  );
  $("passage").hidden = false;
  document.body.classList.add("reading");
  $("passage-title").focus({ preventScroll: true });
  const mark = $("passage-text").querySelector("mark");
  $("passage-text").scrollTop = mark ? Math.max(0, mark.offsetTop - 60) : 0;
}

function closePassage() {
  $("passage").hidden = true;
  document.body.classList.remove("reading");
  returnTo?.focus();
}

function hintOf(response, index) {
  const claim = response.grounding.claims[index];
  const names = new Map(response.references.map((one) => [one.id, one.title || one.docKey]));
  const score = claim.score === null || claim.score === undefined ? "" : ` · ${claim.score.toFixed(2)}`;
  const parts = [element("p", { class: `verdict ${claim.verdict}` }, element("i", {}), VERDICTS[claim.verdict] + score)];
  const units = unitOffsets(textOf(response));
  if (claim.lacking) {
    const lacking = textOf(response).slice(units[claim.lacking.start], units[claim.lacking.end]);
    parts.push(element("p", { class: "lacking" }, `No support for “${lacking.trim()}”`));
  }
  for (const support of claim.supports.slice(0, 2)) {
    const title = `${Number(support.referenceId) + 1}. ${names.get(support.referenceId) || ""}`;
    parts.push(element("blockquote", {}, support.quote, element("cite", {}, title)));
  }
  return parts;
}

function attachHint(part, content) {
  const show = () => {
    const hint = $("hint");
    hint.replaceChildren(...content());
    hint.hidden = false;
    const box = (part.getClientRects()[0] || part.getBoundingClientRect());
    const width = Math.min(380, innerWidth - 24);
    hint.style.width = `${width}px`;
    hint.style.left = `${Math.max(12, Math.min(box.left, innerWidth - width - 12))}px`;
    const above = box.top - hint.offsetHeight - 8;
    hint.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  };
  const hide = () => ($("hint").hidden = true);
  for (const name of ["mouseenter", "focus"]) part.addEventListener(name, show);
  for (const name of ["mouseleave", "blur", "click"]) part.addEventListener(name, hide);
}

// -- conversations ----------------------------------------------------------------------------------------------------

function newSession() {
  sessions.start($("base").value);
  $("turns").replaceChildren();
  $("welcome").hidden = false;
  listSessions();
}

function resume(id) {
  const opened = sessions.open(id);
  if (!opened) return;
  if (bases.has(opened.base)) $("base").value = opened.base;
  $("turns").replaceChildren();
  for (const turn of opened.turns) {
    const view = turnView(turn.question, opened.base, turn.body);
    for (const record of turn.response.activity || []) view.timeline.take(record);
    view.finish(turn.response, false);
  }
  $("welcome").hidden = opened.turns.length > 0;
  document.body.classList.remove("listing");
  listSessions();
  $("question").focus();
}

function listSessions() {
  $("session-list").replaceChildren(
    ...sessions.all.map((one) =>
      element(
        "li",
        {},
        button(one.name, () => resume(one.id), { "aria-current": one.id === sessions.current?.id ? "true" : null }),
        button(
          "×",
          () => {
            sessions.remove(one.id);
            if (one.id === sessions.current?.id) newSession();
            listSessions();
          },
          { class: "remove", "aria-label": `Delete “${one.name}”` },
        ),
      ),
    ),
  );
}

function welcome() {
  const base = bases.get($("base").value);
  if (!base) return;
  $("welcome-name").textContent = base.name;
  $("welcome-text").textContent = base.description || "Ask a question. Each sentence of the answer leads to the words that support it.";
  $("welcome-sources").replaceChildren(
    ...base.sources.map(({ name, description }) =>
      element("li", {}, element("strong", {}, name), description ? element("span", {}, description) : null),
    ),
  );
}

function say(text) {
  $("status").textContent = text;
}

// -- start ------------------------------------------------------------------------------------------------------------

async function loadBases() {
  for await (const one of withKey(async function* (key) {
    yield* await listBases(key);
  })) {
    bases.set(one.name, one);
  }
  $("base").replaceChildren(...[...bases.keys()].map((name) => element("option", {}, name)));
  if (!bases.size) say("The server has no knowledge base.");
  newSession();
  welcome();
  await openAddress();
}

function grow() {
  $("question").style.height = "auto";
  $("question").style.height = `${Math.min($("question").scrollHeight, 200)}px`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const question = $("question").value.trim();
  if (!question) return;
  $("question").value = "";
  grow();
  submit(question);
});
$("question").addEventListener("input", grow);
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("ask").requestSubmit();
});
$("base").addEventListener("change", () => {
  newSession();
  welcome();
});
$("new-session").addEventListener("click", () => {
  newSession();
  document.body.classList.remove("listing");
  $("question").focus();
});
$("open-sessions").addEventListener("click", () => {
  const open = document.body.classList.toggle("listing");
  $("open-sessions").setAttribute("aria-expanded", String(open));
});
$("close-passage").addEventListener("click", closePassage);
addEventListener("hashchange", openAddress);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  $("hint").hidden = true;
  if (!$("passage").hidden) closePassage();
});

loadBases().catch((error) => {
  $("welcome-text").textContent = error.message;
  say(`Error: ${error.message}`);
});
