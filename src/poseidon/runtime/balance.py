"""Shares by speed, adapted slowly: a pure state machine that is fed readings and tells when to share in another way.

Comes in: now and then one `Reading` of every rank, and how many samples each has. Goes out: nothing for as long as
other shares would gain little, else a `Change`. The first goes to the best shares, since equal ones were nobody's
finding; each later one half of the way, as the readings after it show where that leads: so a time that a rank needs
whatever its samples is found by and by, and odd readings do little harm. The global batch stays as large as it is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.runtime.departure import Reading
from poseidon.runtime.portions import cut

NUM_READINGS = 3
"""The medians of so many count."""
LEAST_GAIN = 0.04
"""Share of a step that other shares have to save."""

Propose = Callable[[Sequence[float], Sequence[float], int], Sequence[int]]
"""From each rank's fixed seconds of a step, its seconds per sample and the samples of all to the samples of each."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other shares."""

    samples: tuple[int, ...]
    """Of a global batch, by rank."""
    seconds_before: float
    """That the slowest rank computes in a step, as read."""
    seconds_after: float
    """As expected from its seconds per sample."""


class Balance:
    """Knows how fast each rank has been lately.

    Args:
        propose: What the best shares are.
    """

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self._recent: deque[Sequence[Reading]] = deque(maxlen=NUM_READINGS)
        self._has_changed = False

    def restart(self) -> None:
        """What was read holds no longer."""
        self._recent.clear()

    def note(self, readings: Sequence[Reading], samples: Sequence[int]) -> Change | None:
        """Takes one reading of every rank.

        Args:
            readings: By rank.
            samples: Of a global batch, by rank, while that was read; at least one each.

        Returns:
            Other shares, if these are not good enough; then the balance has restarted.
        """
        self._recent.append(readings)
        if len(self._recent) < NUM_READINGS:
            return None
        by_rank = [Reading.median_of(recent) for recent in zip(*self._recent, strict=True)]
        fixed = [reading.own - reading.passes for reading in by_rank]
        per_sample = [reading.passes / number for reading, number in zip(by_rank, samples, strict=True)]
        standing_still = min(reading.exposed for reading in by_rank)  # for the network, whatever the shares
        best = self._propose(fixed, per_sample, sum(samples))
        before, then = _slowest(fixed, per_sample, samples), _slowest(fixed, per_sample, best)
        if before - then < LEAST_GAIN * (before + standing_still):
            return None
        self.restart()
        changed = half_way(samples, best) if self._has_changed else tuple(best)
        self._has_changed = True
        after = _slowest(fixed, per_sample, changed)
        return Change(samples=changed, seconds_before=before, seconds_after=after)


def half_way(samples: Sequence[int], best: Sequence[int]) -> tuple[int, ...]:
    """Between two ways to share as many samples; the second where there is nothing between."""
    between = tuple(cut(sum(samples), [now + then for now, then in zip(samples, best, strict=True)]))
    return tuple(best) if between == tuple(samples) else between


def _slowest(fixed: Sequence[float], per_sample: Sequence[float], samples: Sequence[int]) -> float:
    return max(some + each * number for some, each, number in zip(fixed, per_sample, samples, strict=True))
