"""Loss and seconds of every step, combined over the ranks now and then instead of in every step.

Ranks keep what they measured and exchange it every few seconds, so that nothing is sent in between; the global loss of
each single step is known all the same, only a little later.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import starmap

import torch

from poseidon.artifact import Value
from poseidon.runtime.attach import Run
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


class Ledger:
    """What this rank noted since the ranks last exchanged their notes.

    Args:
        run: Whose steps are noted.
        most_steps: Exchange after this many at the latest.
        on_results: Gets the combined steps, oldest first, on every rank.
    """

    def __init__(self, run: Run, most_steps: int, on_results: Callable[[Sequence[StepResult]], None]) -> None:
        self.num_steps = 0
        self.num_samples = 0
        self.seconds = 0.0
        """Of all combined steps."""
        self._run = run
        self._most_steps = max(1, most_steps)
        self._on_results = on_results
        self._shares: list[tuple[int, Share]] = []
        self._loss_sums: list[torch.Tensor] = []
        self._step_seconds: list[float] = []
        self._interval = 1
        run.recorder.on_step.append(self._note_seconds)

    def close(self) -> None:
        """Notes nothing any more."""
        self._run.recorder.on_step.remove(self._note_seconds)

    def note(self, epoch: int, share: Share, loss: torch.Tensor | None) -> None:
        """Notes one step with this rank's mean loss; None where it had no sample."""
        self._shares.append((epoch, share))
        self._loss_sums.append(torch.zeros(()) if loss is None else loss.detach() * len(share.indices))
        self.num_steps += 1
        if len(self._shares) >= self._interval:
            self.combine()

    def combine(self) -> None:
        """Exchanges what was noted; all ranks call it after the same step."""
        if not self._shares:
            return
        mine = {
            "loss_sums": [float(value) for value in self._loss_sums],
            "seconds": self._step_seconds,
            "interval": self._next_interval(),
        }
        texts = self._run.group.all_gather_text(json.dumps(mine), "combining losses")
        everyone = [json.loads(text) for text in texts]
        loss_sums = [sum(parts) for parts in zip(*(one["loss_sums"] for one in everyone), strict=True)]
        seconds = [max(parts) for parts in zip(*(one["seconds"] for one in everyone), strict=True)]
        self._interval = everyone[0]["interval"]
        first = self.num_steps - len(self._shares)
        noted = zip(range(first, self.num_steps), self._shares, loss_sums, seconds, strict=True)
        results = list(starmap(_result, noted))
        self.num_samples += sum(result.num_samples for result in results)
        self.seconds += sum(seconds)
        self._shares, self._loss_sums, self._step_seconds = [], [], []
        self._on_results(results)

    def _next_interval(self) -> int:
        """As many steps as take about five seconds; grows slowly, because the first steps are not like the others."""
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return max(1, min(round(COMBINE_SECONDS / max(mean, 1e-6)), 4 * self._interval, self._most_steps))

    def _note_seconds(self, step: Step) -> None:
        self._step_seconds.append(step.seconds)


def _result(step: int, place: tuple[int, Share], loss_sum: float, seconds: float) -> StepResult:
    epoch, share = place
    return StepResult(
        step=step, epoch=epoch, loss=loss_sum / share.global_count, seconds=seconds, num_samples=share.global_count
    )
