"""Sufficient factors under everything that a model may do with a fully connected layer."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from poseidon.comm import SufficientFactor
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, check_steps, rows

pytestmark = pytest.mark.multiprocess


def square(model, x):
    return model(x).square().mean()


def make_mlp(bias=True, inplace=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias=bias), nn.ReLU(inplace=inplace), nn.Linear(9, 4, bias=bias))


# What goes in


def inputs(rank, world_size):
    for bias in (True, False):
        for shape in ((6,), (5, 6), (2, 3, 6), (2, 1, 3, 6)):

            def data(r, step, shape=shape):
                return rows(r, step, math.prod(shape[:-1]), 6).reshape(shape)

            check_steps(rank, world_size, make_mlp(bias), SufficientFactor(), square, data)


def row_counts(rank, world_size):
    # other counts on each rank, none on some, far more than the plan's capacity, none anywhere but once
    counts = [[4, 2, 3, 1], [0, 5, 2, 2], [40, 1, 0, 90], [3, 3, 3, 3], [0, 0, 0, 0], [200, 0, 0, 0], [2, 2, 2, 2]]

    def data(r, step):
        return rows(r, step, counts[step][r], 6)

    def total(model, x):
        return model(x).square().sum()

    check_steps(rank, world_size, make_mlp(), SufficientFactor(), total, data, steps=len(counts))


class Recurrent(nn.Module):
    """One cell, run as often as the batch says."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, x, times):
        for _ in range(times):
            x = torch.tanh(self.cell(x))
        return x


def called_often(rank, world_size):
    times = [2, 2, 1, 3, 3, 5, 1]
    check_steps(
        *(rank, world_size, Recurrent(), SufficientFactor()),
        lambda model, batch: model(*batch).square().mean(),
        lambda r, step: (rows(r, step, 3 + r, 6), times[step] + (r if step == 5 else 0)),
        steps=len(times),
    )


def keyword(rank, world_size):
    model = nn.Linear(6, 3)
    check_steps(
        *(rank, world_size, model, SufficientFactor()),
        lambda model, x: model(input=x).square().mean(),
        lambda r, step: rows(r, step, 4, 6),
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("check", [inputs, row_counts, called_often, keyword])
def test_what_goes_in(check, world_size):
    run_ranks(world_size, check)


# What is trained


def frozen(rank, world_size):
    def data(r, step):
        return rows(r, step, 5, 6)

    for name in ("0.bias", "2.bias", "0.weight", "2.weight"):
        model = make_mlp()
        model.get_parameter(name).requires_grad_(False)
        check_steps(rank, world_size, model, SufficientFactor(), square, data)
    check_steps(  # the input's gradient is wanted as well
        *(rank, world_size, make_mlp(), SufficientFactor()),
        lambda model, x: _with_input_gradient(model, x),
        data,
    )


def _with_input_gradient(model, x):
    x = x.clone().requires_grad_()
    return model(x).square().mean()


def frozen_for_a_while(rank, world_size):
    pair = Pair(
        *(rank, world_size, make_mlp(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5, 6).requires_grad_(),
    )
    for step, trained in enumerate([True, False, True, False]):
        for model in (pair.model, pair.alone):
            model[2].requires_grad_(trained)
        sent = pair.run.group.bytes_sent
        pair.step(step)
        if not trained:
            one_layer = 5 * (6 + 9) * 4 * (world_size - 1)
            assert pair.run.group.bytes_sent - sent < one_layer + 500, "a frozen layer's factors travel"
    pair.run.detach()


def inplace_in_three_dimensions(rank, world_size):
    check_steps(
        *(rank, world_size, make_mlp(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 12, 6).view(2, 6, 6),
    )


@pytest.mark.parametrize("check", [frozen, frozen_for_a_while, inplace_in_three_dimensions])
def test_what_is_trained(check):
    run_ranks(2, check)


# Precision


def autocast(rank, world_size):
    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def data(r, step):
        return rows(r, step, 64, 256)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(inplace=True), nn.Linear(128, 64))
    pair = Pair(rank, world_size, model, SufficientFactor(), loss, data, tolerance=0.02)
    assert [layer.factor_num_bytes for layer in pair.run.plan.profile.layers] == [2, 2]
    sent = pair.run.group.bytes_sent
    pair.steps(3)
    per_step = (pair.run.group.bytes_sent - sent) / 3
    assert per_step == pytest.approx(64 * (256 + 128 + 128 + 64) * 2 * (world_size - 1), rel=0.02)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    pair.run.detach()


def double_precision(rank, world_size):
    check_steps(
        *(rank, world_size, make_mlp().double(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5, 6).double(),
        tolerance=1e-13,
    )


@pytest.mark.parametrize("check", [autocast, double_precision])
def test_precision(check):
    run_ranks(2, check)


# Checkpoints


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, times=1):
        super().__init__()
        self.inner = make_mlp()
        self.back = nn.Linear(4, 6)
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = self.back(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))
        return x


def checkpointed(rank, world_size):
    for use_reentrant in (True, False):
        for times in (1, 2):
            torch.manual_seed(0)
            pair = Pair(
                *(rank, world_size, Checkpointed(use_reentrant, times), SufficientFactor(), square),
                lambda r, step: rows(r, step, 5 + r, 6).requires_grad_(),
            )
            pair.steps(3)
            sent = pair.run.group.bytes_sent
            pair.step(3)
            most = times * (6 + world_size) * (6 + 9 + 9 + 4 + 4 + 6) * 4 * (world_size - 1) + 6 * 64 * (world_size - 1)
            assert pair.run.group.bytes_sent - sent <= most, "recomputed factors travel too"
            pair.run.detach()


def checkpointed_all_reduce(rank, world_size):
    for use_reentrant in (True, False):
        for times in (1, 2):
            torch.manual_seed(0)
            check_steps(
                *(rank, world_size, Checkpointed(use_reentrant, times), None, square),
                lambda r, step: rows(r, step, 5 + r, 6).requires_grad_(),
            )


@pytest.mark.parametrize("check", [checkpointed, checkpointed_all_reduce])
def test_checkpoint(check):
    run_ranks(2, check)


# Passes that do not come in pairs


def two_forwards(rank, world_size):
    pair = Pair(
        *(rank, world_size, make_mlp(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5 + r, 6),
    )

    def both(model, step, backward):
        first = [square(model, pair.data(r, step)) for r in backward]
        second = [3 * square(model, pair.data(r, step + 100)) for r in backward]
        return first, second

    for step in range(4):
        together = step % 2 == 0
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()
        (first,), (second,) = both(pair.model, step, [rank])
        if together:
            (first + second).backward()
        else:  # the later forward's backward first, then the earlier one's
            second.backward()
            first.backward()
        firsts, seconds = both(pair.alone, step, range(world_size))
        ((sum(firsts) + sum(seconds)) / world_size).backward()
        pair.compare()
        pair.update()
    pair.run.detach()


def graph_kept(rank, world_size):
    """Backward twice through one graph, with another forward in between."""
    pair = Pair(
        *(rank, world_size, make_mlp(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5, 6),
    )
    for step in range(2):
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()
        kept = square(pair.model, pair.data(rank, step))
        kept.backward(retain_graph=True)
        other = square(pair.model, pair.data(rank, step + 50))
        (kept + other).backward()
        for r in range(world_size):
            twice = 2 * square(pair.alone, pair.data(r, step)) + square(pair.alone, pair.data(r, step + 50))
            (twice / world_size).backward()
        pair.compare()
        pair.update()
    pair.run.detach()


def forgotten_forward(rank, world_size):
    pair = Pair(
        *(rank, world_size, make_mlp(), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5, 6),
    )
    kept = []
    for step in range(5):
        if step in (1, 2, 3) and rank == step % world_size:
            output = square(pair.model, rows(9, step, 7, 6))  # nobody calls backward
            kept.append(output)
            if step == 2:
                kept.clear()
            del output
        if step == 4:
            with torch.no_grad():
                square(pair.model, rows(9, step, 300, 6))
        pair.step(step)
    pair.run.detach()


def forgotten_at_the_end(rank, world_size):
    """A forward with a graph on one rank, then detached, attached again and trained on."""
    for _ in range(2):
        pair = Pair(
            *(rank, world_size, make_mlp(), SufficientFactor(), square),
            lambda r, step: rows(r, step, 5, 6),
        )
        pair.steps(2)
        if rank == 1:
            square(pair.model, rows(9, 9, 5, 6))
        pair.run.detach()


@pytest.mark.parametrize("check", [two_forwards, graph_kept, forgotten_forward, forgotten_at_the_end])
@pytest.mark.parametrize("world_size", [2, 3])
def test_passes_that_do_not_come_in_pairs(check, world_size):
    run_ranks(world_size, check)


# What the model looks like meanwhile


def looks(model):
    return type(model), list(model.state_dict()), list(map(type, model)), [id(p) for p in model.parameters()]


def untouched(rank, world_size):
    model = make_mlp()
    before = looks(model)
    text = repr(model)
    pair = Pair(rank, world_size, model, SufficientFactor(), square, lambda r, step: rows(r, step, 5, 6))
    assert looks(model) == before
    assert repr(model) == text
    pair.steps(2)
    twin = copy.deepcopy(model)
    x = rows(0, 7, 3, 6)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any(), "the copy computes with the original's weights"
    assert model(x).any()
    exchanges = pair.run.num_exchanges
    square(twin, x).backward()
    assert pair.run.num_exchanges == exchanges, "the copy takes part in exchanges"
    pair.steps(2)
    assert_on_all_ranks(dict(model.named_parameters()))
    pair.run.detach()
    assert "forward" not in model[0].__dict__


def test_model_is_untouched():
    run_ranks(2, untouched)


class CountProducts(TorchDispatchMode):
    """Notes the shapes of the results of matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.shapes.append((left.shape[0], left.shape[1], right.shape[1]))
        return result


def products(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    pair = Pair(rank, world_size, model, SufficientFactor(), square, lambda r, step: rows(r, step, 5, 6))
    pair.step(0)
    loss = square(model, pair.data(rank, 1))
    with CountProducts() as count:
        loss.backward()
    pair.run.detach()
    return sorted(count.shapes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_local_weight_gradient_is_computed(world_size):
    total = 5 * world_size
    for shapes in run_ranks(world_size, products):
        assert shapes == sorted([(5, 4, 9), (4, total, 9), (9, total, 6)])


# What has no factors


class UsesOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) + F.linear(x, self.layer.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = x.view(1, -1, 6)
        return self.attention(x, x, x)[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def make_normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


WITHOUT_FACTORS = {
    "outside": UsesOutside,
    "attention": Attention,
    "tied": Tied,
    "normed": make_normed,
}


def without_factors(rank, world_size, name):
    check_steps(
        *(rank, world_size, WITHOUT_FACTORS[name](), SufficientFactor(), square),
        lambda r, step: rows(r, step, 5, 6),
    )


@pytest.mark.parametrize("name", WITHOUT_FACTORS)
def test_what_has_no_factors_falls_back(name):
    run_ranks(2, without_factors, name)
