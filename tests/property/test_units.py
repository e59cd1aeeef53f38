"""What is written can be read again, to the four digits that are written."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.units import (
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

FOUR_DIGITS = 5.1e-4
Parse = Callable[[str], float]
Format = Callable[[float], str]


@pytest.mark.parametrize(
    ("parse", "format_"),
    [
        (parse_seconds, format_seconds),
        (parse_bandwidth, format_bandwidth),
        (parse_flops_per_s, format_flops_per_s),
    ],
)
@given(value=st.floats(min_value=1e-9, max_value=1e15))
def test_rates_and_seconds_survive(parse: Parse, format_: Format, value: float) -> None:
    assert parse(format_(value)) == pytest.approx(value, rel=FOUR_DIGITS)


@pytest.mark.parametrize("format_", [format_bytes, format_traffic])
@given(value=st.integers(min_value=0, max_value=2**50))
def test_bytes_survive(format_: Format, value: int) -> None:
    assert parse_bytes(format_(value)) == pytest.approx(value, rel=FOUR_DIGITS)


@given(text=st.text())
def test_any_other_text_is_refused_in_our_own_words(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        parse_seconds(text)
