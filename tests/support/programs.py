"""Training loops as data: what two ranks do, op by op, and what one process makes of the same.

A program is readable and can be pasted as a test. Its ops are words with arguments:

- `forward 3 ab` puts the loss of 3 samples, by way of the parts `a` and `b` of the net, with the losses at hand
- `backward 2` goes backward through the last two losses together; `backward 1 keep` keeps their graph and them
- `drop` forgets the losses at hand, `no_sync` and `sync` open and close `run.no_sync()`, `empty` is `run.empty_step()`
- `zero`, `zero keep` and `zero model` are `zero_grad` of the optimizer, without `set_to_none`, and of the model
- `step`, `clip` and `check` are the optimizer's step, `clip_grad_norm_` and `check_replicas`
- `infer 2 a` is a forward in evaluation, `read` looks at every `p.grad`, `state` takes both state_dicts
- `flush` and `weight 5` are those of the run; `drain` answers the other rank until it drains too
- `adopt 1` goes on under another plan of the program, `attach 1` detaches first
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.plan import Plan
from poseidon.profile.graph import GradientStructure, ModelProfile
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from poseidon.runtime.options import Mean, RunOptions

WORLD_SIZE = 2
PARTS = "tabcd"
"""The trunk, and the branches behind it."""
SCHEMES_BY_LAYER = {
    "embedding": ("all_reduce", "sparse_rows", "sharded_server"),
    "trunk": ("all_reduce", "sufficient_factor", "sharded_server"),
    "norm": ("all_reduce", "sharded_server"),
    "a": ("all_reduce", "sufficient_factor", "sharded_server"),
    "b": ("all_reduce", "sufficient_factor", "sharded_server"),
    "c": ("all_reduce", "sharded_server"),
    "d": ("all_reduce", "sufficient_factor", "sharded_server"),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
RELATIVE, ABSOLUTE = 1e-9, 1e-11


class Net(nn.Module):
    """Small layers of every kind; which of them a forward uses, it is told."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4, sparse=sparse)
        self.trunk = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.a = nn.Linear(6, 3)
        self.b = nn.Linear(6, 3, bias=False)
        self.c = nn.Conv1d(1, 3, 6)
        self.d = nn.Linear(6, 6)
        self.double()

    def forward(self, tokens: torch.Tensor, parts: str) -> torch.Tensor:
        x = torch.ones(len(tokens), 6, dtype=torch.float64)
        if "t" in parts:
            x = self.norm(self.trunk(self.embedding(tokens))).tanh()
        branches = {
            "a": lambda: self.a(x),
            "b": lambda: self.b(x),
            "c": lambda: self.c(x.unsqueeze(1)).squeeze(2),
            "d": lambda: self.d(self.d(x).tanh())[:, :3],  # called twice
        }
        return sum((branches[part]() for part in parts if part != "t"), start=x[:, :3])


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a plan says."""

    schemes: tuple[tuple[str, str], ...] = ()
    """Layers and their schemes; all-reduce where nothing is said."""
    deferred: tuple[str, ...] = ()
    one_bucket_each: bool = False
    wait_free: bool = True
    rows: int = 4
    """As many the buffers of factors and rows have room for at first."""

    def plan(self, sparse: bool) -> Plan:
        profile = _profile(sparse)
        layers = tuple(
            layer if layer.structure is GradientStructure.DENSE else layer.model_copy(update={"rows": self.rows})
            for layer in profile.layers
        )
        kinds = {layer.name: "all_reduce" for layer in layers} | dict(self.schemes)
        plain = [name for name, kind in kinds.items() if kind == "all_reduce"]
        return Plan.model_validate(
            {
                "world_size": WORLD_SIZE,
                "profile": profile.model_copy(update={"layers": layers}),
                "schemes": {name: SCHEMES[kind]() for name, kind in kinds.items()},
                "arrival": tuple(reversed(kinds)),
                "buckets": tuple((name,) for name in reversed(plain)) if self.one_bucket_each else (),
                "deferred": self.deferred,
                "wait_free": self.wait_free,
            }
        )

    @property
    def served(self) -> set[str]:
        """The layers whose mean gradient the optimizer owns."""
        return {name for name, kind in self.schemes if kind == "sharded_server"}


@cache
def _profile(sparse: bool) -> ModelProfile:
    return profile_structure(Net(sparse))


@dataclass(frozen=True, kw_only=True)
class Program:
    """What two ranks do."""

    ops: tuple[tuple[str, ...], tuple[str, ...]]
    """Of rank 0 and of rank 1."""
    ways: tuple[Way, ...] = (Way(),)
    """The plans that they know, beginning under the first."""
    optimizer: str = "sgd"
    sparse: bool = False
    """Whether the embedding's gradients are sparse."""
    mean: Mean = "ranks"


def batch(rank: int, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a rank's forward number `count`."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randint(0, 9, (rows,), generator=generator), torch.randn(
        rows, 3, dtype=torch.float64, generator=generator
    )


@dataclass(frozen=True)
class Seen:
    """What an op has shown."""

    op: str
    values: np.ndarray
    """NaN where there is none."""


class Losses:
    """The losses at hand on one rank."""

    def __init__(self, rank: int, model: nn.Module) -> None:
        self._rank, self._model = rank, model
        self._count = 0
        self._at_hand: list[torch.Tensor] = []
        self._stale: list[torch.Tensor] = []

    def forward(self, rows: str, parts: str) -> None:
        tokens, target = batch(self._rank, self._count, int(rows))
        self._count += 1
        self._at_hand.append((self._model(tokens, parts) - target).square().mean())

    def infer(self, rows: str, parts: str) -> torch.Tensor:
        tokens, _ = batch(self._rank, self._count, int(rows))
        self._model.eval()
        with torch.no_grad():
            output = self._model(tokens, parts)
        self._model.train()
        return output

    def take(self, count: str, keep: bool) -> torch.Tensor:
        """The sum of the last ones."""
        taken = self._at_hand[-int(count) :]
        if not keep:
            del self._at_hand[-int(count) :]
        return torch.stack(taken).sum()

    def drop(self) -> None:
        self._at_hand, self._stale = [], []

    def outdate(self) -> None:
        """The parameters change: no backward can come by the graphs that there are, which live on."""
        self._stale += self._at_hand
        self._at_hand = []


class Player:
    """Plays one rank's part of a program in a run."""

    def __init__(self, rank: int, program: Program, group: Group) -> None:
        self._program, self._group = program, group
        self.model = Net(program.sparse)
        if rank:  # attaching makes replicas equal
            for parameter in self.model.parameters():
                parameter.data.add_(1.0)
        self.optimizer = OPTIMIZERS[program.optimizer](self.model.parameters())
        self._losses = Losses(rank, self.model)
        self._way = program.ways[0]
        self._attach()
        self._no_sync = ExitStack()
        self._seen: list[Seen] = []

    def play(self, ops: Sequence[str]) -> list[Seen]:
        for op in ops:
            name, *args = op.split()
            values = getattr(self, name)(*args)
            if values is not None:
                self._seen.append(Seen(op, values))
        self._no_sync.close()
        self._run.detach()
        self._seen.append(Seen("end", flat(p.detach() for p in self.model.parameters())))
        return self._seen

    def forward(self, rows: str, parts: str) -> None:
        self._losses.forward(rows, parts)

    def infer(self, rows: str, parts: str) -> np.ndarray:
        return flat([self._losses.infer(rows, parts)])

    def drop(self) -> None:
        self._losses.drop()

    def backward(self, count: str, keep: str = "") -> None:
        self._losses.take(count, bool(keep)).backward(retain_graph=bool(keep))

    def empty(self) -> None:
        self._run.empty_step()

    def no_sync(self) -> None:
        self._no_sync.enter_context(self._run.no_sync())

    def sync(self) -> None:
        self._no_sync.close()

    def zero(self, how: str = "") -> None:
        if how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how != "keep")

    def read(self) -> np.ndarray:
        return gradients(self.model, self._way)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def step(self) -> np.ndarray:
        self.optimizer.step()
        self._losses.outdate()
        return flat(p.detach() for p in self.model.parameters())

    def flush(self) -> None:
        self._run.flush()

    def check(self) -> None:
        self._run.check_replicas()

    def state(self) -> np.ndarray:
        self.optimizer.state_dict()
        return flat(self.model.state_dict().values())

    def adopt(self, way: str) -> None:
        self._way = self._program.ways[int(way)]
        self._run.adopt(self._way.plan(self._program.sparse))

    def attach(self, way: str) -> None:
        self._run.detach()
        self._way = self._program.ways[int(way)]
        self._attach()

    def _attach(self) -> None:
        plan = self._way.plan(self._program.sparse)
        self._run = attach(self.model, self.optimizer, plan, self._group, RunOptions(mean=self._program.mean))

    def weight(self, count: str) -> None:
        self._run.weight(int(count))

    def drain(self) -> None:
        self._run.drain()


def flat(tensors: Any) -> np.ndarray:
    """Tensors end to end."""
    return torch.cat([tensor.to_dense().reshape(-1) for tensor in tensors]).numpy().copy()


def gradients(model: nn.Module, way: Way) -> np.ndarray:
    """End to end, NaN where there is none; without those that the optimizer owns."""
    return flat(
        torch.full_like(p, torch.nan) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if name.split(".")[0] not in way.served
    )


class OutOfStepError(Exception):
    """The ranks of a program do not come to the same things."""


class Reference:
    """One process that does what both ranks of a program do, and takes the mean itself."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._model = Net()
        self._names = [name for name, _ in self._model.named_parameters()]
        self._parameters = list(self._model.parameters())
        self._optimizer = OPTIMIZERS[program.optimizer](self._parameters)
        self._way = program.ways[0]
        self._losses = [Losses(rank, self._model) for rank in range(WORLD_SIZE)]
        self._syncing = [True] * WORLD_SIZE
        self._items = [1.0] * WORLD_SIZE
        """What the loss of each rank's next backward is a mean over, if the forward has it."""
        self._told: list[float | None] = [None] * WORLD_SIZE
        """The same, if the loop has it."""
        self._passes: list[list[float]] = [[] for _ in range(WORLD_SIZE)]
        """The items of each rank's backward passes since the last exchange."""
        self._local: list[dict[int, torch.Tensor]] = [{} for _ in range(WORLD_SIZE)]
        """What they have added up, weighted by their items, by the parameter's number."""
        self._used: set[int] = set()
        """Parameters whose mean gradient the optimizer owns and has used."""
        self._seen: list[list[Seen | None]] = [[] for _ in range(WORLD_SIZE)]

    def play(self) -> list[list[Seen | None]]:
        """What each rank should see; None where that is not defined.

        Raises:
            OutOfStepError: The ranks do not come to the same things.
        """
        ranks = [self._alone(rank) for rank in range(WORLD_SIZE)]
        ops = [next(rank, "") for rank in ranks]
        while any(ops):
            if ops[0] != ops[1] and not ("drain" in ops and {"exchange", "step", "zero"} & set(ops)):
                raise OutOfStepError(f"{ops[0]!r} on rank 0, {ops[1]!r} on rank 1")
            op = next((op for op in ops if op != "drain"), "drain")  # who drains does what the other does
            self._together(op)
            ops = [next(rank, "") if mine == op else mine for rank, mine in zip(ranks, ops, strict=True)]
        for seen in self._seen:
            seen.append(Seen("end", self._values()))
        return self._seen

    def _alone(self, rank: int) -> Iterator[str]:
        """Does what a rank does on its own, up to what all ranks do together."""
        losses = self._losses[rank]
        for op in self._program.ops[rank]:
            match op.split():
                case ["forward", rows, parts]:
                    losses.forward(rows, parts)
                    self._items[rank] = float(rows)
                case ["weight", count]:
                    self._told[rank] = float(count)
                case ["infer", rows, parts]:
                    self._seen[rank].append(Seen(op, flat([losses.infer(rows, parts)])))
                case ["drop"]:
                    losses.drop()
                case ["no_sync" | "sync"]:
                    self._syncing[rank] = op == "sync"
                case ["backward", count, *keep]:
                    self._backward(rank, losses.take(count, bool(keep)), bool(keep))
                    if self._syncing[rank]:
                        yield "exchange"
                case ["empty"]:
                    self._syncing[rank] = True
                    yield "exchange"
                case ["read"]:
                    self._seen[rank].append(None if self._local[rank] else Seen(op, gradients(self._model, self._way)))
                case ["state"]:
                    self._seen[rank].append(Seen(op, self._values()))
                case ["flush"]:
                    pass
                case _:
                    yield op
                    if op == "step":
                        self._seen[rank].append(Seen(op, self._values()))

    def _backward(self, rank: int, loss: torch.Tensor, keep: bool) -> None:
        local = self._local[rank]
        told, self._told[rank] = self._told[rank], None
        items = 1.0 if self._program.mean == "ranks" else self._items[rank] if told is None else told
        self._passes[rank].append(items)
        parts = torch.autograd.grad(loss, self._parameters, retain_graph=keep, allow_unused=True)
        for index, part in enumerate(parts):
            if part is not None:
                local[index] = items * part + local.get(index, 0.0)

    def _together(self, op: str) -> None:
        match op.split():
            case ["exchange"]:
                self._exchange()
            case ["zero", *how]:
                self._optimizer.zero_grad(set_to_none=how != ["keep"])
                for local in self._local:
                    local.clear()
            case ["clip"]:
                nn.utils.clip_grad_norm_(self._parameters, 0.5)
            case ["step"]:
                self._optimizer.step()
                self._used = {i for i, name in enumerate(self._names) if name.split(".")[0] in self._way.served}
                for losses in self._losses:
                    losses.outdate()
            case [("adopt" | "attach") as how, way]:
                if how == "attach":
                    self._begin_run()
                self._forget_used()
                self._way = self._program.ways[int(way)]

    def _exchange(self) -> None:
        self._forget_used()
        if self._program.mean == "ranks":
            scale = 1.0 / WORLD_SIZE
        else:
            scale = max(map(len, self._passes)) / (sum(map(sum, self._passes)) or 1.0)
        for passes in self._passes:
            passes.clear()
        for index, parameter in enumerate(self._parameters):
            parts = [local.pop(index) for local in self._local if index in local]
            if parts:
                mean = torch.stack(parts).sum(0) * scale
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def _begin_run(self) -> None:
        """Another run has counted nothing so far."""
        self._items, self._told = [1.0] * WORLD_SIZE, [None] * WORLD_SIZE
        self._passes = [[] for _ in range(WORLD_SIZE)]

    def _forget_used(self) -> None:
        for index in self._used:
            self._parameters[index].grad = None
        self._used.clear()

    def _values(self) -> np.ndarray:
        return flat(p.detach() for p in self._parameters)


def difference(found: Sequence[Seen], expected: Sequence[Seen | None]) -> str:
    """The first difference between what a rank saw and what it should have seen, in words; empty if there is none."""
    for number, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        if wanted is None:
            continue
        assert mine.op == wanted.op
        close = np.isclose(mine.values, wanted.values, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        if not close.all():
            place = int(np.argmin(close))
            return (
                f"what {mine.op!r} shows (number {number} of what is seen) differs at {place} of {len(close)}: "
                f"{mine.values[place]!r} instead of {wanted.values[place]!r}"
            )
    return ""
