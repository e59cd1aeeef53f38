"""The secret of a job: whoever knows it belongs to the job, and nobody else is listened to.

A launcher makes one and hands it to its ranks in POSEIDON_SECRET; a person puts one into a file that only they can read
and names it in POSEIDON_SECRET_FILE. It never crosses the network: peers prove to each other that they know it. It is
not shown by `repr`, not logged and not part of any error.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from poseidon.errors import ConfigError

SECRET_VARIABLE = "POSEIDON_SECRET"
FILE_VARIABLE = "POSEIDON_SECRET_FILE"
TAG_BYTES = 32
"""Of HMAC-SHA256."""
_LEAST_BYTES = 16
_MOST_BYTES = 1024
_ADVICE = "`openssl rand -hex 32` makes one"


class Secret:
    """What all ranks of a job know and nobody else.

    Args:
        key: At least 16 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < _LEAST_BYTES:
            raise ConfigError(f"a secret has at least {_LEAST_BYTES} bytes, not {len(key)}; {_ADVICE}")
        self._key = key

    @classmethod
    def make(cls) -> "Secret":
        """A new one."""
        return cls(secrets.token_bytes(TAG_BYTES))

    @classmethod
    def find(cls, environment: Mapping[str, str] | None = None) -> "Secret | None":
        """The one that POSEIDON_SECRET holds or POSEIDON_SECRET_FILE names; None where neither is set.

        Raises:
            ConfigError: It is no secret, or others may read its file.
        """
        variables = os.environ if environment is None else environment
        if text := variables.get(SECRET_VARIABLE):
            return cls._of_hex(text, SECRET_VARIABLE)
        if path := variables.get(FILE_VARIABLE):
            return cls.read(Path(path))
        return None

    @classmethod
    def read(cls, path: Path) -> "Secret":
        """The one in a file, in hexadecimal digits.

        Raises:
            ConfigError: The file cannot be read, others than its owner may read it, or it holds no secret.
        """
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise ConfigError(
                        f"cannot use the secret in {path}: its mode is {stat.S_IMODE(mode):04o}, so that others than "
                        f"its owner may get at it; run `chmod 600 {path}`"
                    )
                data = file.read(2 * _MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the secret in {path}: {error.strerror}") from error
        return cls._of_hex(data.decode("ascii", errors="replace"), str(path))

    @classmethod
    def _of_hex(cls, text: str, source: str) -> "Secret":
        digits = text.strip()
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            raise ConfigError(f"cannot use the secret in {source}: not hexadecimal digits; {_ADVICE}") from None
        if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
            raise ConfigError(
                f"cannot use the secret in {source}: {len(digits)} hexadecimal digits, where {2 * _LEAST_BYTES} to "
                f"{2 * _MOST_BYTES} are needed; {_ADVICE}"
            )
        return cls(key)

    @property
    def hex(self) -> str:
        """As POSEIDON_SECRET has it; for the environment of a process that belongs to the job."""
        return self._key.hex()

    def tag(self, purpose: str, *parts: bytes) -> bytes:
        """Proves knowledge of the secret to whoever knows it too.

        Args:
            purpose: What it is for: a tag for one purpose is worth nothing for another.
            parts: What it speaks of, each with its length.
        """
        text = b"".join(len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._key, text, "sha256")

    def __repr__(self) -> str:
        """Without what it is."""
        return "Secret(hidden)"
