"""Where the time of a step went: its wall time cut into parts that add up to it.

Where several things go on at once the earlier in this list counts: standing still for a slow rank, standing still for
the network, a transfer under way behind something else, computing, loading samples. What is left is `other`. Measured
and predicted steps are cut by the same rule.
"""

from collections.abc import Iterable, Mapping

from poseidon.artifact import Value
from poseidon.timeline import COMPUTING, Activity, Step

Span = tuple[float, float]
"""Start and end, in seconds."""


class StepParts(Value):
    """Seconds of a step, or of many, by what they went to."""

    computing: float = 0.0
    """Forward, backward, rebuild or optimizer, with nothing on the wire."""
    hidden: float = 0.0
    """A transfer is under way and the training thread goes on with its work."""
    exposed: float = 0.0
    """The training thread stands still for the network."""
    waiting: float = 0.0
    """The training thread stands still because another rank has not made its part of the transfer ready."""
    loader: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The wall time."""
        return self.computing + self.hidden + self.exposed + self.waiting + self.loader + self.other

    def __add__(self, more: "StepParts") -> "StepParts":
        """Part by part."""
        return StepParts.model_validate({name: value + getattr(more, name) for name, value in self})

    def shares(self) -> dict[str, float]:
        """Each part of the wall time; they add up to 1, unless there is no time at all."""
        return {name: value / self.total if self.total else 0.0 for name, value in self}


LABELS = {
    "computing": "computing",
    "hidden": "hidden communication",
    "exposed": "exposed communication",
    "waiting": "waiting for a slow rank",
    "loader": "loader",
    "other": "other",
}


def split_step(step: Step, last_starts: Mapping[str, float]) -> StepParts:
    """The parts of one step of one rank.

    Args:
        step: What this rank did.
        last_starts: By name of a transfer, when the last rank had its part of it ready, on this rank's clock.
    """
    exposed = [i for i in step.intervals if i.activity is Activity.EXPOSED]
    waiting = [(i.start, min(i.end, last_starts.get(i.name, i.start))) for i in exposed]
    spans: dict[str, list[Span]] = {
        "waiting": waiting,
        "exposed": _spans(step, Activity.EXPOSED),
        "hidden": _spans(step, Activity.TRANSFER),
        "computing": _spans(step, *COMPUTING),
        "loader": _spans(step, Activity.LOADER),
    }
    seconds: dict[str, float] = {}
    covered: list[Span] = []
    for name, found in spans.items():
        before = _length(covered)
        covered = _union([*covered, *_clip(found, step)])
        seconds[name] = _length(covered) - before
    return StepParts(**seconds, other=max(0.0, step.seconds - _length(covered)))


def find_last_starts(steps: Iterable[Step]) -> dict[str, float]:
    """By name of a transfer, when the last of the ranks started it, from the same step of all ranks."""
    starts: dict[str, float] = {}
    for step in steps:
        for interval in step.intervals:
            if interval.activity is Activity.TRANSFER:
                starts[interval.name] = max(starts.get(interval.name, interval.start), interval.start)
    return starts


def _spans(step: Step, *activities: Activity) -> list[Span]:
    return [(i.start, i.end) for i in step.intervals if i.activity in activities]


def _clip(spans: Iterable[Span], step: Step) -> list[Span]:
    clipped = [(max(start, step.start), min(end, step.end)) for start, end in spans]
    return [(start, end) for start, end in clipped if start < end]


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
