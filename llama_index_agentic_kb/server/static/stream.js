// Requests to the server: the knowledge bases, and a question's events.

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const API_VERSION = "2026-08-01-preview";

export function retrievePath(base) {
  return `/knowledgebases/${encodeURIComponent(base)}/retrieve?api-version=${API_VERSION}`;
}

function headers(key, more) {
  return key ? { "api-key": key, ...more } : more;
}

async function errorOf(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // not JSON: the status says it
  }
  return new ServerError(response.status, message);
}

export async function listBases(key) {
  const response = await fetch("/page/bases", { headers: headers(key, {}) });
  if (!response.ok) throw await errorOf(response);
  return (await response.json()).value;
}

// Return a passage by its source and id, with the names that a reference has.
export async function readPassage(base, source, id, key) {
  const query = new URLSearchParams({ source, id, "api-version": API_VERSION });
  const response = await fetch(`/knowledgebases/${encodeURIComponent(base)}/passage?${query}`, { headers: headers(key, {}) });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// Yield {name, data} of each server-sent event. A heartbeat is a comment, and skipped.
export async function* ask(base, body, key, signal) {
  const response = await fetch(retrievePath(base), {
    method: "POST",
    headers: headers(key, { "Content-Type": "application/json", Accept: "text/event-stream" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    buffered += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const blocks = buffered.split("\n\n");
    buffered = blocks.pop();
    for (const block of blocks) {
      const event = { name: "", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.name) yield { name: event.name, data: JSON.parse(event.data) };
    }
    if (done) return;
  }
}
