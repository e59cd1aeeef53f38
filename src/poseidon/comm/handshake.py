"""Proving to each other that both ends of a connection know the job's secret, before anything else is said.

The server greets with a nonce. The client answers with a nonce of its own and a tag over both; the server, if that is
right, with another tag over both. Each message has a fixed size, and until its tag is right nothing of it is looked at
but magic and version. Both ends then hold a key for each direction of this one session. Tags of client, server and
session have different purposes, so none can be sent back as another; nonces make each handshake unlike every other.

Pure, as `frames`: bytes in, bytes out.
"""

import hmac
import secrets
import struct
from typing import NamedTuple

from poseidon.comm.secret import TAG_BYTES, Secret
from poseidon.errors import CommError

HANDSHAKE_SECONDS = 5.0
"""Who has not proved the secret by then is dropped."""

_MAGIC = b"poseidon"
_VERSION = 1
_NONCE_BYTES = 32
_GREETING = struct.Struct(f"!8sH{_NONCE_BYTES}s")
_PROOF = struct.Struct(f"!8sH{_NONCE_BYTES}s{TAG_BYTES}s")

GREETING_BYTES = _GREETING.size
PROOF_BYTES = _PROOF.size
ANSWER_BYTES = TAG_BYTES


class HandshakeError(CommError):
    """The other end does not know the secret, or does not speak this protocol."""


class SessionKeys(NamedTuple):
    """What signs the frames of one session."""

    to_server: bytes
    to_client: bytes


class ServerHandshake:
    """The server's part.

    Args:
        secret: Of the job.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self.greeting = _GREETING.pack(_MAGIC, _VERSION, secrets.token_bytes(_NONCE_BYTES))

    def check(self, proof: bytes) -> tuple[bytes, SessionKeys]:
        """The answer to a client's proof, and the keys.

        Args:
            proof: `PROOF_BYTES` bytes.

        Raises:
            HandshakeError: It does not prove the secret.
        """
        magic, version, nonce, tag = _PROOF.unpack(proof)
        _check_version(magic, version)
        both = self.greeting + nonce
        if not hmac.compare_digest(tag, self._secret.tag("client", both)):
            raise HandshakeError("it does not know the job's secret")
        return self._secret.tag("server", both), _keys(self._secret, both)


class ClientHandshake:
    """The client's part.

    Args:
        secret: Of the job.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._both = b""

    def prove(self, greeting: bytes) -> bytes:
        """The proof to send after a server's greeting, of `GREETING_BYTES` bytes.

        Raises:
            HandshakeError: This is no such greeting.
        """
        magic, version, _ = _GREETING.unpack(greeting)
        _check_version(magic, version)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._both = greeting + nonce
        return _PROOF.pack(_MAGIC, _VERSION, nonce, self._secret.tag("client", self._both))

    def check(self, answer: bytes) -> SessionKeys:
        """The keys, once the server has proved that it knows the secret too.

        Args:
            answer: `ANSWER_BYTES` bytes.

        Raises:
            HandshakeError: It does not.
        """
        if not hmac.compare_digest(answer, self._secret.tag("server", self._both)):
            raise HandshakeError("it does not know the job's secret")
        return _keys(self._secret, self._both)


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise HandshakeError("it does not speak this protocol")
    if version != _VERSION:
        raise HandshakeError(f"it speaks version {version} of the protocol, and this end {_VERSION}")


def _keys(secret: Secret, both: bytes) -> SessionKeys:
    return SessionKeys(secret.tag("to server", both), secret.tag("to client", both))
