"""A run as a whole: attached and undone, refused where ranks or plans do not fit, proofs that replicas are equal."""

import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from poseidon.comm import SCHEMES, AllReduce, ShardedServer, SufficientFactor
from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_same, plan_for, rows, seeded

pytestmark = pytest.mark.multiprocess


def square(model, x):
    return model(x).square().mean()


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


MIX = {
    "table": SCHEMES["sparse_rows"](),
    "layers.0": SufficientFactor(),
    "layers.2": AllReduce(),
    "layers.3": ShardedServer(),
}


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("poseidon-")}


def undone(rank, world_size):
    pair = Pair(rank, world_size, Everything(), MIX, square, lookups)
    assert threads() == {"poseidon-issue", "poseidon-complete", "poseidon-complete-aside"}
    pair.steps(3)
    pair.run.check_replicas()
    pair.backward(3)
    pair.backward_alone(3)
    pair.run.detach()
    assert not threads()
    for module in pair.model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in pair.model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    assert not pair.optimizer._optimizer_step_pre_hooks
    assert not pair.optimizer._optimizer_step_post_hooks
    found = {n: p.grad for n, p in pair.model.named_parameters()}
    assert_same(found, {n: p.grad for n, p in pair.alone.named_parameters()})  # usable, the served ones too
    pair.update()
    # From here on nothing is exchanged: each rank is alone with its own batch.
    pair.model.zero_grad()
    square(pair.model, lookups(rank, 9)).backward()
    pair.alone.zero_grad()
    square(pair.alone, lookups(rank, 9)).backward()
    own = {n: p.grad for n, p in pair.model.named_parameters()}
    assert_same(own, {n: p.grad for n, p in pair.alone.named_parameters()})
    twin = Pair(rank, world_size, pair.model, MIX, square, lookups)  # and on again
    twin.steps(2)
    twin.run.detach()


def baseline(rank, world_size):
    """Not wait-free: all transfers after backward; and over two connections. The same numbers."""
    for change in ({"wait_free": False}, {"connections": 2}):
        pair = Pair(rank, world_size, Everything(), MIX, square, lookups)
        pair.run.adopt(pair.run.plan.model_copy(update=change))
        pair.steps(3)
        pair.run.detach()


def root_layer(rank, world_size):
    """The model is the layer."""
    for kind in SCHEMES:
        pair = Pair(*(rank, world_size, nn.Linear(6, 4), SCHEMES[kind](), square, lambda r, step: rows(r, step, 5, 6)))
        pair.steps(2)
        pair.run.detach()


def one_rank_adds_up(rank, world_size):
    """Its timeline: steps follow one another, intervals lie inside, bytes are those that the group counted."""
    pair = Pair(rank, world_size, Everything(), MIX, square, lookups)
    before = pair.run.group.bytes_sent
    for step in range(3):
        pair.backward(step)
        pair.optimizer.step()
    steps = pair.run.timeline.steps
    assert [step.index for step in steps] == [0, 1, 2]
    assert all(later.start == earlier.end for earlier, later in pairwise(steps))
    for step in steps:
        assert all(step.start <= i.start <= i.end <= step.end for i in step.intervals)
    pair.backward(3)  # the last gather of parameters belongs to the step that follows it
    counted = sum(step.bytes_sent for step in pair.run.timeline.steps)
    assert counted == pair.run.group.bytes_sent - before
    pair.run.detach()


@pytest.mark.parametrize("check", [undone, baseline, root_layer, one_rank_adds_up])
def test_run(check):
    run_ranks(2, check)


def alone(rank, world_size):
    """One rank: nothing is exchanged, everything works."""
    pair = Pair(rank, world_size, Everything(), MIX, square, lookups)
    pair.steps(2)
    with pair.run.no_sync():
        pair.backward(2)
    pair.run.empty_step()
    pair.run.check_replicas()
    pair.run.sync_buffers()
    pair.run.detach()
    assert pair.run.group.bytes_sent == 0
    assert not threads()


def test_one_rank():
    run_ranks(1, alone)


# Refusals


def longer():
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))


MODELS = {
    "layer": (lambda: nn.Sequential(nn.Linear(6, 4)), longer, "missing on rank 0 and parameter '1.weight' (4, 4)"),
    "fewer": (
        longer,
        lambda: nn.Sequential(nn.Linear(6, 4)),
        "parameter '1.weight' (4, 4) torch.float32 on rank 0 and",
    ),
    "shape": (lambda: nn.Linear(6, 4), lambda: nn.Linear(6, 5), "parameter 'weight' (5, 6)"),
    "dtype": (lambda: nn.Linear(6, 4), lambda: nn.Linear(6, 4).double(), "(4, 6) torch.float64 on rank 1"),
    "frozen": (lambda: nn.Linear(6, 4), lambda: nn.Linear(6, 4).requires_grad_(False), "frozen parameter 'weight'"),
    "buffer": (
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        "buffer 'running_mean'",
    ),
    "layout": (
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        "(4, 3, 3, 3) with strides (27, 1, 9, 3) torch.float32 on rank 1",
    ),
}


def other_models(rank, world_size):
    for usual, other, message in MODELS.values():
        model = other() if rank == 1 else usual()
        with pytest.raises(InfeasibleError, match="the models differ between ranks") as caught:
            attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
        assert message in str(caught.value)
    assert not threads()


def other_plans(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    group = Group.of_default()
    profile = profile_structure(model)
    for plan, message in (
        (uniform_plan(profile, world_size + 1), f"the plan is for {world_size + 1} ranks, but {world_size} are here"),
        (uniform_plan(profile_structure(longer()), world_size), "at layer '1': planned for .*4, 4.*found .*2, 4"),
        (uniform_plan(profile_structure(model[0]), world_size), "at layer '': the model has no such layer"),
        (
            uniform_plan(profile_structure(nn.Sequential(nn.Linear(6, 4))), world_size),
            "at layer '1': the plan does not mention it",
        ),
        (
            uniform_plan(profile, world_size, {"1": SufficientFactor() if rank else AllReduce()}),
            "the plans differ between ranks: the scheme of layer '1' is .*all_reduce.* on rank 0 and .*factor.* rank 1",
        ),
        (
            plan_for(model, world_size, SufficientFactor(), lambda: square(model, rows(0, 0, 3 + rank, 6))),
            "the plans differ between ranks: rows of layer '0' is 3 on rank 0 and 4 on rank 1",
        ),
    ):
        with pytest.raises(InfeasibleError, match=message):
            attach(model, None, plan, group)
    run = attach(model, None, uniform_plan(profile, world_size), group)
    served = uniform_plan(profile, world_size, ShardedServer())
    with pytest.raises(InfeasibleError, match=r"distribute\(\) was given none"):
        run.adopt(served)
    square(model, rows(rank, 0, 3, 6)).backward()  # the run goes on under its old plan
    run.detach()


def drifted(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    torch.manual_seed(rank)
    run = attach(model, None, uniform_plan(profile_structure(model), world_size), Group.of_default())
    run.check_replicas()
    if rank == 1:
        with torch.no_grad():
            model[1].bias[0] += 1e-6
    with pytest.raises(CommError, match=r"after exchange 0: parameter '1.bias' on rank\(s\) 1 differs from rank 0's"):
        run.check_replicas()
    run.detach()


@pytest.mark.parametrize("check", [other_models, other_plans, drifted])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_does_not_fit_is_named(check, world_size):
    run_ranks(world_size, check)


# Gradients that are nobody's step


def inner_gradients(rank, world_size, kind):
    """`torch.autograd.grad` for inputs: on all ranks, as adversarial training has it, and then on one rank only."""
    pair = Pair(
        *(rank, world_size, nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), SCHEMES[kind]()),
        *(attacked, lambda r, step: rows(r, step, 5, 6)),
    )
    for step in range(4):
        exchanges = pair.run.num_exchanges
        if rank == 1 and step >= 2:
            x = rows(7, step, 3, 6).requires_grad_()
            (saliency,) = torch.autograd.grad(square(pair.model, x), x)
            assert saliency.any()
        pair.step(step)
        assert pair.run.num_exchanges == exchanges + 1
    pair.run.detach()


def attacked(model, x):
    x = x.clone().requires_grad_()
    (direction,) = torch.autograd.grad(square(model, x), x)
    return square(model, (x + 0.1 * direction.sign()).detach())


@pytest.mark.parametrize("kind", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_inner_gradients(kind):
    run_ranks(2, inner_gradients, kind)


def gradients_of_parameters(rank, world_size):
    for kind in ("all_reduce", "sufficient_factor"):
        model = nn.Linear(6, 4)
        plan = plan_for(model, world_size, SCHEMES[kind](), lambda model=model: square(model, rows(0, 0, 5, 6)))
        run = attach(model, None, plan, Group.of_default())
        square(model, rows(rank, 0, 5, 6)).backward()
        loss = square(model, rows(rank, 1, 5, 6))
        if kind == "all_reduce":
            assert torch.autograd.grad(loss, list(model.parameters()))[0].any()
        else:
            with pytest.raises(CommError, match=r"asked for the gradient of a parameter of , which sufficient_factor"):
                torch.autograd.grad(loss, list(model.parameters()))
        assert run.num_exchanges == 1
        square(model, rows(rank, 2, 5, 6)).backward()
        assert run.num_exchanges == 2
        run.detach()


def hooked(rank, world_size):
    """Hooks of the model's own on layers and their gradients work as ever."""
    seen = []
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda module, given, output: output * 2)
        layer.register_full_backward_hook(lambda module, mine, given: seen.append(given[0].shape))
    pair = Pair(rank, world_size, model, SufficientFactor(), square, lambda r, step: rows(r, step, 5, 6))
    assert not pair.run.plan.is_plain
    seen.clear()
    pair.backward(0)
    assert seen == [(5, 4), (5, 9)]
    pair.run.detach()
    Pair(rank, world_size, model, SufficientFactor(), square, lambda r, step: rows(r, step, 5, 6)).steps(3).run.detach()


@pytest.mark.parametrize("check", [gradients_of_parameters, hooked])
def test_what_else_models_do(check):
    run_ranks(2, check)
