// An answer's Markdown as elements, with its claims marked by their support.

import { button, element, safeUrl, unitOffsets } from "./dom.js";

export const VERDICTS = {
  supported: "supported",
  partiallySupported: "partly supported",
  unsupported: "not supported",
  contradicted: "contradicted",
  notCheckable: "not checked",
};
const INLINE = /\[ref_id:(\d+)\]|\*\*([^*\n]+)\*\*|`([^`\n]+)`|\*([^*\s][^*\n]*)\*|\[([^\][\n]+)\]\((https?:[^)\s]+)\)/g;

// Return the answer's blocks. `claims` may be empty while the answer streams; `onClaim(index)` and `onReference(id)`
// are called when a reader chooses one.
export function renderAnswer(text, claims, { onClaim, onReference, hint }) {
  const painter = new Painter(text, claims, { onClaim, onReference, hint });
  return painter.blocks();
}

class Painter {
  constructor(text, claims, actions) {
    const units = unitOffsets(text);
    this.text = text;
    this.actions = actions;
    this.claims = claims.map((claim, index) => ({
      index,
      start: units[claim.span.start],
      end: units[claim.span.end],
      claim,
      shown: false,
    }));
  }

  blocks() {
    const blocks = [];
    let list = null;
    let at = 0;
    let code = null;
    for (const line of this.text.split("\n")) {
      const start = at;
      at += line.length + 1;
      if (/^\s*```/.test(line)) {
        code = code ? null : element("code");
        if (code) blocks.push(element("pre", {}, code));
        list = null;
        continue;
      }
      if (code) {
        code.append(`${line}\n`);
        continue;
      }
      const heading = /^(#{1,4})\s+/.exec(line);
      const item = /^\s*([-*•]|\d{1,3}[.)])\s+/.exec(line);
      if (item) {
        const ordered = /\d/.test(item[1]);
        const name = ordered ? "OL" : "UL";
        if (!list || list.tagName !== name) {
          list = element(name, ordered ? { start: parseInt(item[1], 10) } : {});
          blocks.push(list);
        }
        list.append(this.inline(element("li"), start + item[0].length, start + line.length));
        continue;
      }
      list = null;
      if (!line.trim()) continue;
      const skipped = heading ? heading[0].length : 0;
      blocks.push(this.inline(element(heading ? "h4" : "p"), start + skipped, start + line.length));
    }
    return blocks;
  }

  inline(parent, start, end) {
    let at = start;
    for (const found of this.text.slice(start, end).matchAll(INLINE)) {
      const [whole, reference, strong, code, emphasis, label, url] = found;
      const from = start + found.index;
      const before = reference === undefined ? from : at + this.text.slice(at, from).trimEnd().length;
      this.plain(parent, at, before); // a marker stands close to its sentence
      at = from + whole.length;
      if (reference !== undefined) parent.append(this.reference(reference));
      else if (strong !== undefined) parent.append(this.inline(element("strong"), from + 2, at - 2));
      else if (code !== undefined) parent.append(element("code", {}, code));
      else if (emphasis !== undefined) parent.append(this.inline(element("em"), from + 1, at - 1));
      else if (safeUrl(url)) {
        const link = element("a", { href: url, rel: "noopener noreferrer", target: "_blank" });
        parent.append(this.inline(link, from + 1, from + 1 + label.length));
      }
    }
    this.plain(parent, at, end);
    return parent;
  }

  // Append text, cut where claims begin and end.
  plain(parent, start, end) {
    let at = start;
    for (const item of this.claims) {
      if (item.end <= at || item.start >= end) continue;
      if (item.start > at) parent.append(this.text.slice(at, item.start));
      const from = Math.max(at, item.start);
      at = Math.min(item.end, end);
      parent.append(this.claim(item, this.text.slice(from, at)));
    }
    if (at < end) parent.append(this.text.slice(at, end));
  }

  claim(item, text) {
    const { claim, index } = item;
    if (!claim.checkRequired && claim.verdict === "notCheckable") return document.createTextNode(text);
    const first = !item.shown && text.trim() !== "";
    item.shown ||= first;
    const part = element("span", {
      class: `claim ${claim.verdict}`,
      "data-claim": index,
      ...(first && {
        role: "button",
        tabindex: 0,
        "aria-label": `${text.trim()} (${VERDICTS[claim.verdict]}; open the evidence)`,
      }),
    });
    part.append(text);
    part.addEventListener("click", () => this.actions.onClaim(index));
    part.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.actions.onClaim(index);
    });
    this.actions.hint(part, index);
    return part;
  }

  reference(id) {
    const number = Number(id) + 1;
    return button(String(number), () => this.actions.onReference(id), {
      class: "ref",
      "aria-label": `Source ${number}`,
    });
  }
}

// Return a line that says how many claims have which verdict.
export function legend(claims) {
  const counts = new Map();
  for (const claim of claims) {
    if (claim.checkRequired || claim.verdict !== "notCheckable") {
      counts.set(claim.verdict, (counts.get(claim.verdict) || 0) + 1);
    }
  }
  const items = Object.keys(VERDICTS)
    .filter((verdict) => counts.has(verdict))
    .map((verdict) =>
      element("li", { class: verdict }, element("i", { "aria-hidden": "true" }), `${counts.get(verdict)} ${VERDICTS[verdict]}`),
    );
  return items.length ? element("ul", { class: "legend", "aria-label": "Support of the sentences" }, ...items) : null;
}
