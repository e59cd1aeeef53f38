"""A run's folder, read back: what was asked for, what was measured, what was planned and predicted.

A run that was killed has no result and no merged timeline; what it has is read all the same, and `notes` says what is
missing.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from poseidon.artifact import describe
from poseidon.cluster.rates import Rates
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.reading import parse_json, read_lines, read_text
from poseidon.runtime.baseline import Baseline
from poseidon.runtime.clocks import Clocks
from poseidon.runtime.ledger import StepResult
from poseidon.runtime.surroundings import Surroundings, counted
from poseidon.simulator import simulate
from poseidon.timeline import Step, Timeline

READ_STEPS = 200
"""The last steps of every rank that are read: enough for medians, and little enough for a page."""
MOST_RESULTS = 1_000_000
"""The last lines of `steps.jsonl` that are read."""
FEW_STEPS = 5
"""Fewer than that are said to be few."""
CHANGES = ("adopted", "kept", "dropped")
"""Kinds of events after which steps are under another plan."""


class Event(BaseModel):
    """Something that was decided or noticed on the way."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: str
    exchange: int
    text: str


class Facts(BaseModel):
    """What `run.json` says; keys that are not known here are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    poseidon: str
    task: str
    note: str
    options: dict[str, Any]
    surroundings: Surroundings
    baseline: Baseline | None = None
    exchanges: dict[str, tuple[str, ...]] = {}
    clocks: Clocks | None = None
    rates: Rates | None = None
    events: tuple[Event, ...] = ()
    plan: str = ""
    result: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run as its folder tells it."""

    folder: Path
    facts: Facts
    results: Sequence[StepResult]
    """Every step over all ranks, oldest first."""
    timelines: Sequence[Timeline]
    """The last settled steps, by rank."""
    plan: Plan | None
    predicted: Sequence[Timeline]
    """Predicted steps, of one rank of each kind; empty where nothing was predicted."""
    notes: Sequence[str] = ()
    """What a reader should know about gaps."""

    @classmethod
    def load(cls, folder: Path, plan: Path | None = None) -> "RunRecord":
        """Reads a folder that `poseidon train --out` has written.

        Args:
            folder: The run's folder.
            plan: Another plan to predict from; the run's own if left out.

        Raises:
            ConfigError: It is no such folder, or a file in it cannot be used.
        """
        facts = _read_facts(folder)
        timelines, notes = _read_timelines(folder, facts)
        if facts.result is None:
            notes.append("the run did not come to its end")
        own = folder / "plan.json"
        given = None if plan is None else Plan.load(plan)
        return cls(
            folder=folder,
            facts=facts,
            results=_read_results(folder / "steps.jsonl"),
            timelines=timelines,
            plan=given or (Plan.load(own) if own.exists() else None),
            predicted=_read_predicted(folder, facts, given),
            notes=notes,
        )

    @cached_property
    def settled_results(self) -> Sequence[StepResult]:
        """Those of the steps that the timelines have, where one step is one exchange; all of them otherwise."""
        indices = set(self.common_indices)
        settled = [result for result in self.results if result.step in indices]
        return settled if len(settled) == len(indices) else self.results

    @cached_property
    def common_indices(self) -> Sequence[int]:
        """Steps that every rank has, oldest first."""
        by_rank = [{step.index for step in timeline.steps} for timeline in self.timelines]
        return sorted(set.intersection(*by_rank)) if by_rank else []

    def steps_at(self, index: int) -> list[Step]:
        """One step on all ranks, by rank."""
        return [step for timeline in self.timelines for step in timeline.steps if step.index == index]

    def typical_index(self) -> int | None:
        """The step whose time on its slowest rank is the median; None where there is no step."""
        indices = sorted(self.common_indices, key=lambda i: sum(step.seconds for step in self.steps_at(i)))
        return indices[(len(indices) - 1) // 2] if indices else None

    def predicted_of(self, rank: int) -> Step | None:
        """The predicted step of the rank, or of the one before it that stands for it; None where there is none."""
        steps = [timeline.steps[-1] for timeline in self.predicted if timeline.steps]
        return max((s for s in steps if s.rank <= rank), key=lambda s: s.rank, default=None)

    def layers_of(self, transfer: str) -> tuple[str, ...]:
        """Which layers a transfer of the timeline carries."""
        return self.facts.exchanges.get(exchange_of(transfer), ())


def exchange_of(transfer: str) -> str:
    """The exchange that a transfer belongs to: its name without what is added in parentheses."""
    name, separator, added = transfer.rpartition(" (")
    return name if separator and added.endswith(")") else transfer


def _read_facts(folder: Path) -> Facts:
    path = folder / "run.json"
    if not path.is_file():
        raise ConfigError(
            f"cannot report on {folder}: {path.name} is not there; give a folder that `poseidon train --out` has "
            "written"
        )
    facts = parse_json(read_text(path), path, finite=False)
    try:
        return Facts.model_validate(facts)
    except ValidationError as error:
        raise ConfigError(f"cannot use {path} as the facts of a run: {describe(error)}") from error


class _ResultLine(StepResult):
    """A line of `steps.jsonl`: a loss that is no number stands as null, and what follows from the rest is there too."""

    model_config = ConfigDict(extra="ignore")

    @field_validator("loss", mode="before")
    @classmethod
    def _null_is_no_number(cls, value: Any) -> Any:
        return math.nan if value is None else value


def _read_results(path: Path) -> list[StepResult]:
    """A last line that a crash cut short is left out; more than the last `MOST_RESULTS` are not kept."""
    lines = deque(enumerate(read_lines(path), start=1) if path.exists() else (), maxlen=MOST_RESULTS)
    results: list[StepResult] = []
    for number, line in lines:
        try:
            results.append(_ResultLine.model_validate_json(line))
        except ValidationError as error:
            if number < lines[-1][0]:
                raise ConfigError(f"cannot use line {number} of {path} as a step: {describe(error)}") from error
    return results


def _read_timelines(folder: Path, facts: Facts) -> tuple[list[Timeline], list[str]]:
    world_size = facts.surroundings.world_size
    notes = []
    merged = folder / "timeline.jsonl"
    if merged.exists():
        steps = Timeline.load(merged, last=READ_STEPS * world_size).steps
    else:
        parts = [folder / f"timeline.rank{rank}.jsonl" for rank in range(world_size)]
        loaded = [Timeline.load(part, last=READ_STEPS) for part in parts if part.exists()]
        steps = tuple(step for timeline in loaded for step in timeline.steps)
        notes.append("each rank's times are on its own clock")
    by_rank: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_rank[step.rank].append(step)
    if missing := sorted(set(range(world_size)) - set(by_rank)):
        notes.append(f"the timelines of ranks {', '.join(map(str, missing))} are not in the folder")
    first = _last_change(facts)
    timelines = [Timeline(steps=tuple(_settled(by_rank[rank], first))) for rank in sorted(by_rank)]
    fewest = min((len(timeline.steps) for timeline in timelines), default=0)
    if fewest < FEW_STEPS:
        notes.append(f"{counted(fewest, 'step')} under the last plan: too few for figures to rely on")
    return timelines, notes


def _settled(steps: Sequence[Step], first: int) -> Sequence[Step]:
    """The steps under the last plan, without the one in which it was taken up; all where there are no others."""
    planned = [step for step in steps if step.scheme == "plan"]
    return [step for step in planned if step.index > first] or planned or steps


def _last_change(facts: Facts) -> int:
    return max((event.exchange for event in facts.events if event.kind in CHANGES), default=-1)


def _read_predicted(folder: Path, facts: Facts, given: Plan | None) -> Sequence[Timeline]:
    """As it was written down with the run; another plan's is computed now, with the rates of the run."""
    if given is not None:
        return predict(given, facts.rates)
    path = folder / "predicted.jsonl"
    by_rank: dict[int, list[Step]] = defaultdict(list)
    for step in Timeline.load(path).steps if path.exists() else ():
        by_rank[step.rank].append(step)
    return [Timeline(steps=tuple(by_rank[rank])) for rank in sorted(by_rank)]


def predict(plan: Plan, rates: Rates | None) -> Sequence[Timeline]:
    """Predicted steps under a plan, one timeline for each kind of rank; none where layers or links were not timed."""
    if rates is None or not plan.profile.seconds or plan.world_size != rates.world_size:
        return []
    return simulate(plan.profile, plan, rates).timelines
