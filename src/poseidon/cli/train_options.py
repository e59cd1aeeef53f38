"""What `poseidon train` was asked for: from its options, or from those of the run that goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import typer

from poseidon.artifact import Value
from poseidon.errors import ConfigError
from poseidon.runtime import memory
from poseidon.runtime.keeping import Every, Keeping
from poseidon.runtime.options import Shares
from poseidon.runtime.run_folder import check_unused, is_unbegun, read_facts
from poseidon.runtime.trainer import Schedule
from poseidon.tasks import Task

WHERE = ("hosts", "procs_per_host", "link", "cpu", "cluster", "at")
"""On which machines: given anew as a whole, or not at all."""
HOW_LONG = ("epochs", "steps")
AS_BEFORE = ("task", "plan", "allow", "shares", "batch", "accumulate", "seed", "virtual")
"""What makes the training another one: a run that goes on keeps it."""
OF_THIS_START = ("resume", "out", "init", "given")
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints in that of the run."""


class TrainOptions(Value):
    """The options of the command, by their names there."""

    task: str | None
    hosts: int | None
    procs_per_host: int
    link: list[str] | None
    cpu: list[str] | None
    cluster: Path | None
    at: list[str] | None
    plan: str
    allow: str
    shares: Shares
    batch: int | None
    accumulate: int
    epochs: int | None
    steps: int | None
    seed: int
    out: Path | None
    resume: Path | None
    init: Path | None
    save_every: str
    keep_last: int
    keep_best: int
    commit_every: str | None
    restarts: int
    min_hosts: int | None
    tensorboard: bool
    virtual: str | None
    baseline: bool
    check_replicas: bool
    explain: bool
    given: frozenset[str] = frozenset()
    """Names of the options that were on the command line."""

    @classmethod
    def of_call(cls, values: Mapping[str, Any], context: typer.Context | None) -> Self:
        """From the arguments of the command's function, and what is known of where they come from."""
        options = {name: value for name, value in values.items() if name in cls.model_fields}
        sources = {name: context.get_parameter_source(name) for name in options} if context is not None else {}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        return cls.model_validate({**options, "given": given})

    @property
    def goes_on(self) -> bool:
        """Whether what is in the folder is this run's own: of before, or of an earlier start of the job."""
        return self.resume is not None or memory.attempt() > 0

    def merged(self) -> Self:
        """With `--resume`, the options of the run that goes on, but for those that may be given anew and were.

        Raises:
            ConfigError: There is no run, or an option would make it another training.
        """
        if self.resume is None:
            return self
        earlier = read_facts(self.resume)["options"].get("command")
        if not isinstance(earlier, dict):
            raise ConfigError(f"cannot go on with the run in {self.resume}: its run.json does not say its options")
        for name in AS_BEFORE:
            if name in self.given and getattr(self, name) != earlier.get(name):
                raise ConfigError(
                    f"cannot go on with the run in {self.resume} with {name} {getattr(self, name)!r}: it was begun "
                    f"with {earlier.get(name)!r}; leave it out, or begin another run"
                )
        new = set(OF_THIS_START) | self.given
        if new & set(WHERE):
            new |= set(WHERE)
        kept = {name: value for name, value in earlier.items() if name not in new}
        return self.model_validate({**self.model_dump(), **kept, "out": self.resume})

    def schedule(self, task: Task) -> Schedule:
        """How long, and with how many samples."""
        return Schedule(
            epochs=self.epochs or task.epochs,
            max_steps=self.steps,
            batch_size=self.accumulate * (self.batch or task.batch_size),
            accumulate=self.accumulate,
            seed=self.seed,
            check_replicas=self.check_replicas,
        )

    def keeping(self) -> Keeping:
        """What is kept on the way.

        Raises:
            ConfigError: An interval cannot be read.
        """
        folder = None if self.out is None else self.out / CHECKPOINTS
        return Keeping(
            commits=memory.can_restart() or self.commit_every is not None,
            commit_every=None if self.commit_every is None else Every.parse(self.commit_every),
            folder=folder,
            save_every=Every.parse(self.save_every),
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            resume_from=folder if self.goes_on else None,
            has_to_resume=self.resume is not None,
        )

    def to_facts(self) -> dict[str, Any]:
        """As they are written down, for a run that goes on from here."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in OF_THIS_START}

    def check_folder(self, rank: int) -> Callable[[Path], None]:
        """What refuses a folder, on a rank: another run's has to stay as it is."""
        if not self.goes_on:
            return check_unused
        return self._check_own if rank == 0 else lambda path: None

    def _check_own(self, path: Path) -> None:
        """Raises ConfigError where a folder is not of an earlier start of this very job."""
        if self.resume is not None or is_unbegun(path):
            return
        facts = read_facts(path)
        if facts["options"].get("command") != self.to_facts() or facts.get("result"):
            raise ConfigError(
                f"cannot write the run into {path}: another run has written there; name another folder, or go on with "
                f"that run by --resume {path}"
            )
