"""Permissions: who may see which documents, enforced by a filter that nothing can widen.

A source declares the metadata fields that say who may see a document (``Permissions``). A request has a ``Principal``.
Both determine a mandatory filter: it is combined by AND with the filters of callers and planners, pushed down to the
store, applied by the lexical index, facets and lists, and every returned node is checked against it.

Stores differ in their support for lists (Chroma rejects them), so a document's users and groups are boolean keys, one
for each name: ``{"acl_group_managers": True}``. ``Permissions.stamp`` adds them before documents are stored. Readers
can neither see these keys (``Permissions.conceal``) nor filter on them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import filterfalse, permutations
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError
from llama_index_agentic_kb.schema.filters import Condition, FilterNode, all_of, any_of
from llama_index_agentic_kb.schema.request import Principal

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode, RelatedNodeInfo

Document = TypeVar("Document", bound="BaseNode")

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED: Final = frozenset({"_node_content", "_node_type", "agentic_kb", "doc_id", "document_id", "ref_doc_id"})
"""Metadata keys that LlamaIndex's stores and this package write themselves."""
_OTHER: Final = re.compile(rb"[^A-Za-z0-9]")
_EXCLUDED: Final = ("excluded_embed_metadata_keys", "excluded_llm_metadata_keys")
_NOBODY: Final = "no principal was given: pass principal= or use acting_as(...)"

_current: ContextVar[Principal | None] = ContextVar("agentic_kb_principal", default=None)


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """The metadata fields that say who may see a document.

    A principal of the document's tenant may see it if at least one of the other fields allows it: the document is
    public, owned by the principal's user, or shared with that user or one of its groups. If only ``tenant`` is
    declared, the whole tenant may see it. A document with none of the declared fields is visible to nobody.

        KnowledgeSource("docs", index=index, permissions=Permissions(tenant="tenant", groups="acl_group_"))

    Args:
        tenant: The key of the document's tenant.
        owner: The key of the document's owner, a single user.
        users: The prefix of boolean keys, one for each user that the document is shared with.
        groups: The prefix of boolean keys, one for each group that the document is shared with.
        public: The boolean key that makes a document visible to everybody (in its tenant).

    Raises:
        ConfigurationError: No field is declared, a name has characters other than letters, digits and underscores, is
            reserved by stores, or can collide with another.
    """

    tenant: str | None = None
    owner: str | None = None
    users: str | None = None
    groups: str | None = None
    public: str | None = None

    def __post_init__(self) -> None:
        """Check the field names."""
        declared = {one.name: name for one in fields(self) if (name := getattr(self, one.name)) is not None}
        if not declared:
            raise ConfigurationError("Permissions: declare at least one field, such as tenant='tenant'")
        for role, name in declared.items():
            _check_key(role, name)
        for (role, name), (other, beside) in permutations(declared.items(), 2):
            if role in ("users", "groups") and beside.startswith(name):
                raise ConfigurationError(
                    f"Permissions.{other}: {beside!r} begins with the prefix of {role}, {name!r}: "
                    "one key could mean both"
                )
            if name == beside and other not in ("users", "groups"):  # else the prefix is refused, in turn
                raise ConfigurationError("Permissions: tenant, owner and public must be different keys")

    def filter_for(self, principal: Principal | None) -> FilterNode:
        """Return the mandatory filter for a principal's searches.

        Raises:
            DeniedError: The principal is None, or lacks the tenant, user or groups that the fields require.
        """
        if principal is None:
            raise DeniedError(_NOBODY)
        of_tenant, user = None, principal.user
        if self.tenant is not None:
            if principal.tenant is None:
                raise DeniedError("the principal has no tenant, and the documents' permissions are by tenant")
            of_tenant = Condition(key=self.tenant, value=principal.tenant)
            if self.owner is self.users is self.groups is self.public is None:
                return of_tenant
        flags = [] if self.public is None else [self.public]
        flags += self._flags([] if user is None else [user], sorted(principal.groups))
        grants = [Condition(key=key, value=True) for key in flags]
        if self.owner is not None and user is not None:
            grants.append(Condition(key=self.owner, value=user))
        if not grants:
            raise DeniedError("the principal has none of what the documents' permissions are by: user, groups")
        whole = all_of(of_tenant, grants[0] if len(grants) == 1 else any_of(*grants))
        assert whole is not None
        return whole

    def _flags(self, users: Iterable[str], groups: Iterable[str]) -> list[str]:
        """Return the boolean keys of users and groups; of users only if they are declared, of groups likewise."""
        declared = ((self.users, users), (self.groups, groups))
        return [_key(prefix, name) for prefix, names in declared if prefix is not None for name in names]

    def stamp(
        self,
        metadata: JsonMapping,
        *,
        tenant: str | None = None,
        owner: str | None = None,
        users: Iterable[str] = (),
        groups: Iterable[str] = (),
        public: bool = False,
    ) -> JsonObject:
        """Return a copy of a document's metadata with permission fields, for storing it.

        Existing values of the declared keys are removed: a document can't grant access to itself.

        Raises:
            ConfigurationError: An argument has no declared field, or the required tenant is missing.
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
        return stamped | dict.fromkeys(self._flags(shared, members), True)

    def protect(self, document: Document, **access: Any) -> Document:
        """Return a copy of a document or node with the fields of ``stamp``, which embeddings and prompts leave out."""
        stamped = self.stamp(document.metadata, **access)
        hidden = [key for key in stamped if self.declares(key)]
        left_out = {name: list(dict.fromkeys([*getattr(document, name), *hidden])) for name in _EXCLUDED}
        copy: Document = document.model_copy(update={"metadata": stamped, **left_out})
        return copy

    def conceal(self, node: Document) -> Document:
        """Return a copy of a LlamaIndex node without permission fields; the node itself if it has none."""

        def plain(related: RelatedNodeInfo) -> RelatedNodeInfo:
            return related.model_copy(update={"metadata": self.without(related.metadata)})

        change: JsonObject = {"metadata": self.without(node.metadata), "relationships": {}}
        for name in _EXCLUDED:
            change[name] = [*filterfalse(self.declares, getattr(node, name))]
        for kind, related in node.relationships.items():
            plained = [plain(one) for one in related] if isinstance(related, list) else plain(related)
            change["relationships"][kind] = plained
        for name, value in change.items():
            if getattr(node, name) != value:
                copy: Document = node.model_copy(update=change)
                return copy
        return node

    def without(self, metadata: JsonMapping) -> JsonObject:
        """Return a copy of metadata without the permission fields."""
        return {key: value for key, value in metadata.items() if not self.declares(key)}

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.users, self.groups)))

    def declares(self, key: object) -> bool:
        """Return whether a metadata key is a permission field."""
        if not isinstance(key, str):  # stores may return others
            return False
        return key in (self.tenant, self.owner, self.public) or key.startswith(self._prefixes)

    def hides(self, key: str) -> bool:
        """Return whether a metadata key is a permission field other than the tenant: readers may not filter on it."""
        return key != self.tenant and self.declares(key)


def _check_key(role: str, name: object) -> None:
    if name in RESERVED:
        raise ConfigurationError(f"Permissions.{role}: {name!r} is a key that stores write themselves")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigurationError(f"Permissions.{role}: {name!r} is no plain name of A-Z, a-z, 0-9 and _")


def _key(prefix: str, name: str) -> str:
    """Return a name's boolean key, which all stores take: all but letters and digits as ``_`` and two hex digits."""
    return prefix + _OTHER.sub(lambda byte: b"_%02X" % byte[0][0], name.encode("utf-8")).decode("ascii")


@contextmanager
def acting_as(principal: Principal) -> Iterator[None]:
    """Make requests on behalf of a principal, for code that can't pass one (agents, chains, tools).

        with acting_as(alice):
            agent_answer = agent.chat("What is our margin?")

    It applies to this thread or task, to tasks started from it, and to streams created inside and read outside. Inside
    a generator it applies to the code that reads the generator too, between two items. A context or a retriever that
    has a different principal raises ``DeniedError``.
    """
    if not isinstance(principal, Principal):
        raise ConfigurationError(f"principal: expected a Principal, got {type(principal).__name__}")
    token = _current.set(merge_principals(principal, _current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def current_principal() -> Principal | None:
    """Return the principal on whose behalf this code runs, if any."""
    return _current.get()


def set_principal(principal: Principal | None) -> None:
    """Set the principal of the current context, so that nested calls, such as other knowledge bases, act for it."""
    _current.set(principal)


def merge_principals(*given: Principal | None, required: bool = False) -> Principal | None:
    """Return the principal of a request, of those that are bound to the retriever, passed, or set in the context.

    Raises:
        DeniedError: A required one is missing, or two differ: if one had precedence, a caller could choose its rights.
    """
    distinct = {*given} - {None}
    if len(distinct) > 1:
        raise DeniedError(
            "two principals were given for one request (bound to the retriever, passed with the request, or by "
            "acting_as): they must be the same"
        )
    if required and not distinct:
        raise DeniedError(_NOBODY)
    return next(iter(distinct), None)


searched_under: Final[ContextVar[Permissions | None]] = ContextVar("agentic_kb_searched_under", default=None)
"""The permissions of the source whose search this code runs in. A retriever that is that source keeps their fields in
its nodes: the search checks each node by them, and its own request conceals them."""


class ConversationOwner:
    """The owner of a conversation: the principal of its first request. Thread-safe.

    A principal is identified by tenant and user, so its groups may change; without a user, by tenant and groups.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: tuple[object, ...] | None = None
        self.number = 0
        """The number of conversations that ended before the current one."""

    def claim(self, principal: Principal | None) -> int:
        """Make a principal the owner if there is none; return the conversation's number, or raise ``DeniedError``."""
        with self._lock:
            self._owner = self._owner or _who(principal)
            if self._owner != _who(principal):
                raise DeniedError("the conversation is another principal's: make a chat engine, and a memory, for each")
            return self.number

    def check(self, principal: Principal | None) -> None:
        """Raise ``DeniedError`` if the conversation belongs to another principal than this one; None may read any."""
        if principal is not None and self._owner not in (None, _who(principal)):
            raise DeniedError("the conversation is another principal's")

    def end(self, *, forgotten: bool) -> None:
        """Begin the next conversation, which anybody may own if the content was deleted (``forgotten``)."""
        with self._lock:
            self.number += 1
            self._owner = None if forgotten else self._owner


_owners: dict[int, ConversationOwner] = {}
_owners_lock: Final = Lock()


def owner_of(memory: object) -> ConversationOwner:
    """Return the conversation owner of a memory, shared by all chat engines that use the memory."""
    with _owners_lock:
        if id(memory) not in _owners:
            _owners[id(memory)] = ConversationOwner()
            weakref.finalize(memory, _owners.pop, id(memory), None)
        return _owners[id(memory)]


def _who(principal: Principal | None) -> tuple[object, ...]:
    if principal is None:
        return ("nobody",)
    if principal.user is not None:
        return ("user", principal.tenant, principal.user)
    return ("groups", principal.tenant, principal.groups)
