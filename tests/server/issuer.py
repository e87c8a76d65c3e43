"""An issuer of tokens: keys of its own, and the JSON Web Key Set that verifiers read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER, AUDIENCE = "https://issuer.test", "agentic-kb"


class Issuer:
    """Signs tokens; ``jwks`` is the file with its public key."""

    def __init__(self, folder: Path, kid: str = "k1") -> None:
        self._key, self._kid, self.jwks = ec.generate_private_key(ec.SECP256R1()), kid, folder / "jwks.json"
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key()))
        self.jwks.write_text(json.dumps({"keys": [{**public, "kid": kid, "alg": "ES256", "use": "sig"}]}))

    def token(self, **claims: Any) -> str:
        """A token that holds for a minute, with changed or further claims; None leaves one out."""
        whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "app", **claims}
        kept = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(kept, self._key, algorithm="ES256", headers={"kid": self._kid})
