"""Quantities as people write them, to base units and back: the only file that knows kilo, mega and bits.

Inside Poseidon everything is in seconds, bytes, bytes per second, FLOPs and FLOPs per second. A file or an option may
say `10Gbit/s`, `64MiB` or `250us`. Networks count in powers of 1000, memory in powers of 1024, and nothing is guessed:
`Gb` without a rate is refused.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator

from poseidon.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
BITS_PER_BYTE = 8
MILLISECONDS = 1e3
MICROSECONDS = 1e6
"""In a second, where something wants its times in these."""
BYTES_PER_FLOAT32 = 4

_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_SIZE = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_RATE = {
    **{f"{prefix}bit/s": factor / BITS_PER_BYTE for prefix, factor in (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
    **{f"{prefix}B/s": factor for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
}
_COMPUTE = {f"{prefix}FLOP/s": factor for prefix, factor in (("", 1.0), ("M", 1e6), ("G", 1e9), ("T", 1e12))}
_CORES = {"%": 0.01, "cores": 1.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/%]*)\s*")


def _parse(text: str | int | float, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"cannot read {text!r} as a {what}: write it like {example!r}")
    if not isinstance(text, str):
        if not 0 <= text <= sys.float_info.max:
            raise ConfigError(f"cannot read {_shown(text)} as a {what}: it must be a number of zero or more")
        return float(text)
    match = _QUANTITY.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if unit not in units:
        known = ", ".join(units)
        raise ConfigError(f"cannot read {text!r} as a {what}: use one of the units {known}, for example {example!r}")
    value = float(number) * units[unit]
    if value == math.inf:
        raise ConfigError(f"cannot read {text!r} as a {what}: it is more than a number can be")
    return value


def _shown(number: int | float) -> str:
    return (
        repr(number)
        if abs(number) < 10**30 or isinstance(number, float)
        else f"a whole number of {number.bit_length()} bits"
    )


def parse_seconds(text: str | int | float) -> float:
    """Seconds from text such as `250us` or `1.5s`; a bare number is seconds already.

    Raises:
        ConfigError: The unit is missing or unknown.
    """
    return _parse(text, _TIME, "duration", "250us")


def parse_bytes(text: str | int | float) -> int:
    """Bytes from text such as `64MiB` or `4MB`; a bare number is bytes already.

    Raises:
        ConfigError: The unit is missing or unknown.
    """
    return round(_parse(text, _SIZE, "size", "64MiB"))


def parse_bandwidth(text: str | int | float) -> float:
    """Bytes per second from text such as `10Gbit/s` or `1.25GB/s`; a bare number is bytes per second already.

    Raises:
        ConfigError: The unit is missing or unknown, or the rate is not positive.
    """
    rate = _parse(text, _RATE, "link rate", "1Gbit/s")
    if rate <= 0:
        raise ConfigError(f"cannot use {text!r} as a link rate: it must be above zero")
    return rate


def parse_flops_per_s(text: str | int | float) -> float:
    """FLOPs per second from text such as `120GFLOP/s`; a bare number is FLOPs per second already.

    Raises:
        ConfigError: The unit is missing or unknown.
    """
    if text == math.inf:
        return math.inf  # computing that costs nothing, as some published models assume
    return _parse(text, _COMPUTE, "compute rate", "120GFLOP/s")


def parse_cores(text: str | int | float) -> float:
    """Cores from text such as `40%` of one, or `1.5cores`; a bare number is cores already.

    Raises:
        ConfigError: The unit is missing or unknown, or nothing is left.
    """
    cores = _parse(text, _CORES, "share of a processor core", "40%")
    if cores <= 0:
        raise ConfigError(f"cannot use {text!r} as a share of a processor core: it must be above zero")
    return cores


def _largest(value: float, units: list[tuple[str, float]]) -> str:
    for unit, factor in units:
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.4g}{unit}"
    unit, factor = units[-1]
    return f"{value / factor:.4g}{unit}"


def format_seconds(value: float) -> str:
    """Text such as `12.3ms`, four significant digits."""
    return _largest(value, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)])


def format_bytes(value: float) -> str:
    """Text such as `64MiB`, four significant digits, powers of 1024."""
    return _largest(value, [("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1)])


def format_traffic(value: float) -> str:
    """Text such as `10.2MB`, four significant digits, powers of 1000, as networks count."""
    return _largest(value, [("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1)])


def format_bandwidth(value: float) -> str:
    """Text such as `1Gbit/s`, four significant digits."""
    bits = value * BITS_PER_BYTE
    return _largest(bits, [("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)])


def format_flops_per_s(value: float) -> str:
    """Text such as `120GFLOP/s`, four significant digits."""
    return _largest(value, [("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0)])


def format_cores(value: float) -> str:
    """Text such as `40%`, of one core."""
    return f"{value:.4g}cores" if value > 1 else f"{100 * value:.4g}%"


def _as_validator(parse: Callable[[str | int | float], float]) -> BeforeValidator:
    def validate(text: str | int | float) -> float:
        try:
            return parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error  # pydantic adds the key and hands it on

    return BeforeValidator(validate)


Seconds = Annotated[float, _as_validator(parse_seconds)]
"""A pydantic field in seconds that also takes `250us`."""
Bytes = Annotated[int, _as_validator(parse_bytes)]
"""A pydantic field in bytes that also takes `64MiB`."""
Bandwidth = Annotated[float, _as_validator(parse_bandwidth)]
"""A pydantic field in bytes per second that also takes `10Gbit/s`."""
Cores = Annotated[float, _as_validator(parse_cores)]
"""A pydantic field in processor cores that also takes `40%`."""
FlopsPerSecond = Annotated[float, _as_validator(parse_flops_per_s)]
"""A pydantic field in FLOPs per second that also takes `120GFLOP/s`."""
