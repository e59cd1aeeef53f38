"""Curves from transfers whose seconds are made up, on a clock that only they move."""

import pytest

from poseidon.comm import timing
from poseidon.units import KIB, MIB

SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)


class Alone:
    """A group of which this is the only rank that is asked."""

    def barrier(self):
        pass

    def all_gather_text(self, text, what):
        return [text]


class Clock:
    """Reads what transfers have taken so far."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def curve_of(clock, seconds_of, **changes):
    def transfer(tensor):
        clock.now += seconds_of(tensor.numel() * 4)

    given = {"sizes": SIZES, "batch_seconds": 0.05, "most_seconds": 1.0} | changes
    return timing.measure_curve(Alone(), transfer, 1.5, **given)


def test_a_curve_has_the_bytes_that_a_rank_sends(clock):
    curve = curve_of(clock, lambda num_bytes: 1e-3 + num_bytes / 1e8)
    assert curve.num_bytes == pytest.approx(SIZES, rel=0.01)
    assert all(num_bytes % 6 == 0 for num_bytes in curve.num_bytes), "one and a half times whole numbers"
    assert curve.latency == pytest.approx(1e-3, rel=0.02)
    assert curve.bandwidth == pytest.approx(1.5e8, rel=0.01)


def test_sizes_that_would_take_too_long_are_left_out(clock):
    curve = curve_of(clock, lambda num_bytes: num_bytes / 1e6, most_seconds=0.8)
    assert curve.num_bytes == pytest.approx(SIZES[:3], rel=0.01)
    assert curve.at(16 * MIB) == pytest.approx(16 * MIB / 1.5e6, rel=0.01)
    slow = curve_of(clock, lambda num_bytes: 10.0, most_seconds=0.8)
    assert slow.num_bytes == pytest.approx(SIZES[:2], rel=0.01), "two are measured in any case: a slope needs them"


def test_the_first_transfer_of_a_size_does_not_count(clock):
    seen = set()

    def seconds_of(num_bytes):
        first = num_bytes not in seen
        seen.add(num_bytes)
        return 5.0 if first else 0.01

    assert curve_of(clock, seconds_of).seconds == pytest.approx([0.01] * 4)


def test_a_larger_transfer_never_takes_less(clock):
    times = dict(zip((round(size / 1.5 / 4) for size in SIZES), (3.0, 1.0, 5.0, 4.0), strict=True))
    curve = curve_of(clock, lambda num_bytes: times[num_bytes // 4], most_seconds=100.0)
    assert curve.seconds == pytest.approx([2.0, 2.0, 4.5, 4.5])


def test_the_slowest_rank_counts(clock):
    class Two(Alone):
        def all_gather_text(self, text, what):
            return [text, text.replace("0.5", "0.75")]

    assert timing.slowest(Two(), 0.5) == 0.75
    once = lambda: setattr(clock, "now", clock.now + 0.5)  # noqa: E731
    assert timing.time_transfer(Two(), once, 0.05) == 0.75
