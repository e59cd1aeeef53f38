"""The sharded server: even shards, every elementwise optimizer exact, whole again after `detach`."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poseidon.comm import ShardedServer
from poseidon.comm.group import Group
from poseidon.comm.sharded_server import ELEMENTWISE
from poseidon.errors import InfeasibleError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_same, check_steps, rows

pytestmark = pytest.mark.multiprocess

SMALL = ShardedServer(piece_bytes=64)
"""Several pieces even for small layers."""


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 6)


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


# Shares


def numbers_in_state(optimizer):
    states = optimizer.state.values()
    return sum(value.numel() for state in states for value in state.values() if value.dim())


def shares(rank, world_size, make):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    run = attach(
        model, optimizer, uniform_plan(profile_structure(model), world_size, ShardedServer()), Group.of_default()
    )
    width = next(model.parameters()).shape[1:]
    sent = run.group.bytes_sent
    model(torch.randn(2, *width) if len(width) == 1 else torch.randn(2, width[0], 8, 8)).square().mean().backward()
    pushed = run.group.bytes_sent - sent
    optimizer.step()
    assert all(p.grad is None for p in model.parameters()), "the optimizer owns the mean"
    mine = numbers_in_state(optimizer), pushed, run.group.bytes_sent - sent - pushed
    run.detach()
    return (*mine, sum(p.numel() for p in model.parameters()), numbers_in_state(optimizer))


def make_big():
    return nn.Linear(700, 301)


def make_vgg_like():
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2048, 120), nn.ReLU(), nn.Linear(120, 10))


@pytest.mark.parametrize("make", [make_big, make_vgg_like])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_are_even(make, world_size):
    found = run_ranks(world_size, shares, make)
    total = found[0][3]
    for state, pushed, gathered, _, after in found:
        assert state == pytest.approx(2 * total / world_size, rel=0.01), "two moments of this rank's numbers"
        assert after == 2 * total, "whole again"
        assert pushed == pytest.approx(4 * total * (world_size - 1) / world_size, rel=0.01)
        assert gathered == pytest.approx(4 * total * (world_size - 1) / world_size, rel=0.01)
    for column in zip(*found, strict=True):
        assert max(column) / (sum(column) / world_size) < 1.1


# Optimizers

VARIANTS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
]


def optimizers(rank, world_size):
    for make in (*(lambda p, kind=kind: kind(p, lr=0.01) for kind in ELEMENTWISE), *VARIANTS):
        try:
            check_steps(rank, world_size, make_mlp(), SMALL, square, data, make, steps=4, tolerance=1e-4)
        except AssertionError as error:
            error.add_note(str(make([nn.Parameter(torch.zeros(1))])))
            raise


def test_every_elementwise_optimizer_is_exact():
    run_ranks(3, optimizers)


class Subclass(torch.optim.SGD):
    """May do anything."""


def refused(rank, world_size):
    model = make_mlp()
    plan = uniform_plan(profile_structure(model), world_size, {"2": ShardedServer()})
    matrices = [model[0].weight, model[2].weight]
    for optimizer, name in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (Subclass(model.parameters(), lr=0.1), "Subclass"),
        *((getattr(torch.optim, name)(matrices), name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)),
        (None, "given none"),
    ):
        groups = None if optimizer is None else [id(p) for group in optimizer.param_groups for p in group["params"]]
        with pytest.raises(InfeasibleError, match=f"layer 2: .*{name}.*choose all_reduce"):
            attach(model, optimizer, plan, Group.of_default())
        assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        if optimizer is not None:
            assert [id(p) for group in optimizer.param_groups for p in group["params"]] == groups
    model[2].weight.data = torch.randn(9, 4).t()
    with pytest.raises(InfeasibleError, match=r"layer 2: .*weight is not contiguous"):
        attach(model, torch.optim.SGD(model.parameters()), plan, Group.of_default())


def test_other_optimizers_are_refused_with_the_reason():
    run_ranks(2, refused)


# Loops as people write them


def schedulers(rank, world_size):
    def make(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1, momentum=0.9)

    pair = Pair(rank, world_size, make_mlp(), SMALL, square, data, make)
    both = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (pair.optimizer, pair.optimizer_alone)
    ]
    for step in range(4):
        pair.step(step)
        for scheduler in both:
            scheduler.step()
    assert [group["lr"] for group in pair.optimizer.param_groups] == [0.5**5, 0.1 * 0.5**4]
    pair.run.detach()


def zeroing(rank, world_size):
    for by_model in (False, True):
        for set_to_none in (False, True):
            pair = Pair(rank, world_size, make_mlp(), SMALL, square, data)
            for step in range(4):
                (pair.model if by_model else pair.optimizer).zero_grad(set_to_none=set_to_none)
                square(pair.model, data(rank, step)).backward()
                pair.backward_alone(step)
                pair.update()
            pair.run.detach()


def several_backwards(rank, world_size):
    pair = Pair(rank, world_size, make_mlp(), SMALL, square, data)
    for step in (0, 10):
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()
        for micro in range(3):
            square(pair.model, data(rank, step + micro)).backward()
            for r in range(world_size):
                (square(pair.alone, data(r, step + micro)) / world_size).backward()
        pair.update()
    pair.run.detach()


class Branches(nn.Module):
    """A layer whose bias is used in some steps only, and one that one rank does not reach."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.other = nn.Linear(6, 6)

    def forward(self, x, with_bias, with_other):
        bias = self.layer.bias if with_bias else None
        y = nn.functional.linear(x, self.layer.weight, bias) * self.scale
        return self.other(y) if with_other else y


BRANCHES = [(False, ()), (True, (0, 1, 2)), (False, (1,)), (True, ()), (False, (0, 2))]


def branches(rank, world_size):
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ):
        pair = Pair(
            *(rank, world_size, Branches(), SMALL, lambda model, given: model(*given).square().mean()),
            lambda r, step: (data(r, step), BRANCHES[step][0], r in BRANCHES[step][1]),
            make,
        )
        pair.step(0)
        pair.run.detach()  # some parameters have no state yet
        assert_same_state(pair)
        pair.run = attach(pair.model, pair.optimizer, pair.run.plan, Group.of_default())
        for step in range(1, len(BRANCHES)):
            pair.step(step)
        pair.run.detach()
        assert_same_state(pair)


def assert_same_state(pair):
    for mine, theirs in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
        found, expected = pair.optimizer.state.get(mine, {}), pair.optimizer_alone.state.get(theirs, {})
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
        assert_same({key: found[key] for key in expected}, expected, 1e-4)


@pytest.mark.parametrize("check", [schedulers, zeroing, several_backwards, branches])
def test_loops(check):
    run_ranks(3, check)


# On and off again


def on_and_off(rank, world_size):
    """Alone, attached in mid-training, detached, alone again: as if alone all the time."""
    for make in (
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
    ):
        model = make_mlp()
        model.scale = nn.Parameter(torch.tensor(1.0))

        def loss(model, x):
            return square(model, x) * model.scale

        optimizer = make(model.parameters())
        for step in range(2):
            train_alone(model, optimizer, loss, step, world_size)
        alone = copy.deepcopy(model)
        optimizer_alone = make(alone.parameters())
        optimizer_alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run = attach(model, optimizer, uniform_plan(profile_structure(model), world_size, SMALL), Group.of_default())
        for step in range(2, 4):
            optimizer.zero_grad()
            loss(model, data(rank, step)).backward()
            optimizer.step()
            train_alone(alone, optimizer_alone, loss, step, world_size)
        run.detach()
        for step in range(4, 6):
            train_alone(model, optimizer, loss, step, world_size)
            train_alone(alone, optimizer_alone, loss, step, world_size)
        assert [p.shape for p in model.parameters()] == [p.shape for p in alone.parameters()]
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        assert_same(parameters, {n: p.detach() for n, p in alone.named_parameters()})
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert_same(
                {key: torch.as_tensor(value) for key, value in optimizer.state[mine].items()},
                {key: torch.as_tensor(value) for key, value in optimizer_alone.state[theirs].items()},
                1e-4,
            )


def train_alone(model, optimizer, loss, step, world_size):
    optimizer.zero_grad()
    for r in range(world_size):
        (loss(model, data(r, step)) / world_size).backward()
    optimizer.step()


def gradient_in_hand(rank, world_size):
    """Attached and detached between backward and step: the mean is neither lost nor counted twice."""
    pair = Pair(rank, world_size, make_mlp(), SMALL, square, data)
    plan = pair.run.plan
    pair.backward(0)
    pair.backward_alone(0)
    pair.run.detach()
    pair.run.plan = uniform_plan(plan.profile, world_size)  # for the comparison: gradients are here
    pair.compare()
    pair.run = attach(pair.model, pair.optimizer, plan, Group.of_default())
    pair.update()
    pair.step(1)
    pair.run.detach()


def more_ranks_than_numbers(rank, world_size):
    """Some shards are empty."""
    torch.manual_seed(0)
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p)):
        model = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 6))
        check_steps(rank, world_size, model, SMALL, square, data, make)
    assert dist.get_rank() == rank


@pytest.mark.parametrize("check", [on_and_off, gradient_in_hand])
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_and_off_again(check, world_size):
    run_ranks(world_size, check)


def test_empty_shards():
    run_ranks(4, more_ranks_than_numbers)
