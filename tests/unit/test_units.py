"""Quantities: what is read, what is refused, what is written."""

import pytest
from pydantic import ValidationError

from poseidon.artifact import Value
from poseidon.errors import ConfigError
from poseidon.units import (
    Bandwidth,
    Bytes,
    FlopsPerSecond,
    Seconds,
    format_bandwidth,
    format_bytes,
    format_flops_per_s,
    format_seconds,
    format_traffic,
    parse_bandwidth,
    parse_bytes,
    parse_flops_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("1.5s", 1.5),
        ("3 ms", 3e-3),
        (" 20ns ", 20e-9),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("1e-3s", 1e-3),
        (".5s", 0.5),
        (2, 2.0),
        (0.25, 0.25),
        (0, 0.0),
    ],
)
def test_seconds(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("64MiB", 64 * 1024**2), ("4MB", 4_000_000), ("1.5kB", 1500), ("2TiB", 2 * 1024**4), ("7B", 7), (4096, 4096)],
)
def test_bytes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbit/s", 1.25e9),
        ("1 Gbit/s", 125e6),
        ("8bit/s", 1.0),
        ("1.25GB/s", 1.25e9),
        ("64kB/s", 64e3),
        (125e6, 125e6),
    ],
)
def test_bandwidth(text: str | float, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(("text", "flops_per_s"), [("120GFLOP/s", 120e9), ("1.5TFLOP/s", 1.5e12), (1e9, 1e9)])
def test_flops_per_s(text: str | float, flops_per_s: float) -> None:
    assert parse_flops_per_s(text) == pytest.approx(flops_per_s, rel=1e-12)


@pytest.mark.parametrize("text", ["10Gb", "10Gb/s", "10Gbps", "10", "Gbit/s", "", "-1Gbit/s", "1,5Gbit/s", "nanGbit/s"])
def test_bandwidth_is_never_guessed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bandwidth(text)
    assert str(caught.value) == (
        f"cannot read {text!r} as a link rate: use one of the units bit/s, kbit/s, Mbit/s, Gbit/s, B/s, kB/s, MB/s, "
        "GB/s, for example '1Gbit/s'"
    )


@pytest.mark.parametrize("text", ["64mib", "64Mb", "1k", "12"])
def test_bytes_are_never_guessed(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot read '{text}' as a size: use one of the units B, KiB, MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "found"), [(True, "True"), (None, "None"), ([1], r"\[1\]")])
def test_other_types_are_refused(text: object, found: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {found} as a duration: write it like '250us'"):
        parse_seconds(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0Gbit/s", 0, 0.0])
def test_a_link_has_a_rate(text: str | float) -> None:
    with pytest.raises(ConfigError, match="must be above zero"):
        parse_bandwidth(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0])
def test_a_bare_number_is_finite_and_not_negative(value: float) -> None:
    infinite_rate = [] if value == float("inf") else [parse_flops_per_s]  # computing that costs nothing is allowed
    for parse in (parse_seconds, parse_bytes, parse_bandwidth, *infinite_rate):
        with pytest.raises(ConfigError, match=f"cannot read {value} as a"):
            parse(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(0.0123), "12.3ms"),
        (format_seconds(1.0), "1s"),
        (format_seconds(0.99999), "1s"),
        (format_seconds(90.0), "90s"),
        (format_seconds(42e-6), "42us"),
        (format_seconds(0.0), "0ns"),
        (format_seconds(-0.0123), "-12.3ms"),
        (format_bytes(64 * 1024**2), "64MiB"),
        (format_bytes(1536), "1.5KiB"),
        (format_bytes(1023), "1023B"),
        (format_bytes(0), "0B"),
        (format_traffic(10_200_000), "10.2MB"),
        (format_traffic(999), "999B"),
        (format_bandwidth(125e6), "1Gbit/s"),
        (format_bandwidth(1.25e9), "10Gbit/s"),
        (format_bandwidth(0.5), "4bit/s"),
        (format_flops_per_s(120e9), "120GFLOP/s"),
    ],
)
def test_format(text: str, expected: str) -> None:
    assert text == expected


class Quantities(Value):
    latency: Seconds = 0.0
    bucket: Bytes = 0
    link: Bandwidth = 1.0
    rate: FlopsPerSecond = 1.0


def test_fields_take_units() -> None:
    quantities = Quantities(latency="250us", bucket="64MiB", link="10Gbit/s", rate="2GFLOP/s")  # type: ignore[arg-type]
    assert quantities == Quantities(latency=250e-6, bucket=64 * 1024**2, link=1.25e9, rate=2e9)


def test_a_field_refuses_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="cannot read '10Gb' as a link rate: use one of the units"):
        Quantities(link="10Gb")  # type: ignore[arg-type]
