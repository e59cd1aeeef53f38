"""The clocks of all ranks against rank 0's, by ping exchange, so that their timelines can be laid side by side.

Rank 0 sends a ping, the other rank answers with the time on its clock, and rank 0 assumes that the answer was given
half way through the round trip. It cannot be wrong by more than half of the round trip, so the shortest of several
counts. Measured at the start and at the end of a run: between the two a clock is assumed to drift evenly.

Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 1989, sections 3 and 4; here with a
fixed number of attempts.
"""

import json
import time
from collections.abc import Callable, Sequence

import torch

from poseidon.artifact import Value
from poseidon.comm.group import Group
from poseidon.timeline import Step, Timeline

CLOCK_TAG = 3
"""Of the messages; below the tags of all exchanges."""
ROUND_TRIPS = 20


class ClockOffset(Value):
    """One rank's clock at one moment."""

    at: float
    """The moment, in seconds since the epoch on this rank's clock."""
    offset_seconds: float
    """To be added to a time on this rank's clock to have it on rank 0's."""
    uncertainty_seconds: float
    """The offset is not off by more than this: half of the shortest round trip."""

    @property
    def is_clear(self) -> bool:
        """Whether the clocks differ by more than could be measured; on one machine they do not."""
        return abs(self.offset_seconds) > self.uncertainty_seconds


class Clocks(Value):
    """All ranks' clocks at the start and at the end of a run, by rank."""

    start: tuple[ClockOffset, ...]
    end: tuple[ClockOffset, ...]

    @property
    def uncertainty_seconds(self) -> float:
        """Two times on the clocks of different ranks may be apart by so much more or less than they seem to be."""
        return max((one.uncertainty_seconds for one in (*self.start, *self.end)), default=0.0)

    def differ(self, rank: int) -> bool:
        """Whether this rank's clock is known to differ from rank 0's; where it is not, times stay as they are."""
        return self.start[rank].is_clear or self.end[rank].is_clear

    def offset_at(self, rank: int, moment: float) -> float:
        """What to add to a time on this rank's clock: on a line between the two measurements, level outside of them."""
        first, last = self.start[rank], self.end[rank]
        if last.at <= first.at:
            return last.offset_seconds
        share = min(1.0, max(0.0, (moment - first.at) / (last.at - first.at)))
        return first.offset_seconds + share * (last.offset_seconds - first.offset_seconds)

    def align(self, step: Step) -> Step:
        """The step on rank 0's clock; what a clock drifts within one step is left out."""
        return step.shifted(self.offset_at(step.rank, step.start)) if self.differ(step.rank) else step

    def align_all(self, timelines: Sequence[Timeline]) -> list[Timeline]:
        """Timelines of any ranks on rank 0's clock."""
        return [Timeline(steps=tuple(map(self.align, timeline.steps))) for timeline in timelines]


def measure_offsets(group: Group, clock: Callable[[], float] = time.time) -> tuple[ClockOffset, ...]:
    """Every rank's clock against rank 0's; all ranks call this together, while nothing else crosses the network.

    Args:
        group: The ranks.
        clock: Seconds since the epoch, as this rank's timeline uses them.

    Returns:
        By rank, the same on every rank.
    """
    with group.waiting("the comparison of clocks"):
        if group.rank != 0:
            _answer(group, clock)
            mine: list[ClockOffset] = []
        else:
            here = ClockOffset(at=clock(), offset_seconds=0.0, uncertainty_seconds=0.0)
            mine = [here, *(_ask(group, peer, clock) for peer in range(1, group.world_size))]
    text = group.broadcast_text(json.dumps([one.model_dump() for one in mine]), "sending the clocks' offsets")
    return tuple(map(ClockOffset.model_validate, json.loads(text)))


def _ask(group: Group, peer: int, clock: Callable[[], float]) -> ClockOffset:
    """On rank 0: the shortest of several round trips."""
    return min((_round_trip(group, peer, clock) for _ in range(ROUND_TRIPS)), key=lambda one: one.uncertainty_seconds)


def _round_trip(group: Group, peer: int, clock: Callable[[], float]) -> ClockOffset:
    answer = torch.zeros(1, dtype=torch.float64)
    sent = clock()
    group.exchange([(peer, torch.zeros(1))], [(peer, answer)], tag=CLOCK_TAG, what="a ping").wait()
    received = clock()
    there = float(answer)
    half = (received - sent) / 2
    return ClockOffset(at=there, offset_seconds=sent + half - there, uncertainty_seconds=half)


def _answer(group: Group, clock: Callable[[], float]) -> None:
    ping = torch.zeros(1)
    for _ in range(ROUND_TRIPS):
        group.exchange([], [(0, ping)], tag=CLOCK_TAG, what="a ping").wait()
        now = torch.tensor([clock()], dtype=torch.float64)
        group.exchange([(0, now)], [], tag=CLOCK_TAG, what="the answer to a ping").wait()
