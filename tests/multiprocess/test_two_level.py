"""Two levels: exact, the same bits everywhere, no deadlock whatever the hosts are, few bytes across a link."""

from unittest import mock

import pytest
import torch
from torch import nn

from poseidon.comm import AllReduce, SufficientFactor
from poseidon.comm.group import Group
from poseidon.comm.two_level import inner_num_bytes, outer_num_bytes
from poseidon.errors import InfeasibleError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, rows

pytestmark = pytest.mark.multiprocess

HOSTS = {
    "2x2": ((0, 1), (2, 3)),
    "interleaved": ((0, 2), (1, 3)),
    "unequal": ((0, 1, 2), (3, 4)),
    "one_alone": ((0,), (1, 2)),
}
TWO_LEVELS = {
    "all_reduce": AllReduce(levels=2),
    "small_buckets": AllReduce(levels=2, first_bytes=8, bucket_bytes=100),
    "factors": SufficientFactor(levels=2),
    "half_width": AllReduce(levels=2, wire="bfloat16"),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.branches = nn.ModuleList(nn.Linear(9, 7, bias=False) for _ in range(2))
        self.last = nn.Linear(7, 5)

    def forward(self, x, branch):
        x = self.norm(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.branches[branch](x)))


def square(model, batch):
    return model(*batch).square().mean()


def data(rank, step):
    """In step 2 rank 1 has no samples; ranks take different branches; row counts differ, more than at first."""
    if step == 2 and rank == 1:
        return None
    return rows(rank, step, 4 + step + rank, 6), (rank + step) % 2 if step != 3 else 0


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def every_way(rank, world_size, hosts):
    for name, scheme in TWO_LEVELS.items():
        rounded = scheme.exactness == "rounded"
        pair = Pair(
            *(rank, world_size, Net(), scheme, square, data, momentum),
            tolerance=0.05 if rounded else 1e-5,
            hosts=hosts,
        )
        used = {scheme for scheme in pair.run.plan.schemes.values() if scheme.levels == 2}
        assert used, name
        pair.steps(5)
        with pair.run.no_sync():
            square(pair.model, data(rank, 5)).backward()
        pair.run.check_replicas()
        pair.run.detach()


@pytest.mark.parametrize("layout", HOSTS)
def test_exact_and_alike_on_all_ranks(layout):
    hosts = HOSTS[layout]
    run_ranks(sum(map(len, hosts)), every_way, hosts)


def mixed(rank, world_size):
    """One and two levels, factors and buckets, over two connections, at once."""
    schemes = {
        "first": SufficientFactor(),
        "norm": AllReduce(levels=2),
        "branches.0": SufficientFactor(levels=2),
        "branches.1": AllReduce(),
        "last": AllReduce(levels=2, wire="float16"),
    }
    pair = Pair(*(rank, world_size, Net(), schemes, square, data), tolerance=0.02, hosts=HOSTS["2x2"])
    pair.steps(6)
    pair.run.adopt(pair.run.plan.model_copy(update={"wait_free": False}))
    pair.steps(2)
    pair.run.detach()


def test_levels_mix():
    run_ranks(4, mixed)


# Bytes


def wide_data(rank, step):
    return rows(rank, step, 8, 256)


def link_bytes(rank, world_size, scheme, hosts):
    """What this rank sends in one step to ranks of other hosts, and what it sends altogether."""
    torch.manual_seed(0)
    pair = Pair(
        *(rank, world_size, nn.Linear(256, 256, bias=False), scheme, lambda m, x: m(x).square().mean(), wide_data),
        tolerance=0.05,
        hosts=hosts,
    )
    pair.step(0)
    group, crossed = pair.run.group, [0]
    home = group.layout.host_of(rank)
    exchange, in_lane = group.exchange, group.all_reduce_in_lane

    def count_exchange(sends, receives, **kwargs):
        crossed[0] += sum(t.numel() * t.element_size() for peer, t in sends if peer not in home)
        return exchange(sends, receives, **kwargs)

    def count_lane(tensor, what):
        pending = in_lane(tensor, what)
        crossed[0] += pending.num_bytes
        return pending

    before = group.bytes_sent
    with mock.patch.multiple(group, exchange=count_exchange, all_reduce_in_lane=count_lane):
        pair.backward(1)
    pair.run.detach()
    (layer,) = pair.run.plan.layers.values()
    return crossed[0], group.bytes_sent - before, pair.run.plan.bytes_sent, layer.num_bytes


@pytest.mark.parametrize("layout", ["2x2", "unequal"])
def test_the_sum_crosses_each_link_once(layout):
    hosts = HOSTS[layout]
    results = run_ranks(sum(map(len, hosts)), link_bytes, AllReduce(levels=2), hosts)
    gradient = results[0][3]
    for host in hosts:
        assert sum(results[rank][0] for rank in host) == pytest.approx(outer_num_bytes(gradient, len(hosts)), rel=0.01)
    assert sum(sent for _, sent, _, _ in results) / len(results) == pytest.approx(results[0][2], rel=0.01)


@pytest.mark.parametrize("layout", ["2x2", "unequal"])
def test_factors_cross_each_link_once_for_each_host(layout):
    hosts = HOSTS[layout]
    world_size = sum(map(len, hosts))
    factors = 8 * (256 + 256) * 4
    results = run_ranks(world_size, link_bytes, SufficientFactor(levels=2), hosts)
    for host in hosts:
        crossed = sum(results[rank][0] for rank in host)
        assert crossed == pytest.approx(factors * len(host) * (len(hosts) - 1), rel=0.02)
    assert sum(sent for _, sent, _, _ in results) / world_size == pytest.approx(results[0][2], rel=0.02)
    flat = run_ranks(world_size, link_bytes, SufficientFactor(), hosts)
    for host in hosts:
        crossed = sum(flat[rank][0] for rank in host)
        assert crossed == pytest.approx(factors * len(host) * (world_size - len(host)), rel=0.02)


def test_bytes_by_hand():
    assert inner_num_bytes(1000, 4) == 750
    assert outer_num_bytes(1000, 4) == 1500
    assert outer_num_bytes(1000, 1) == 0


# Where there is one level only


def refused(rank, world_size, hosts, counted):
    model = nn.Sequential(nn.Linear(4, 4))
    group = Group.of_default(hosts=hosts)
    for scheme in (AllReduce(levels=2), SufficientFactor(levels=2)):
        plan = uniform_plan(profile_structure(model), world_size, scheme)
        with pytest.raises(
            InfeasibleError, match=f"{scheme.kind} with levels = 2 .* here are {counted}: .* levels = 1"
        ):
            attach(model, None, plan, group)


@pytest.mark.parametrize(
    ("hosts", "counted"),
    [(((0,), (1,), (2,)), "3 hosts with 1 rank"), (((0, 1, 2),), "1 host with 3 ranks")],
)
def test_one_level_is_refused(hosts, counted):
    run_ranks(3, refused, hosts, counted)


def found_out(rank, world_size):
    group = Group.of_default()
    assert group.layout.hosts == (tuple(range(world_size)),), "all on this machine"
    assert not group.layout.has_two_levels


def test_ranks_find_out_who_shares_their_host():
    run_ranks(3, found_out)
