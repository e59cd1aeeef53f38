"""Where the time of the steps went, over all ranks, from their timelines: in a few numbers and in a table."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from poseidon.artifact import Value
from poseidon.breakdown import LABELS, StepParts, find_last_starts, split_step
from poseidon.timeline import Timeline
from poseidon.units import format_seconds, format_traffic


class Summary(Value):
    """Steps of all ranks in a few numbers."""

    num_steps: int
    num_ranks: int
    median_step_seconds: float
    """Of the steps' wall times, each the mean over ranks: these end a step at slightly different moments, and the
    longest of every step would count that again and again."""
    parts: StepParts
    """Mean over steps and ranks."""
    bytes_sent_per_rank: float
    """Payload per step, mean over ranks."""

    def shares_in_percent(self) -> dict[str, int]:
        """Whole percentages that add up to 100, by label."""
        return dict(zip(LABELS.values(), round_to(100, list(self.parts.shares().values())), strict=True))


def summarize(timelines: Sequence[Timeline]) -> Summary:
    """All steps that every rank has, in a few numbers.

    Args:
        timelines: One per rank, on one clock. By as much as the clocks are uncertain, what counts as waiting may be
            the network's.
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
        median_step_seconds=statistics.median(statistics.fmean(steps[i].seconds for steps in by_rank) for i in common),
        parts=StepParts.model_validate({name: value / count for name, value in total}),
        bytes_sent_per_rank=sum(steps[i].bytes_sent for steps in by_rank for i in common) / count,
    )


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


def round_to(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the shares that add up to the total: the largest remainders are rounded up."""
    if not sum(shares):
        return [0] * len(shares)
    exact = [total * share / sum(shares) for share in shares]
    rounded = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded
