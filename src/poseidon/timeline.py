"""What happened, or is predicted to happen, when: the one schema for measured and predicted steps.

A timeline is a list of steps of one rank; a step is a list of intervals. The file form is JSON lines, one step a line,
so that a run that is killed keeps every finished step.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from poseidon.artifact import Value, describe
from poseidon.errors import ConfigError


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
    start: float
    """Seconds since the epoch on this rank's clock."""
    end: float
    """Seconds since the epoch on this rank's clock."""
    num_bytes: int = 0
    """Payload that this rank sent, for transfers."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


class Step(Value):
    """One training step of one rank."""

    rank: int
    index: int
    """Counts exchanges of gradients from zero."""
    start: float
    """Seconds since the epoch."""
    end: float
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
            ConfigError: The file is missing, or a line that is not the last is no step.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        steps = []
        first = 0 if last is None else max(0, len(lines) - last)
        for number, line in enumerate(lines[first:], start=first + 1):
            try:
                steps.append(Step.model_validate_json(line))
            except ValidationError as error:
                if number < len(lines):
                    raise ConfigError(f"cannot use line {number} of {path} as a step: {describe(error)}") from error
        return cls(steps=tuple(steps))

    def save(self, path: str | Path) -> None:
        """Writes JSON lines, one step a line."""
        Path(path).write_text("".join(to_line(step) for step in self.steps), encoding="utf-8")


def to_line(step: Step) -> str:
    """The JSON line of one step, with its line end."""
    return step.model_dump_json(exclude_defaults=True) + "\n"


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """The steps of several ranks in one timeline, by step and then by rank."""
    steps = [step for timeline in timelines for step in timeline.steps]
    return Timeline(steps=tuple(sorted(steps, key=lambda step: (step.index, step.rank))))
