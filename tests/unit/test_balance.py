"""Shares that follow the ranks' speeds slowly: where they lead, and what does not move them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.planner.shares import shares_by_speed
from poseidon.runtime.balance import NUM_READINGS, Balance, Change, half_way
from poseidon.runtime.departure import Reading

FAST, SLOW = 0.001, 0.004


class Ranks:
    """Ranks that need a fixed time and a time for each sample, and wait for the slowest."""

    def __init__(self, per_sample: Sequence[float], *, fixed: float = 0.0, hidden: float = 0.0, network: float = 0.0):
        self.per_sample = per_sample
        self.fixed = fixed
        self.hidden = hidden
        """Fixed, but seen as forward and backward."""
        self.network = network
        self.samples: tuple[int, ...] = (32,) * len(per_sample)
        self.balance = Balance(shares_by_speed)

    def read(self, noise: Sequence[float] | None = None) -> list[Reading]:
        passes = [
            (each * number + self.hidden) * more
            for each, number, more in zip(
                self.per_sample, self.samples, noise or [1.0] * len(self.samples), strict=True
            )
        ]
        slowest = max(passes) + self.fixed + self.network
        return [
            Reading(
                step=slowest, exposed=slowest - mine - self.fixed, computing=mine + self.fixed, loader=0, passes=mine
            )
            for mine in passes
        ]

    def go_on(self, num_readings: int = NUM_READINGS) -> list[Change]:
        """Carries out what the balance asks for."""
        changes = []
        for _ in range(num_readings):
            if change := self.balance.note(self.read(), self.samples):
                self.samples = change.samples
                changes.append(change)
        return changes


def test_ranks_that_compute_alike_are_left_alone():
    assert Ranks([FAST, FAST, 1.03 * FAST]).go_on(30) == []


def test_the_first_change_goes_all_the_way_and_a_later_one_half_of_it():
    ranks = Ranks([FAST, FAST, SLOW, SLOW])
    (change,) = ranks.go_on()
    assert change.samples == (52, 52, 12, 12)
    assert change.seconds_before == pytest.approx(0.128)
    assert change.seconds_after == pytest.approx(0.052)
    ranks.per_sample = [FAST, FAST, FAST, FAST]
    (change,) = ranks.go_on()
    assert change.samples == (42, 42, 22, 22)
    assert change.seconds_after == pytest.approx(0.042)


def test_nothing_is_decided_on_fewer_readings():
    ranks = Ranks([FAST, SLOW])
    assert ranks.go_on(NUM_READINGS - 1) == []
    assert len(ranks.go_on(1)) == 1
    assert ranks.go_on(NUM_READINGS - 1) == []


def test_what_was_read_before_a_restart_does_not_count():
    ranks = Ranks([FAST, SLOW])
    ranks.go_on(NUM_READINGS - 1)
    ranks.balance.restart()
    assert ranks.go_on(NUM_READINGS - 1) == []


@pytest.mark.parametrize("fixed", [0.0, 0.03])
@pytest.mark.parametrize("hidden", [0.0, 0.03])
def test_it_ends_at_the_best_shares_and_stays_there(fixed: float, hidden: float):
    ranks = Ranks([FAST, FAST, SLOW, SLOW], fixed=fixed, hidden=hidden)
    ranks.go_on(60)
    assert ranks.go_on(60) == []
    best = shares_by_speed([0.0] * 4, ranks.per_sample, 128)
    least = max(each * number for each, number in zip(ranks.per_sample, best, strict=True))
    now = max(each * number for each, number in zip(ranks.per_sample, ranks.samples, strict=True))
    assert now - least <= 0.06 * (now + fixed + hidden)
    assert sum(ranks.samples) == 128


def test_one_odd_reading_moves_nothing():
    ranks = Ranks([FAST, FAST])
    for noise in ([1, 1], [1, 9], [1, 1], [1, 1], [9, 1], [1, 1]):
        assert ranks.balance.note(ranks.read(noise), ranks.samples) is None


def test_a_slow_network_makes_other_shares_not_worth_while():
    assert Ranks([FAST, 2 * FAST], network=1.0).go_on(12) == []


def test_a_rank_that_recovers_gets_its_samples_back():
    ranks = Ranks([FAST, SLOW])
    ranks.go_on(40)
    assert ranks.samples[1] < 16
    ranks.per_sample = [FAST, FAST]
    ranks.go_on(60)
    assert abs(ranks.samples[0] - ranks.samples[1]) <= 4


@given(
    samples=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=6),
)
def test_half_way_keeps_the_global_batch_and_every_rank(samples: list[tuple[int, int]]):
    now = [before for before, _ in samples]
    then = shares_by_speed([0.0] * len(samples), [float(each) for _, each in samples], sum(now))
    between = half_way(now, then)
    assert sum(between) == sum(now)
    assert min(between) >= 1
    assert (between == tuple(now)) == (now == then)
