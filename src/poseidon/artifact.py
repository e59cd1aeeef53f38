"""Value classes and their files: TOML where people write, JSON where Poseidon writes.

`Value` is the base of every value class: frozen, keyword-only, checked when built. `Artifact` adds a file form. A file
that cannot be used becomes a `ConfigError` that names the path, the key, the value and what is known instead.
"""

import json
import secrets
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from poseidon.errors import ConfigError
from poseidon.reading import MOST_FILE_BYTES, MOST_TOML_BYTES, parse_json, parse_toml, read_text

MOST_RANKS = 2**16
"""Of one job, whatever a file says: a thousand times what anybody has trained with Poseidon."""


class Value(BaseModel):
    """Base of the value classes: frozen, keyword-only, no unknown fields, checked when built."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Artifact(Value):
    """A value class that can be saved and loaded: `.toml` as TOML, anything else as JSON."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the file form.

        Raises:
            ConfigError: The file is missing, is not valid TOML or JSON, exceeds a limit of `reading`, or a key of it
                cannot be used.
        """
        path = Path(path)
        toml = path.suffix == ".toml"
        text = read_text(path, MOST_TOML_BYTES if toml else MOST_FILE_BYTES)
        return cls.parse(text, source=str(path), toml=toml)

    @classmethod
    def parse(cls, text: str, *, source: str = "text", toml: bool = False) -> Self:
        """Builds the value from the text of its file form; `source` is what errors call it.

        Raises:
            ConfigError: As `load`.
        """
        data = parse_toml(text, source) if toml else parse_json(text, source)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"cannot use {source} as a {cls.__name__}: {describe(error)}") from error

    def save(self, path: str | Path) -> None:
        """Writes the file form whole or not at all: to a temporary name first, then renamed."""
        path = Path(path)
        data = self.model_dump(mode="json", exclude_none=True)
        text = tomli_w.dumps(data) if path.suffix == ".toml" else json.dumps(data, indent=2) + "\n"
        write_whole(path, text)

    def to_json(self) -> str:
        """The JSON form on one line, as it crosses the network between ranks."""
        return self.model_dump_json(exclude_none=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old one or the new one, never a part.

    The temporary name cannot be foreseen and is always a new file, so that nobody else who may write to the folder can
    have put a link there.

    Raises:
        ConfigError: The folder does not exist or cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def describe(error: ValidationError) -> str:
    """The errors of a pydantic validation on one line: key, value found, what was expected."""
    return "; ".join(_describe_one(dict(item)) for item in error.errors(include_url=False))


def _describe_one(item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "the whole"
    found = repr(item.get("input"))
    if item["type"] == "extra_forbidden":
        return f"key {key!r} is not known here"
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    return f"key {key!r} has {found if len(found) < 80 else found[:77] + '...'}: {item['msg']}"
