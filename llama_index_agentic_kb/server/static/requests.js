// A question's request as JSON, curl and Python, to copy.

import { button, element } from "./dom.js";
import { API_VERSION, retrievePath } from "./stream.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function forms(base, body) {
  const json = JSON.stringify(body, null, 2);
  const origin = location.origin;
  const python = JSON.stringify(json); // a JSON string is a Python string
  return {
    JSON: json,
    curl: [
      `curl -N ${quoted(origin + retrievePath(base))} \\`,
      `  -H "api-key: $API_KEY" -H 'content-type: application/json' -H 'accept: text/event-stream' \\`,
      `  -d ${quoted(JSON.stringify(body))}`,
    ].join("\n"),
    Python: [
      "from llama_index_agentic_kb import RetrievalRequest",
      "",
      "# kb = KnowledgeBase([...])",
      `request = RetrievalRequest.parse(${python})`,
      "print(kb.retrieve(request))",
    ].join("\n"),
    "Azure SDK": [
      "import json, os",
      "from azure.core.credentials import AzureKeyCredential",
      "from azure.search.documents.knowledgebases import KnowledgeBaseRetrievalClient",
      "from azure.search.documents.knowledgebases.models import KnowledgeBaseRetrievalRequest",
      "",
      "client = KnowledgeBaseRetrievalClient(",
      `    ${JSON.stringify(origin)}, AzureKeyCredential(os.environ["API_KEY"]),`,
      `    knowledge_base_name=${JSON.stringify(base)}, api_version=${JSON.stringify(API_VERSION)},`,
      ")",
      `request = KnowledgeBaseRetrievalRequest(json.loads(${python}))`,
      "print(client.retrieve(request).response[0].content[0].text)",
    ].join("\n"),
  };
}

export function requestView(base, body) {
  const made = forms(base, body);
  const code = element("code");
  const tabs = element("div", { class: "tabs", role: "group", "aria-label": "Form of the request" });
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const choose = (name) => {
    code.textContent = made[name];
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab.textContent === name));
  };
  tabs.append(...Object.keys(made).map((name) => button(name, () => choose(name), { "aria-pressed": "false" })));
  choose("JSON");
  const pre = element("pre", { tabindex: 0, role: "region", "aria-label": "Request" }, code);
  return element("details", { class: "request" }, element("summary", {}, "Request"), element("div", { class: "bar-row" }, tabs, copy), pre);
}
