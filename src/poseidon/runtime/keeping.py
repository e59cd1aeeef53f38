"""What a training keeps of itself on the way, and when: commits in memory, checkpoints in a folder.

All ranks commit and save after the same step. So they decide by what all of them know alike: the number of steps, and
what they have told each other when they last combined their notes.
"""

import logging
import math
import re
import time
from pathlib import Path
from typing import Self

from pydantic import Field

from poseidon.artifact import Value
from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.attach import Run
from poseidon.runtime.cursor import Cursor, Fit
from poseidon.runtime.ledger import Ledger
from poseidon.runtime.resuming import Resumption
from poseidon.runtime.surroundings import counted
from poseidon.tasks.task import Objective
from poseidon.units import format_seconds, parse_seconds

COMMIT_SHARE = 0.01
"""Of the time that commits may take where nobody says how often they are to be."""
LONGEST_UNCOMMITTED_SECONDS = 30.0
"""Work that may be lost, whatever a commit costs, where nobody says."""

log = logging.getLogger(__name__)


class Every(Value):
    """An interval in steps or in seconds."""

    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From text such as `500steps` or `10min`.

        Raises:
            ConfigError: It is neither.
        """
        if match := re.fullmatch(r"\s*([0-9]+)\s*steps?\s*", text):
            if not int(match[1]):
                raise ConfigError(f"cannot use {text!r} as an interval: one step is the least")
            return cls(steps=int(match[1]))
        try:
            seconds = parse_seconds(text)
        except ConfigError as error:
            raise ConfigError(f"cannot read {text!r} as an interval: write it like '500steps' or '10min'") from error
        if not seconds:
            raise ConfigError(f"cannot use {text!r} as an interval: it is no time at all")
        return cls(seconds=seconds)

    def is_over(self, *, steps: int, seconds: float) -> bool:
        """Whether so many steps, or so many seconds, are the interval or more."""
        return steps >= self.steps if self.steps is not None else seconds >= (self.seconds or 0.0)


class Keeping(Value):
    """What is kept, how often, and what training goes on from. What is left out here is not kept."""

    commits: bool = False
    """Whether steps are committed in memory, for the next start of the job."""
    commit_every: Every | None = None
    """As often as costs a hundredth of the time, if left out."""
    folder: Path | None = None
    """Of checkpoints."""
    save_every: Every = Every(seconds=600.0)
    """Between two checkpoints within an epoch; there is one at the end of each epoch, too."""
    keep_last: int = Field(default=3, ge=1)
    keep_best: int = Field(default=0, ge=0)
    """Of the epochs' checkpoints, by the task's headline score."""
    resume_from: Path | None = None
    """A folder of checkpoints to go on from."""
    has_to_resume: bool = False
    """Whether there has to be a state to go on from: training is not to begin anew."""


class Kept(Value):
    """What keeping has cost, and what it was good for."""

    resumptions: tuple[Resumption, ...] = ()
    """Each time that the training went on."""
    num_commits: int = 0
    commit_seconds: float = 0.0
    """That the training stood still for them on this rank."""
    num_saves: int = 0
    save_seconds: float = 0.0
    """That the training stood still for them on this rank."""

    def sentences(self) -> list[str]:
        """What there is to be said at the end."""
        lines = [str(one) for one in self.resumptions]
        kept = {"committed in memory": (self.num_commits, self.commit_seconds)}
        kept["saved"] = self.num_saves, self.save_seconds
        parts = [
            f"{counted(number, 'step')} {how} in {format_seconds(seconds)} of standing still"
            for how, (number, seconds) in kept.items()
            if number
        ]
        return [*lines, *([", ".join(parts)] if parts else [])]


def go_on(run: Run, cursor: Cursor, keeping: Keeping) -> None:
    """Goes on from what an earlier start or run has left, if there is anything; says what that means for batches.

    Raises:
        CheckpointError: There has to be something, and there is not.
    """
    run.track(cursor=cursor)
    if not run.resume(keeping.resume_from) and keeping.has_to_resume:
        raise CheckpointError(f"cannot go on: {keeping.resume_from} has no complete checkpoint; train anew")
    if run.resumption is not None:
        cursor.resumptions.append(run.resumption.model_dump())
    before, cursor.world_size = cursor.world_size, run.group.world_size
    if before != cursor.world_size and run.group.rank == 0:
        rates = ", ".join(sorted({f"{group['lr']:g}" for one in run.optimizers for group in one.param_groups}))
        log.warning(
            "%d ranks instead of %d: the global batch stays %d samples, %s instead of %s; the learning rate stays %s",
            cursor.world_size,
            before,
            cursor.global_batch_size,
            Fit.of(cursor, cursor.world_size),
            Fit.of(cursor, before),
            rates,
        )


class Keeper:
    """Commits and saves when it is time.

    Args:
        run: What is kept.
        cursor: Where the training is.
        ledger: What the ranks told each other of clocks and costs.
        keeping: What is kept, and how often.
    """

    def __init__(self, run: Run, cursor: Cursor, ledger: Ledger, keeping: Keeping) -> None:
        self._run = run
        self._cursor = cursor
        self._ledger = ledger
        self._keeping = keeping
        self._commits, self._saves = _Mark(cursor.num_steps), _Mark(cursor.num_steps)
        self._between_commits = 1
        self._commit_seconds = self._save_seconds = 0.0

    @property
    def kept(self) -> Kept:
        """What was kept until now."""
        return Kept(
            resumptions=tuple(map(Resumption.model_validate, self._cursor.resumptions)),
            num_commits=self._commits.count,
            commit_seconds=self._commit_seconds,
            num_saves=self._saves.count,
            save_seconds=self._save_seconds,
        )

    def after_step(self) -> None:
        """Commits or saves if it is time; on all ranks after the same step."""
        leaves = bool(self._run.leaving.ranks)
        commits = self._keeping.commits or (leaves and self._keeping.folder is None)
        if commits and self._is_time_to_commit():
            self._commit()  # does not return where ranks leave, unless memory is short
        if self._keeping.folder is not None and (leaves or self._is_due(self._saves, self._keeping.save_every)):
            self._save(None)

    def after_epoch(self, objective: Objective) -> None:
        """Saves what has just been scored, where there is a folder."""
        score = self._cursor.scores.get(objective.metric)
        if self._keeping.folder is not None:
            self._save(-score if score is not None and objective.metric_falls else score)

    def _is_due(self, mark: "_Mark", every: Every) -> bool:
        steps, seconds = self._cursor.num_steps - mark.step, self._ledger.clock - mark.clock
        return steps > 0 and every.is_over(steps=steps, seconds=seconds)

    def _is_time_to_commit(self) -> bool:
        if self._run.leaving.ranks:
            return True
        if self._keeping.commit_every is not None:
            return self._is_due(self._commits, self._keeping.commit_every)
        if self._commits.count and self._ledger.mean_seconds:
            self._between_commits = steps_between(self._ledger.stall_seconds, self._ledger.mean_seconds)
        return self._cursor.num_steps - self._commits.step >= self._between_commits

    def _commit(self) -> None:
        began = time.monotonic()
        self._ledger.combine()
        self._run.commit()
        stall = time.monotonic() - began
        self._ledger.note_stall(stall)
        self._commit_seconds += stall
        self._commits.set(self._cursor.num_steps, self._ledger.clock)

    def _save(self, score: float | None) -> None:
        assert self._keeping.folder is not None
        began = time.monotonic()
        self._ledger.combine()
        self._run.save(
            self._keeping.folder, score=score, keep_last=self._keeping.keep_last, keep_best=self._keeping.keep_best
        )
        self._save_seconds += time.monotonic() - began
        self._saves.set(self._cursor.num_steps, self._ledger.clock)


class _Mark:
    """When something was last done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.clock = 0.0
        self.count = 0

    def set(self, step: int, clock: float) -> None:
        self.step, self.clock = step, clock
        self.count += 1


def steps_between(stall_seconds: float, step_seconds: float) -> int:
    """After how many steps to commit, so that it costs a hundredth of the time, but every half minute at least."""
    cheap = math.ceil(stall_seconds / (COMMIT_SHARE * step_seconds))
    longest = int(LONGEST_UNCOMMITTED_SECONDS / step_seconds)
    return max(1, min(cheap, longest))
