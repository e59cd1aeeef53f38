"""Clocks that are wrong on purpose, between real ranks."""

import time

import pytest

from poseidon.comm.group import Group
from poseidon.runtime.clocks import Clocks, measure_offsets
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

SHIFTS = (0.0, 3.5, -120.25)
"""By how many seconds each rank's clock is fast."""


def shifted_clocks(rank, world_size, drift):
    group = Group.of_default()
    begin = time.time()
    start = measure_offsets(group, lambda: time.time() + SHIFTS[rank])
    end = measure_offsets(group, lambda: time.time() + SHIFTS[rank] + drift * rank + 100.0)
    seconds = time.time() - begin
    group.close()
    return start, end, seconds


def test_the_shift_of_a_clock_is_found_within_the_stated_uncertainty() -> None:
    drift = 0.25
    results = run_ranks(3, shifted_clocks, drift)
    start, end, seconds = results[0]
    assert [(one[0], one[1]) for one in results] == [(start, end)] * 3  # every rank knows the same
    for rank in range(3):
        error = abs(start[rank].offset_seconds + SHIFTS[rank])
        assert error <= start[rank].uncertainty_seconds + 1e-6
        assert abs(end[rank].offset_seconds + SHIFTS[rank] + drift * rank) <= end[rank].uncertainty_seconds + 1e-6
        assert start[rank].uncertainty_seconds < seconds
    clocks = Clocks(start=start, end=end)
    assert not clocks.differ(0)
    assert clocks.differ(1)
    assert clocks.differ(2)


def test_one_rank_is_its_own_measure() -> None:
    (only,) = measure_offsets(Group([]))
    assert (only.offset_seconds, only.uncertainty_seconds) == (0, 0)
