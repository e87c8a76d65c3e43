"""Who calls: API keys, bearer tokens, and the principal on whose behalf a request searches."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import httpx
import jwt
from starlette.requests import Request

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.server.catalog import ApiKey, Catalog, hash_of
from llama_index_agentic_kb.server.errors import ForbiddenError, UnauthorizedError
from llama_index_agentic_kb.server.quotas import Bucket, Rates

QUERY_SOURCE: Final = "x-ms-query-source-authorization"
"""The header with the token of the user on whose behalf a request searches."""
_BEARER: Final = "bearer "
_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys alone: a shared secret would let each verifier sign."""
_JWKS_SECONDS: Final = 5.0
_JWKS_AGE: Final = 600.0  # age in seconds after which the issuer's keys are read anew
_JWKS_PAUSE: Final = 10.0  # minimum seconds between two readings, so that forged key ids cause no flood

_UNKNOWN_PER_MINUTE: Final = 600
"""The number of unknown keys in a minute for which the catalog is read anew; further ones are refused without."""


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """What a verified bearer token says."""

    subject: str  # a name of its holder for rates and logs
    principal: Principal | None  # holder's identity for permissions; None if the token names no user, tenant or group
    is_admin: bool = False  # whether the holder may change definitions
    may_query: bool = True  # whether the holder may ask


class TokenVerifier(Protocol):
    """Verifies bearer tokens."""

    async def verify(self, token: str) -> VerifiedToken:
        """Return what a token says; raise ``UnauthorizedError`` if it is not valid."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, by key or token."""

    name: str
    is_admin: bool
    principal: Principal | None = None


@dataclass(kw_only=True, eq=False)
class JwksVerifier:
    """Verifies JSON Web Tokens by the public keys of their issuer."""

    issuer: str  # the expected ``iss``
    audience: str  # the expected ``aud``
    jwks: str  # URL (https, or http on this machine) or path of the issuer's JSON Web Key Set
    tenant_claim: str = "tid"
    user_claims: Sequence[str] = ("oid", "sub")  # the first that is present counts
    groups_claim: str = "groups"
    admin_role: str = "AgenticKB.Admin"  # the role (claim ``roles``) that may change definitions
    query_role: str | None = None  # the role that may ask; None lets every holder of a valid token ask

    def __post_init__(self) -> None:
        """Check the address of the keys."""
        address = urlsplit(self.jwks)
        is_local = address.scheme == "http" and address.hostname in ("127.0.0.1", "localhost")
        if "://" in self.jwks and address.scheme != "https" and not is_local:
            raise ConfigurationError("jwks: keys must come over https, or from a file")
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._read_at = self._tried_at = -math.inf
        self._reading = asyncio.Lock()

    async def verify(self, token: str) -> VerifiedToken:
        """Return what a token says; see ``TokenVerifier``."""
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
            return self._verified(claims)
        except (jwt.PyJWTError, ConfigurationError, ValueError, TypeError) as error:
            raise UnauthorizedError(f"the bearer token is not valid: {type(error).__name__}") from error

    def _verified(self, claims: Mapping[str, Any]) -> VerifiedToken:
        tenant, groups = claims.get(self.tenant_claim), claims.get(self.groups_claim) or ()
        user = next((claims[name] for name in self.user_claims if claims.get(name)), None)
        roles = claims.get("roles") or ()
        roles = [roles] if isinstance(roles, str) else roles  # a part of a text is no role
        named = tenant is not None or user is not None or groups
        return VerifiedToken(
            subject=str(user or claims.get("azp") or "token"),
            principal=Principal(tenant=tenant, user=user, groups=groups) if named else None,
            is_admin=self.admin_role in roles,
            may_query=self.query_role is None or self.query_role in roles or self.admin_role in roles,
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


@dataclass(slots=True)
class Access:
    """Authenticates requests, by keys of the catalog or of a file (by hash), or by tokens; None verifies no token."""

    catalog: Catalog
    keys: Mapping[str, ApiKey]
    verifier: TokenVerifier | None
    rates: Rates
    _unknown: Bucket = field(default_factory=lambda: Bucket(_UNKNOWN_PER_MINUTE))

    async def caller(self, request: Request, *, admin: bool = False) -> Caller:
        """Return who makes a request, counted against its rate: by an API key, or by a bearer token.

        Raises:
            UnauthorizedError: There are no credentials, or they are not valid.
            ForbiddenError: The caller lacks the role, with ``admin`` that of an administrator.
            TooManyRequestsError: The caller exceeded its rate.
        """
        key = request.headers.get("api-key") or request.headers.get("x-goog-api-key")
        authorization = request.headers.get("authorization", "")
        if key is not None:
            found = await self._by_key(key)
            caller, may_query = Caller(f"key:{found.name}", found.role == "admin"), True
        elif authorization.lower().startswith(_BEARER):
            token = await self._by_token(authorization)
            caller, may_query = Caller(f"user:{token.subject}", token.is_admin, token.principal), token.may_query
        else:
            raise UnauthorizedError("credentials are missing: send the header api-key, or Authorization: Bearer ...")
        request.state.caller = caller.name
        self.rates.count(caller.name)
        if not may_query or (admin and not caller.is_admin):
            raise ForbiddenError("this needs an admin key, or a token with the admin role" if may_query else "no role")
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

    async def _by_key(self, key: str) -> ApiKey:
        asked, hashed = time.monotonic(), hash_of(key)
        found = self.keys.get(hashed) or (await self.catalog.snapshot()).keys.get(hashed)
        if found is None and self._unknown.has_room():  # a new key, perhaps
            found = (await self.catalog.snapshot(since=asked)).keys.get(hashed)
        if found is None:
            raise UnauthorizedError("the API key is not known, or was revoked")
        return found

    async def _by_token(self, authorization: str) -> VerifiedToken:
        if self.verifier is None:
            raise UnauthorizedError("this server verifies no bearer tokens; send the header api-key")
        token = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else authorization
        return await self.verifier.verify(token.strip())
