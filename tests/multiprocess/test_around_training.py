"""What surrounds the update in real loops: schedulers, averages of weights, hooks, wrapped and fused optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from poseidon.comm import AllReduce, ShardedServer, SufficientFactor
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, assert_same, rows

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]

PLANS = {
    "all_reduce": AllReduce(),
    "server": ShardedServer(piece_bytes=64),
    "mixed": {"0": ShardedServer(piece_bytes=64), "2": SufficientFactor()},
    "deferred": AllReduce(),
}


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 6)


def make_pair(rank, world_size, name, make_optimizer=None):
    late = {"deferred": ("0", "2")} if name == "deferred" else {}

    def plan(made):
        return made.model_copy(update=late)

    return Pair(rank, world_size, make_mlp(), PLANS[name], square, data, make_optimizer, plan=plan)


def averages(rank, world_size, name):
    """EMA and SWA copies, read and updated while transfers may be under way."""
    pair = make_pair(rank, world_size, name)
    kinds = [lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.7)), AveragedModel]
    copies, copies_alone = [k(pair.model) for k in kinds], [k(pair.alone) for k in kinds]
    by_hand, by_hand_alone = copy.deepcopy(pair.model), copy.deepcopy(pair.alone)
    for index in range(4):
        pair.backward(index)
        pair.backward_alone(index)
        pair.optimizer.step()
        pair.optimizer_alone.step()
        for averaged, alone in zip(copies, copies_alone, strict=True):
            averaged.update_parameters(pair.model)
            alone.update_parameters(pair.alone)
        with torch.no_grad():
            for mine, model in ((by_hand, pair.model), (by_hand_alone, pair.alone)):
                for kept, parameter in zip(mine.parameters(), model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.3)
    for found, expected in zip((*copies, by_hand), (*copies_alone, by_hand_alone), strict=True):
        mine = {n: p.detach() for n, p in found.named_parameters()}
        assert_same(mine, {n: p.detach() for n, p in expected.named_parameters()})
        assert_on_all_ranks(mine)
    pair.run.detach()


@pytest.mark.parametrize("name", PLANS)
def test_averages_of_weights_are_those_of_one_process(name):
    run_ranks(2, averages, name)


def schedulers(rank, world_size, name):
    pair = make_pair(rank, world_size, name, lambda p: torch.optim.AdamW(p, lr=0.02))
    made = []
    for optimizer in (pair.optimizer, pair.optimizer_alone):
        one = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
        made.append((one, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)))
    rates = []
    for index in range(5):
        pair.step(index)
        mine = square(pair.model, data(rank, index)).detach()
        alone = sum(square(pair.alone, data(other, index)).detach() for other in range(world_size)) / world_size
        mean = pair.run.mean(mine, 5)
        assert mean == pytest.approx(float(alone), rel=1e-5)
        for (cycle, plateau), loss in zip(made, (mean + index, float(alone) + index), strict=True):
            cycle.step()
            plateau.step(loss)
        rates.append([group["lr"] for group in pair.optimizer.param_groups])
        assert rates[-1] == [group["lr"] for group in pair.optimizer_alone.param_groups]
    pair.run.detach()
    return rates


@pytest.mark.parametrize("name", PLANS)
def test_schedulers_decide_alike_on_the_mean_loss(name):
    first, *others = run_ranks(2, schedulers, name)
    assert all(rates == first for rates in others)
    assert len({tuple(rates) for rates in first}) > 2


class Lookahead:
    """An optimizer around another one: every second step goes back half of the way."""

    def __init__(self, optimizer, model):
        self.optimizer, self.model, self.count = optimizer, model, 0
        self.slow = [p.detach().clone() for p in model.parameters()]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.model.parameters(), strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


VARIANTS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    lambda p: torch.optim.RAdam(p, lr=0.01, foreach=False),
]


def optimizers(rank, world_size, name):
    for make in VARIANTS:
        pair = make_pair(rank, world_size, name, make)
        counted = []
        pair.optimizer.register_step_pre_hook(lambda *_, c=counted: c.append("before"))
        pair.optimizer.register_step_post_hook(lambda *_, c=counted: c.append("after"))
        pair.steps(3).run.detach()
        assert counted == ["before", "after"] * 3
    wrapped = make_pair(rank, world_size, name)
    wrapped.optimizer = Lookahead(wrapped.optimizer, wrapped.model)
    wrapped.optimizer_alone = Lookahead(wrapped.optimizer_alone, wrapped.alone)
    wrapped.steps(5).run.detach()


@pytest.mark.parametrize("name", PLANS)
def test_fused_foreach_hooked_and_wrapped_optimizers(name):
    run_ranks(2, optimizers, name)


def clip_before_every_update(rank, world_size, name):
    """Ranks with more steps than others: clipping is part of the update, also of a rank that has run out."""
    model, alone = make_mlp(), make_mlp()
    optimizer, optimizer_alone = (torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, alone))
    run = attach(model, optimizer, uniform_plan(profile_structure(model), world_size, PLANS[name]), Group.of_default())

    def update():
        run.clip_grad_norm_(0.02)
        optimizer.step()
        optimizer.zero_grad()

    with run.join(update):
        for index in range(2 + 2 * rank):
            square(model, data(rank, index)).backward()
            update()
    for index in range(2 * world_size):
        for other in range(world_size):
            if index < 2 + 2 * other:
                (square(alone, data(other, index)) / world_size).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.02)
        optimizer_alone.step()
        optimizer_alone.zero_grad()
    found = {n: p.detach() for n, p in model.named_parameters()}
    assert_same(found, {n: p.detach() for n, p in alone.named_parameters()})
    assert_on_all_ranks(found)
    run.detach()


@pytest.mark.parametrize("name", ["all_reduce", "server", "mixed"])
def test_clipping_is_part_of_what_a_rank_without_samples_answers_with(name):
    run_ranks(2, clip_before_every_update, name)
