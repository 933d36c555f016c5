"""How the ranks of a job prove to each other that they belong to it.

A job has a secret, which its ranks receive over Dask's own connections, and which is never sent
between them. What is sent is a proof: a keyed hash (HMAC, SHA-256) of what is said and of a number
that the other side has just made up. So nobody else can say anything, and what was said before
cannot be said again.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "proof", "proves"]

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size


def proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the proof that whoever says `parts` for a purpose knows the secret."""
    code = hmac.new(secret, purpose.encode() + b"\0", hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big"))
        code.update(part)
    return code.digest()


def proves(given: bytes, secret: bytes, purpose: str, *parts: bytes) -> bool:
    """Return whether a proof is right, in a time that does not tell how far it is."""
    return hmac.compare_digest(given, proof(secret, purpose, *parts))
