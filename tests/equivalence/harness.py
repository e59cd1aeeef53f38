"""What runs in every rank: combinations of a situation and a scheme, and the reference beside them."""

import functools
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.equivalence.schemes import AUTO, HOSTS, SCHEMES
from tests.equivalence.situation import Side, Situation, Tensors
from tests.equivalence.situations import SITUATIONS
from tests.support.steps import digest
from torch import nn
from torch.utils._pytree import tree_map

from poseidon.auto import distribute
from poseidon.comm.group import Group
from poseidon.errors import InfeasibleError
from poseidon.profile.graph import ModelProfile
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.options import RunOptions

COMBINATION_SECONDS = 45.0
"""Until a combination counts as stuck."""


class Combination(NamedTuple):
    """One test."""

    situation: str
    scheme: str


class Outcome(NamedTuple):
    """Of one combination, as one rank saw it."""

    error: float = 0.0
    """The largest relative error of any gradient or parameter; known to rank 0 only."""
    where: str = ""
    """What had it."""
    digest: str = ""
    """Of the bits of everything that was compared."""
    refusal: str = ""
    """Why the scheme cannot do it."""


class Alone(Side):
    """One process on the batches of all ranks, in plain PyTorch."""

    is_alone = True

    def note_gradients(self) -> None:
        self.note("gradients", {name: parameter.grad for name, parameter in self.named_parameters()})

    def work(self, step: int | None = None) -> list[tuple[Any, float]]:
        step = self.index if step is None else step
        batches = [self.situation.batch(rank, step) for rank in range(self.world_size)]
        batches = [batch for batch in batches if batch is not None]
        if self.situation.joins_batches:
            return [(tree_map(lambda *parts: torch.cat(parts), *batches), 1.0)] if batches else []
        return [(batch, 1.0 / self.world_size) for batch in batches]

    def no_samples(self) -> None:
        pass

    @property
    def runs(self) -> Mapping[str, Run]:
        return {}

    def no_sync(self, *, silent: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def weight(self, num_items: int) -> None:
        pass

    def join(self, update: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def mean(self, value: torch.Tensor, num_items: int) -> float:
        return value.item()


class Rank(Side):
    """One rank under a plan."""

    is_alone = False

    def __init__(self, situation: Situation, rank: int, world_size: int, scheme: str) -> None:
        super().__init__(situation, world_size, rank)
        self.scheme = scheme
        self._runs: dict[str, Run] = {}
        group = Group.of_default(hosts=HOSTS if scheme == "two_level" else [[r] for r in range(world_size)])
        options = RunOptions(mean=situation.mean)
        for name, model in self.models.items():
            if scheme == AUTO:
                self._runs[name] = distribute(model, self.optimizers[name], mean=situation.mean, group=group)
                continue
            profile = profiles_of(type(situation).__name__)[name]
            plan = SCHEMES[scheme](profile, world_size, model, self.optimizers[name])
            assert plan is not None, f"no layer of {situation} can use {scheme}"
            self._runs[name] = attach(model, self.optimizers[name], plan, group, options)

    @property
    def runs(self) -> Mapping[str, Run]:
        return self._runs

    def note_gradients(self) -> None:
        """Without those that the server keeps, and where layers are deferred in every second step only."""
        if self.scheme == "deferred" and self.index % 2 == 0:
            self.note("gradients", {})
            return
        served = {
            f"{name}.{layer}.{key}".strip(".")
            for name, run in self._runs.items()
            for layer, scheme in run.plan.schemes.items()
            if scheme.kind == "sharded_server"
            for key, _ in run.model.get_submodule(layer).named_parameters(recurse=False)
        }
        self.note("gradients", {n: p.grad for n, p in self.named_parameters() if n not in served})

    def work(self, step: int | None = None) -> list[tuple[Any, float]]:
        batch = self.situation.batch(self.rank, self.index if step is None else step)
        return [] if batch is None else [(batch, 1.0)]

    def no_samples(self) -> None:
        for run in self._runs.values():
            run.empty_step()

    @contextmanager
    def no_sync(self, *, silent: bool = True) -> Iterator[None]:
        self.run.flush()  # what the last step has deferred
        before = self.run.group.bytes_sent
        with self.run.no_sync():
            yield
        assert not silent or self.run.group.bytes_sent == before, "something was sent inside no_sync"

    @property
    def run(self) -> Run:
        """The first model's."""
        return next(iter(self._runs.values()))

    def weight(self, num_items: int) -> None:
        self.run.weight(num_items)

    def join(self, update: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        return self.run.join(update)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return self.run.clip_grad_norm_(max_norm)

    def mean(self, value: torch.Tensor, num_items: int) -> float:
        return self.run.mean(value, num_items)


def run_combinations(rank: int, world_size: int, combinations: Sequence[Combination], folder: Path) -> None:
    """Goes through them and leaves a line for each in a file of this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=COMBINATION_SECONDS))
    with (folder / str(rank)).open("a", encoding="utf-8") as file:
        for combination in combinations:
            with deadline(combination):
                outcome = run_combination(rank, world_size, combination)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
    dist.barrier()
    dist.destroy_process_group()


def run_combination(rank: int, world_size: int, combination: Combination) -> Outcome:
    """One situation under one scheme from beginning to end."""
    situation = SITUATIONS[combination.situation]()
    with default_dtype(situation.dtype):
        num_steps = situation.steps_under_auto if combination.scheme == AUTO else situation.num_steps
        expected = records_alone(combination.situation, world_size, num_steps) if rank == 0 else None
        try:
            found = go_through(Rank(situation, rank, world_size, combination.scheme), num_steps)
        except InfeasibleError as error:
            return Outcome(refusal=str(error))
        bits = digest({f"{label}: {name}": t for label, tensors in found for name, t in tensors.items()})
        error, where = (0.0, "") if expected is None else largest_error(found, expected)
    return Outcome(error=error, where=where, digest=bits)


def go_through(side: Side, num_steps: int) -> list[tuple[str, Tensors]]:
    """Every step of a script; what was noted in them."""
    situation = side.situation
    try:
        situation.begin(side)
        for side.index in range(num_steps):
            situation.step(side)
        situation.end(side)
        side.note_parameters()
    except InfeasibleError:  # on all ranks alike
        side.detach()
        raise
    side.detach()
    situation.afterwards(side)
    side.note_parameters()
    return side.records


@functools.cache
def records_alone(name: str, world_size: int, num_steps: int) -> list[tuple[str, Tensors]]:
    """The reference, the same for all schemes."""
    return go_through(Alone(SITUATIONS[name](), world_size), num_steps)


@functools.cache
def profiles_of(name: str) -> dict[str, ModelProfile]:
    """What one watched backward pass shows of each model of a situation."""
    situation = SITUATIONS[name]()
    models = situation.models()
    watches = {key: StepWatch(model) for key, model in models.items()}
    situation.sample(models)
    return {key: watch.profile() for key, watch in watches.items()}


def largest_error(found: list[tuple[str, Tensors]], expected: list[tuple[str, Tensors]]) -> tuple[float, str]:
    """The largest relative error of any tensor that was noted on both sides, and which has it."""
    assert [label for label, _ in found] == [label for label, _ in expected]
    errors = [(0.0, "")]
    for (label, mine), (_, theirs) in zip(found, expected, strict=True):
        errors += [(relative_error(t, theirs[name]), f"{name} in {label}") for name, t in mine.items()]
    return max(errors)


def relative_error(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Of a tensor to its own length; infinite where only one side has it, or where it is not finite."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if not torch.isfinite(expected).all():
        return float("inf")
    length = float(torch.linalg.vector_norm(expected.double()))
    off = float(torch.linalg.vector_norm(found.double() - expected.double()))
    if off == 0.0:
        return 0.0
    return off / length if length and math.isfinite(off) else float("inf")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What new tensors of floating-point numbers are, meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deadline(combination: Combination) -> Iterator[None]:
    """Raises TimeoutError wherever the training thread stands when the time is over."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(
            f"{combination.situation} under {combination.scheme} stood still for {COMBINATION_SECONDS:g} s"
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, COMBINATION_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
