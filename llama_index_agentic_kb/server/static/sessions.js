// Conversations, kept in this browser.

const KEY = "agentic-kb-conversations";
const MAX_CONVERSATIONS = 50;

export class Sessions {
  constructor() {
    try {
      this.all = JSON.parse(localStorage.getItem(KEY)) || [];
    } catch {
      this.all = [];
    }
    this.current = null;
  }

  start(base) {
    this.current = { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, base, name: "", turns: [] };
  }

  open(id) {
    this.current = this.all.find((one) => one.id === id) || null;
    return this.current;
  }

  add(turn) {
    const { current } = this;
    current.turns.push(turn);
    current.name ||= turn.question.slice(0, 80);
    this.all = [current, ...this.all.filter((one) => one.id !== current.id)].slice(0, MAX_CONVERSATIONS);
    this.save();
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    this.save();
  }

  // Keep what fits: the browser limits the size, and the oldest conversation goes first.
  save() {
    for (;;) {
      try {
        localStorage.setItem(KEY, JSON.stringify(this.all));
        return;
      } catch {
        if (!this.all.pop()) return;
      }
    }
  }
}
