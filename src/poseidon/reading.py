"""Reading what somebody else has written: files, lines, JSON and TOML, within bounds that hold before memory is taken.

A file may have been edited by hand, damaged, or made to do harm. So no more of it is read than the limit, the number
of values is bounded before they are made, and what JSON leaves open is refused: a key that is given twice, a number
that is none, a whole number beyond 64 bits. Errors name the file, the key, the value found and the limit.
"""

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from poseidon.errors import ConfigError
from poseidon.units import GIB, MIB, format_bytes

MOST_FILE_BYTES = 64 * MIB
"""Of a file that is read whole: profiles and plans of the largest models have a few MiB."""
MOST_TOML_BYTES = MIB
"""Of a file that people write."""
MOST_LINE_BYTES = 16 * MIB
"""Of one line of a file of lines: a step with tens of thousands of intervals has a few MiB."""
MOST_KEPT_BYTES = GIB
"""Of lines that are read together."""
MOST_VALUES = 4_000_000
"""Numbers, texts, lists and tables in one text of JSON or TOML."""
MOST_DEPTH = 64
"""Of lists and tables in each other."""
MOST_INTEGER = 2**63 - 1
"""TOML's own bound; counts, ranks and bytes stay far below it."""

_CHUNK_BYTES = MIB
_LONGEST_SHOWN = 60
_COMMANDS = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Color, C0 and C1 controls but tab and line end, and what changes the direction of writing."""
_LONG_KEY = re.compile(rf"""(?<![\w."'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_DEPTH}}}""")
"""A dotted key of more parts than there may be tables in each other."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most so many; none at the end."""


def read_bytes(path: str | Path, most_bytes: int = MOST_FILE_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        ConfigError: It cannot be read, is a pipe or a device, or is larger than `most_bytes`.
    """
    path = Path(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            _check_regular(path, file)
            return read_stream(file, path, most_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: str | Path, most_bytes: int = MOST_FILE_BYTES) -> str:
    """The content of a regular file as text.

    Raises:
        ConfigError: As `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_stream(file: Readable, source: str | Path, most_bytes: int) -> bytes:
    """Everything that a stream gives, be it compressed or not.

    Raises:
        ConfigError: It gives more than `most_bytes`; no more than these have been held.
    """
    content = bytearray()
    while chunk := file.read(_CHUNK_BYTES):
        content += chunk
        if len(content) > most_bytes:
            raise ConfigError(
                f"cannot read {source}: it has more than {format_bytes(most_bytes)}, the most that is read"
            )
    return bytes(content)


def read_lines(path: str | Path, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a regular file, one at a time, without their ends.

    Raises:
        ConfigError: It cannot be read, is a pipe or a device, or a line is longer than `most_bytes`.
    """
    path = Path(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            _check_regular(path, file)
            number = 0
            while line := file.readline(most_bytes + 1):
                number += 1
                if len(line) > most_bytes:
                    raise ConfigError(
                        f"cannot read line {number} of {path}: it has more than {format_bytes(most_bytes)}, the most "
                        "that is read"
                    )
                yield line.rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def parse_json(text: str, source: str | Path, *, finite: bool = True) -> Any:
    """The value that a text of JSON stands for.

    Args:
        text: What is parsed.
        source: What errors call it.
        finite: Whether NaN and the infinities are refused, as JSON has it; Python writes them all the same.

    Raises:
        ConfigError: It is no JSON, gives a key twice, or exceeds a limit of this module.
    """
    _check_count(text, source)
    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ConfigError(_too_deep(source)) from error
    except ValueError as error:
        raise ConfigError(f"cannot read {source} as JSON: {error}") from error
    _check_values(value, source, refused=_not_finite if finite else _nothing)
    return value


def parse_toml(text: str, source: str | Path) -> dict[str, Any]:
    """The table that a text of TOML stands for. TOML has infinity, and whoever uses a value says whether it may be one.

    Raises:
        ConfigError: It is no TOML, holds NaN, or exceeds a limit of this module.
    """
    if len(text) > MOST_TOML_BYTES:
        raise ConfigError(f"cannot read {source} as TOML: it has more than {format_bytes(MOST_TOML_BYTES)}")
    _check_count(text, source)
    if _LONG_KEY.search(text):
        raise ConfigError(_too_deep(source))
    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(_too_deep(source)) from error
    except ValueError as error:
        raise ConfigError(f"cannot read {source} as TOML: {error}") from error
    _check_values(value, source, refused=math.isnan)
    return value


def printable(text: str, *, colors: bool = False) -> str:
    """A text that may be shown on a terminal: what would command the terminal, or turn the line around, is visible.

    Line ends and tabs stay. A character that cannot be shown becomes its number.

    Args:
        text: From anywhere.
        colors: Whether the sequences that set colors and weight stay; they do nothing else.
    """
    return _COMMANDS.sub(lambda found: _kept_or_shown(found.group(), colors), text)


def _kept_or_shown(found: str, colors: bool) -> str:
    if len(found) > 1 and colors:
        return found
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in found)


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for somebody to write to a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_regular(path: Path, file: IO[bytes]) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise ConfigError(f"cannot read {path}: it is no ordinary file")


def _check_count(text: str, source: str | Path) -> None:
    """Each value but the first follows one of these characters, so that there are no more values than characters."""
    count = sum(map(text.count, ",[{=")) + 1
    if count > MOST_VALUES:
        raise ConfigError(f"cannot read {source}: it holds up to {count:,} values, more than {MOST_VALUES:,}")


def _check_values(
    value: Any, source: str | Path, key: tuple[str, ...] = (), *, refused: Callable[[float], bool]
) -> None:
    """Depth and numbers of everything in a value; `refused` says which floating-point numbers may not be."""
    if isinstance(value, dict | list):
        if len(key) >= MOST_DEPTH:
            raise ConfigError(_too_deep(source))
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(item, source, (*key, str(name)), refused=refused)
    elif isinstance(value, float) and refused(value):
        raise ConfigError(f"cannot use {source}: key {'.'.join(key)!r} has {value}, which is no finite number")
    elif isinstance(value, int) and abs(value) > MOST_INTEGER:
        bits = value.bit_length()
        raise ConfigError(
            f"cannot use {source}: key {'.'.join(key)!r} has a whole number of {bits} bits; 63 are the most"
        )


def _not_finite(number: float) -> bool:
    return not math.isfinite(number)


def _nothing(_: float) -> bool:
    return False


def _too_deep(source: str | Path) -> str:
    return f"cannot read {source}: lists and tables are in each other more than {MOST_DEPTH} deep"


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        shown = twice if len(twice) <= _LONGEST_SHOWN else f"{twice[:_LONGEST_SHOWN]}…"
        raise ValueError(f"key {shown!r} is given twice")
    return table
