"""Buckets and an order that a plan names: exact, the same bits everywhere, issued as the plan says."""

import pytest
import torch
from torch import nn

from poseidon.comm import AllReduce, ShardedServer, SufficientFactor
from poseidon.comm.all_reduce import VOTE_AFTER
from poseidon.comm.group import Group
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, rows

pytestmark = pytest.mark.multiprocess

NAMES = ["0", "2", "4", "6", "8"]


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return None if (rank, step) == (1, 2) else rows(rank, step, 4 + rank, 6)


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *(part for width in (6, 9, 5, 7) for part in (nn.Linear(width, {6: 9, 9: 5, 5: 7, 7: 4}[width]), nn.Tanh())),
        nn.Linear(4, 3),
    )


def changed(**changes):
    return lambda plan: Plan.model_validate({**dict(plan), **changes})


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def issued(run):
    """The exchanges in the order in which their last transfers left in the last step."""
    transfers = {t.name: t for e in run._exchanges for t in e.transfers[-1:]}
    last = run.timeline.steps[-1]
    starts = {i.name: i.start for i in last.intervals if i.activity == "transfer" and i.name in transfers}
    return sorted(starts, key=lambda name: starts[name])


PLANS = {
    "one": ([tuple(reversed(NAMES))], (), ["8..0"]),
    "each": ([(name,) for name in reversed(NAMES)], (), ["8", "6", "4", "2", "0"]),
    "apart": ([("8", "4"), ("6", "0"), ("2",)], (), ["8..4", "2", "6..0"]),
    "first_layers_first": ([(n,) for n in reversed(NAMES)], ("0", "2", "4", "6", "8"), ["0", "2", "4", "6", "8"]),
    "by_size_in_order": ([], ("4", "0", "2", "8", "6"), ["8..0"]),
}


def as_planned(rank, world_size):
    for buckets, order, expected in PLANS.values():
        pair = Pair(
            *(rank, world_size, make_mlp(), AllReduce(), square, data, momentum),
            plan=changed(buckets=tuple(buckets), order=order),
        )
        for step in range(4):
            pair.step(step)
            assert issued(pair.run) == expected
        pair.run.detach()


def mixed(rank, world_size):
    """Other schemes beside planned buckets, in an order of their own; two dtypes in one bucket cross apart."""
    model = make_mlp()
    model[4].double()
    model[3] = nn.Sequential(nn.Tanh(), Cast(torch.float64))
    model[5] = nn.Sequential(nn.Tanh(), Cast(torch.float32))
    pair = Pair(
        *(rank, world_size, model, {"0": SufficientFactor(), "8": ShardedServer()}, square, data, momentum),
        plan=changed(buckets=(("6", "4", "2"),), order=("0", "8", "2", "4", "6")),
    )
    assert [exchange.name for exchange in pair.run._exchanges if exchange.name[0] in "642"] == ["6..2", "4"]
    for step in range(4):
        pair.step(step)
        assert issued(pair.run) == ["0 (second factor)", "8 (push)", "4", "6..2"]
    pair.run.detach()


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def other_arrival(rank, world_size):
    """Gradients that come in another order than the plan knows: buckets by size from then on, still exact."""
    pair = Pair(
        *(rank, world_size, make_mlp(), AllReduce(), square, data, momentum),
        plan=changed(arrival=tuple(NAMES), buckets=(("0", "2"), ("4", "6", "8")), order=tuple(NAMES)),
    )
    for step in range(VOTE_AFTER + 4):
        pair.step(step)
    assert pair.run.plan.arrival == tuple(reversed(NAMES))
    assert pair.run.plan.buckets == ()
    pair.run.detach()


@pytest.mark.parametrize("check", [as_planned, mixed, other_arrival])
@pytest.mark.parametrize("world_size", [2, 3])
def test_planned(check, world_size):
    run_ranks(world_size, check)


def different(rank, world_size):
    model = make_mlp()
    plan = uniform_plan(profile_structure(model), world_size)
    for change, message in (
        ({"buckets": (("0", "2", "4"), ("6", "8")) if rank else (("0", "2"), ("4", "6", "8"))}, "what is in buckets"),
        ({"order": tuple(NAMES) if rank else tuple(reversed(NAMES))}, "the order of transfers"),
        ({"deferred": ("0",) if rank else ("2",)}, "what is deferred"),
    ):
        with pytest.raises(InfeasibleError, match=f"the plans differ between ranks: {message} is"):
            attach(model, torch.optim.SGD(model.parameters()), changed(**change)(plan), Group.of_default())


def test_ranks_with_other_plans_are_told():
    run_ranks(2, different)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schemes": {"2": AllReduce(wire="bfloat16")}}, "layers '0' and '2' share a bucket, but not one scheme"),
        ({"deferred": ("2",)}, "layers '0' and '2' share a bucket, but only one is deferred"),
        ({"buckets": (("0", "2"), ("2", "4", "6", "8"))}, "buckets name a layer twice"),
        ({"buckets": (("0", "2"),)}, "at layer '4': it is on all_reduce and in no bucket"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(change, message):
    plan = uniform_plan(profile_structure(make_mlp()), 2)
    if "schemes" in change:
        change = {"schemes": {**plan.schemes, **change["schemes"]}}
    with pytest.raises(ValueError, match=message):
        changed(**{"buckets": (("0", "2"), ("4", "6", "8")), **change})(plan)
