"""Loss and seconds of every step, combined over the ranks now and then instead of in every step.

Ranks keep what they measured and exchange it every few seconds, so that nothing is sent in between; the global loss of
each single step is known all the same, only a little later.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import starmap

import torch

from poseidon.artifact import Value
from poseidon.runtime.attach import Run
from poseidon.runtime.cursor import Cursor
from poseidon.runtime.data import Share
from poseidon.timeline import Step

COMBINE_SECONDS = 5.0
"""About how often the ranks exchange what they noted."""


class StepResult(Value):
    """One training step over all ranks."""

    step: int
    """Counts from zero over all epochs."""
    epoch: int
    loss: float
    """Mean over the samples of all ranks."""
    seconds: float
    """Wall time on the rank on which it was longest."""
    num_samples: int
    """Of all ranks."""

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.num_samples / self.seconds

    def to_line(self) -> str:
        """The JSON line of this step, with its line end; a loss that is no number becomes null."""
        loss = self.loss if math.isfinite(self.loss) else None
        return json.dumps({**self.model_dump(), "loss": loss, "samples_per_s": self.samples_per_s}) + "\n"


class Watcher:
    """Is told how the training goes; this one does nothing with it."""

    def on_start(self, num_steps: int, num_made: int = 0) -> None:
        """So many steps are to be made in all, of which some lie behind already."""

    def on_step(self, num_steps: int) -> None:
        """So many steps are made on this rank."""

    def on_results(self, results: Sequence[StepResult]) -> None:
        """What a few steps gave over all ranks, every few seconds."""

    def on_epoch(self, epoch: int, num_steps: int, scores: Mapping[str, float]) -> None:
        """An epoch, or what was made of it, ended after so many steps in all, and its model scored so."""


class Ledger:
    """What this rank noted since the ranks last exchanged their notes.

    Args:
        run: Whose steps are noted.
        cursor: Is moved on by each step, and by each combination.
        most_steps: Exchange after this many at the latest.
        watcher: Gets the combined steps, oldest first, on every rank.
    """

    def __init__(self, run: Run, cursor: Cursor, most_steps: int, watcher: Watcher) -> None:
        self.clock = 0.0
        """Seconds on rank 0 since it began, when notes were last combined: the same on every rank."""
        self.mean_seconds = 0.0
        """Of the steps that were combined last."""
        self.stall_seconds = 0.0
        """How long something beside the steps last kept a rank, where it kept it longest; see `note_stall`."""
        self._run = run
        self._cursor = cursor
        self._most_steps = max(1, most_steps)
        self._watcher = watcher
        self._began = time.monotonic()
        self._stall_here = 0.0
        self._shares: list[tuple[int, Share]] = []
        self._loss_sums: list[torch.Tensor] = []
        self._step_seconds: list[float] = []
        self._seconds_of_step = 0.0
        self._interval = 1
        run.recorder.on_step.append(self._note_seconds)

    def close(self) -> None:
        """Notes nothing any more."""
        self._run.recorder.on_step.remove(self._note_seconds)

    def note(self, share: Share, loss: torch.Tensor | None) -> None:
        """Notes one step with this rank's mean loss; None where it had no sample."""
        self._shares.append((self._cursor.epoch, share))
        self._step_seconds.append(self._seconds_of_step)
        self._seconds_of_step = 0.0
        self._loss_sums.append(torch.zeros(()) if loss is None else loss.detach() * len(share.indices))
        self._cursor.num_steps += 1
        self._cursor.num_seen = share.end
        if len(self._shares) >= self._interval:
            self.combine()

    def note_stall(self, seconds: float) -> None:
        """Notes how long something beside the steps has just kept this rank; all ranks know when they next combine."""
        self._stall_here = seconds

    def combine(self) -> None:
        """Exchanges what was noted; all ranks call it after the same step."""
        if not self._shares:
            return
        mine = {
            "loss_sums": [float(value) for value in self._loss_sums],
            "seconds": self._step_seconds,
            "interval": self._next_interval(),
            "clock": time.monotonic() - self._began,
            "stall": self._stall_here,
        }
        with self._run.recorder.standing_still("losses"):
            texts = self._run.group.all_gather_text(json.dumps(mine), "combining losses")
        everyone = [json.loads(text) for text in texts]
        loss_sums = [sum(parts) for parts in zip(*(one["loss_sums"] for one in everyone), strict=True)]
        seconds = [max(parts) for parts in zip(*(one["seconds"] for one in everyone), strict=True)]
        self._interval, self.clock = everyone[0]["interval"], everyone[0]["clock"]
        self.stall_seconds = max(one["stall"] for one in everyone)
        self.mean_seconds = sum(seconds) / len(seconds)
        num_steps = self._cursor.num_steps
        noted = zip(range(num_steps - len(self._shares), num_steps), self._shares, loss_sums, seconds, strict=True)
        results = list(starmap(_result, noted))
        self._cursor.num_trained += sum(result.num_samples for result in results)
        self._cursor.seconds += sum(seconds)
        self._shares, self._loss_sums, self._step_seconds = [], [], []
        self._watcher.on_results(results)

    def _next_interval(self) -> int:
        """As many steps as take about five seconds; grows slowly, because the first steps are not like the others."""
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return max(1, min(round(COMBINE_SECONDS / max(mean, 1e-6)), 4 * self._interval, self._most_steps))

    def _note_seconds(self, step: Step) -> None:
        self._seconds_of_step += step.seconds  # a loss may hold several backward passes


def _result(step: int, place: tuple[int, Share], loss_sum: float, seconds: float) -> StepResult:
    epoch, share = place
    return StepResult(
        step=step, epoch=epoch, loss=loss_sum / share.global_count, seconds=seconds, num_samples=share.global_count
    )
