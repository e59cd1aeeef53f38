"""When steps are no longer what they were: a pure state machine that is fed readings and tells a lasting departure.

Comes in: now and then one `Reading` of every rank. Goes out: nothing for as long as steps take what was expected, a
`Departure` once they have not for several readings in a row. Whoever feeds it finds out why and says so; `Suspect` is
what the readings alone give away.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

from poseidon.timeline import COMPUTING, Activity, Interval, Step

LASTING_RATIO = 1.25
"""Steps that take so many times as long as expected, or as little, are a departure if it lasts."""
SLOWER_READINGS = 2
"""For so many readings in a row."""
FASTER_READINGS = 6
"""The good news can wait."""
CALM_READINGS = 10
"""After a departure so many readings count for nothing, and twice as many after each further one: what goes up and down
all the time is not chased."""
MOST_CALM_READINGS = 640
OWN_SHARE = 0.5
"""A rank whose own time grew by so much of what the step grew is the cause."""
_BUSY_OR_STILL = frozenset((*COMPUTING, Activity.EXPOSED))
_PASSING_OR_STILL = frozenset((Activity.FORWARD, Activity.BACKWARD, Activity.EXPOSED))


class Reading(NamedTuple):
    """What a few steps of one rank were made of: medians, in seconds."""

    step: float
    """Wall time."""
    exposed: float
    """The training thread stood still for the network or for other ranks."""
    computing: float
    loader: float
    """Of the training loop, as far as it says so."""
    passes: float = 0.0
    """Forward and backward, of what is computing: it grows with the samples."""

    @property
    def parts(self) -> dict[str, float]:
        """The rank's own time, which no other rank and no link accounts for."""
        other = self.step - self.exposed - self.computing - self.loader
        return {"computing": self.computing, "loader": self.loader, "other": other}

    @property
    def own(self) -> float:
        """All of it."""
        return self.step - self.exposed

    @classmethod
    def of_step(cls, step: Step) -> Self:
        """One step by itself; who stands still for a transfer in the midst of computing does not compute then."""
        exposed = _covered(i for i in step.intervals if i.activity is Activity.EXPOSED)
        return cls(
            step=step.seconds,
            exposed=exposed,
            computing=_covered(i for i in step.intervals if i.activity in _BUSY_OR_STILL) - exposed,
            loader=step.seconds_in(Activity.LOADER),
            passes=_covered(i for i in step.intervals if i.activity in _PASSING_OR_STILL) - exposed,
        )

    @classmethod
    def median_of(cls, readings: Sequence[Self]) -> Self:
        """Part by part."""
        return cls(*map(median, zip(*readings, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Ranks whose own time grew."""

    ranks: tuple[int, ...]
    part: str
    """Of `Reading.parts`, the one that grew most."""
    before: float
    """Its seconds on the first of the ranks."""
    now: float


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Steps have taken another time than expected for a while."""

    before: tuple[Reading, ...]
    """By rank, as expected."""
    now: tuple[Reading, ...]
    """By rank, as last read."""

    @property
    def seconds_before(self) -> float:
        """Of a step, as expected."""
        return step_seconds(self.before)

    @property
    def seconds_now(self) -> float:
        """Of a step, as last read."""
        return step_seconds(self.now)

    @property
    def slower(self) -> bool:
        """Whether it is for the worse."""
        return self.seconds_now > self.seconds_before

    def suspect(self) -> Suspect | None:
        """The ranks to which the change is due by themselves; None where it is due to what is between them."""
        change = self.seconds_now - self.seconds_before
        own = [(now.own - before.own) / change for before, now in zip(self.before, self.now, strict=True)]
        ranks = sorted((rank for rank, share in enumerate(own) if share >= OWN_SHARE), key=lambda rank: -own[rank])
        if not ranks:
            return None
        before, now = self.before[ranks[0]].parts, self.now[ranks[0]].parts
        part = max(before, key=lambda name: (now[name] - before[name]) / change)
        return Suspect(ranks=tuple(ranks), part=part, before=before[part], now=now[part])

    def compute_growth(self) -> list[float]:
        """By rank, how many times as long as before it computes."""
        return [
            now.computing / before.computing if before.computing else 1.0
            for before, now in zip(self.before, self.now, strict=True)
        ]


class DepartureWatch:
    """Knows what steps take, and notices when they no longer do; the first readings say what is expected."""

    def __init__(self) -> None:
        self.expected: tuple[Reading, ...] | None = None
        self._num_departures = 0
        self._calm = 0
        self._slower = 0
        self._faster = 0

    def restart(self) -> None:
        """What was expected holds no longer: the next readings say what does."""
        self.expected = None
        self._slower = self._faster = 0

    def note(self, readings: Sequence[Reading]) -> Departure | None:
        """Takes one reading of every rank, by rank; a lasting departure is told once, then the watch has restarted."""
        if self.expected is None:
            self.expected = tuple(readings)
            return None
        ratio = step_seconds(readings) / step_seconds(self.expected)
        self._slower = self._slower + 1 if ratio > LASTING_RATIO else 0
        self._faster = self._faster + 1 if ratio < 1 / LASTING_RATIO else 0
        if self._calm:
            self._calm -= 1
            return None
        if self._slower < SLOWER_READINGS and self._faster < FASTER_READINGS:
            return None
        departure = Departure(before=self.expected, now=tuple(readings))
        self._calm = min(CALM_READINGS * 2**self._num_departures, MOST_CALM_READINGS)
        self._num_departures += 1
        self.restart()
        return departure


def passes_in(step: Step) -> int:
    """How many backward passes a rank made up to its exchange: more than one where the loop accumulates."""
    return sum(1 for interval in step.intervals if interval.activity is Activity.BACKWARD)


def step_seconds(readings: Sequence[Reading]) -> float:
    """All ranks take a step together; where one was held up outside of it, the others count."""
    return median(reading.step for reading in readings)


def _covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of them was under way; given by their start, as a step has them."""
    seconds, end = 0.0, float("-inf")
    for interval in intervals:
        seconds += max(0.0, interval.end - max(interval.start, end))
        end = max(end, interval.end)
    return seconds
