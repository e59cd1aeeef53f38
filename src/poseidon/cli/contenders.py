"""Who races: Poseidon's plan, one scheme for every layer, DDP as it comes, and a loop without any of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.auto import distribute
from poseidon.comm import SCHEMES, AllReduce, CommScheme, SparseRows
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.plan import Plan, uniform_plan
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.data import Shares, batches
from poseidon.runtime.trainer import to_device
from poseidon.tasks import Batch, Samples, Task
from poseidon.timeline import Step

OURS = "poseidon"
ALONE = "one process"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What every contender starts from, so that they do the same work."""

    task: Task
    data: Samples
    batch_size: int
    seed: int
    device: torch.device
    group: Group

    def make_model(self) -> nn.Module:
        """A model with the same first weights each time."""
        torch.manual_seed(self.seed)
        return self.task.make_model().to(self.device).train()

    def make_batches(self) -> Iterator[Batch]:
        """This rank's part of every full global batch, epoch after epoch, in the same order each time."""
        shares = Shares(
            num_samples=len(self.data),
            rank=self.group.rank,
            world_size=self.group.world_size,
            local_batch_size=self.batch_size,
            seed=self.seed,
        )
        if shares.num_samples < shares.global_batch_size:
            raise ConfigError(
                f"cannot race with batches of {self.batch_size} on {shares.world_size} ranks: the task has "
                f"{shares.num_samples} samples, one step takes {shares.global_batch_size}; use a smaller --batch"
            )
        epoch = 0
        while True:
            full = [share for share in shares.epoch(epoch) if share.global_count == shares.global_batch_size]
            for _, batch in batches(self.data, full, collate=self.task.collate):
                assert batch is not None
                yield to_device(batch, self.device)
            epoch += 1


@dataclass
class Racer:
    """One contender at work on this rank."""

    name: str
    start: Start
    model: nn.Module
    """What the loss calls: the model, or what wraps it."""
    optimizer: torch.optim.Optimizer
    run: Run | None = None
    known_bytes_sent: float | None = None
    """Payload per rank and step where it is not counted but known from how the contender works."""
    losses: list[float] = field(default_factory=list)
    """This rank's, of every step."""
    exposed: list[float] = field(default_factory=list)
    """Seconds of every step of the present turn."""

    def __post_init__(self) -> None:
        self._batches = self.start.make_batches()
        if self.run is not None:
            self.run.recorder.on_step.append(self._note)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being tried out any more."""
        return self.run is None or self.run.settled

    def begin_turn(self) -> None:
        """Forgets the time of the others' turns, and what they set in the group that all share."""
        self.exposed.clear()
        if self.run is not None:
            group = self.run.group
            group.connections = min(self.run.plan.connections, group.max_connections)
            self.run.recorder.restart()

    def take_step(self) -> None:
        """One step on the next batch; dropout draws the same masks for every contender."""
        torch.manual_seed(self.start.seed + 1 + len(self.losses) * self.start.group.world_size + self.start.group.rank)
        batch = next(self._batches)
        self.optimizer.zero_grad()
        loss = self.start.task.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def leave(self) -> None:
        """Takes everything back, on all ranks together."""
        if self.run is not None:
            self.run.detach()

    def _note(self, step: Step) -> None:
        self.exposed.append(step.exposed_seconds)


def _ours(start: Start, observed: Plan | None) -> Racer:
    del observed
    model = start.make_model()
    optimizer = start.task.make_optimizer(model.parameters())
    return Racer(OURS, start, model, optimizer, distribute(model, optimizer, "auto", group=start.group))


def _ddp(start: Start, observed: Plan | None) -> Racer:
    """With its defaults; an all-reduce sends 2(P-1)/P of the gradients, which DDP does not count.

    Of a sparse gradient it sends the rows of a step, so that what it sends is not known beforehand.
    """
    del observed
    model = start.make_model()
    optimizer = start.task.make_optimizer(model.parameters())
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    world_size = start.group.world_size
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    sent = None if sparse else 2 * num_bytes * (world_size - 1) / world_size
    return Racer("ddp", start, DistributedDataParallel(model), optimizer, known_bytes_sent=sent)


def _uniform(scheme: CommScheme, start: Start, observed: Plan | None) -> Racer:
    """One scheme wherever a layer can use it; the rows of the layers are those that Poseidon observed."""
    assert observed is not None
    model = start.make_model()
    optimizer = start.task.make_optimizer(model.parameters())
    schemes: dict[str, CommScheme] = {}
    for layer in observed.profile.trainable:
        sparse = getattr(model.get_submodule(layer.name), "sparse", False)
        schemes[layer.name] = SparseRows() if sparse else AllReduce() if scheme.refuse(layer) else scheme
    plan = uniform_plan(observed.profile, start.group.world_size, schemes, arrival=observed.arrival)
    return Racer(scheme.kind, start, model, optimizer, attach(model, optimizer, plan, start.group))


def _alone(start: Start, observed: Plan | None) -> Racer:
    """A plain loop, to see what one rank pays for being under a plan."""
    del observed
    model = start.make_model()
    return Racer(ALONE, start, model, start.task.make_optimizer(model.parameters()), known_bytes_sent=0.0)


CONTENDERS: dict[str, Callable[[Start, Plan | None], Racer]] = {
    OURS: _ours,
    "ddp": _ddp,
    **{kind: partial(_uniform, scheme(kind=kind)) for kind, scheme in SCHEMES.items()},
    ALONE: _alone,
}
"""By name, from the common start and the plan that Poseidon has observed its way to."""


def check_names(against: list[str]) -> list[str]:
    """The names without repetitions.

    Raises:
        ConfigError: A contender is not known.
    """
    known = [name for name in CONTENDERS if name not in (OURS, ALONE)]
    for name in against:
        if name not in known:
            raise ConfigError(f"cannot race against {name!r}: known contenders are {', '.join(known)}")
    return list(dict.fromkeys(against))
