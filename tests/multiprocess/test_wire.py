"""Narrower formats on the wire: half the bytes, the same bits everywhere, an error that the format's epsilon bounds."""

import pytest
import torch
from torch import nn

from poseidon.comm import AllReduce, SufficientFactor
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, plan_for, rows

pytestmark = pytest.mark.multiprocess

WIRES = ["bfloat16", "float16"]


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 40)


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


def gradients_of(model, schemes, rank, world_size, batch=data):
    """Of one step under a plan, and what was sent for them."""
    plan = plan_for(model, world_size, schemes, lambda: square(model, batch(0, 0)))
    run = attach(model, None, plan, Group.of_default())
    square(model, batch(rank, 0)).backward()
    (step,) = run.timeline.steps
    sent = sum(i.num_bytes for i in step.intervals if i.activity == "transfer" and i.name != "counts")
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert_on_all_ranks(found)
    run.detach()
    return found, sent


def shares(world_size):
    """Each rank's share of the mean gradient, by name of the parameter."""
    for rank in range(world_size):
        model = make_mlp()
        (square(model, data(rank, 0)) / world_size).backward()
        yield {name: p.grad for name, p in model.named_parameters()}


def bounded_sums(rank, world_size, wire):
    """Each share is rounded once, and each of the sums on the way."""
    exact, sent = gradients_of(make_mlp(), AllReduce(), rank, world_size)
    found, narrow_sent = gradients_of(make_mlp(), AllReduce(wire=wire), rank, world_size)
    assert narrow_sent == sent // 2
    parts = list(shares(world_size))
    format = torch.finfo(getattr(torch, wire))
    for name, value in exact.items():
        largest = sum(part[name].abs() for part in parts)
        error = (found[name] - value).abs()
        assert (error <= world_size * (format.eps * largest + format.smallest_normal * format.eps)).all()
        assert error.max() > 0, "it is rounded, not exact"


def bounded_factors(rank, world_size, wire):
    """Both factors of each row are rounded once; the products are summed in the gradient's own format."""
    schemes = {"2": SufficientFactor(wire=wire)}
    exact, _ = gradients_of(make_mlp(), {"2": SufficientFactor()}, rank, world_size)
    found, _ = gradients_of(make_mlp(), schemes, rank, world_size)
    eps = torch.finfo(getattr(torch, wire)).eps
    largest = torch.zeros_like(exact["2.weight"])
    for other in range(world_size):
        model = make_mlp()
        inputs = model[:2](data(other, 0)).detach()
        output = model[2](inputs).detach().requires_grad_()
        output.square().mean().backward()
        largest += (output.grad / world_size).abs().t() @ inputs.abs()
    error = (found["2.weight"] - exact["2.weight"]).abs()
    assert (error <= 1.01 * eps * largest + 1e-7).all()
    assert error.max() > 0
    assert torch.equal(found["0.weight"], exact["0.weight"]), "the other layer is as exact as before"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", [bounded_sums, bounded_factors])
def test_error(check, world_size, wire):
    run_ranks(world_size, check, wire)


def accumulated(rank, world_size):
    """Accumulation, a rank without samples, rows beyond the buffers: as close as the format allows."""
    for schemes in (AllReduce(wire="bfloat16"), SufficientFactor(wire="bfloat16")):
        pair = Pair(
            *(rank, world_size, make_mlp(), schemes, square),
            lambda r, step: None if (step, r) == (1, 1) else rows(r, step, 5 + 3 * step, 40),
            tolerance=0.03,
        )
        pair.steps(3)
        pair.optimizer.zero_grad()
        with pair.run.no_sync():
            square(pair.model, data(rank, 4)).backward()
        square(pair.model, data(rank, 5)).backward()
        pair.optimizer_alone.zero_grad()
        for r in range(world_size):
            for step in (4, 5):
                (square(pair.alone, data(r, step)) / world_size).backward()
        pair.compare()
        pair.run.detach()


def large_numbers(rank, world_size):
    """Shares of the mean are summed, so that a sum beyond the range of float16 is none; a mean beyond it is inf."""
    model = nn.Linear(1, 1, bias=False)
    run = attach(
        model, None, uniform_plan(profile_structure(model), world_size, AllReduce(wire="float16")), Group.of_default()
    )
    for gradient, expected in ((40_000.0, 40_000.0), (70_000.0, float("inf"))):
        model.zero_grad()
        (model(torch.ones(1, 1)) * gradient).sum().backward()
        assert float(model.weight.grad) == expected
    run.detach()


def narrow_already(rank, world_size):
    """A model in bfloat16 sends what it has."""
    model = make_mlp().bfloat16()
    found, sent = gradients_of(model, AllReduce(wire="float16"), rank, world_size, lambda r, s: data(r, s).bfloat16())
    model = make_mlp().bfloat16()
    exact, plain = gradients_of(model, AllReduce(), rank, world_size, lambda r, s: data(r, s).bfloat16())
    assert sent == plain
    assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize("check", [accumulated, large_numbers, narrow_already])
def test_wire(check):
    run_ranks(3, check)
