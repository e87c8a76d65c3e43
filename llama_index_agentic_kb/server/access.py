"""Who calls, on whose behalf, how much they may ask, and whose question is next.

Each tenant's questions wait in a line of their own. A free place goes to the tenant with the fewest running questions
for its weight, so a flood of one tenant lengthens its own line and nobody else's. When the whole queue is full, the
longest line loses its newest question. Each server counts for itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol
from urllib.parse import urlsplit

import httpx
import jwt
from pydantic import Field, PrivateAttr, ValidationError, field_validator
from starlette.requests import Request

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.schema._model import Model, describe
from llama_index_agentic_kb.server.catalog import ApiKey, Catalog, Setting, hash_of
from llama_index_agentic_kb.server.errors import ForbiddenError, TooManyRequestsError, UnauthorizedError

QUERY_SOURCE: Final = "x-ms-query-source-authorization"  # has the token of the user on whose behalf a request searches
_BEARER: Final = "bearer "
_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys alone: a shared secret would let each verifier sign."""
_JWKS_SECONDS: Final = 5.0
_JWKS_AGE: Final = 600.0  # age in seconds after which the issuer's keys are read anew
_JWKS_PAUSE: Final = 10.0  # minimum seconds between two readings, so that forged key ids cause no flood
_MAX_RATES: Final = 100_000  # maximum number of callers whose rates are kept
_NEW_SHARE: Final = 0.1  # how much of the mean time of an answer the newest one makes up

_UNKNOWN_PER_MINUTE: Final = 600  # unknown keys for which the catalog is read anew; further ones are refused without


class Limits(Model):
    """The limits of a server. Questions have limits of their own, as they cost more than other requests."""

    requests_per_minute: int | None = Field(default=1_200, ge=1)  # of each caller; None means no limit
    running_requests: int = Field(default=500, ge=1)  # further ones get status 503
    running_questions: int = Field(default=200, ge=1)  # at most two fifths of ``running_requests``; further ones wait
    tenant_running_questions: int | None = Field(default=None, ge=1)  # how many of them may be one tenant's
    tenant_questions_per_minute: int | None = Field(default=None, ge=1)
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)  # those of others are 1
    body_bytes: int = Field(default=4_000_000, ge=1_000)  # of a question; a larger one gets status 413


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, by key or by a verified token."""

    name: str  # for rates and logs
    principal: Principal | None = None  # identity for permissions; None if there is no user, tenant or group
    is_admin: bool = False  # whether the caller may change definitions
    may_query: bool = True  # whether the caller may ask


class TokenVerifier(Protocol):
    """Verifies bearer tokens."""

    async def verify(self, token: str) -> Caller:
        """Return the holder of a token; raise ``UnauthorizedError`` if it is not valid."""


class JwksVerifier(Model):
    """Verifies JSON Web Tokens by the public keys of their issuer; ``tokens`` in the configuration file."""

    issuer: Setting  # the expected ``iss``
    audience: Setting  # the expected ``aud``
    jwks: Setting  # URL (https, or http on this machine) or path of the issuer's JSON Web Key Set
    tenant_claim: str = "tid"
    user_claims: list[str] = Field(default_factory=lambda: ["oid", "sub"])  # the first that is present counts
    groups_claim: str = "groups"
    admin_role: str = "AgenticKB.Admin"  # the role (claim ``roles``) that may change definitions
    query_role: str | None = None  # the role that may ask; None lets every holder of a valid token ask

    if not TYPE_CHECKING:  # the arguments are the fields

        def __init__(self, **fields: object) -> None:
            """Check the fields; raise ``ConfigurationError``, which names each invalid one."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ConfigurationError(describe(error)) from error

        __init__.__pydantic_base_init__ = True  # a configuration with a field of this class names its own path

    _keys: dict[str | None, jwt.PyJWK] = PrivateAttr(default_factory=dict)
    _read_at: float = PrivateAttr(default=-math.inf)
    _tried_at: float = PrivateAttr(default=-math.inf)
    _reading: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)

    @field_validator("jwks")
    @classmethod
    def _safe_address(cls, jwks: str) -> str:
        address = urlsplit(jwks)
        is_local = address.scheme == "http" and address.hostname in ("127.0.0.1", "localhost")
        if "://" in jwks and address.scheme != "https" and not is_local:
            raise ValueError("keys must come over https, or from a file")
        return jwks

    async def verify(self, token: str) -> Caller:
        """Return the holder of a token; see ``TokenVerifier``."""
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self.audience,
                issuer=self.issuer,
                options={"require": ["exp", "iss", "aud"]},
            )
            return self._holder(claims)
        except (jwt.PyJWTError, ConfigurationError, ValueError, TypeError) as error:
            raise UnauthorizedError(f"the bearer token is not valid: {type(error).__name__}") from error

    def _holder(self, claims: JsonMapping) -> Caller:
        tenant, groups = claims.get(self.tenant_claim), claims.get(self.groups_claim) or ()
        user = next(filter(None, map(claims.get, self.user_claims)), None)
        roles = claims.get("roles") or ()
        roles = [roles] if isinstance(roles, str) else roles  # a part of a text is no role
        is_named = (tenant, user) != (None, None) or groups
        principal = Principal(tenant=tenant, user=user, groups=groups) if is_named else None
        is_admin = self.admin_role in roles
        return Caller(
            name=str(user or claims.get("azp") or "token"),
            principal=principal,
            is_admin=is_admin,
            may_query=is_admin or self.query_role in (None, *roles),
        )

    async def _key(self, kid: str | None) -> jwt.PyJWK:
        if kid in self._keys and time.monotonic() - self._read_at < _JWKS_AGE:
            return self._keys[kid]  # without waiting for a reading on another token's account
        async with self._reading:  # one for all requests that wait for it, and one try in each pause
            now = time.monotonic()
            is_wanted = kid not in self._keys or now - self._read_at >= _JWKS_AGE
            if is_wanted and now - self._tried_at >= _JWKS_PAUSE:
                self._tried_at = now
                self._keys = await self._read()
                self._read_at = time.monotonic()
        if time.monotonic() - self._read_at >= _JWKS_AGE:
            raise UnauthorizedError("the keys of the tokens' issuer can't be read")
        if kid not in self._keys:
            raise UnauthorizedError("the bearer token is signed with a key that its issuer does not list")
        return self._keys[kid]

    async def _read(self) -> dict[str | None, jwt.PyJWK]:
        try:
            if "://" in self.jwks:
                async with httpx.AsyncClient(timeout=_JWKS_SECONDS, trust_env=False) as client:
                    text = (await client.get(self.jwks)).raise_for_status().text
            else:
                text = await Call(sync=Path(self.jwks).read_text, what="key set")
            return {key.key_id: key for key in jwt.PyJWKSet.from_dict(json.loads(text)).keys}
        except (httpx.HTTPError, OSError, ValueError, AttributeError, TypeError, jwt.PyJWTError) as error:
            raise UnauthorizedError("the keys of the tokens' issuer can't be read") from error


class Rates:
    """The rates of callers or tenants on this server: so many requests may be made at once, and as many a minute."""

    def __init__(self, per_minute: int | None, what: str = "") -> None:
        self._per_minute, self._what = per_minute, what  # None means no limit
        self._left: dict[str, tuple[float, float]] = {}  # by name: the requests left, at a time

    def wait(self, name: str = "") -> float:
        """Count a request, and return 0; if it is one too many, return the seconds until one is allowed."""
        if self._per_minute is None:
            return 0.0
        if len(self._left) > _MAX_RATES:
            self._left.clear()  # of users long gone, mostly; the others start anew
        now = time.monotonic()
        left, at = self._left.get(name, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - at) * self._per_minute / 60)
        self._left[name] = (left - (left >= 1), now)
        return 0.0 if left >= 1 else (1 - left) * 60 / self._per_minute

    def count(self, name: str) -> None:
        """Count a request; raise ``TooManyRequestsError`` if it is one too many."""
        if seconds := self.wait(name):
            raise TooManyRequestsError(self._what.format(self._per_minute), seconds)


@dataclass(slots=True)
class Access:
    """Authenticates requests, by keys of the catalog or of a file (by hash), or by tokens; None verifies no token."""

    catalog: Catalog
    keys: Mapping[str, ApiKey]
    verifier: TokenVerifier | None
    rates: Rates
    _unknown: Rates = field(default_factory=lambda: Rates(_UNKNOWN_PER_MINUTE))

    async def caller(self, request: Request, *, admin: bool = False) -> Caller:
        """Return who makes a request, counted against its rate: by an API key, or by a bearer token.

        Raises ``UnauthorizedError`` without valid credentials, ``ForbiddenError`` for a caller without the role (with
        ``admin`` that of an administrator), and ``TooManyRequestsError`` for one that exceeded its rate.
        """
        key = request.headers.get("api-key") or request.headers.get("x-goog-api-key")
        authorization = request.headers.get("authorization", "")
        if key is not None:
            caller = await self._by_key(key)
        elif authorization.lower().startswith(_BEARER):
            caller = await self._by_token(authorization)
            caller = replace(caller, name=f"user:{caller.name}")
        else:
            raise UnauthorizedError("credentials are missing: send the header api-key, or Authorization: Bearer ...")
        request.state.caller = caller.name
        self.rates.count(caller.name)
        if not caller.may_query:
            raise ForbiddenError("no role")
        if admin and not caller.is_admin:
            raise ForbiddenError("this needs an admin key, or a token with the admin role")
        return caller

    async def asker(self, request: Request) -> tuple[Principal | None, str]:
        """Return on whose behalf a request searches, and whose share of the questions it uses.

        The principal is the query source token's user, or else the caller's; the share is that of its tenant, or else
        the caller's own. Raises as ``caller`` does, also for a query source token that is not valid or names nobody.
        """
        caller = await self.caller(request)
        principal, token = caller.principal, request.headers.get(QUERY_SOURCE)
        if token is not None:
            principal = (await self._by_token(token)).principal
            if principal is None:
                raise UnauthorizedError(f"{QUERY_SOURCE}: the token names no user, tenant or group")
        tenant = None if principal is None else principal.tenant
        return principal, f"tenant:{tenant}" if tenant else caller.name

    async def _by_key(self, key: str) -> Caller:
        asked, hashed = time.monotonic(), hash_of(key)
        found = self.keys.get(hashed) or (await self.catalog.snapshot()).keys.get(hashed)
        if found is None and not self._unknown.wait():  # a new key, perhaps
            found = (await self.catalog.snapshot(since=asked)).keys.get(hashed)
        if found is None:
            raise UnauthorizedError("the API key is not known, or was revoked")
        return Caller(f"key:{found.name}", is_admin=found.role == "admin")

    async def _by_token(self, authorization: str) -> Caller:
        if self.verifier is None:
            raise UnauthorizedError("this server verifies no bearer tokens; send the header api-key")
        token = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else authorization
        return await self.verifier.verify(token.strip())


@dataclass(slots=True)
class _Line:
    """The questions of one tenant."""

    weight: float
    running: int = 0
    served: int = 0  # number of the last place that it got: the smallest is the longest ago
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairQueue:
    """Hands out places for running questions, used on one event loop; ``capacity`` counts those that run or wait."""

    def __init__(self, limits: Limits, capacity: int) -> None:
        self._weights, self._capacity = limits.tenant_weights, capacity
        self._running = min(limits.running_questions, max(1, capacity // 2))  # the rest may wait
        self._tenant_running = limits.tenant_running_questions or self._running
        self._rates = Rates(limits.tenant_questions_per_minute, "this tenant is allowed {} questions a minute")
        self._lines: dict[str, _Line] = {}
        self._served = 0
        self._seconds = 1.0  # that an answer takes, on average

    @property
    def running(self) -> int:
        """The number of questions that are being answered."""
        return sum(line.running for line in self._lines.values())

    @property
    def waiting(self) -> int:
        """The number of questions that wait."""
        return sum(len(line.waiting) for line in self._lines.values())

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait until a question may run, and hold its place while it does.

        Raises ``TooManyRequestsError`` if the tenant exceeded its rate, or the queue is full and its line the longest.
        """
        self._rates.count(tenant)
        line = self._lines.setdefault(tenant, _Line(self._weights.get(tenant, 1.0)))
        try:
            await self._enter(line)
            began = time.monotonic()
            try:
                yield
            finally:
                self._seconds += _NEW_SHARE * (time.monotonic() - began - self._seconds)
                self._leave(line)
        finally:
            if not line.running and not line.waiting and self._lines.get(tenant) is line:
                del self._lines[tenant]

    async def _enter(self, line: _Line) -> None:
        if self.running + self.waiting >= self._capacity:
            self._make_room(line)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(place)
        self._fill()
        try:
            await place
        except BaseException:
            if place.cancel() or place in line.waiting:  # nobody waits any longer
                line.waiting.remove(place)
            elif not place.cancelled() and place.exception() is None:  # it got the place at the same moment
                self._leave(line)
            raise

    def _leave(self, line: _Line) -> None:
        line.running -= 1
        self._fill()

    def _fill(self) -> None:
        """Hand out the free places."""
        while self.running < self._running:
            ready = [line for line in self._lines.values() if line.waiting and line.running < self._tenant_running]
            if not ready:
                return
            line = min(ready, key=lambda line: (line.running / line.weight, line.served))
            place = line.waiting.popleft()
            if not place.done():  # else it was cancelled, and its task has not run since
                self._served += 1
                line.running, line.served = line.running + 1, self._served
                place.set_result(None)

    def _make_room(self, line: _Line) -> None:
        """Refuse the newest question of the longest line; of equal ones, the one that arrives."""
        longest = max(self._lines.values(), key=lambda line: len(line.waiting) / line.weight)
        if longest is line or len(longest.waiting) / longest.weight <= (len(line.waiting) + 1) / line.weight:
            raise self._refusal(line)
        last = longest.waiting.pop()
        if not last.done():
            last.set_exception(self._refusal(longest))

    def _refusal(self, line: _Line) -> TooManyRequestsError:
        seconds = len(line.waiting) * self._seconds / max(1, line.running)
        return TooManyRequestsError("this tenant has too many questions in the queue", seconds)
