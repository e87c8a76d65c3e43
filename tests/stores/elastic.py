"""A stand-in for Elasticsearch and OpenSearch on loopback: what LlamaIndex's adapters and this package ask of them.

It maps fields as they do without a mapping of one's own (text with a keyword beside it, whole numbers, decimals,
booleans, dates), converts values to the type of their field, compares by it, and refuses what it does not know. Lists
come in pages. ``requests`` has what was asked.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from llama_index.core.schema import BaseNode

from tests.loopback import Asked, Loopback

Json = dict[str, Any]

LONGEST: Final = 256
_SIGNS: Final = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.Z]*)?")


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "long", float: "float"}
    return kinds.get(type(value), "date" if _DATE.fullmatch(str(value)) else "text")


def _converted(value: Any, kind: str) -> Any:
    """Return what a field of a type indexes of a value, or compares it as; raise ``ValueError`` if it can't."""
    if kind == "boolean":
        return {"true": True, "false": False, "": False}[_converted(value, "text")]
    if kind in ("long", "float") and not isinstance(value, bool):
        return int(float(value)) if kind == "long" else struct.unpack("f", struct.pack("f", float(value)))[0]
    if kind in ("long", "float"):
        raise ValueError(f"{value} is no number")
    return value if isinstance(value, str) else json.dumps(value)


def _items(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list) else [value]) if one is not None]


class _Index:
    """The documents of one index, and the types of their fields."""

    def __init__(self, mappings: Json) -> None:
        self.rows: dict[str, Json] = {}
        self.mappings: Json = {"properties": {"metadata": {"properties": {}}, **mappings.get("properties", {})}}

    @property
    def fields(self) -> Json:
        return self.mappings["properties"]["metadata"]["properties"]  # type: ignore[no-any-return]

    def put(self, row: str, source: Json) -> None:
        self.rows[row] = source
        for key, value in source["metadata"].items():
            for one in _items(value)[:1]:
                kind = _type(one)
                keyword = {"fields": {"keyword": {"type": "keyword", "ignore_above": LONGEST}}}
                mapped = self.fields.setdefault(key, {"type": kind, **(keyword if kind == "text" else {})})
                _converted(one, mapped["type"])

    def values(self, source: Json, path: str) -> list[Any]:
        """Return what is indexed of a row under a field's name."""
        mapped, name = self.mapped(path), path.removeprefix("metadata.").removesuffix(".keyword")
        items = [_converted(one, mapped["type"]) for one in _items(source["metadata"].get(name))] if mapped else []
        if path.endswith(".keyword"):
            mapped = mapped.get("fields", {}).get("keyword", {})
        if mapped.get("type") == "text":
            return [word for one in items for word in ["", *re.findall(r"\w+", one.lower())]]
        return [one for one in items if not isinstance(one, str) or len(one) <= mapped.get("ignore_above", math.inf)]

    def mapped(self, path: str) -> Json:
        """Return the mapping of a field; nothing for one that no document has had."""
        return self.fields.get(path.removeprefix("metadata.").removesuffix(".keyword"), {})  # type: ignore[no-any-return]

    def passes(self, source: Json, row: str, asked: Json) -> bool:
        """Return whether a row passes a query; fail for one that is not known."""
        ((kind, body),) = asked.items()
        if kind != "bool":
            return self._holds(source, row, kind, body)
        known = {"filter", "must", "should", "must_not", "minimum_should_match"}
        assert body.keys() <= known, body
        every, none, some = ([*_items(body.get(part))] for part in ("filter", "must_not", "should"))
        return (
            all(self.passes(source, row, one) for one in every + _items(body.get("must")))
            and not any(self.passes(source, row, one) for one in none)
            and (not some or any(self.passes(source, row, one) for one in some))
        )

    def _holds(self, source: Json, row: str, kind: str, body: Json) -> bool:
        if kind in ("match_all", "match_none"):
            return kind == "match_all"
        if kind == "ids":
            return row in body["values"]
        if kind == "exists":
            return bool(self.values(source, body["field"]))
        ((path, wanted),) = body.items()
        if kind == "match":
            return bool(self.score(source, path, wanted["query"]))
        held, own = self.values(source, path), self.mapped(path).get("type", "text")
        if kind == "range":
            return any(all(_SIGNS[sign](one, value) for sign, value in wanted.items()) for one in held)
        values = [wanted["value"] if isinstance(wanted, dict) else wanted] if kind == "term" else wanted
        assert kind in ("term", "terms"), kind
        whole = [value for value in values if own != "long" or float(value).is_integer()]
        return not {_converted(value, own) for value in whole}.isdisjoint(held)

    @staticmethod
    def score(source: Json, path: str, words: str) -> float:
        """Return how many of the words are in a text, each weighed by nothing."""
        own = Counter(re.findall(r"\w+", source[path].lower()))
        return float(sum(own[word] > 0 for word in re.findall(r"\w+", words.lower())))

    def search(self, body: Json) -> Json:
        """Answer a search: by vectors with a filter, by words, or of all that pass; and groups of values."""
        asked, near = body.get("query", {"match_all": {}}), body.get("knn")
        fused = [one.get("standard", one) for one in body.get("retriever", {}).get("rrf", {}).get("retrievers", ())]
        fused += [{"query": one} for one in asked.get("hybrid", {}).get("queries", ())]
        if fused:
            hits = {
                hit["_id"]: hit for one in fused for hit in self.search({**one, "size": body["size"]})["hits"]["hits"]
            }
            return {"hits": {"hits": list(hits.values())[: body["size"]], "total": {"value": len(hits)}}}
        if "knn" in asked:  # OpenSearch's
            ((field, inner),) = asked["knn"].items()
            near = {"field": field, "query_vector": inner["vector"], "filter": inner.get("filter", []), "k": inner["k"]}
        scored: list[Json] = []
        for row, source in self.rows.items():
            if near is not None:
                passing = all(self.passes(source, row, one) for one in _items(near["filter"]))
                score = (1 + _cosine(source[near["field"]], near["query_vector"])) / 2
            else:
                passing = self.passes(source, row, asked)
                words = [
                    (at, one) for must in _items(asked.get("bool", {}).get("must")) for at, one in must["match"].items()
                ]
                score = sum(self.score(source, at, one["query"]) for at, one in words)
            if passing:
                scored.append({"_id": row, "_score": score, "_source": source})
        scored.sort(key=lambda hit: -hit["_score"])
        answer: Json = {
            "hits": {"hits": scored[: body.get("size", 10)], "total": {"value": len(scored)}},
            "_shards": {},
        }
        if "aggs" in body:
            answer["aggregations"] = {"found": self._composite(body["aggs"]["found"]["composite"], scored)}
        return answer

    def _composite(self, asked: Json, hits: Sequence[Json]) -> Json:
        names = [(name, one["terms"]["field"]) for source in asked["sources"] for name, one in source.items()]
        groups: Counter[str] = Counter()
        for hit in hits:
            keys: list[Json] = [{}]
            for name, path in names:
                keys = [{**key, name: value} for key in keys for value in self.values(hit["_source"], path)]
            groups.update({json.dumps(key, sort_keys=True) for key in keys})
        start = json.dumps(asked["after"], sort_keys=True) if "after" in asked else ""
        left = sorted(key for key in groups if key > start)
        page = left[: asked["size"]]
        after = {"after_key": json.loads(page[-1])} if page else {}
        return {"buckets": [{"key": json.loads(key), "doc_count": groups[key]} for key in page], **after}


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


class ElasticServer(Loopback):
    """The stand-in; OpenSearch's by its own name and version."""

    def __init__(self, *, opensearch: bool = False) -> None:
        self.opensearch = opensearch
        self.requests: list[tuple[str, str, Any]] = []
        self._indices: dict[str, _Index] = {}
        self._scrolls: dict[str, tuple[int, list[Json]]] = {}
        self._about = {
            "version": {"number": "2.17.0", "distribution": "opensearch"} if opensearch else {"number": "8.19.0"}
        }
        super().__init__(self._answer, {"X-Elastic-Product": "Elasticsearch"})

    def bodies(self, ending: str) -> list[Json]:
        """Return the bodies of the requests to paths that end so."""
        return [body for _, path, body in self.requests if path.endswith(ending)]

    def _answer(self, asked: Asked) -> tuple[int, Json]:
        method, text, target = asked.method, asked.body.decode(), urlsplit(asked.path)
        path = target.path.strip("/")
        lines = [json.loads(line) for line in text.splitlines()] if path.endswith("_bulk") else []
        body = {} if lines or not text else json.loads(text)
        self.requests.append((method, path, lines or body))
        name, _, action = path.partition("/")
        if path.endswith("_bulk"):
            for what, source in zip(lines[::2], lines[1::2], strict=True):
                self._indices[what["index"]["_index"]].put(what["index"]["_id"], source)
            return 200, {"errors": False, "items": [{"index": {"status": 201}} for _ in lines[::2]]}
        if path == "_search/scroll":
            return 200, {"succeeded": True} if method == "DELETE" else self._scrolled(body["scroll_id"])
        if name == "":
            return 200, self._about
        if method == "PUT":
            self._indices[name] = _Index(body.get("mappings", {}))
            return 200, {"acknowledged": True}
        if name not in self._indices:
            return 404, {"error": {"type": "index_not_found_exception", "reason": name}, "status": 404}
        return 200, self._of_index(self._indices[name], name, action, body, parse_qs(target.query))

    def _scrolled(self, scroll: str) -> Json:
        """Return the next page of a list."""
        size, left = self._scrolls[scroll]
        self._scrolls[scroll] = size, left[size:]
        shards = {"successful": 1, "skipped": 0, "total": 1}
        return {"hits": {"hits": left[:size]}, "_scroll_id": scroll, "_shards": shards}

    def _of_index(self, index: _Index, name: str, action: str, body: Json, asked: Json) -> Json:
        if action == "_search":
            size = int(asked.get("size", [body.get("size", 10)])[0])
            found = index.search({**body, "size": len(index.rows) if "scroll" in asked else size})
            if "scroll" not in asked:
                return found
            scroll = f"scroll {len(self._scrolls)}"
            self._scrolls[scroll] = size, found["hits"]["hits"]
            return self._scrolled(scroll)
        if action == "_count":
            return {"count": index.search(body)["hits"]["total"]["value"]}
        if action == "_delete_by_query":
            gone = [row for row, source in index.rows.items() if index.passes(source, row, body["query"])]
            for row in gone:
                del index.rows[row]
            return {"deleted": len(gone)}
        return {name: {"mappings": index.mappings, "settings": {}}}


def elasticsearch_store(url: str, name: str, _dimensions: int) -> Any:
    """Return LlamaIndex's store, whose nodes are added and deleted by a client for each call: it is bound to a loop."""
    from elasticsearch import AsyncElasticsearch  # noqa: PLC0415 (seconds)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, by the adapter's way to configure a model
        from llama_index.vector_stores.elasticsearch import ElasticsearchStore, base  # noqa: PLC0415
    vars(base)["nest_asyncio"] = SimpleNamespace(
        apply=lambda: None
    )  # it would change asyncio for all tests of the process

    class Store(ElasticsearchStore):
        def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
            return self._with_client(lambda store: store.async_add([*nodes]))  # type: ignore[no-any-return]

        def delete(self, ref_doc_id: str, **_: Any) -> None:
            self._with_client(lambda store: store.adelete(ref_doc_id))

        def _with_client(self, work: Callable[[ElasticsearchStore], Any]) -> Any:
            async def run() -> Any:
                async with AsyncElasticsearch(url) as client:
                    return await work(ElasticsearchStore(index_name=name, es_client=client))

            return asyncio.run(run())

    store: Any = Store  # its constructor's defaults are hidden by the way it is built on pydantic
    return store(index_name=name, es_client=AsyncElasticsearch(url))


def opensearch_store(url: str, name: str, dimensions: int) -> Any:
    """Return LlamaIndex's store."""
    from llama_index.vector_stores.opensearch import OpensearchVectorClient, OpensearchVectorStore  # noqa: PLC0415

    unused: Any = SimpleNamespace()
    return OpensearchVectorStore(OpensearchVectorClient(url, name, dimensions, os_async_client=unused))
