"""Batch normalization over all ranks against one process on the union of their batches."""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from poseidon.comm import SCHEMES
from poseidon.comm import liveness as liveness_module
from poseidon.comm.group import Group
from poseidon.errors import CommError
from poseidon.runtime import join
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, assert_same, plan_for, rows, seeded

pytestmark = pytest.mark.multiprocess

TOLERANCE = 1e-9
CLASSES = 3


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.BatchNorm1d(8, momentum=None),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    )


def make_batch(rank: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of another mean and spread on every rank: statistics of one rank are far from those of all."""
    x = rows(rank, step, size, 50).view(size, 2, 5, 5) * (1 + rank) + rank
    return x, torch.randint(CLASSES, (size,), generator=seeded(rank, step, size))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


class Ours:
    """A model under a plan whose batch normalization is over all ranks, and one process with its copy.

    In double precision: what lies right before batch normalization has next to no gradient but rounding.
    """

    def __init__(
        self, rank: int, world_size: int, scheme: str = "all_reduce", model: nn.Module | None = None, **options: Any
    ) -> None:
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(0)
        self.model = model or make_model().double()
        self.alone = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer_alone = torch.optim.SGD(self.alone.parameters(), lr=0.1, momentum=0.9)
        sample = copy.deepcopy(self.model)
        plan = plan_for(sample, world_size, SCHEMES[scheme](), lambda: loss_of(sample, *make_batch(0, 0, 4)))  # type: ignore[call-arg]
        self.run: Run = attach(self.model, self.optimizer, plan, Group.of_default(), RunOptions(**options))
        self.run.sync_batch_norm()

    def step(self, step: int, sizes: Sequence[int]) -> None:
        """One step on batches of these sizes, by rank."""
        self.optimizer.zero_grad()
        self.optimizer_alone.zero_grad()
        if sizes[self.rank]:
            loss_of(self.model, *make_batch(self.rank, step, sizes[self.rank])).backward()
        else:
            self.run.empty_step()
        parts = [make_batch(rank, step, size) for rank, size in enumerate(sizes) if size]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss_of(self.alone, x, y).backward()
        self.optimizer.step()
        self.optimizer_alone.step()

    def compare(self, tolerance: float = TOLERANCE) -> None:
        """Parameters and running statistics agree with those of one process, and bit by bit between ranks."""
        found, expected = self.model.state_dict(), self.alone.state_dict()
        assert_same(found, expected, tolerance)
        assert_on_all_ranks(found)


def train(rank: int, world_size: int, scheme: str, sizes: Sequence[Sequence[int]], options: dict[str, Any]) -> None:
    ours = Ours(rank, world_size, scheme, **options)
    for step, by_rank in enumerate(sizes):
        ours.step(step, by_rank)
        ours.compare()
    ours.run.detach()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unequal_batches_equal_one_process_on_their_union(scheme: str) -> None:
    run_ranks(2, train, scheme, [(3, 6), (5, 2), (1, 7), (4, 4)], {"mean": "samples"})


def test_equal_batches_equal_one_process_on_their_union() -> None:
    run_ranks(3, train, "all_reduce", [(3, 3, 3)] * 3, {"mean": "ranks"})


def in_single_precision(rank: int, world_size: int) -> None:
    ours = Ours(rank, world_size, model=make_model(), mean="samples")
    for step in range(3):
        ours.step(step, (12, 7))
        ours.compare(1e-5)
    ours.run.detach()


def test_in_single_precision() -> None:
    run_ranks(2, in_single_precision)


def test_a_rank_without_samples_keeps_the_statistics_of_the_others() -> None:
    run_ranks(3, train, "sufficient_factor", [(0, 3, 3), (2, 0, 6), (0, 0, 5), (4, 1, 2)], {"mean": "samples"})


def accumulate(rank: int, world_size: int, steps: Sequence[Sequence[Sequence[int]]]) -> None:
    """By step, rank and micro-batch, the sizes of batches; no micro-batch at all is an empty step."""
    ours = Ours(rank, world_size, mean="samples")
    for step, by_rank in enumerate(steps):
        ours.optimizer.zero_grad()
        ours.optimizer_alone.zero_grad()
        for k, size in enumerate(by_rank[rank]):
            with nullcontext() if k == len(by_rank[rank]) - 1 else ours.run.no_sync():
                loss_of(ours.model, *make_batch(rank, 10 * step + k, size)).backward()
        if not by_rank[rank]:
            ours.run.empty_step()
        total, most = sum(map(sum, by_rank)), max(map(len, by_rank))
        for k in range(most):
            parts = [make_batch(r, 10 * step + k, sizes[k]) for r, sizes in enumerate(by_rank) if k < len(sizes)]
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            (loss_of(ours.alone, x, y) * (most * len(x) / total)).backward()
        ours.optimizer.step()
        ours.optimizer_alone.step()
        ours.compare()
    ours.run.detach()


def test_ranks_with_fewer_micro_batches_answer_those_with_more() -> None:
    run_ranks(2, accumulate, [[[4, 2, 5], [3]]] * 3)


def test_any_number_of_micro_batches_of_any_size() -> None:
    draw = random.Random(0)
    steps = [[[draw.randint(2, 5) for _ in range(draw.randint(0, 3))] for _ in range(3)] for _ in range(12)]
    run_ranks(3, accumulate, [by_rank for by_rank in steps if any(by_rank)])


def run_out(rank: int, world_size: int) -> None:
    ours = Ours(rank, world_size, mean="samples")
    lengths = (1, 4, 2)
    with ours.run.join():
        for step in range(lengths[rank]):
            loss_of(ours.model, *make_batch(rank, step, 4)).backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
    for step in range(max(lengths)):
        parts = [make_batch(r, step, 4) for r in range(world_size) if step < lengths[r]]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss_of(ours.alone, x, y).backward()
        ours.optimizer_alone.step()
        ours.optimizer_alone.zero_grad()
    ours.compare()
    ours.run.detach()


def test_ranks_that_have_run_out_answer_the_others() -> None:
    run_ranks(3, run_out)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "1d with length": (lambda: nn.BatchNorm1d(4), (4, 3)),
    "2d": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4, affine=False), (4, 3, 2, 2)),
    "untracked": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 2)),
    "torch's own": (lambda: nn.SyncBatchNorm(4), (4, 3, 2)),
}


def look_closely(rank: int, world_size: int, kind: str) -> None:
    """Outputs and gradients, in double precision."""
    make, shape = KINDS[kind]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, *[1] * (len(shape) - 1)))
            self.norm = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x * self.scale)

    torch.manual_seed(0)
    model, alone = Net().double(), Net().double()
    if kind == "torch's own":
        alone.norm = nn.BatchNorm2d(4).double()  # computes the same, in one process
    sizes = (3, 5)
    parts = [torch.randn(n, *shape, generator=seeded(r)).double() * (r + 1) + r for r, n in enumerate(sizes)]
    x, union = parts[rank].clone().requires_grad_(), torch.cat(parts).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_for(alone, world_size, None, lambda: alone(union.detach()).square().mean())
    alone.norm.load_state_dict(model.norm.state_dict())
    run = attach(model, optimizer, plan, Group.of_default(), RunOptions(mean="samples"))
    names = {name for name, _ in model.norm.named_buffers()}
    run.sync_batch_norm()
    output, expected = model(x), alone(union)
    mine = slice(3) if rank == 0 else slice(3, 8)
    assert_same({"output": output}, {"output": expected[mine]}, TOLERANCE)
    (output**3).mean().backward()
    (expected**3).mean().backward()
    assert union.grad is not None
    assert x.grad is not None
    assert_same({"input": x.grad * sizes[rank] / sum(sizes)}, {"input": union.grad[mine]}, TOLERANCE)
    assert_same(
        {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in alone.named_parameters()}, TOLERANCE
    )
    assert_same(dict(model.norm.named_buffers()), dict(alone.norm.named_buffers()), TOLERANCE)
    assert {name for name, _ in model.norm.named_buffers()} == names
    with torch.no_grad():
        model(x), alone(union)
    assert_same(dict(model.norm.named_buffers()), dict(alone.norm.named_buffers()), TOLERANCE)
    model.eval(), alone.eval()
    if rank == 0 and kind != "untracked":
        assert_same({"evaluated": model(x)}, {"evaluated": alone(union)[mine]}, TOLERANCE)
    run.detach()
    assert "forward" not in model.norm.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_of_inputs_are_those_of_the_union(kind: str) -> None:
    run_ranks(2, look_closely, kind)


def autocast(rank: int, world_size: int) -> tuple[float, float]:
    ours = Ours(rank, world_size, model=make_model(), mean="samples")
    sizes = (3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(ours.model, *make_batch(rank, 0, sizes[rank])).backward()
        x, y = (torch.cat(t) for t in zip(*(make_batch(r, 0, n) for r, n in enumerate(sizes)), strict=True))
        loss_of(ours.alone, x, y).backward()
    found = torch.cat([p.grad.flatten() for p in ours.model.parameters() if p.grad is not None])
    expected = torch.cat([p.grad.flatten() for p in ours.alone.parameters() if p.grad is not None])
    ours.run.detach()
    return float((found - expected).norm()), float(expected.norm())


def test_under_autocast_as_one_process_under_autocast() -> None:
    for error, length in run_ranks(2, autocast):
        assert error < 0.03 * length


class Branching(nn.Module):
    """Calls its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.first, self.second]
        for layer in reversed(layers) if self.turned else layers:
            x = layer(x)
        return x


def disagree(rank: int, world_size: int) -> str:
    model = Branching()
    plan = plan_for(copy.deepcopy(model), world_size, None, lambda: torch.zeros((), requires_grad=True))
    run = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, Group.of_default())
    run.sync_batch_norm()
    model.turned = rank == 1
    with pytest.raises(CommError) as caught:
        model(rows(rank, 0, 3, 4))
    run.detach()
    return str(caught.value)


def test_ranks_that_call_other_layers_are_told_so() -> None:
    first, second = run_ranks(2, disagree)
    assert "forward pass of 'first', rank 1 in the forward pass of 'second'" in first
    assert "forward pass of 'second', rank 0 in the forward pass of 'first'" in second


class Checkpointed(nn.Module):
    """Computes its first half once more in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        layers = list(make_model())
        self.first, self.second = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant:
            x = x.clone().requires_grad_()
        return self.second(checkpoint(self.first, x, use_reentrant=self.use_reentrant))


def recompute(rank: int, world_size: int, use_reentrant: bool) -> None:
    ours = Ours(rank, world_size, model=Checkpointed(use_reentrant).double(), mean="samples")
    for step in range(3):
        ours.step(step, (3, 5))
        ours.compare()
    ours.run.detach()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_once_more_in_backward(use_reentrant: bool) -> None:
    run_ranks(2, recompute, use_reentrant)


def go_ahead(rank: int, world_size: int) -> str:
    """Rank 0 has a batch more than rank 1, which waits for it at the end."""
    liveness_module.PATIENCE_SECONDS = 1.0
    group = join.init()
    model = make_model()
    sample = copy.deepcopy(model)
    plan = plan_for(sample, world_size, None, lambda: loss_of(sample, *make_batch(0, 0, 4)))
    run = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, group)
    run.sync_batch_norm()
    loss_of(model, *make_batch(rank, 0, 4)).backward()
    go_on = run.check_replicas if rank else lambda: loss_of(model, *make_batch(rank, 1, 4))
    with pytest.raises(CommError) as caught:
        go_on()
    join.shutdown(str(caught.value))
    return str(caught.value)


def test_a_rank_that_is_ahead_is_told() -> None:
    first, second = run_ranks(2, go_ahead, init=False)
    assert "the forward pass of '1' in exchange 1 cannot end: rank 1 has left the exchanges behind" in first
    assert "rank 0 ended with" in second
