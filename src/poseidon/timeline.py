"""What happened, or is predicted to happen, when: the one schema for measured and predicted steps.

A timeline is a list of steps of one rank; a step is a list of intervals. The file form is JSON lines, one step a line,
so that a run that is killed keeps every finished step.
"""

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import Field, FiniteFloat, ValidationError

from poseidon.artifact import MOST_RANKS, Value, describe
from poseidon.errors import ConfigError
from poseidon.reading import MOST_INTEGER, MOST_KEPT_BYTES, read_lines
from poseidon.units import format_bytes


class Activity(StrEnum):
    """What an interval was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REBUILD = "rebuild"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    TRANSFER = "transfer"
    EXPOSED = "exposed"
    """The training thread stands still because a transfer has not ended."""


COMPUTING = (Activity.FORWARD, Activity.BACKWARD, Activity.REBUILD, Activity.OPTIMIZER)


class Interval(Value):
    """One activity from `start` to `end`."""

    activity: Activity
    name: str = ""
    """The layer, bucket or exchange; empty where the activity says all."""
    start: FiniteFloat
    """Seconds since the epoch on this rank's clock."""
    end: FiniteFloat
    """Seconds since the epoch on this rank's clock."""
    num_bytes: int = Field(default=0, ge=0, le=MOST_INTEGER)
    """Payload that this rank sent, for transfers."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


class Step(Value):
    """One training step of one rank."""

    rank: int = Field(ge=0, lt=MOST_RANKS)
    index: int = Field(ge=0, le=MOST_INTEGER)
    """Counts exchanges of gradients from zero."""
    start: FiniteFloat
    """Seconds since the epoch."""
    end: FiniteFloat
    """Seconds since the epoch."""
    scheme: str = "plan"
    """`observation` while the first steps cross as plain all-reduce, `trial` and `trial_…` while two plans take turns,
    `plan` once one is settled."""
    intervals: tuple[Interval, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.end - self.start

    def shifted(self, seconds: float) -> "Step":
        """The same step on a clock that shows so many seconds more."""
        moved = [i.model_copy(update={"start": i.start + seconds, "end": i.end + seconds}) for i in self.intervals]
        update = {"start": self.start + seconds, "end": self.end + seconds, "intervals": tuple(moved)}
        return self.model_copy(update=update)

    def seconds_in(self, *activities: Activity) -> float:
        """Sum over the intervals of these activities."""
        return sum(interval.seconds for interval in self.intervals if interval.activity in activities)

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank sent during the step."""
        return sum(interval.num_bytes for interval in self.intervals)

    @property
    def exposed_seconds(self) -> float:
        """Time the training thread stood still for the network or for other ranks."""
        return self.seconds_in(Activity.EXPOSED)

    @property
    def hidden_seconds(self) -> float:
        """Time in which at least one transfer was under way and the training thread was not standing still."""
        busy = _union([i for i in self.intervals if i.activity is Activity.TRANSFER])
        exposed = _union([i for i in self.intervals if i.activity is Activity.EXPOSED])
        return sum(end - start for start, end in busy) - _overlap(busy, exposed)


def _union(intervals: list[Interval]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda i: i.start):
        if merged and interval.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], interval.end))
        else:
            merged.append((interval.start, interval.end))
    return merged


def _overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)


class Timeline(Value):
    """The steps of one rank, oldest first."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def load(cls, path: str | Path, *, last: int | None = None) -> "Timeline":
        """Reads JSON lines, one step a line; a last line that was cut short by a crash is left out.

        Args:
            path: The file.
            last: How many lines at the end to read; all of them if left out.

        Raises:
            ConfigError: The file is missing, a line that is not the last is no step, or there is more to keep than
                `MOST_KEPT_BYTES`.
        """
        steps = []
        lines, first = _last_lines(path, last)
        for number, line in enumerate(lines, start=first):
            try:
                steps.append(Step.model_validate_json(line))
            except ValidationError as error:
                if number < first + len(lines) - 1:
                    raise ConfigError(f"cannot use line {number} of {path} as a step: {describe(error)}") from error
        return cls(steps=tuple(steps))

    def save(self, path: str | Path) -> None:
        """Writes JSON lines, one step a line."""
        Path(path).write_text("".join(to_line(step) for step in self.steps), encoding="utf-8")


def _last_lines(path: str | Path, last: int | None) -> tuple[deque[bytes], int]:
    """The last lines of a file, all where no number is given, and the number of the first of them."""
    kept: deque[bytes] = deque()
    num_bytes = 0
    first = 1
    for line in read_lines(path):
        kept.append(line)
        num_bytes += len(line)
        if last is not None and len(kept) > last:
            num_bytes -= len(kept.popleft())
            first += 1
        if num_bytes > MOST_KEPT_BYTES:
            raise ConfigError(
                f"cannot read {path}: its steps have more than {format_bytes(MOST_KEPT_BYTES)}, the most that is kept"
            )
    return kept, first


def to_line(step: Step) -> str:
    """The JSON line of one step, with its line end."""
    return step.model_dump_json(exclude_defaults=True) + "\n"


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """The steps of several ranks in one timeline, by step and then by rank."""
    steps = [step for timeline in timelines for step in timeline.steps]
    return Timeline(steps=tuple(sorted(steps, key=lambda step: (step.index, step.rank))))
