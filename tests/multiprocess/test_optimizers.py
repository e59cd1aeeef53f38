"""What a loop does between backward and the update: norms, clipping, scalers; several optimizers; whole states."""

import copy
import logging

import pytest
import torch
from torch import nn

from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor
from poseidon.comm.group import Group
from poseidon.errors import CommError, ConfigError, InfeasibleError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, assert_same, rows

pytestmark = pytest.mark.multiprocess

SMALL = ShardedServer(piece_bytes=64)
PLANS = {
    "all_reduce": AllReduce(),
    "factors": SufficientFactor(),
    "server": SMALL,
    "mixed": {"0": SMALL, "2": SufficientFactor(), "4": AllReduce()},
    "deferred": AllReduce(),
    "deferred_factors": SufficientFactor(),
}
USUAL = ("server", "mixed")


def deferring(name):
    return lambda plan: plan.model_copy(update={"deferred": tuple(plan.schemes)} if "deferred" in name else {})


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 6)


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4))


def pair_of(rank, world_size, name, make_optimizer=None, **kwargs):
    return Pair(rank, world_size, make_mlp(), PLANS[name], square, data, make_optimizer, plan=deferring(name), **kwargs)


# Norms and clipping


def clip(rank, world_size, name):
    for norm_type in (2.0, 1.0, 3.5, float("inf")):
        pair = pair_of(rank, world_size, name, lambda p: torch.optim.AdamW(p, lr=0.01))
        for index in range(3):
            pair.backward(index)
            pair.backward_alone(index)
            before = pair.run.grad_norm(norm_type)
            found = pair.run.clip_grad_norm_(0.05, norm_type)
            expected = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.05, norm_type)
            assert torch.equal(before, found)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
            assert_on_all_ranks({"norm": found})
            torch.testing.assert_close(pair.run.grad_norm(norm_type), found.clamp(max=0.05), rtol=1e-4, atol=0.0)
            pair.compare()
            pair.update()
        assert not [event for event in pair.run.events if event["kind"] == "overlooked"]
        pair.run.detach()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_is_that_of_one_process(world_size, name):
    run_ranks(world_size, clip, name)


def odd_norms(rank, world_size):
    pair = pair_of(rank, world_size, "mixed")
    assert pair.run.grad_norm() == 0.0, "before any backward"
    pair.backward(0)
    with pytest.raises(ConfigError, match="norm of type 0"):
        pair.run.grad_norm(0)
    if rank == 1:  # one number of one rank's stretch
        held = [p for exchange in pair.run._exchanges for p in exchange.held if p.numel()]
        held[0].grad.view(-1)[0] = float("nan")
    assert pair.run.grad_norm().isnan()
    assert pair.run.grad_norm(float("inf")).isnan()
    with pytest.raises(RuntimeError, match=r"norm of type 2.0 of all gradients is nan"):
        pair.run.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pair.run.detach()


def test_a_norm_that_is_not_finite_is_seen_by_every_rank():
    run_ranks(2, odd_norms)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 6, sparse=True)
        self.top = nn.Linear(6, 3)

    def forward(self, x):
        return self.top(self.table(x).mean(1))


def look_up(rank, step):
    return torch.randint(0, 30, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def sparse_gradients(rank, world_size):
    pair = Pair(rank, world_size, Table(), {"table": SparseRows(), "top": SMALL}, square, look_up)
    for index in range(2):
        pair.backward(index)
        pair.backward_alone(index)
        found = pair.run.clip_grad_norm_(0.01)
        dense = [p.grad.to_dense() for p in pair.alone.parameters()]
        expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in dense]))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        for parameter in pair.alone.parameters():
            parameter.grad = parameter.grad * (0.01 / (expected + 1e-6))
        pair.update()
    pair.run.detach()


def test_sparse_gradients_count_and_are_clipped():
    run_ranks(2, sparse_gradients)


def overlooked(rank, world_size, how):
    pair = pair_of(rank, world_size, "mixed" if how != "plain" else "factors")
    for index in range(3):
        pair.optimizer.zero_grad()
        square(pair.model, data(rank, index)).backward()
        if how == "run":
            pair.run.clip_grad_norm_(1e-3)
        elif how == "one layer":
            pair.model[4].weight.grad.mul_(2.0)
        else:
            nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-3)
        pair.optimizer.step()
    found = [event["text"] for event in pair.run.events if event["kind"] == "overlooked"]
    pair.run.detach()
    return found


@pytest.mark.parametrize(("how", "count"), [("torch", 1), ("run", 0), ("one layer", 0), ("plain", 0)])
def test_clipping_that_passes_by_what_the_optimizer_holds_is_said_once(how, count):
    for texts in run_ranks(2, overlooked, how):
        assert len(texts) == count
        assert all("those of 0 on sharded_server were not" in text for text in texts)


# GradScaler


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


class Spike(torch.autograd.Function):
    """The identity, whose gradient is not finite in one number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, 0] = float("inf")
        return gradient


def spiked(model, batch):
    """The loss; in some steps one number of the first layer's output gradient is not finite on one rank."""
    x, spike = batch
    y = model[0](x)
    y = Spike.apply(y) if spike else y
    return model[1:](y).square().mean()


def spike_data(rank, step):
    return rows(rank, step, 5, 6), step in (1, 4) and rank == step % 2


def scale(rank, world_size, name, optimizer_name, how):
    pair = Pair(
        rank, world_size, make_mlp(), PLANS[name], spiked, spike_data, OPTIMIZERS[optimizer_name],
        plan=deferring(name),
    )  # fmt: skip
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    skipped = []
    for index in range(6):
        if how == "model.zero_grad":
            pair.model.zero_grad()
        else:
            pair.optimizer.zero_grad()
        scalers[0].scale(pair.loss(pair.model, spike_data(rank, index))).backward()
        pair.optimizer_alone.zero_grad()
        for other in range(world_size):
            scalers[1].scale(pair.loss(pair.alone, spike_data(other, index)) / world_size).backward()
        if how == "clip":
            scalers[0].unscale_(pair.optimizer)
            scalers[1].unscale_(pair.optimizer_alone)
            found = pair.run.clip_grad_norm_(0.05)
            expected = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.05)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)
        scalers[0].step(pair.optimizer)
        scalers[1].step(pair.optimizer_alone)
        before = scalers[0].get_scale()
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), f"in step {index}"
        skipped.append(scalers[0].get_scale() < before)
        pair.compare_parameters()
    assert skipped == [False, True, False, False, True, False]
    groups = pair.optimizer.param_groups
    pair.run.detach()
    assert [len(g["params"]) for g in groups] == [len(g["params"]) for g in pair.optimizer_alone.param_groups]
    assert len(pair.optimizer.state) == len(pair.optimizer_alone.state)
    assert_same(
        {n: p.detach() for n, p in pair.model.named_parameters()},
        {n: p.detach() for n, p in pair.alone.named_parameters()},
    )


def scale_all(rank, world_size, name):
    for optimizer_name in OPTIMIZERS:
        for how in ("step", "clip", "model.zero_grad"):
            try:
                scale(rank, world_size, name, optimizer_name, how)
            except AssertionError as error:
                error.add_note(f"{optimizer_name}, {how}")
                raise


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in PLANS]
)
def test_all_ranks_skip_the_steps_that_one_process_skips(name):
    run_ranks(3, scale_all, name)


# Several optimizers, closures


def two_optimizers(rank, world_size, schemes):
    model, alone = make_mlp(), make_mlp()

    def make(net):
        return [
            torch.optim.Adam(net[:3].parameters(), lr=0.01),
            torch.optim.SGD(net[3:].parameters(), lr=0.1, momentum=0.9),
        ]

    optimizers, optimizers_alone = make(model), make(alone)
    plan = uniform_plan(profile_structure(model), world_size, schemes)
    run = attach(model, optimizers, plan, Group.of_default())
    assert run.optimizers == tuple(optimizers)
    assert run.optimizer is optimizers[0]
    for index in range(4):
        for optimizer in (*optimizers, *optimizers_alone):
            optimizer.zero_grad()
        square(model, data(rank, index)).backward()
        for other in range(world_size):
            (square(alone, data(other, index)) / world_size).backward()
        for which in (0, 1) if index != 2 else (1,):  # one of them rests in a step
            optimizers[which].step()
            optimizers_alone[which].step()
        found = {n: p.detach() for n, p in model.named_parameters()}
        assert_same(found, {n: p.detach() for n, p in alone.named_parameters()}, 1e-4)
        assert_on_all_ranks(found)
    states = [run.optimizer_state_dict(optimizer) for optimizer in optimizers]
    for state, other in zip(states, optimizers_alone, strict=True):
        assert_state(state, other.state_dict())
    with pytest.raises(ConfigError, match="which of 2 optimizers"):
        run.optimizer_state_dict()
    run.detach()


def assert_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            mine = found["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert mine.shape == value.shape
                torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-6)
            else:
                assert mine == value


@pytest.mark.parametrize("schemes", [AllReduce(), SMALL, {"0": SMALL, "4": SMALL}])
def test_two_optimizers_over_one_model(schemes):
    run_ranks(2, two_optimizers, schemes)


def refused(rank, world_size):
    del rank
    model = make_mlp()
    profile = profile_structure(model)
    halves = [torch.optim.SGD([model[0].weight], lr=0.1), torch.optim.SGD([model[0].bias], lr=0.1)]
    plain, served = (uniform_plan(profile, world_size, scheme) for scheme in (AllReduce(), {"0": SMALL}))
    late = plain.model_copy(update={"deferred": ("0",), "buckets": (("4", "2"), ("0",))})
    group = Group.of_default()
    for optimizer, plan, reason in (
        (torch.optim.LBFGS(model.parameters()), plain, "LBFGS on several ranks: its step.. calls a closure"),
        (halves, served, "layer 0: .* SGD does not update its bias"),
        (torch.optim.SGD(model[2:].parameters()), served, "layer 0: .* given none that updates it"),
        ([torch.optim.SGD(model[:2].parameters()), torch.optim.SGD(model[2:].parameters())], late, "cannot defer '0'"),
    ):
        with pytest.raises(InfeasibleError, match=reason):
            attach(model, optimizer, plan, group)
    with pytest.raises(ConfigError, match="cannot use object as an optimizer"):
        attach(model, object(), plain, group)
    run = attach(model, torch.optim.SGD(model.parameters()), plain, group)
    with pytest.raises(InfeasibleError, match="plan is for 3 ranks"):
        run.adopt(uniform_plan(profile, world_size + 1, AllReduce()))
    run.adopt(served)
    run.adopt(served)
    square(model, data(0, 0)).backward()
    run.detach()


def test_what_optimizers_cannot_do_is_refused_with_the_reason():
    run_ranks(2, refused)


def test_one_rank_takes_lbfgs():
    model = make_mlp()
    plan = uniform_plan(profile_structure(model), 1, AllReduce())
    optimizer = torch.optim.LBFGS(model.parameters())
    run = attach(model, optimizer, plan, Group([]))

    def closure():
        optimizer.zero_grad()
        loss = square(model, data(0, 0))
        loss.backward()
        return loss

    before = optimizer.step(closure)
    assert closure() < before
    run.detach()


# Whole states

STATES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam([{"params": p[:3]}, {"params": p[3:], "lr": 0.02}], lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
}


def listing(name):
    return lambda parameters: STATES[name](list(parameters))


def go_on(rank, world_size, name, weights, state, start):
    """Loads on so many ranks and takes two steps; one rank uses neither plan nor run."""
    model = make_mlp()
    model.load_state_dict(weights)
    optimizer = listing(name)(model.parameters())
    run = None
    if world_size > 1:
        plan = uniform_plan(profile_structure(model), world_size, {"0": SMALL, "4": SMALL})
        run = attach(model, optimizer, plan, Group.of_default())
        run.load_optimizer_state_dict(state)
        again = run.optimizer_state_dict()
        assert_bits(again, state)
    else:
        optimizer.load_state_dict(state)
        assert_bits(optimizer.state_dict(), state)
    for index in range(start, start + 2):
        optimizer.zero_grad()
        shares = [data(0, index), data(1, index)]
        if run is not None:
            square(model, shares[rank]).backward()
        else:
            (sum(square(model, share) for share in shares) / 2).backward()
        optimizer.step()
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    if run is not None:
        run.detach()
    return parameters


def assert_bits(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][index][key], value), (index, key)


def save_after(rank, world_size, name):
    pair = pair_of(rank, world_size, "mixed", listing(name)).steps(3)
    state = copy.deepcopy(pair.run.optimizer_state_dict())
    weights = copy.deepcopy(pair.model.state_dict())
    expected = copy.deepcopy(pair.optimizer_alone.state_dict())
    assert_state(state, expected)
    for index in (3, 4):
        pair.step(index)  # nothing was disturbed
    pair.run.detach()
    return weights, state


@pytest.mark.parametrize("name", STATES)
def test_a_state_saved_on_three_ranks_goes_on_in_one_process_and_on_two(name):
    saved = run_ranks(3, save_after, name)
    weights, state = saved[0]
    for other_weights, other in saved[1:]:
        assert_bits(other, state)
        assert all(torch.equal(other_weights[key], value) for key, value in weights.items())
    alone = go_on(0, 1, name, weights, copy.deepcopy(state), 3)  # which an optimizer updates in place
    for parameters in run_ranks(2, go_on, name, weights, state, 3):
        assert_same(parameters, alone)


def midway(rank, world_size):
    """Between backward and the update the mean stays with the optimizer, not finite too."""
    pair = Pair(rank, world_size, make_mlp(), SMALL, spiked, spike_data)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index in range(3):
        pair.optimizer.zero_grad()
        scaler.scale(pair.loss(pair.model, spike_data(rank, index))).backward()
        pair.run.optimizer_state_dict()
        before = scaler.get_scale()
        scaler.step(pair.optimizer)
        scaler.update()
        assert (scaler.get_scale() < before) == (index == 1)
    pair.run.check_replicas()
    pair.model(data(rank, 0))
    with pytest.raises(CommError, match=r"between optimizer.step.. and the next forward pass"):
        pair.run.optimizer_state_dict()
    pair.run.detach()


def test_a_state_may_be_asked_for_before_the_update():
    run_ranks(2, midway)


def warned(rank, world_size):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("poseidon.runtime.stepping").addHandler(handler)
    for name in ("server", "factors"):
        pair = pair_of(rank, world_size, name).steps(1)
        pair.optimizer.state_dict()
        pair.run.optimizer_state_dict()
        pair.run.detach()
    return said


def test_the_state_of_a_shard_is_not_taken_for_the_whole():
    for said in run_ranks(2, warned):
        assert len(said) == 1
        assert "run.optimizer_state_dict()" in said[0]
