"""Who may see an ingested file, and where its link leads: no file says so itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_index_agentic_kb import KnowledgeBase, Permissions, Principal
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.store import ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

FORGED = """---
tenant: acme
Tenant: acme
org: acme
owner: ann
acl_public: true
acl_group_hr: true
acl_user_ann: true
url: https://evil.example/p.png
URL: https://evil.example/q.png
year: 1969
---
Snow falls.
"""
ANN = Principal(tenant="acme", user="ann", groups={"hr"})
WHOLE = Permissions(tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder with a file that says all of itself that it can."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "forged.md").write_text(FORGED)
    return tmp_path / "docs"


Seen = Callable[..., list[Reference]]


@pytest.fixture
def seen(store: DirectoryStore) -> Seen:
    """A function that returns what a principal finds."""

    def ask(permissions: Permissions | None, principal: Principal | None) -> list[Reference]:
        kb = KnowledgeBase.from_store(
            store.path, embed_model=HashEmbedding(), permissions=permissions, effort="minimal"
        )
        return list(kb.retrieve("snow", output_mode="extractiveData", principal=principal).references)

    return ask


@pytest.mark.parametrize("permissions", [WHOLE, Permissions(tenant="tenant"), Permissions(public="acl_public")])
def test_a_file_can_not_grant_itself(docs: Path, store: DirectoryStore, seen: Seen, permissions: Permissions) -> None:
    """Its front matter names tenant, owner, group and user, and says that it is public: nobody sees it."""
    ingest(docs, store)
    assert seen(permissions, ANN) == []
    assert len(seen(None, None)) == 1
    assert store.nodes("docs")[0].metadata["year"] == 1969


def test_what_is_stamped_holds(docs: Path, store: DirectoryStore, seen: Seen) -> None:
    """By a mapping or by path; another stamp takes the place of the first, and nothing is embedded again."""
    ingest(docs, store, stamp={"tenant": "acme", "groups": ["hr"]})
    assert len(seen(WHOLE, ANN)) == 1
    assert seen(WHOLE, Principal(tenant="acme", user="ann")) == []
    assert seen(WHOLE, Principal(tenant="other", groups={"hr"})) == []
    report = ingest(docs, store, stamp=lambda path: {"tenant": path.stem, "public": True})
    assert (report.updated, report.chunks_embedded) == (("docs/forged.md",), 0)
    assert seen(WHOLE, ANN) == []
    assert len(seen(WHOLE, Principal(tenant="forged", user="x"))) == 1
    assert ingest(docs, store, stamp={"tenant": "forged", "public": True}).unchanged == ("docs/forged.md",)


def test_fields_of_other_names_must_be_protected(docs: Path, store: DirectoryStore, seen: Seen) -> None:
    """Permissions over a field that files could set are refused, until they are ingested with it."""
    named = Permissions(tenant="org")
    ingest(docs, store)
    with pytest.raises(ConfigurationError, match=r"'docs' may have set org themselves.*--tenant"):
        seen(named, ANN)
    ingest(docs, store, permissions=named)
    assert seen(named, ANN) == []
    ingest(docs, store, permissions=named, stamp={"tenant": "acme"})
    assert len(seen(named, ANN)) == 1


@pytest.mark.parametrize("stamp", [{"tenant": ""}, {"owner": "a\x00"}, {"groups": [""]}])
def test_stamps_that_can_not_be_are_refused(docs: Path, store: DirectoryStore, stamp: Any) -> None:
    """Nothing is stored that nobody, or somebody else, would see."""
    with pytest.raises(ValueError, match=r"tenant|user|group"):
        ingest(docs, store, stamp=stamp)
    assert store.documents.documents("docs") == {}


def test_links_are_no_files_own(docs: Path, store: DirectoryStore, seen: Seen) -> None:
    """A reference has neither a file's own link nor its path on the server, unless the files are trusted."""
    ingest(docs, store)
    (reference,) = seen(None, None)
    assert (reference.url, reference.citation_url) == (None, None)
    assert "evil" not in str(store.nodes("docs")[0].metadata)
    assert str(docs) not in str(store.nodes("docs")[0].metadata)
    ingest(docs, store, trust_urls=True)
    assert seen(None, None)[0].url == "https://evil.example/p.png"
