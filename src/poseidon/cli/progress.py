"""How a training goes, on rank 0: a bar on a terminal, a line every few seconds elsewhere, events for TensorBoard."""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from poseidon.cli.terminal import make_console
from poseidon.errors import ConfigError
from poseidon.runtime.ledger import StepResult, Watcher
from poseidon.runtime.run_folder import RunFolder

LINE_SECONDS = 5.0
"""Between two lines, where there is no bar."""


class Watchers(Watcher):
    """Tells several."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def on_start(self, num_steps: int, num_made: int = 0) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.on_start(num_steps, num_made)

    def on_step(self, num_steps: int) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.on_step(num_steps)

    def on_results(self, results: Sequence[StepResult]) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.on_results(results)

    def on_epoch(self, epoch: int, num_steps: int, scores: Mapping[str, float]) -> None:
        """See `Watcher`."""
        for watcher in self._watchers:
            watcher.on_epoch(epoch, num_steps, scores)


class Progress(Watcher):
    """A bar where stderr is a terminal, otherwise a line every few seconds.

    Args:
        metric: The score to show after each epoch, next to the others.
        console: Where lines go.
    """

    def __init__(self, metric: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._metric = metric
        self._console = console
        terminal = make_console(stderr=True)
        self._bar: Bar | None = None
        if terminal.is_terminal:
            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=terminal, transient=True)
            self._bar_task = self._bar.add_task("starting", total=None)
        self._num_steps = self._num_made = 0
        self._shown_at = self._clock()

    def on_start(self, num_steps: int, num_made: int = 0) -> None:
        """See `Watcher`."""
        self._num_steps, self._num_made = num_steps, num_made
        self._shown_at = self._clock()
        if self._bar is not None:
            self._bar.update(self._bar_task, total=num_steps, completed=num_made)

    def on_step(self, num_steps: int) -> None:
        """See `Watcher`."""
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=num_steps)

    def on_results(self, results: Sequence[StepResult]) -> None:
        """See `Watcher`."""
        seconds = sum(result.seconds for result in results)
        num_samples = sum(result.num_samples for result in results)
        loss = sum(result.loss * result.num_samples for result in results) / num_samples
        state = f"epoch {results[-1].epoch + 1}: loss {loss:.4f}, {num_samples / seconds:,.0f} samples/s in all"
        done = results[-1].step + 1
        if self._bar is not None:
            self._bar.update(self._bar_task, description=state)
        elif self._clock() - self._shown_at >= LINE_SECONDS or done == self._num_made + len(results):
            self._shown_at = self._clock()
            left = (self._num_steps - done) * seconds / len(results)
            self._console.print(f"step {done} of {self._num_steps}, {state}, {left:,.0f} s left", soft_wrap=True)

    def on_epoch(self, epoch: int, num_steps: int, scores: Mapping[str, float]) -> None:
        """See `Watcher`."""
        first = {self._metric: scores[self._metric]} if self._metric in scores else {}
        figures = ", ".join(f"{name} {value:.4f}" for name, value in {**first, **scores}.items())
        if self._bar is not None and num_steps == self._num_steps:
            self._bar.stop()
        console = self._console if self._bar is None else self._bar.console
        console.print(f"epoch {epoch + 1} ended at step {num_steps}: test {figures}", soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        """Shows the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it away."""
        if self._bar is not None:
            self._bar.stop()


class StepsFile(Watcher):
    """Writes every step into the run's folder, on rank 0; on every rank cuts off what is made anew.

    Args:
        folder: Of the run.
        facts: What its `run.json` says from when training begins, or goes on: no sooner, for it may have nothing to go
            on from, and then what an earlier run left is to stay.
    """

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any]) -> None:
        self._folder = folder
        self._facts = facts

    def on_start(self, num_steps: int, num_made: int = 0) -> None:
        """See `Watcher`."""
        self._folder.go_on_from(num_made)
        self._folder.write_facts(self._facts)

    def on_results(self, results: Sequence[StepResult]) -> None:
        """See `Watcher`."""
        self._folder.note_results(results)


class Tensorboard(Watcher):
    """Writes events for TensorBoard; a context manager that closes their file."""

    def __init__(self, folder: Path) -> None:
        self.check()
        self._folder = folder
        self._writer: Any = None

    def on_start(self, num_steps: int, num_made: int = 0) -> None:
        """See `Watcher`; events of steps that are made anew count no longer."""
        from torch.utils.tensorboard import SummaryWriter  # the extra may not be installed

        self._writer = SummaryWriter(str(self._folder), purge_step=num_made or None)

    @staticmethod
    def check() -> None:
        """Raises ConfigError where TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "cannot write TensorBoard events: it is not installed; pip install 'poseidon-dl[tensorboard]'"
            )

    def on_results(self, results: Sequence[StepResult]) -> None:
        """See `Watcher`."""
        for result in results:
            self._writer.add_scalar("train/loss", result.loss, result.step)
            self._writer.add_scalar("train/samples_per_s", result.samples_per_s, result.step)
            self._writer.add_scalar("train/step_seconds", result.seconds, result.step)

    def on_epoch(self, epoch: int, num_steps: int, scores: Mapping[str, float]) -> None:
        """See `Watcher`."""
        del epoch
        for name, value in scores.items():
            self._writer.add_scalar(f"test/{name}", value, num_steps)

    def __enter__(self) -> Self:
        """The file is opened when the training starts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        if self._writer is not None:
            self._writer.close()
