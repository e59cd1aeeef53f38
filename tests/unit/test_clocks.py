"""Laying timelines of several clocks side by side."""

import pytest

from poseidon.runtime.clocks import ClockOffset, Clocks
from poseidon.timeline import Activity, Interval, Step, Timeline


def offset(at: float, seconds: float, uncertainty: float = 0.001) -> ClockOffset:
    return ClockOffset(at=at, offset_seconds=seconds, uncertainty_seconds=uncertainty)


ZERO = offset(0, 0, 0)
CLOCKS = Clocks(start=(ZERO, offset(100, 2.0)), end=(ZERO, offset(200, 3.0, 0.004)))


@pytest.mark.parametrize(("moment", "expected"), [(100, 2.0), (150, 2.5), (200, 3.0), (0, 2.0), (1000, 3.0)])
def test_a_clock_drifts_evenly_between_the_measurements(moment: float, expected: float) -> None:
    assert CLOCKS.offset_at(1, moment) == pytest.approx(expected)


def test_measurements_at_the_same_moment_take_the_later_one() -> None:
    clocks = Clocks(start=(ZERO, offset(100, 2.0)), end=(ZERO, offset(100, 3.0)))
    assert clocks.offset_at(1, 100) == 3.0


def test_a_step_moves_with_all_that_is_in_it() -> None:
    interval = Interval(activity=Activity.FORWARD, start=150.0, end=150.5)
    (timeline,) = CLOCKS.align_all(
        [Timeline(steps=(Step(rank=1, index=0, start=150, end=151, intervals=(interval,)),))]
    )
    (step,) = timeline.steps
    assert (step.start, step.end) == (152.5, 153.5)
    assert (step.intervals[0].start, step.intervals[0].end) == (152.5, 153.0)


def test_what_cannot_be_told_from_zero_moves_nothing() -> None:
    clocks = Clocks(start=(ZERO, offset(100, 0.0005)), end=(ZERO, offset(200, -0.0009)))
    step = Step(rank=1, index=0, start=150, end=151)
    assert not clocks.differ(1)
    assert clocks.align(step) is step


def test_the_largest_uncertainty_is_stated() -> None:
    assert CLOCKS.uncertainty_seconds == 0.004
