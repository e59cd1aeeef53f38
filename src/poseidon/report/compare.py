"""Contenders side by side: medians with their spread, ratios round by round, bytes and losses.

Comes in: what each contender measured, turn by turn. Goes out: a `Comparison`, as JSON for programs and as a table for
people. Nothing in here measures.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from poseidon.artifact import Value
from poseidon.units import format_seconds, format_traffic


class Spread(Value):
    """The middle of some numbers, and between which values eight in ten of them lie."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one number; between two numbers it interpolates."""
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median=median, p10=p10, p90=p90)


class RankTurn(Value):
    """What one contender did before the next one's turn, on one rank."""

    step_seconds: tuple[float, ...]
    """Of each step that counts."""
    bytes_sent: float | None
    """Payload per step; None where nobody counts it and it is not known."""
    wire_bytes: float | None
    """What the host's interface sent per step; None on all but one of the ranks of a host."""
    exposed_seconds: tuple[float, ...] | None
    """Of each step that counts; None where nobody measures it."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one contender did before the next one's turn, over all ranks."""

    step_seconds: Sequence[float]
    """Of each step that counts, the mean over ranks."""
    bytes_sent_per_host: float | None
    """Payload per step, mean over hosts; None where nobody counted it."""
    wire_bytes_per_host: float | None
    """What the hosts' interfaces sent per step, mean over hosts; None where they have none of their own."""
    exposed_seconds: Sequence[float] | None
    """Of each step that counts, mean over ranks; None where nobody measured it."""


@dataclass(kw_only=True)
class Measured:
    """All turns of one contender."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    """One per round."""
    losses: Sequence[float] = ()
    """Mean over all samples, of every step since the first, warm-up included."""


class Contender(Value):
    """One contender in a few numbers."""

    name: str
    step_seconds: Spread
    bytes_sent_per_host: float | None
    wire_bytes_per_host: float | None
    exposed_seconds: float | None
    loss: float | None
    """After as many steps as the contender with the fewest made."""
    losses: tuple[float | None, ...]


class Comparison(Value):
    """A race and what it ran on."""

    version: int = 1
    task: str
    note: str
    hosts: int
    cores_per_host: float
    link: str | None
    shaped: bool
    world_size: int
    threads: int
    device: str
    torch: str
    poseidon: str
    batch_size: int
    """Samples per rank and step."""
    rounds: int
    steps: int
    """That count, per turn."""
    compared_at_step: int
    """After how many steps the losses are compared."""
    plan: str
    """What Poseidon's plan does, in words."""
    contenders: tuple[Contender, ...]
    speedup_over: dict[str, Spread]
    """By the other contender's name: its step time over Poseidon's, round by round."""

    def to_text(self) -> str:
        """Indented JSON; a figure that is no number becomes null."""
        return self.model_dump_json(indent=2) + "\n"


def combine_ranks(ranks: Sequence[RankTurn], num_hosts: int) -> Turn:
    """The same turn on every rank as one."""
    sent = [one.bytes_sent for one in ranks if one.bytes_sent is not None]
    wire = [one.wire_bytes for one in ranks if one.wire_bytes is not None]
    exposed = [one.exposed_seconds for one in ranks if one.exposed_seconds is not None]
    return Turn(
        step_seconds=[statistics.fmean(seconds) for seconds in zip(*(one.step_seconds for one in ranks), strict=True)],
        bytes_sent_per_host=sum(sent) / num_hosts if sent else None,
        wire_bytes_per_host=sum(wire) / num_hosts if wire else None,
        exposed_seconds=[statistics.fmean(seconds) for seconds in zip(*exposed, strict=True)] if exposed else None,
    )


def describe(measured: Measured, compared_at_step: int) -> Contender:
    """One contender's turns in a few numbers."""
    turns = measured.turns
    exposed = [turn.exposed_seconds for turn in turns if turn.exposed_seconds is not None]
    losses = tuple(loss if math.isfinite(loss) else None for loss in measured.losses)
    return Contender(
        name=measured.name,
        step_seconds=Spread.of([seconds for turn in turns for seconds in turn.step_seconds]),
        bytes_sent_per_host=_mean([turn.bytes_sent_per_host for turn in turns]),
        wire_bytes_per_host=_mean([turn.wire_bytes_per_host for turn in turns]),
        exposed_seconds=statistics.median(s for seconds in exposed for s in seconds) if exposed else None,
        loss=losses[compared_at_step - 1],
        losses=losses,
    )


def speedup(ours: Measured, other: Measured) -> Spread:
    """How many times as long the other's steps take, from the ratio of the medians of each round."""
    return Spread.of(
        [
            statistics.median(theirs.step_seconds) / statistics.median(mine.step_seconds)
            for mine, theirs in zip(ours.turns, other.turns, strict=True)
        ]
    )


def fewest_steps(contenders: Sequence[Measured]) -> int:
    """After how many steps all contenders have a loss."""
    return min(len(one.losses) for one in contenders)


def draw(comparison: Comparison) -> Table:
    """A table for people, readable at 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("contender", no_wrap=True)
    for heading in ("step", "p10 – p90", "sent", "on wire", "exposed", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in comparison.contenders:
        seconds = one.step_seconds
        table.add_row(
            one.name,
            format_seconds(seconds.median),
            f"{_short(seconds.p10)} – {_short(seconds.p90)}",
            "?" if one.bytes_sent_per_host is None else format_traffic(one.bytes_sent_per_host),
            "" if one.wire_bytes_per_host is None else format_traffic(one.wire_bytes_per_host),
            "" if one.exposed_seconds is None else format_seconds(one.exposed_seconds),
            "" if one.loss is None else f"{one.loss:.4f}",
        )
    return table


def _short(seconds: float) -> str:
    """Three digits are enough for a spread."""
    return format_seconds(float(f"{seconds:.3g}"))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
