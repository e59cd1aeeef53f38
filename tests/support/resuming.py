"""A training with everything in it that a state has to hold, which can be saved and gone on with at any step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from poseidon.comm import AllReduce, CommScheme, ShardedServer, SparseRows, SufficientFactor
from poseidon.comm.group import Group
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.optimizers import Optimizers
from poseidon.runtime.options import RunOptions

NUM_SAMPLES = 44
"""No multiple of a global batch, so that epochs end with a small one."""
GLOBAL_BATCH = 12
SMALL_BUCKETS = AllReduce(first_bytes=64, bucket_bytes=600)

SAMPLES = RunOptions(mean="samples")
Optimizer = torch.optim.Optimizer


class Drawn(Dataset[Any]):
    """Samples that a data set makes with random numbers, new ones each time."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return torch.tensor([index % 20, (7 * index) % 20]), torch.randn(6), index % 4


class Model(nn.Module):
    """Rows of an embedding, batch normalization, dropout and layers for every scheme."""

    def __init__(self, *, sparse: bool, plain: bool) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(20, 5, mode="sum", sparse=sparse)
        self.first = nn.Linear(11, 16)
        self.norm = nn.LayerNorm(16) if plain else nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.0 if plain else 0.2)
        self.second = nn.Linear(16, 8)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, items: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.items(items).to(x), x], dim=1)
        x = self.dropout(F.relu(self.norm(self.first(x))))
        return self.last(torch.tanh(self.second(x)))


def _adam(model: Model) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _momentum(model: Model) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def _sparse_and_dense(model: Model) -> list[Optimizer]:
    rest = [p for name, p in model.named_parameters() if not name.startswith("items")]
    return [torch.optim.SparseAdam(model.items.parameters(), lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


MIX: Mapping[str, CommScheme] = {
    "items": ShardedServer(),
    "first": SufficientFactor(),
    "norm": SMALL_BUCKETS,
    "second": ShardedServer(piece_bytes=64),
    "last": SMALL_BUCKETS,
}


@dataclass(frozen=True)
class Case:
    """How a training is done."""

    schemes: CommScheme | Mapping[str, CommScheme]
    make: Callable[[Model], Optimizers] = _adam
    deferred: tuple[str, ...] = ()
    sparse: bool = False
    scaled: bool = False
    options: RunOptions = SAMPLES
    hosts: tuple[tuple[int, ...], ...] = ()
    min_ranks: int = 1
    is_rounded: bool = False


CASES = {
    "all_reduce": Case(SMALL_BUCKETS, _momentum),
    "all_reduce, bfloat16 on the wire": Case(
        AllReduce(first_bytes=64, bucket_bytes=600, wire="bfloat16"), is_rounded=True
    ),
    "sharded_server, Adam": Case(ShardedServer()),
    "sharded_server, momentum": Case(ShardedServer(piece_bytes=64), _momentum),
    "sharded_server, GradScaler": Case(ShardedServer(), scaled=True),
    "sufficient_factor": Case(SufficientFactor()),
    "sparse_rows, two optimizers": Case({"items": SparseRows()}, _sparse_and_dense, sparse=True),
    "deferred": Case(SMALL_BUCKETS, deferred=("items", "first", "norm", "second", "last")),
    "mixed": Case(MIX),
    "mixed, deferred": Case({**MIX, "items": SMALL_BUCKETS}, _momentum, deferred=("first",)),
    "buffers after each step": Case(SMALL_BUCKETS, options=RunOptions(mean="samples", buffers="after_step")),
    "two levels": Case(AllReduce(levels=2, first_bytes=64, bucket_bytes=600), hosts=((0, 1), (2, 3)), min_ranks=4),
    "two levels of factors": Case(
        {"first": SufficientFactor(levels=2), "second": ShardedServer()}, hosts=((0, 1), (2, 3)), min_ranks=4
    ),
}
"""Every scheme, and what else makes steps depend on those before them."""


class Job:
    """One training on this rank.

    Args:
        rank: This rank.
        case: How.
        plain: In double precision, without what depends on how samples are spread over ranks.
    """

    def __init__(self, rank: int, case: Case, *, plain: bool = False) -> None:
        hosts = [[r for r in host if r < dist.get_world_size()] for host in case.hosts]
        group = Group.of_default(hosts=hosts)
        torch.manual_seed(0)
        self.model = Model(sparse=case.sparse, plain=plain).to(torch.float64 if plain else torch.float32)
        optimizers = case.make(self.model)
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.run: Run = attach(self.model, optimizers, self._plan(case, group), group, case.options)
        loader = DataLoader(Drawn(), batch_size=GLOBAL_BATCH // group.world_size, shuffle=True)
        self.loader = self.run.shard(loader, seed=3, seed_samples=plain)
        self.dtype = torch.float64 if plain else torch.float32
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.97) for one in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=case.scaled)
        self.noise = torch.Generator().manual_seed(rank)
        self.run.track(scaler=self.scaler, **{f"scheduler{n}": one for n, one in enumerate(self.schedulers)})
        self.run.track(each_rank=True, noise=self.noise)
        self._noisy = not plain
        torch.manual_seed(100 + rank)
        self._batches = self._endless()

    def _plan(self, case: Case, group: Group) -> Plan:
        watch = StepWatch(self.model)
        x = torch.randn(3, 6, dtype=next(self.model.parameters()).dtype)
        self.model(torch.tensor([[0, 1], [2, 3], [4, 5]]), x).sum().backward()
        self.model.zero_grad()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
        plan = uniform_plan(watch.profile(), group.world_size, case.schemes)
        return Plan.model_validate({**dict(plan), "deferred": case.deferred})

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, num_steps: int) -> list[float]:
        """So many steps; the loss of each over all ranks."""
        return [self.step() for _ in range(num_steps)]

    def step(self) -> float:
        """One step."""
        items, x, y = next(self._batches)
        x = x.to(self.dtype)
        if self._noisy:
            x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        for one in self.optimizers:
            one.zero_grad()
        loss = F.cross_entropy(self.model(items, x), y)
        self.scaler.scale(loss).backward()
        for one, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            self.scaler.step(one)
            scheduler.step()
        self.scaler.update()
        return self.run.mean(loss.detach(), len(y))

    def bits(self) -> dict[str, torch.Tensor]:
        """All that the model has learned."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def interrupted(rank: int, case: Case, folder: Path, before: int, after: int, *, alone: bool = False) -> str:
    """A training that is saved and goes on, and one that goes on from there in its place.

    Args:
        rank: This rank.
        case: How it is done.
        folder: Of checkpoints.
        before: Steps before the checkpoint.
        after: Steps after it.
        alone: Whether to compare with a training without a checkpoint, too.

    Returns:
        The first difference between them; nothing if there is none.
    """
    saved = Job(rank, case)
    losses = saved.train(before)
    saved.run.save(folder)
    expected = losses + saved.train(after)
    bits = saved.bits()
    saved.run.detach()
    if alone:
        whole = Job(rank, case)
        if (others := whole.train(before + after)) != expected:
            return f"with a checkpoint on the way losses are {expected}, without {others}"
        whole.run.detach()
    resumed = Job(rank, case)
    loaded = resumed.run.load(folder)
    if (loaded.step, resumed.run.step) != (before, before):
        return f"it goes on at step {resumed.run.step}"
    losses += resumed.train(after)
    here = resumed.bits()
    resumed.run.detach()
    if losses != expected:
        step = next(n for n, (one, other) in enumerate(zip(losses, expected, strict=True)) if one != other)
        return f"the loss of step {step} is {losses[step]} instead of {expected[step]}"
    odd = [name for name, value in bits.items() if not torch.equal(value, here[name])]
    return f"{odd} differ at the end" if odd else ""


def saved_on_the_way(rank: int, case: Case, folder: Path, before: int, after: int) -> list[float]:
    """A training in double precision, saved after so many steps; the losses of the steps after those."""
    job = Job(rank, case, plain=True)
    job.train(before)
    job.run.save(folder)
    losses = job.train(after)
    job.run.detach()
    return losses


def gone_on_with(rank: int, case: Case, folder: Path, after: int) -> list[float]:
    """The same from the checkpoint on, perhaps on another number of ranks."""
    job = Job(rank, case, plain=True)
    job.run.load(folder)
    losses = job.train(after)
    job.run.check_replicas()
    job.run.detach()
    return losses


def relative_difference(losses: list[float], others: list[float]) -> float:
    """The largest between two sequences of as many losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))
