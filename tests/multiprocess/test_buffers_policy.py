"""When every rank has rank 0's buffers: on request, or after each step, and never in between."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import Plan
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks
from support.steps import digest, plan_for, rows

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """Batch normalization, and buffers of other types that change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("largest", torch.zeros(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("stretched", torch.zeros(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen.roll(1).logical_or(x.mean() > 0)  # a new tensor in place of the buffer
        self.largest.fill_(float(x.max()))
        return self.last(self.norm(self.first(x)))


def make_run(
    world_size: int, *, optimizer: bool = True, deferred: Sequence[str] = (), **options: Any
) -> tuple[Net, torch.optim.Optimizer | None, Run]:
    torch.manual_seed(0)
    model = Net()
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    sample = copy.deepcopy(model)
    plan = plan_for(sample, world_size, None, lambda: sample(rows(0, 0, 4, 6)).square().mean())
    plan = Plan.model_validate({**dict(plan), "deferred": deferred})
    return model, made, attach(model, made, plan, Group.of_default(), RunOptions(**options))


def buffers_of(model: nn.Module, *without: str) -> str:
    return digest({name: buffer for name, buffer in model.named_buffers() if name not in without})


def forward(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(rows(rank, step, 4, 6) + rank).square().mean()
    return loss


def after_each_step(rank: int, world_size: int, deferred: Sequence[str]) -> list[tuple[str, str, str]]:
    """Buffers after the backward pass, after the step, and of one process that has rank 0's batches only."""
    model, optimizer, run = make_run(world_size, buffers="after_step", deferred=deferred)
    alone = copy.deepcopy(model)
    seen = []
    for step in range(4):
        assert optimizer is not None
        optimizer.zero_grad()
        loss = forward(model, rank, step)
        alone.load_state_dict(model.state_dict() | dict(alone.named_buffers()), strict=False)
        forward(alone, 0, step)
        loss.backward()
        before = buffers_of(model)
        optimizer.step()
        run.check_replicas()
        seen.append((before, buffers_of(model), buffers_of(alone)))
    run.detach()
    return seen


@pytest.mark.parametrize("deferred", [(), ("first", "last")], ids=["plain", "deferred"])
def test_after_each_step_all_have_rank_zeros(deferred: Sequence[str]) -> None:
    for step in zip(*run_ranks(3, after_each_step, deferred), strict=True):
        before, after, alone = zip(*step, strict=True)
        assert len(set(before)) == 3, "each rank counts its own batches until then"
        assert set(after) == {alone[0]}


def without_optimizer(rank: int, world_size: int) -> list[str]:
    model, _, run = make_run(world_size, optimizer=False, buffers="after_step")
    forward(model, rank, 0).backward()
    found = buffers_of(model)
    run.detach()
    return [found]


def on_request(rank: int, world_size: int) -> list[str]:
    model, optimizer, run = make_run(world_size)
    assert optimizer is not None
    forward(model, rank, 0).backward()
    optimizer.step()
    before = buffers_of(model)
    run.sync_buffers()
    run.check_replicas()
    after = buffers_of(model)
    run.detach()
    return [before, after]


def test_without_an_optimizer_they_are_sent_after_the_exchange() -> None:
    assert len({found[0] for found in run_ranks(2, without_optimizer)}) == 1


def test_on_request_they_are_sent_then_and_not_before() -> None:
    before, after = zip(*run_ranks(2, on_request), strict=True)
    assert len(set(before)) == 2
    assert len(set(after)) == 1


def two_forwards(rank: int, world_size: int) -> None:
    """Two forwards before one backward, and a step of the optimizer while a graph is alive."""
    model, optimizer, run = make_run(world_size, buffers="after_step")
    assert optimizer is not None
    other = nn.Linear(2, 6)
    for step in range(3):
        optimizer.zero_grad()
        (forward(model, rank, step) + forward(model, rank, step + 10)).backward()
        kept = other(forward(model, rank, step).detach().expand(1, 2))
        optimizer.step()
        kept.sum().backward()
    run.check_replicas()
    run.detach()


def test_two_forwards_before_one_backward() -> None:
    run_ranks(2, two_forwards)


def ignored(rank: int, world_size: int) -> tuple[str, str]:
    model, optimizer, run = make_run(world_size, buffers="after_step", ignore=("largest",))
    assert optimizer is not None
    forward(model, rank, 0).backward()
    optimizer.step()
    run.sync_buffers()
    run.check_replicas()
    run.detach()
    return digest({"": model.largest}), buffers_of(model, "largest")


def test_ignored_ones_stay_each_ranks_own() -> None:
    own, others = zip(*run_ranks(2, ignored), strict=True)
    assert len(set(own)) == 2
    assert len(set(others)) == 1


def refuse(rank: int, world_size: int, change: Callable[[Net, int], None], request: bool) -> str:
    model, optimizer, run = make_run(world_size, buffers="on_request" if request else "after_step")
    assert optimizer is not None
    forward(model, rank, 0).backward()
    change(model, rank)
    with pytest.raises(InfeasibleError) as caught:
        run.sync_buffers() if request else optimizer.step()
    run.detach()
    return str(caught.value)


def lengthen(model: Net, rank: int) -> None:
    if rank == 1:
        model.seen = torch.zeros(5, dtype=torch.bool)


def lengthen_everywhere(model: Net, rank: int) -> None:
    del rank
    model.seen = torch.zeros(5, dtype=torch.bool)


def add(model: Net, rank: int) -> None:
    if rank == 1:
        model.register_buffer("more", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lengthen, "'seen' is (3,) torch.bool on rank 0 and (5,) torch.bool on rank 1"), (add, "'more' is missing on")],
    ids=["shape", "number"],
)
def test_on_request_other_buffers_are_named(change: Callable[[Net, int], None], expected: str) -> None:
    for message in run_ranks(2, refuse, change, True):
        assert expected in message


def test_after_a_step_a_changed_buffer_is_named() -> None:
    for message in run_ranks(2, refuse, lengthen_everywhere, False):
        assert "'seen' was (3,) torch.bool when all ranks last compared them and is (5,) torch.bool now" in message


def drift(rank: int, world_size: int, policy: str) -> str:
    """Rank 1 changes a buffer that the policy has made equal."""
    model, optimizer, run = make_run(world_size, buffers=policy)
    assert optimizer is not None
    forward(model, rank, 0).backward()
    optimizer.step()
    if policy == "on_request":
        run.check_replicas()  # nothing is promised yet
        run.sync_buffers()
    run.check_replicas()
    if rank == 1:
        model.norm.running_mean[2] += 1
    with pytest.raises(CommError) as caught:
        run.check_replicas()
    run.detach()
    return str(caught.value)


@pytest.mark.parametrize("policy", ["after_step", "on_request"])
def test_a_buffer_that_has_drifted_is_named(policy: str) -> None:
    for message in run_ranks(2, drift, policy):
        assert "'norm.running_mean' on rank(s) 1" in message
