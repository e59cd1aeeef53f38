"""Where the time of a step went, over all ranks, from their timelines.

The wall time of a step is cut into parts that add up to it. Where several things go on at once the earlier in this
list counts: standing still for a slow rank, standing still for the network, a transfer under way behind something
else, computing, loading samples. What is left is `other`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from poseidon.artifact import Value
from poseidon.timeline import COMPUTING, Activity, Step, Timeline
from poseidon.units import format_seconds, format_traffic

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


class Summary(Value):
    """Steps of all ranks in a few numbers."""

    num_steps: int
    num_ranks: int
    median_step_seconds: float
    """Of the steps' wall times, each on the rank on which it was longest."""
    parts: StepParts
    """Mean over steps and ranks."""
    bytes_sent_per_rank: float
    """Payload per step, mean over ranks."""

    def shares_in_percent(self) -> dict[str, int]:
        """Whole percentages that add up to 100, by label."""
        return dict(zip(LABELS.values(), _round_to(100, list(self.parts.shares().values())), strict=True))


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


def summarize(timelines: Sequence[Timeline]) -> Summary:
    """All steps that every rank has, in a few numbers.

    Args:
        timelines: One per rank. Clocks of several machines agree as well as NTP makes them; what is attributed to
            waiting and what to the network is uncertain by as much.
    """
    by_rank = [{step.index: step for step in timeline.steps} for timeline in timelines]
    common = sorted(set.intersection(*(set(steps) for steps in by_rank))) if by_rank else []
    if not common:
        return Summary(
            num_steps=0, num_ranks=len(timelines), median_step_seconds=0.0, parts=StepParts(), bytes_sent_per_rank=0.0
        )
    total = StepParts()
    for index in common:
        last_starts = find_last_starts([steps[index] for steps in by_rank])
        for steps in by_rank:
            total += split_step(steps[index], last_starts)
    count = len(common) * len(by_rank)
    return Summary(
        num_steps=len(common),
        num_ranks=len(by_rank),
        median_step_seconds=statistics.median(max(steps[i].seconds for steps in by_rank) for i in common),
        parts=StepParts.model_validate({name: value / count for name, value in total}),
        bytes_sent_per_rank=sum(steps[i].bytes_sent for steps in by_rank for i in common) / count,
    )


def find_last_starts(steps: Iterable[Step]) -> dict[str, float]:
    """By name of a transfer, when the last of the ranks started it, from the same step of all ranks."""
    starts: dict[str, float] = {}
    for step in steps:
        for interval in step.intervals:
            if interval.activity is Activity.TRANSFER:
                starts[interval.name] = max(starts.get(interval.name, interval.start), interval.start)
    return starts


def draw(summary: Summary, *, num_hosts: int) -> Table:
    """A table for people: the median step, where its time goes and what a host sends."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("median step", format_seconds(summary.median_step_seconds), f"over {summary.num_steps} steps")
    for label, percent in summary.shares_in_percent().items():
        table.add_row(f"  {label}", f"{percent} %", "█" * round(percent / 4))
    sent = summary.bytes_sent_per_rank * summary.num_ranks / num_hosts
    table.add_row("sent per host and step", format_traffic(sent), "")
    return table


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


def _round_to(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the shares that add up to the total: the largest remainders are rounded up."""
    if not sum(shares):
        return [0] * len(shares)
    exact = [total * share / sum(shares) for share in shares]
    rounded = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded
