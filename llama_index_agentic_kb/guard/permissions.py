"""Permissions: who may see which documents, as a filter that nothing can widen.

A source declares the metadata fields that say who may see a document (``Permissions``). A request has a ``Principal``.
Out of both comes a mandatory filter: it is joined by "and" to whatever callers and planners ask for, pushed down to
the store, taken by the lexical index, facets and lists alike, and every node that comes back is checked against it.

Stores differ in what they do with lists (Chroma refuses them), so a document's users and groups are boolean keys, one
a name: ``{"acl_group_managers": True}``. ``Permissions.stamp`` makes them when documents are stored. Readers never see
them: whom else a document is shared with is not for them (``Permissions.conceal``), nor may they filter on it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, Final, TypeAlias, TypeVar

from llama_index_agentic_kb.errors import ConfigurationError, DeniedError
from llama_index_agentic_kb.schema.filters import Condition, FilterNode, all_of, any_of
from llama_index_agentic_kb.schema.request import Principal

Document = TypeVar("Document", bound=Any)
"""A LlamaIndex document or node: this module needs no LlamaIndex."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED: Final = frozenset({"_node_content", "_node_type", "agentic_kb", "doc_id", "document_id", "ref_doc_id"})
"""Keys that LlamaIndex's stores, and our evidence, write themselves."""
_OTHER: Final = re.compile(rb"[^A-Za-z0-9]")
_EXCLUDED: Final = ("excluded_embed_metadata_keys", "excluded_llm_metadata_keys")
_NOBODY: Final = "no principal was given: pass principal= or use acting_as(...)"

_current: ContextVar[Principal | None] = ContextVar("agentic_kb_principal", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The metadata fields that say who may see a document.

    A document is seen by a principal of its tenant to whom at least one of the other fields grants it: it is public,
    the principal's own, shared with the principal's user, or with one of its groups. Without any of the other fields,
    its whole tenant sees it. What has none of the declared fields is seen by nobody.

        KnowledgeSource("docs", index=index, permissions=Permissions(tenant="tenant", groups="acl_group_"))

    Args:
        tenant: Key of the document's tenant.
        owner: Key of the one user whom it belongs to.
        users: Prefix of boolean keys, one for each user whom it is shared with.
        groups: Prefix of boolean keys, one for each group that it is shared with.
        public: Boolean key of what everybody (of its tenant) may see.

    Raises:
        ConfigurationError: No field is declared, one is no plain name (letters, digits and underscores; it stands in
            OData filters), or two of them can name one key.
    """

    tenant: str | None = None
    owner: str | None = None
    users: str | None = None
    groups: str | None = None
    public: str | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        declared = {one.name: name for one in fields(self) if (name := getattr(self, one.name)) is not None}
        if not declared:
            raise ConfigurationError("Permissions: declare at least one field, such as tenant='tenant'")
        for role, name in declared.items():
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"Permissions.{role}: {name!r} is no plain name of letters, digits and underscores"
                )
            if name in _RESERVED:
                raise ConfigurationError(f"Permissions.{role}: {name!r} is a key that stores write themselves")
        plain = [name for role, name in declared.items() if role not in ("users", "groups")]
        if len(set(plain)) < len(plain):
            raise ConfigurationError("Permissions: tenant, owner and public must be different keys")
        for role in sorted({"users", "groups"} & declared.keys()):
            for other, name in declared.items():
                if other != role and name.startswith(declared[role]):
                    raise ConfigurationError(
                        f"Permissions.{other}: {name!r} begins with the prefix of {role}, {declared[role]!r}: "
                        "one key could mean both"
                    )

    def filter_for(self, principal: Principal | None) -> FilterNode:
        """Return the filter that a principal's searches must keep to.

        Raises:
            DeniedError: There is no principal, or it lacks what the fields ask for.
        """
        if principal is None:
            raise DeniedError(_NOBODY)
        if self.tenant is not None and principal.tenant is None:
            raise DeniedError("the principal has no tenant, and the documents' permissions are by tenant")
        of_tenant = None if self.tenant is None else Condition(key=self.tenant, value=principal.tenant or "")
        grants = list(self._grants(principal))
        if of_tenant is not None and self.owner is self.users is self.groups is self.public is None:
            return of_tenant
        if not grants:
            raise DeniedError("the principal has none of what the documents' permissions are by: user, groups")
        whole = all_of(of_tenant, grants[0] if len(grants) == 1 else any_of(*grants))
        assert whole is not None
        return whole

    def _grants(self, principal: Principal) -> Iterator[Condition]:
        """Yield every condition of which one has to hold."""
        if self.public is not None:
            yield Condition(key=self.public, value=True)
        if self.owner is not None and principal.user is not None:
            yield Condition(key=self.owner, value=principal.user)
        if self.users is not None and principal.user is not None:
            yield Condition(key=_key(self.users, principal.user), value=True)
        if self.groups is not None:
            for group in sorted(principal.groups):
                yield Condition(key=_key(self.groups, group), value=True)

    def stamp(
        self,
        metadata: Mapping[str, Any],
        *,
        tenant: str | None = None,
        owner: str | None = None,
        users: Iterable[str] = (),
        groups: Iterable[str] = (),
        public: bool = False,
    ) -> dict[str, Any]:
        """Return metadata that say who may see a document, for storing it.

        Whatever of the declared keys is in the metadata already is removed: a document can't grant itself to anybody.

        Args:
            metadata: The document's; not changed.
            tenant: Whose it is.
            owner: The one user whom it belongs to.
            users: Those whom it is shared with.
            groups: Those that it is shared with.
            public: Whether everybody (of its tenant) may see it.

        Raises:
            ConfigurationError: Something is given for which no field is declared, or a name can't be one.
        """
        shared, members = tuple(users), tuple(groups)
        roles = {"tenant": tenant, "owner": owner, "users": shared, "groups": members, "public": public}
        for role, value in roles.items():
            if value and getattr(self, role) is None:
                raise ConfigurationError(f"{role}: Permissions declare no field for it; give Permissions({role}=...)")
        if self.tenant is not None and tenant is None:
            raise ConfigurationError("tenant: a document without a tenant would be seen by nobody; say whose it is")
        for user in (*shared, *([] if owner is None else [owner])):
            Principal(user=user)  # checks the name
        Principal(tenant=tenant, user="anybody", groups=members)
        stamped = self.without(metadata)
        plain = ((self.tenant, tenant), (self.owner, owner), (self.public, public))
        stamped.update((key, value) for key, value in plain if key is not None and value is not None)
        for prefix, names in ((self.users, shared), (self.groups, members)):
            stamped.update((_key(prefix or "", name), True) for name in names)
        return stamped

    def protect(self, document: Document, **access: Any) -> Document:
        """Return a copy of a document or node that is stamped, and whose permissions are neither embedded nor prompted.

        Args:
            document: A LlamaIndex document or node; not changed.
            access: Who may see it; see ``stamp``.
        """
        stamped = self.stamp(document.metadata, **access)
        hidden = [key for key in stamped if self.declares(key)]
        left_out = {name: list(dict.fromkeys([*getattr(document, name), *hidden])) for name in _EXCLUDED}
        copy: Document = document.model_copy(update={"metadata": stamped, **left_out})
        return copy

    def conceal(self, node: Document) -> Document:
        """Return a node without what says who may see it, for its reader: itself where there is nothing of the kind.

        Args:
            node: A LlamaIndex node; not changed.
        """
        change: dict[str, Any] = {name: [k for k in getattr(node, name) if not self.declares(k)] for name in _EXCLUDED}
        change["metadata"] = self.without(node.metadata)
        change["relationships"] = {
            kind: [self._unshared(one) for one in related] if isinstance(related, list) else self._unshared(related)
            for kind, related in node.relationships.items()
        }
        if all(getattr(node, name) == value for name, value in change.items()):
            return node
        copy: Document = node.model_copy(update=change)
        return copy

    def _unshared(self, related: Document) -> Document:
        copy: Document = related.model_copy(update={"metadata": self.without(related.metadata)})
        return copy

    def without(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return metadata without what says who may see the document, for showing it to one of them."""
        return {key: value for key, value in metadata.items() if not self.declares(key)}

    def declares(self, key: str) -> bool:
        """Return whether a metadata key is one of those that say who may see a document."""
        return key == self.tenant or self.hides(key)

    def hides(self, key: str) -> bool:
        """Return whether a metadata key says who else may see a document: no reader may filter on it."""
        shared = (self.users is not None and key.startswith(self.users)) or key in (self.owner, self.public)
        return shared or (self.groups is not None and key.startswith(self.groups))


def _key(prefix: str, name: str) -> str:
    """Return the boolean key of a name: letters and digits as they are, every other byte as ``_`` and two hex digits.

    No two names have one key, and every key is a plain one, as OData and all stores take it.
    """
    encoded = _OTHER.sub(lambda byte: b"_%02X" % byte[0][0], name.encode("utf-8"))
    return prefix + encoded.decode("ascii")


@contextmanager
def acting_as(principal: Principal) -> Iterator[None]:
    """Make requests on behalf of a principal, for code that can't hand it on (agents, chains, tools).

        with acting_as(alice):
            agent_answer = agent.chat("What is our margin?")

    It holds for this thread or task and what is started from it, and for streams that are begun inside and read
    outside. A retriever that is bound to another principal refuses.

    Args:
        principal: Who asks.

    Raises:
        DeniedError: Inside of another principal's context.
    """
    if not isinstance(principal, Principal):
        raise ConfigurationError(f"principal: expected a Principal, got {type(principal).__name__}")
    token = _current.set(merge_principals(principal, _current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def current_principal() -> Principal | None:
    """Return the principal on whose behalf this code runs; None outside of ``acting_as``."""
    return _current.get()


def merge_principals(*given: Principal | None, required: bool = False) -> Principal | None:
    """Return the one principal of a request: bound to the retriever, given with the request, or of the context.

    Args:
        given: Each of them.
        required: Whether there must be one.

    Raises:
        DeniedError: Two of them differ, or there is none and one is required. None goes before the others: whoever
            could choose would choose the wider one.
    """
    distinct = {one for one in given if one is not None}
    if len(distinct) > 1:
        raise DeniedError(
            "two principals were given for one request (bound to the retriever, passed with the request, or by "
            "acting_as): they must be the same"
        )
    if required and not distinct:
        raise DeniedError(_NOBODY)
    return next(iter(distinct), None)


def set_principal(principal: Principal | None) -> None:
    """Make the rest of this context a principal's: what a request calls, such as a knowledge base in it, acts for it.

    A flow does so once, in the context that it has to itself.
    """
    _current.set(principal)


_Person: TypeAlias = tuple[object, ...]


class ConversationOwner:
    """The owner of a conversation: its answers were made of what one principal may see. Thread-safe.

    The first who speaks in it owns it. A person whose groups change stays the same person; one who is known by groups
    alone is another where these differ.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: tuple[Any, ...] | None = None
        self.number = 0
        """How many conversations ended before the one under way."""

    def claim(self, principal: Principal | None) -> int:
        """Own the conversation, or go on in one's own; return its number.

        Raises:
            DeniedError: It is another's.
        """
        with self._lock:
            self._owner = self._owner or _who(principal)
            if self._owner != _who(principal):
                raise DeniedError("the conversation is another principal's: make a chat engine, and a memory, for each")
            return self.number

    def check(self, principal: Principal | None) -> None:
        """Raise unless a principal may read the conversation; who asks for nobody (None) may.

        Raises:
            DeniedError: It is another's.
        """
        if principal is not None and self._owner not in (None, _who(principal)):
            raise DeniedError("the conversation is another principal's")

    def end(self, *, forgotten: bool) -> None:
        """End the conversation; the next one is anybody's where nothing of it is left, else the same owner's."""
        with self._lock:
            self.number += 1
            self._owner = None if forgotten else self._owner


_owners: dict[int, ConversationOwner] = {}
_owners_lock: Final = Lock()


def owner_of(memory: object) -> ConversationOwner:
    """Return the owner of the conversation that a memory holds: one a memory, whatever speaks in it."""
    with _owners_lock:
        if id(memory) not in _owners:
            _owners[id(memory)] = ConversationOwner()
            weakref.finalize(memory, _owners.pop, id(memory), None)
        return _owners[id(memory)]


def _who(principal: Principal | None) -> _Person:
    if principal is None:
        return ("nobody",)
    if principal.user is not None:
        return ("user", principal.tenant, principal.user)
    return ("groups", principal.tenant, principal.groups)
