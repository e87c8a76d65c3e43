// The plan and its searches as rows of bars on one time axis.

import { element, seconds } from "./dom.js";

const STAGES = {
  plan: "Plan the searches",
  findings: "Read what was found",
  revision: "Look for gaps",
  tool: "Choose a tool",
  answer: "Write the answer",
};
const OUTCOMES = { ok: "done", empty: "empty", skipped: "empty" };

export class Timeline {
  constructor() {
    this.rows = new Map();
    this.bars = new Map();
    this.started = null;
    this.ended = null;
    this.summary = element("summary", {}, "Planning");
    this.list = element("ol", { class: "rows" });
    this.view = element("details", { class: "timeline", open: true }, this.summary, this.list);
  }

  // Take a record of activity, started or completed.
  take(record) {
    if (!record.startedAt || record.type === "agenticReasoning") return;
    const start = Date.parse(record.startedAt);
    this.started ??= start;
    let bar = this.bars.get(record.id);
    if (!bar) {
      bar = { start, end: null, view: element("span", { class: "bar running" }) };
      bar.view.append(element("span", { class: "hidden" }));
      this.bars.set(record.id, bar);
      const track = this.row(record);
      bar.view.style.top = `${4 + 7 * track.childElementCount}px`; // searches of several sources below one another
      track.append(bar.view);
      track.style.height = `${9 + 7 * track.childElementCount}px`;
      this.tick();
    }
    if (record.completedAt) this.complete(bar, record);
    if (record.subQueries) this.announce(record.subQueries);
    this.layout();
  }

  complete(bar, record) {
    bar.end = Date.parse(record.completedAt);
    const state = record.error ? "failed" : OUTCOMES[record.outcome] || "failed";
    const shown = record.type === "searchIndex" && record.count === 0 && state === "done" ? "empty" : state;
    bar.view.className = `bar ${shown}`;
    const source = record.knowledgeSourceName;
    const parts = [source, shown === "failed" ? record.error?.message || record.outcome : null];
    if (record.count !== undefined) parts.push(`${record.count} of ${record.candidates ?? record.count} kept`);
    if (record.inputTokens) parts.push(`${record.inputTokens + (record.outputTokens || 0)} tokens`);
    parts.push(seconds(record.elapsedMs ?? bar.end - bar.start));
    const text = parts.filter(Boolean).join(" · ");
    bar.view.title = text;
    bar.view.firstChild.textContent = `${shown}: ${text}`;
  }

  row(record) {
    const key = record.subQueryId ? `q ${record.subQueryId}` : `s ${record.id}`;
    const query = record.searchIndexArguments?.search;
    const waiting = query && this.rows.get(`w ${query}`);
    if (waiting && !this.rows.has(key)) {
      waiting.label.classList.remove("waiting");
      this.rows.set(key, waiting);
    }
    if (!this.rows.has(key)) this.rows.set(key, this.addRow(query || STAGES[record.purpose] || record.type, !query));
    const row = this.rows.get(key);
    if (record.knowledgeSourceName) {
      row.sources.add(record.knowledgeSourceName);
      row.tags.textContent = [...row.sources].join(", ");
    }
    return row.track;
  }

  addRow(label, isStage) {
    const tags = element("small");
    const name = element("span", { class: isStage ? "label stage" : "label", title: label }, label);
    const track = element("span", { class: "track" });
    this.list.append(element("li", {}, element("span", { class: "what" }, name, tags), track));
    return { label: name, tags, track, sources: new Set() };
  }

  // Show planned searches that have not started.
  announce(queries) {
    for (const query of queries) {
      const known = [...this.rows.values()].some((row) => row.label.title === query);
      if (known) continue;
      const row = this.addRow(query, false);
      row.label.classList.add("waiting");
      this.rows.set(`w ${query}`, row);
    }
  }

  layout() {
    const now = this.ended ?? Math.max(...[...this.bars.values()].map((bar) => bar.end ?? bar.start), this.now());
    const whole = Math.max(now - this.started, 1);
    for (const { start, end, view } of this.bars.values()) {
      view.style.left = `${(100 * (start - this.started)) / whole}%`;
      view.style.width = `${Math.max(0.6, (100 * ((end ?? now) - start)) / whole)}%`;
    }
  }

  // The server's time, estimated from the moment its first record arrived.
  now() {
    this.offset ??= Date.now() - this.started;
    return Date.now() - this.offset;
  }

  tick() {
    if (this.frame || this.ended) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.ended) return;
      const running = [...this.bars.values()].filter((bar) => bar.end === null).length;
      this.layout();
      this.summary.textContent = `Searching · ${seconds(this.now() - this.started)}`;
      if (running) this.tick();
    });
  }

  // Close the rows when the answer is there.
  finish(response, wasOpen) {
    const ends = [...this.bars.values()].map((bar) => bar.end ?? bar.start);
    this.ended = ends.length ? Math.max(...ends) : 0;
    for (const bar of this.bars.values()) {
      if (bar.end !== null) continue;
      bar.end = this.ended;
      bar.view.className = "bar failed";
    }
    const planned = new Set((response?.plan?.subQueries || []).map((step) => step.query));
    for (const [key, row] of this.rows) {
      if (!key.startsWith("w ") || row.track.childElementCount) continue;
      if (planned.has(row.label.title)) row.label.classList.add("unsearched");
      else row.track.parentElement.remove(); // it was searched with known values filled in
    }
    this.layout();
    this.describe(response?.plan);
    const searches = (response?.activity || []).filter((record) => record.subQueryId).length;
    const parts = [`${searches || this.bars.size} ${searches === 1 ? "search" : "searches"}`];
    const used = (response?.activity || []).reduce((sum, one) => sum + (one.inputTokens || 0) + (one.outputTokens || 0), 0);
    if (this.started !== null) parts.push(seconds(this.ended - this.started));
    if (used) parts.push(`${used.toLocaleString("en")} tokens`);
    this.summary.textContent = parts.join(" · ");
    this.view.open = wasOpen;
  }

  // Say which rows build on which.
  describe(plan) {
    const names = new Map((plan?.subQueries || []).map((step, number) => [step.id, number + 1]));
    for (const step of plan?.subQueries || []) {
      const row = this.rows.get(`q ${step.id}`);
      if (!row) continue;
      row.label.textContent = `${names.get(step.id)}. ${step.query}`;
      const parents = step.dependsOn.map((id) => names.get(id)).filter(Boolean);
      if (parents.length) row.tags.textContent += ` · builds on ${parents.join(", ")}`;
    }
  }
}
