"""Plain all-reduce in buckets, and what holds for every scheme: accumulation, unused layers, clipping, buffers."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poseidon.comm import SCHEMES, AllReduce
from poseidon.comm.all_reduce import VOTE_AFTER, BucketExchange
from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, check_steps, rows, seeded

pytestmark = pytest.mark.multiprocess


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 6)


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4))


def buckets_of(run):
    return [exchange.bucket for exchange in run._exchanges if isinstance(exchange, BucketExchange)]


# Memory and layout


def views(rank, world_size):
    model = make_mlp()
    plan = uniform_plan(profile_structure(model), world_size, AllReduce(first_bytes=100, bucket_bytes=300))
    run = attach(model, None, plan, Group.of_default())
    buckets = buckets_of(run)
    assert buckets[0].flat.numel() < buckets[1].flat.numel(), "the first is small, so that the link starts early"
    for step in range(3):
        model.zero_grad()
        square(model, data(rank, step)).backward()
        for bucket in buckets:
            first = bucket.flat.data_ptr()
            behind = first + bucket.flat.numel() * 4
            assert all(first <= p.grad.data_ptr() < behind for p in bucket.parameters)
    run.detach()
    assert not {p.grad.untyped_storage().data_ptr() for p in model.parameters()} & {
        bucket.flat.untyped_storage().data_ptr() for bucket in buckets
    }


def live_bytes(rank, world_size):
    """Between two steps there is one copy of the gradients, the buckets, and nothing else of their size."""
    model = nn.Linear(500, 400)
    run = attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(2):
        model.zero_grad()
        square(model, rows(rank, step, 3, 500)).backward()
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known
    }
    large = [size for size in storages.values() if size > 100_000]
    assert sum(large) <= 4 * (500 * 400 + 400 + 3)
    run.detach()


class Layouts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 7).t())
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.conv(x.view(-1, 3, 3, 3)).flatten(1)
        return (x @ self.turned.t()).double() * self.wide * self.scalar


def layouts(rank, world_size):
    pair = Pair(rank, world_size, Layouts(), None, square, lambda r, step: rows(r, step, 5, 27))
    assert len(pair.run._exchanges) == 2, "one bucket for each dtype"
    pair.steps(3)
    assert pair.model.conv.weight.grad.stride() == pair.model.conv.weight.stride()
    assert pair.model.turned.grad.stride() == pair.model.turned.stride()
    pair.run.detach()
    check_steps(
        *(rank, world_size, make_mlp().bfloat16(), None, square),
        lambda r, step: data(r, step).bfloat16(),
        tolerance=0.03,
        steps=2,
    )


@pytest.mark.parametrize("check", [views, live_bytes, layouts])
def test_memory_and_layout(check):
    run_ranks(2, check)


# Order of arrival


class Ordered(nn.Module):
    """Layers that run in another order than they were made, as `order` says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.order = [2, 0, 3, 1]

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


SMALL_BUCKETS = AllReduce(first_bytes=100, bucket_bytes=200)
"""Smaller than a layer: its weight and bias are in two buckets."""


def reordered(rank, world_size):
    pair = Pair(rank, world_size, Ordered(), SMALL_BUCKETS, square, data)
    wrong = tuple(f"layers.{index}" for index in range(4))
    pair.run.adopt(pair.run.plan.model_copy(update={"arrival": wrong}))
    seen = [pair.run._exchanges]
    for step in range(VOTE_AFTER + 6):
        pair.step(step)
        if pair.run._exchanges is not seen[-1]:
            seen.append(pair.run._exchanges)
            assert step == VOTE_AFTER
    assert pair.run.plan.arrival == ("layers.1", "layers.3", "layers.0", "layers.2")
    assert len(seen) == 2, "rebuilt once, and then never again"
    pair.run.detach()


def changing(rank, world_size):
    """Another order in every step, on every rank: no order is worth new buckets."""
    pair = Pair(rank, world_size, Ordered(), SMALL_BUCKETS, square, data)
    exchanges = pair.run._exchanges
    for step in range(8):
        for model in (pair.model, pair.alone):
            model.order = torch.randperm(4, generator=seeded(step)).tolist()
        pair.step(step)
    assert pair.run._exchanges is exchanges
    pair.run.detach()


@pytest.mark.parametrize("check", [reordered, changing])
def test_order_of_arrival(check):
    run_ranks(3, check)


# Layers that some steps or ranks leave out


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.never = nn.Linear(6, 6)

    def forward(self, x, branch):
        x = torch.tanh(self.first(x))
        return x if branch is None else self.branches[branch](x)


def branches(rank, world_size, kind):
    """A layer that one rank leaves out counts as zero there; one that all leave out stays as it is."""
    chosen = [[0, 0, 0], [1, 2, 0], [None, 1, None], [None, None, None], [2, 2, 2], [0, 1, 2]]

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, momentum=0.9)

    pair = Pair(
        *(rank, world_size, Branches(), None, lambda model, given: square(lambda x: model(x, given[1]), given[0])),
        lambda r, step: (data(r, step), chosen[step][r]),
        make,
    )
    pair.run.adopt(uniform_plan(pair.run.plan.profile, world_size, scheme_of(kind)))
    before = pair.model.never.weight.detach().clone()
    pair.steps(len(chosen))
    assert pair.model.never.weight.grad is None
    assert torch.equal(pair.model.never.weight, before), "no weight decay without a gradient"
    pair.run.detach()


def scheme_of(kind):
    return SCHEMES[kind]()


@pytest.mark.parametrize("kind", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_layers_left_out(kind):
    run_ranks(3, branches, kind)


# Accumulation


class Everything(nn.Module):
    """A layer for each scheme."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 6)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.LayerNorm(9), nn.Linear(9, 4))

    def forward(self, x):
        return self.layers(self.table(x))


def lookups(rank, step):
    return torch.randint(0, 30, (4 + rank,), generator=seeded(rank, step))


def accumulation(rank, world_size, kind):
    pair = Pair(rank, world_size, Everything(), scheme_of(kind), square, lookups)
    for step in range(0, 16, 4):
        pair.optimizer.zero_grad()
        sent = pair.run.group.bytes_sent
        count = 4 if step != 8 else 2  # not always as often
        for micro in range(count - 1):
            with pair.run.no_sync():
                square(pair.model, lookups(rank, step + micro)).backward()
        assert pair.run.group.bytes_sent == sent, "nothing crosses the network before the last micro-batch"
        square(pair.model, lookups(rank, step + count - 1)).backward()
        assert pair.run.group.bytes_sent > sent
        expect(pair, [(step + micro, 1) for micro in range(count)])
    pair.run.detach()


def expect(pair, parts):
    """The gradients are the mean of these steps' losses, each times its factor; then an update."""
    pair.optimizer_alone.zero_grad()
    for r in range(pair.world_size):
        for step, factor in parts:
            (factor * pair.loss(pair.alone, pair.data(r, step)) / pair.world_size).backward()
    pair.compare()
    pair.update()


def half_in_no_sync(rank, world_size, kind):
    """Only the forward, or only the backward, inside `no_sync`: backward decides, as with DDP's gradients."""
    pair = Pair(rank, world_size, Everything(), scheme_of(kind), square, lookups)
    for step in range(0, 12, 4):
        pair.optimizer.zero_grad()
        with pair.run.no_sync():
            first = square(pair.model, lookups(rank, step))
        first.backward()
        expect(pair, [(step, 1)])
        pair.optimizer.zero_grad()
        second = square(pair.model, lookups(rank, step + 1))
        sent = pair.run.group.bytes_sent
        with pair.run.no_sync():
            second.backward()
        square(pair.model, lookups(rank, step + 2)).backward()
        assert pair.run.group.bytes_sent > sent
        expect(pair, [(step + 1, 1), (step + 2, 1)])
    pair.run.detach()


def without_data_at_the_end(rank, world_size, kind):
    """Accumulated gradients of a rank that has no batch for the exchange itself still count."""
    pair = Pair(rank, world_size, Everything(), scheme_of(kind), square, lookups)
    pair.step(0)
    pair.optimizer.zero_grad()
    with pair.run.no_sync():
        square(pair.model, lookups(rank, 1)).backward()
    pair.run.empty_step()
    expect(pair, [(1, 1)])
    pair.step(2)
    pair.run.detach()


def kept_memory(rank, world_size, kind):
    """Gradients zeroed in place, and gradients that nobody zeroes."""
    pair = Pair(rank, world_size, Everything(), scheme_of(kind), square, lookups)
    for step in range(3):
        pair.optimizer.zero_grad(set_to_none=False)
        square(pair.model, lookups(rank, step)).backward()
        expect(pair, [(step, 1)])
    if kind != "sharded_server":  # there the optimizer's step has used the mean up
        square(pair.model, lookups(rank, 3)).backward()
        for r in range(world_size):
            (square(pair.alone, lookups(r, 3)) / world_size).backward()
        pair.compare()
    pair.run.detach()


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("check", [accumulation, half_in_no_sync, without_data_at_the_end, kept_memory])
def test_accumulation(check, kind):
    run_ranks(2, check, kind)


# Between backward and step, and after


def clipping(rank, world_size):
    for kind in ("all_reduce", "sufficient_factor", "sparse_rows"):
        pair = Pair(rank, world_size, Everything(), scheme_of(kind), square, lookups)
        for step in range(3):
            pair.backward(step)
            pair.backward_alone(step)
            norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.01) for model in (pair.model, pair.alone)]
            assert torch.isclose(*norms, rtol=1e-5)
            pair.compare()
            pair.update()
        pair.run.detach()


def buffers(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    run = attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
    for step in range(3):
        model.zero_grad()
        square(model, data(rank, step)).backward()
    mine = model[1].running_mean.clone()
    run.sync_buffers()
    assert_on_all_ranks(dict(model.named_buffers()))
    assert torch.equal(model[1].running_mean, mine) == (rank == 0), "rank 0's"
    assert int(model[1].num_batches_tracked) == 3
    run.detach()


class HiddenSparse(nn.Module):
    """Nothing about it says that its gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 3))

    def forward(self, x):
        return F.embedding(x, self.table, sparse=True)


def sparse_is_refused(rank, world_size):
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True))
    for kind in ("all_reduce", "sharded_server"):
        plan = uniform_plan(profile_structure(model), world_size, scheme_of(kind))
        with pytest.raises(InfeasibleError, match=f"layer '0' has sparse gradients, which {kind} cannot carry"):
            attach(model, torch.optim.SGD(model.parameters()), plan, Group.of_default())
    model = HiddenSparse()
    run = attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
    with pytest.raises(CommError, match="table has a sparse gradient, which cannot be all-reduced"):
        square(model, torch.tensor([1, 2])).backward()
    run.detach()


@pytest.mark.parametrize("check", [clipping, buffers, sparse_is_refused])
def test_between_backward_and_step(check):
    run_ranks(2, check)


def broken_off(rank, world_size):
    """A backward pass that an exception ended is named at the next forward, on the rank where it happened."""
    model = make_mlp()
    run = attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
    square(model, data(rank, 0)).backward()

    def fail(_):
        raise ValueError("not this time")

    model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="not this time"):
        square(model, data(rank, 1)).backward()
    with pytest.raises(
        Exception, match=f"rank {rank}: the last backward pass broke off with an exception in exchange 1"
    ):
        square(model, data(rank, 2))
    run.detach()


def test_broken_backward():
    run_ranks(2, broken_off)
