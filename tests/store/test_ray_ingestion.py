"""Ray itself takes half a minute to start: here its place is taken by calls; ``make kills-ray`` kills real ones."""

from __future__ import annotations

import os
from base64 import b64encode
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest

from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, IngestionError
from llama_index_agentic_kb.store import KnowledgeStore, ingest, ray_ingestion
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.files import Access
from llama_index_agentic_kb.store.ray_ingestion import (
    TRIES,
    File,
    RemoteFile,
    _Cluster,
    _Job,
    _listed,
    _Worker,
    ingest_on_ray,
)
from llama_index_agentic_kb.store.reading import IRREGULAR, UnreadableError
from llama_index_agentic_kb.testing import HashEmbedding
from tests.loopback import Asked, Loopback
from tests.store.conftest import written

MODEL = HashEmbedding()
SIZES = (254, 32)


@pytest.fixture
def bucket() -> Iterator[str]:
    system: Any = fsspec.filesystem("memory")
    for name in ("a.md", "sub/b.txt", "sub/.hidden.md", "c.exe"):
        system.pipe(f"/bucket/manuals/{name}", f"Rain in {name}.".encode())
    yield "memory://bucket/manuals"
    system.store.clear()


def test_files_of_object_storage_are_listed_by_source(bucket: str) -> None:
    """A folder is a source; hidden files are left out, other kinds are skipped."""
    skipped: list[tuple[str, str]] = []
    groups, folders = _listed([bucket], None, skipped)
    (group,) = groups.values()
    assert ([*groups], folders) == (["manuals"], {"memory:///bucket/manuals": bucket})
    assert {path: file.origin for path, file in group.files.items()} == {
        "a.md": "memory:///bucket/manuals/a.md",
        "sub/b.txt": "memory:///bucket/manuals/sub/b.txt",
    }
    assert [path for path, _ in skipped] == ["/bucket/manuals/c.exe"]


@pytest.mark.parametrize("url", ["memory://nothing", "unknown://bucket"])
def test_a_folder_without_files_is_an_error(url: str) -> None:
    """A folder that is not there deletes no documents."""
    with pytest.raises(ConfigurationError, match=url):
        _listed([url], None, [])


def test_actors_store_what_ingest_stores(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files give the same documents and vectors; a second time all are unchanged; deleted files go.

    Sizes that don't fit the store's model are refused before there is a cluster.
    """
    clusters: list[_Job] = []

    @contextmanager
    def cluster(_address: object, job: _Job, *_: object) -> Iterator[_Cluster]:
        ray = SimpleNamespace(wait=lambda calls, num_returns: (calls[:1], calls[1:]), get=lambda report: report)
        clusters.append(job)
        yield _Cluster(ray, [SimpleNamespace(ingest=SimpleNamespace(remote=_Worker(job).ingest))])

    monkeypatch.setattr(ray_ingestion, "_cluster", cluster)
    monkeypatch.setattr(DirectoryStore, "shared", True)
    texts = {name: f"Rain in {name}." for name in ("a.md", "sub/b.txt")}
    seen: list[tuple[int, int, str]] = []
    with KnowledgeStore.open(tmp_path / "one", embed_model=MODEL, create=True) as store:
        ingest(written(tmp_path / "manuals", texts), store)
        expected = {node.id_: node.text for node in store.nodes("manuals")}
    first, again = (
        ingest_on_ray([bucket], str(tmp_path / "other"), embed_model=MODEL, progress=lambda *one: seen.append(one))
        for _ in range(2)
    )
    with KnowledgeStore.open(tmp_path / "other", embed_model=MODEL) as store:
        assert {node.id_: node.text for node in store.nodes("manuals")} == expected
    assert (len(first.added), first.failed, first.skipped_files[0][0]) == (2, (), "/bucket/manuals/c.exe")
    assert (again.unchanged, again.chunks_embedded) == (first.added, 0)
    assert seen == [(at, 2, f"{bucket.replace('//', '///')}/{name}") for at, name in enumerate(texts, start=1)] * 2
    fsspec.filesystem("memory").rm("/bucket/manuals/a.md")
    assert ingest_on_ray([bucket], str(tmp_path / "other"), embed_model=MODEL).deleted == ("manuals/a.md",)
    monkeypatch.setattr("llama_index_agentic_kb.store.chunking.input_window", lambda _: 256)
    with pytest.raises(ConfigurationError, match="chunk_size is 600, but the embedding model reads only 254"):
        ingest_on_ray([bucket], str(tmp_path / "other"), embed_model=MODEL, chunk_size=600)
    assert len(clusters) == 3


class DiedError(Exception):
    """Stands for Ray's errors; ``cause`` is set where the actor itself raised."""

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__()
        self.cause = cause


def files(*names: str) -> list[File]:
    return [(f"s3://b/{name}", name, "s3://b") for name in names]


def performed(fails: Any, *batches: list[File]) -> tuple[set[str], list[str]]:
    """Perform batches on a cluster whose calls are made at once, and raise what ``fails`` returns for a batch."""

    def get(batch: list[File]) -> Any:
        if error := fails(batch):
            raise error
        return SimpleNamespace(added=tuple(path for _, path, _ in batch), failed=())

    errors = SimpleNamespace(RayError=DiedError)
    ray = SimpleNamespace(wait=lambda calls, num_returns: (calls[:1], calls[1:]), get=get, exceptions=errors)
    worker = SimpleNamespace(ingest=SimpleNamespace(remote=lambda source, batch, known: tuple(batch)))
    reports = _Cluster(ray, [worker]).perform("docs", deque(batches), {}, lambda *_: None)
    return {one for report in reports for one in report.added}, [url for report in reports for url, _ in report.failed]


@pytest.mark.parametrize(("count", "sizes"), [(1_000, {128, 104}), (9, {2, 1}), (3, {1}), (0, set())])
def test_each_actor_has_a_share_of_few_files(count: int, sizes: set[int]) -> None:
    """Batches are large, but no actor is idle where there are files for it."""
    batches = _Cluster(None, [object(), object()]).batches(files(*map(str, range(count))))
    assert {len(batch) for batch in batches} == sizes
    assert [one for batch in batches for one in batch] == files(*map(str, range(count)))


def test_a_batch_whose_actor_died_is_given_to_another() -> None:
    """Each file is ingested once, whatever died before."""
    deaths = iter([DiedError(), None, DiedError(), DiedError()])
    assert performed(lambda _: next(deaths, None), files("a", "b"), files("c")) == ({"a", "b", "c"}, [])


def test_an_actor_has_a_batch_in_waiting_and_one_that_died_gets_the_next_last() -> None:
    """None is idle between two batches; what died at one actor is tried at the other."""
    given: list[str] = []

    def actor(name: str) -> Any:
        return SimpleNamespace(ingest=SimpleNamespace(remote=lambda _source, batch, _known: (name, *batch)))

    def wait(calls: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        given.append("".join(name for name, *_ in calls))
        return calls[:num_returns], calls[num_returns:]

    def get(call: Any) -> Any:
        if call[0] == "x" and len(call) == 2:  # a batch of one file
            raise DiedError
        return SimpleNamespace(added=call[1:], failed=())

    ray = SimpleNamespace(wait=wait, get=get, exceptions=SimpleNamespace(RayError=DiedError))
    cluster = _Cluster(ray, [actor("x"), actor("y")])
    for count, expected in ((20, ["xyxy", "yxy", "xy", "y"]), (1, ["x", "y"])):
        given.clear()
        reports = cluster.perform("docs", cluster.batches(files(*map(str, range(count)))), {}, lambda *_: None)
        assert (given, sum(len(one.added) for one in reports)) == (expected, count)


@pytest.mark.parametrize(("cause", "stored"), [(None, "good"), (IngestionError("the store is away"), "bad")])
def test_a_bad_actor_gets_no_batch_again_that_died_there(
    cause: Exception | None, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies at once while the other is busy: each batch is tried there once, and no file is blamed.

    An actor that lives may have a batch again for which it did not reach the store.
    """
    monkeypatch.setattr(ray_ingestion, "PAUSE", 0.0)
    tried: set[Any] = set()

    def actor(name: str) -> Any:
        return SimpleNamespace(ingest=SimpleNamespace(remote=lambda _source, batch, _known: (name, *batch)))

    def wait(calls: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        calls = sorted(calls, key=lambda call: call[0] != "bad")
        return calls[:num_returns], calls[num_returns:]

    def get(call: Any) -> Any:
        if call[0] == "bad" and call not in tried:
            tried.add(call)
            raise DiedError(cause)
        return SimpleNamespace(added=call[1:], failed=(), by=call[0])

    ray = SimpleNamespace(wait=wait, get=get, exceptions=SimpleNamespace(RayError=DiedError))
    batches = deque([files(name) for name in "abcd"])
    reports: Any = _Cluster(ray, [actor("bad"), actor("good")]).perform("docs", batches, {}, lambda *_: None)
    assert sorted(path for report in reports for _, path, _ in report.added) == ["a", "b", "c", "d"]
    assert [url for report in reports for url, _ in report.failed] == []
    assert any(report.by == stored for report in reports)


def test_what_waits_behind_a_death_is_not_blamed() -> None:
    """An actor that dies takes the batch with it that waits there; only the file that kills is reported."""
    dead: list[bool] = []

    def fails(batch: list[File]) -> DiedError | None:
        bad = any(path == "bad" for _, path, _ in batch)
        waited = bool(dead) and dead.pop()
        dead[:] = [True] if bad and len(batch) > 1 else []
        return DiedError() if bad or waited else None

    assert performed(fails, files("a", "bad", "c"), files("x"), files("y")) == ({"a", "c", "x", "y"}, ["s3://b/bad"])


def test_symlinks_are_left_out(tmp_path: Path) -> None:
    """A link in a shared folder does not bring in what lies outside, nor does one that came after the list."""
    written(tmp_path, {"secret.txt": "secret", "docs/a.txt": "open"})
    (tmp_path / "docs" / "n.txt").symlink_to(tmp_path / "secret.txt")
    skipped: list[tuple[str, str]] = []
    os.mkfifo(tmp_path / "docs" / "pipe.txt")
    groups, folders = _listed([str(tmp_path / "docs")], None, skipped)
    (file,) = groups["docs"].files.values()
    assert (file.relative, [reason for _, reason in skipped]) == ("a.txt", ["is a symlink", IRREGULAR])
    (tmp_path / "docs" / "a.txt").unlink()
    (tmp_path / "docs" / "a.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UnreadableError, match="is a symlink"):
        RemoteFile(tmp_path / "copy", "a.txt", file.root, file.origin, folders[file.root]).digest(1_000)


PAGES = {"a.md": "Rain.", "x::b.md": "Snow.", "large.md": "x" * 2_000}


def test_a_web_servers_folder_is_read_and_nothing_else(tmp_path: Path) -> None:
    """Files are opened by the URL that was passed; its password is stored and shown nowhere."""
    links = "".join(f'<a href="{name}">x</a>' for name in (*PAGES, "gone.md", "/private/b.md", "%2e%2e/private/b.md"))

    def answer(asked: Asked) -> tuple[int, str]:
        """Answer as a folder, whose page lists what is elsewhere too, for those who know the password."""
        if asked.headers.get("Authorization") != f"Basic {b64encode(b'ann:crab-soup-71').decode()}":
            return 401, ""
        name = unquote(asked.path.rpartition("/")[2])
        return 404 if name == "gone.md" else 200, links if asked.path == "/docs" else PAGES.get(name, "Secret.")

    server = Loopback(answer)
    url, shown = (f"http://{user}127.0.0.1:{server.port}/docs" for user in ("ann:crab-soup-71@", ""))
    skipped: list[tuple[str, str]] = []
    groups, folders = _listed([url], None, skipped)
    assert (folders, [reason for _, reason in skipped]) == ({shown: url}, [])
    with KnowledgeStore.open(tmp_path / "kb", embed_model=MODEL, create=True) as store:
        store.put_source("docs")
        worker = _Worker(_Job(store.location, MODEL, SIZES, Access(None, None, trust_urls=False), 1_000, folders))
        report = worker.ingest(
            "docs", [(one.origin, one.relative, one.root) for one in groups["docs"].files.values()], {}
        )
        texts = [node.text for node in store.nodes("docs")]
        stored = {one.origin for one in store.stored_documents("docs").values()}
    server.close()
    assert (sorted(texts), stored) == (["Rain.", "Snow."], {f"{shown}/{name}" for name in ("a.md", "x::b.md")})
    reasons = dict(report.failed)
    assert reasons.keys() == {f"{shown}/large.md", f"{shown}/gone.md"}
    assert "is too large" in reasons[f"{shown}/large.md"]
    assert "crab-soup-71" not in str((groups, report, skipped))


def test_a_password_is_not_in_errors() -> None:
    """A folder that can't be listed is named without it."""
    with pytest.raises(ConfigurationError, match=r"ftp://\*\*\*@127\.0\.0\.1:1/docs: can't be listed") as raised:
        _listed(["ftp://ann:crab-soup-71@127.0.0.1:1/docs"], None, [])
    assert "crab-soup-71" not in str(raised.value)


@pytest.mark.parametrize("outages", [1, TRIES])
def test_a_store_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, outages: int) -> None:
    """After several tries the ingestion ends, and says how to go on."""
    monkeypatch.setattr(ray_ingestion, "PAUSE", 0)
    errors = iter([DiedError(IngestionError("The store is away."))] * outages)
    if outages < TRIES:
        assert performed(lambda _: next(errors, None), files("a")) == ({"a"}, [])
        return
    with pytest.raises(AgenticKBError, match=r"The store is away\. Run the ingestion again"):
        performed(lambda _: next(errors, None), files("a"))


def test_a_directory_is_no_shared_store(tmp_path: Path, bucket: str) -> None:
    """It has one writer; the error says what is needed."""
    with pytest.raises(ConfigurationError, match="needs a shared store"):
        ingest_on_ray([bucket], str(tmp_path / "kb"), embed_model=MODEL)
