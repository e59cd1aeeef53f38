"""Two plans take turns for a few steps, and the slower one is dropped. Every step is as exact as any other."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from poseidon.plan import Plan
from poseidon.runtime.attach import Run
from poseidon.timeline import Step
from poseidon.units import format_seconds

WARM_UP_STEPS = 1
"""Steps after a change of plan that do not count."""
COUNTED_STEPS = 2
"""Steps in a turn that count."""
MOST_ROUNDS = 3
CLEAR_RATIO = 1.3
"""A plan that is so much faster is kept after the first round; one that seems slower is dropped only after the last."""
TOLERANCE = 1.02
"""The new plan stays unless the other is faster by more than this: what is left is noise."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a trial ended."""

    seconds: float
    """Of a step under the new plan."""
    other_seconds: float
    """Of a step under the one that it was compared with."""

    @property
    def ratio(self) -> float:
        """How many times as fast the new plan is."""
        return self.other_seconds / self.seconds

    @property
    def stays(self) -> bool:
        """Whether the new plan is kept."""
        return self.ratio * TOLERANCE >= 1

    def in_words(self, new: str, other: str) -> str:
        """What is kept and what each of the two takes, called as given."""
        times = f"{format_seconds(self.seconds)} a step against {format_seconds(self.other_seconds)}"
        if self.stays:
            return f"{new} stays: {times} with {other}, {self.ratio:.2f} times as fast"
        return f"{new} is dropped for {other}, which is {1 / self.ratio:.2f} times as fast: {times}"


class Trial:
    """Runs a new plan and another in turns. Its `exchanged` is called after each exchange, on all ranks.

    Args:
        run: Whose steps are counted.
        new: Takes the first turn.
        other: What it has to be faster than.
        label: What the timeline calls the other one's steps.
        on_end: Called on all ranks together, with the last turn's plan still in force.
    """

    def __init__(self, run: Run, new: Plan, other: Plan, *, label: str, on_end: Callable[[Verdict], None]) -> None:
        self._run = run
        self._turns = [(new, "trial"), (other, label)]
        self._turn = 0
        self._on_end = on_end
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._round = 1
        self._last: Step | None = None
        run.settled = False
        run.recorder.on_step.append(self._note)
        run.on_exchanged = self.exchanged
        run.on_detach = self.close
        self._take_turn(0)

    def exchanged(self) -> None:
        """Advances by one step."""
        assert self._last is not None
        self._left -= 1
        if self._left < COUNTED_STEPS:
            self._seconds[self._turn].append(self._last.seconds)
        if self._left > 0:
            return
        if self._turn == 0:
            self._take_turn(1)
            return
        verdict = self._compare()
        if self._round < MOST_ROUNDS and verdict.ratio < CLEAR_RATIO:
            self._round += 1
            self._take_turn(0)
            return
        self.close()
        self._on_end(verdict)

    def close(self) -> None:
        """Counts no more steps."""
        self._run.recorder.on_step.remove(self._note)
        self._run.on_exchanged = self._run.on_detach = lambda: None

    def _take_turn(self, turn: int) -> None:
        self._turn = turn
        self._left = WARM_UP_STEPS + COUNTED_STEPS
        self._run.adopt(*self._turns[turn])

    def _note(self, step: Step) -> None:
        self._last = step

    def _compare(self) -> Verdict:
        """From the steps of all ranks, of each step the slowest rank's seconds."""
        self._run.flush()
        texts = self._run.group.all_gather_text(json.dumps(self._seconds), "comparing two plans")
        new, other = (
            median(max(times) for times in zip(*everyone, strict=True))
            for everyone in zip(*map(json.loads, texts), strict=True)
        )
        return Verdict(seconds=new, other_seconds=other)
