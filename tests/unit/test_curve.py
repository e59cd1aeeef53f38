"""Curves of seconds by size."""

import pytest

from poseidon.cluster.curve import Curve

MEASURED = Curve(num_bytes=(1_000, 11_000, 111_000), seconds=(0.001, 0.002, 0.023))


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [(0, 0.001), (1_000, 0.001), (6_000, 0.0015), (11_000, 0.002), (61_000, 0.0125), (221_000, 0.023 + 0.022)],
)
def test_between_points_on_a_line_beyond_by_the_bandwidth(num_bytes, seconds):
    assert MEASURED.at(num_bytes) == pytest.approx(seconds)


def test_the_bandwidth_is_that_of_the_whole_curve():
    assert MEASURED.bandwidth == pytest.approx(110_000 / 0.022)
    assert Curve(num_bytes=(1_000,), seconds=(0.01,)).bandwidth == pytest.approx(100_000)


def test_a_line():
    line = Curve.line(latency=0.5, bandwidth=1e6)
    assert line.at(2_000_000) == pytest.approx(2.5)
    assert line.at(5 * 2**30) == pytest.approx(0.5 + 5 * 2**30 / 1e6)
    assert (line.latency, line.bandwidth) == pytest.approx((0.5, 1e6))


def test_latency_and_wire_are_scaled_each_for_itself():
    scaled = MEASURED.scaled(latency=3.0, wire=2.0)
    assert scaled.seconds == pytest.approx((0.003, 0.003 + 2 * 0.001, 0.003 + 2 * 0.022))


@pytest.mark.parametrize(
    ("sizes", "seconds", "reason"),
    [((1, 2), (0.1,), "2 sizes but 1 times"), ((2, 2), (0.1, 0.2), "do not rise"), ((1, 2), (0.1, -0.2), "below zero")],
)
def test_what_is_no_curve_is_refused(sizes, seconds, reason):
    with pytest.raises(ValueError, match=reason):
        Curve(num_bytes=sizes, seconds=seconds)


def test_equal_times_do_not_make_bytes_free():
    flat = Curve(num_bytes=(1, 2), seconds=(0.1, 0.1))
    assert flat.bandwidth <= 1e30


def test_factors_of_one_change_no_bit():
    measured = Curve(num_bytes=(1024, 65536, 1048576), seconds=(0.000795, 0.00099313, 0.0018263))
    assert measured.scaled() == measured
