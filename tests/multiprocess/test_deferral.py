"""Overlap with the next forward: exact whatever the loop does between two steps, and no rank is ever stuck."""

import copy
import threading
import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor, Transfer
from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from poseidon.runtime.deferral import StandIn
from support.ranks import run_ranks
from support.steps import Pair, assert_same, rows, seeded

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]

STEPS = 20


class Net(nn.Module):
    """A layer for each scheme, branches that some steps leave out, a layer that no step uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 6)
        self.first = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.branches = nn.ModuleList(nn.Linear(9, 7, bias=False) for _ in range(2))
        self.last = nn.Linear(7, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x, branch=0):
        x = self.norm(torch.tanh(self.first(self.table(x))))
        return self.last(torch.tanh(self.branches[branch](x)))


MIX = {
    "table": SparseRows(),
    "first": SufficientFactor(),
    "norm": AllReduce(),
    "branches.0": SufficientFactor(),
    "branches.1": AllReduce(),
    "last": AllReduce(),
}
CHOICES = {
    "all_reduce": AllReduce(),
    "small_buckets": AllReduce(first_bytes=8, bucket_bytes=100),
    "factors": SufficientFactor(),
    "mix": MIX,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def square(model, batch):
    return model(*batch).square().mean()


def lookups(rank, step):
    return torch.randint(0, 30, (3 + rank + step % 3,), generator=seeded(rank, step)), step % 2


def defer(*names):
    """Only these layers; all of them if none is named."""
    return lambda plan: Plan.model_validate({**dict(plan), "deferred": names or plan.arrival})


def make_pair(rank, world_size, choice="mix", optimizer="sgd", names=(), data=lookups, *, two_levels=False, **changes):
    """A pair whose layers of these names, or all, are deferred; `changes` of the plan besides."""
    schemes = CHOICES[choice]
    if two_levels:
        schemes = schemes.model_copy(update={"levels": 2})
    make = optimizer if callable(optimizer) else OPTIMIZERS[optimizer]
    return Pair(
        *(rank, world_size, Net(), schemes, square, data, make),
        plan=lambda made: Plan.model_validate({**dict(defer(*names)(made)), **changes}),
        hosts=(range(world_size // 2), range(world_size // 2, world_size)) if two_levels else (),
    )


def is_open(pair):
    return any(owed.is_open for owed in pair.run._deferral._all)


def slow(transfer_seconds=0.02):
    """Transfers of gradients that take their time, so that much happens before they end."""
    advance = Transfer.advance

    def later(transfer, stage):
        if transfer.name != "counts":
            time.sleep(transfer_seconds)
        advance(transfer, stage)

    return mock.patch.object(Transfer, "advance", later)


def nothing(*_):
    pass


def take(pair, step, zero=lambda optimizer: optimizer.zero_grad(), before=nothing, after=nothing):
    """A step of both, in which nothing is looked at.

    Args:
        pair: The model under its plan and the one alone.
        step: Number of the batches.
        zero: Given each optimizer.
        before: Given each model and optimizer, before the optimizer's step.
        after: The same after it.
    """
    zero(pair.optimizer)
    batch = pair.data(pair.rank, step)
    if batch is None:
        pair.run.empty_step()
    else:
        pair.loss(pair.model, batch).backward()
    zero(pair.optimizer_alone)
    pair.accumulate_alone(step)
    finish(pair, before, after)


def finish(pair, before=nothing, after=nothing):
    for model, optimizer in ((pair.model, pair.optimizer), (pair.alone, pair.optimizer_alone)):
        before(model, optimizer)
        optimizer.step()
        after(model, optimizer)


def end(pair):
    """What is still owed is paid, and everything is as on one rank."""
    pair.run.check_replicas()
    pair.compare_parameters()
    pair.run.detach()
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(isinstance(p.grad, StandIn) for p in pair.model.parameters())
    pair.compare_parameters()


# The loop as it is


def plain(rank, world_size, choice):
    for optimizer, names in (
        ("sgd", ()),
        ("adamw", ("first", "last")),
        ("adamw_foreach", ()),
        ("sgd", ("table", "branches.0", "branches.1")),
    ):
        pair = make_pair(rank, world_size, choice, optimizer, names)
        for step in range(STEPS):
            take(pair, step)
            assert is_open(pair), "nothing has been waited for that was not needed"
        end(pair)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_as_in_one_process(choice, world_size):
    run_ranks(world_size, plain, choice)


def slowly(rank, world_size):
    """Transfers that are under way for long: next steps begin before the last one's have ended."""
    with slow():
        for choice, two_levels in (("all_reduce", False), ("mix", False), ("factors", True)):
            pair = make_pair(rank, world_size, choice, "adamw", two_levels=two_levels)
            for step in range(8):
                take(pair, step)
            end(pair)


def test_long_transfers():
    run_ranks(4, slowly)


def scheduled(rank, world_size):
    """The learning rate at the time of the step counts, be it a number or a tensor; each step is counted once."""
    for optimizer in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    ):
        pair = make_pair(rank, world_size, optimizer=optimizer)
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: [1.0, 0.1, 3.0][step % 3])
            for o in (pair.optimizer, pair.optimizer_alone)
        ]
        for step in range(STEPS):
            take(pair, step)
            for scheduler in schedulers:
                scheduler.step()
            for group in (*pair.optimizer.param_groups, *pair.optimizer_alone.param_groups):
                group["weight_decay"] = 0.01 * (step % 4)
        assert pair.optimizer.param_groups[0]["params"] == list(pair.model.parameters())
        end(pair)


def groups_of_parameters(rank, world_size):
    def make(parameters):
        some, others = parameters[::2], parameters[1::2]
        return torch.optim.SGD([{"params": some, "lr": 0.02}, {"params": others, "momentum": 0.5}], lr=0.05)

    pair = make_pair(rank, world_size, optimizer=lambda p: make(list(p)))
    for step in range(6):
        take(pair, step)
    end(pair)


def kept_gradients(rank, world_size):
    """Zeroing in place is not waited for; neither is it forgotten. Gradients that nobody zeroes accumulate."""
    for optimizer in ("sgd", "adamw_foreach"):
        for zero in (lambda o: o.zero_grad(set_to_none=False), nothing):
            pair = make_pair(rank, world_size, optimizer=optimizer)
            for step in range(6):
                take(pair, step, zero=zero)
                zero(pair.optimizer)
                assert is_open(pair)
            end(pair)


def accumulated(rank, world_size):
    for choice in CHOICES:
        pair = make_pair(rank, world_size, choice)
        for step in range(0, 24, 3):
            pair.optimizer.zero_grad()
            pair.optimizer_alone.zero_grad()
            for micro in range(2):
                with pair.run.no_sync():
                    square(pair.model, lookups(rank, step + micro)).backward()
            square(pair.model, lookups(rank, step + 2)).backward()
            for micro in range(3):
                pair.accumulate_alone(step + micro)
            finish(pair)
        end(pair)


class Attention(nn.Module):
    """Its parameters are used by modules that do not own them, by fused functions, and once more in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.memory = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)
        return self.head(self.memory(x)[0])


def attention(rank, world_size):
    pair = Pair(
        *(rank, world_size, Attention(), None, lambda model, x: model(x).square().mean()),
        *(lambda r, step: rows(r, step, 10, 8).view(2, 5, 8), OPTIMIZERS["adamw"]),
        plan=defer(),
    )
    for step in range(8):
        take(pair, step)
        if step % 3 == 0:
            outputs = []
            for model in (pair.model, pair.alone):
                with torch.inference_mode():
                    outputs.append({"output": model.eval()(rows(0, step, 10, 8).view(2, 5, 8))})
                model.train()
            assert_same(*outputs)
    end(pair)


@pytest.mark.parametrize("check", [scheduled, groups_of_parameters, kept_gradients, accumulated, attention])
def test_loops(check):
    run_ranks(2, check)


# Steps in which something is missing


def sometimes(rank, step):
    """Rank 1 has no samples in every third step; in one step nobody has."""
    return None if (rank == 1 and step % 3 == 1) or step == 5 else lookups(rank, step)


def missing(rank, world_size):
    for choice in CHOICES:
        pair = make_pair(rank, world_size, choice, data=sometimes)
        before = pair.model.never.weight.detach().clone()
        for step in range(10):
            take(pair, step)
        end(pair)
        assert torch.equal(pair.model.never.weight, before), "no weight decay without a gradient"
        assert pair.model.never.weight.grad is None


def more_rows_each_time(rank, world_size):
    """Parts that have to be sent once more, while one rank evaluates and the other waits for it elsewhere."""

    def growing(rank, step):
        return torch.randint(0, 30, (3 + 5 * step,), generator=seeded(rank, step)), step % 2

    pair = make_pair(rank, world_size, "factors", data=growing)
    for step in range(6):
        take(pair, step)
        if rank == 0:
            with torch.no_grad():
                pair.model(*lookups(0, 0))
        dist.barrier()
    end(pair)


def forwards_without_backward(rank, world_size):
    """And backward passes without a step, and steps without a backward pass."""
    pair = make_pair(rank, world_size)
    for step in range(9):
        square(pair.model, lookups(rank, step + 50))
        if step % 3 == 1:
            pair.backward(step)
            continue
        take(pair, step)
        if step % 3 == 2:
            finish(pair)  # with the same gradients again
    end(pair)


def again_through_one_graph(rank, world_size):
    """A backward pass that no forward precedes finds final gradients and adds to them."""
    pair = make_pair(rank, world_size, "all_reduce")
    for step in range(4):
        pair.optimizer.zero_grad()
        pair.optimizer_alone.zero_grad()
        loss = square(pair.model, lookups(rank, step))
        loss.backward(retain_graph=True)
        loss.backward()
        mean = sum(square(pair.alone, lookups(r, step)) for r in range(world_size)) / world_size
        mean.backward(retain_graph=True)
        mean.backward()
        finish(pair)
    end(pair)


@pytest.mark.parametrize("check", [missing, more_rows_each_time, forwards_without_backward, again_through_one_graph])
@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_steps(check, world_size):
    run_ranks(world_size, check)


# What reads gradients between backward and step


def clipped(rank, world_size):
    for foreach in (None, True, False):
        pair = make_pair(rank, world_size, optimizer="adamw")
        norms = []

        def clip(model, _, foreach=foreach, norms=norms):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach))

        for step in range(6):
            take(pair, step, before=clip)
        assert torch.allclose(torch.stack(norms[::2]), torch.stack(norms[1::2]), rtol=1e-5)
        end(pair)


def clipped_by_value(rank, world_size):
    pair = make_pair(rank, world_size)
    for step in range(4):
        take(pair, step, before=lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.001))
    end(pair)


def scaled(rank, world_size):
    """Losses scaled up and gradients scaled down; a step is skipped where a gradient is not finite."""
    pair = make_pair(rank, world_size, optimizer="adamw")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(8):
        pair.optimizer.zero_grad()
        loss = square(pair.model, lookups(rank, step)) * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(pair.optimizer)
        scaler.step(pair.optimizer)
        scaler.update()
        if step != 3:
            pair.optimizer_alone.zero_grad()
            pair.accumulate_alone(step)
            pair.optimizer_alone.step()
    end(pair)


def own_gradients(rank, world_size):
    """What the loop puts into `p.grad`, or takes out, is what the optimizer sees."""

    def change(model, _):
        model.first.weight.grad = torch.ones_like(model.first.weight)
        model.last.weight.grad = None

    pair = make_pair(rank, world_size)
    for step in range(4):
        take(pair, step, before=change)
        assert torch.equal(pair.model.first.weight.grad, torch.ones(9, 6))
        assert pair.model.last.weight.grad is None
    end(pair)


def hooked(rank, world_size):
    """Hooks of the step see it once each, gradients before and parameters after, wherever they were registered."""
    seen = {"alone": [], "run": []}

    def watch(optimizer, model, name):
        def before(*_):
            seen[name].append(sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None))

        def after(*_):
            seen[name].append(sum(float(p.sum()) for p in model.parameters()))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    pair = make_pair(rank, world_size, optimizer=make)
    watch(pair.optimizer, pair.model, "run")
    watch(pair.optimizer_alone, pair.alone, "alone")
    for step in range(4):
        take(pair, step)
    assert len(seen["run"]) == 8
    assert torch.allclose(torch.tensor(seen["run"]), torch.tensor(seen["alone"]), atol=1e-5)
    end(pair)


def closure(rank, world_size):
    pair = make_pair(rank, world_size)
    for step in range(3):

        def run_closure(step=step):
            pair.optimizer.zero_grad()
            loss = square(pair.model, lookups(rank, step))
            loss.backward()
            return loss

        def alone_closure(step=step):
            pair.optimizer_alone.zero_grad()
            pair.accumulate_alone(step)

        take(pair, step + 10)
        pair.optimizer.step(run_closure)
        pair.optimizer_alone.step(alone_closure)
    end(pair)


@pytest.mark.parametrize("check", [clipped, clipped_by_value, scaled, own_gradients, hooked, closure])
def test_readers_of_gradients(check):
    run_ranks(2, check)


# What reads parameters after the step


def look(model, optimizer, how):
    """Everything that can be seen of the parameters in one way."""
    batch = lookups(0, 99)
    if how == "evaluation":
        with torch.inference_mode():
            return {"output": model(*batch).clone()}
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return {"output": model(*batch).float().detach()}
    if how == "state_dict":
        return {name: value.clone() for name, value in model.state_dict().items()}
    if how == "part":
        return {name: value.clone() for name, value in model.first.state_dict().items()}
    if how == "optimizer":
        states = sorted(optimizer.state_dict()["state"].items())
        return {f"{place}.{key}": value.clone() for place, state in states for key, value in state.items()}
    if how == "copy":
        return {name: p.detach() for name, p in copy.deepcopy(model).named_parameters()}
    if how == "data":
        return {name: p.data.clone() for name, p in model.named_parameters()}
    if how == "foreach":
        return dict(enumerate(torch._foreach_mul(list(model.parameters()), 1.0)))
    if how == "write":
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
        return {}
    if how == "own_function":
        return {"output": F.linear(torch.ones(1, 7), model.last.weight).detach()}
    if how == "gradients":
        return {n: torch.zeros_like(p) if p.grad is None else p.grad * 2 for n, p in model.named_parameters()}
    with torch.device("cpu"):
        return {"vector": nn.utils.parameters_to_vector(model.parameters()).detach()}


WAYS = [
    *("evaluation", "autocast", "state_dict", "part", "optimizer", "copy", "data", "foreach", "write"),
    *("own_function", "gradients", "vector"),
]


def looked_at(rank, world_size):
    for how in WAYS:
        pair = make_pair(rank, world_size)
        for step in range(4):
            take(pair, step)
            if step == 2:  # paid in the next forward, after one that was paid elsewhere
                continue
            seen = [look(*one, how) for one in ((pair.model, pair.optimizer), (pair.alone, pair.optimizer_alone))]
            try:
                assert_same(*seen, 1e-2 if how == "autocast" else 1e-5)
            except AssertionError as error:
                error.add_note(how)
                raise
        end(pair)


def moving_average(rank, world_size):
    """A loop that averages parameters after each step, and one whose optimizer is loaded on the way."""
    averages = {}

    def average(model, optimizer):
        mine = averages.setdefault(id(model), [p.detach().clone() for p in model.parameters()])
        torch._foreach_lerp_(mine, list(model.parameters()), 0.1)

    pair = make_pair(rank, world_size, optimizer="adamw")
    for step in range(6):
        take(pair, step, after=average)
        if step == 3:
            for optimizer in (pair.optimizer, pair.optimizer_alone):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(*(dict(enumerate(averages[id(model)])) for model in (pair.model, pair.alone)))
    end(pair)


def flushed(rank, world_size):
    """`flush` is for what nothing can see: a view of a parameter's memory that was made before."""
    pair = make_pair(rank, world_size)
    views = {name: p.detach().numpy() for name, p in pair.model.named_parameters()}
    for step in range(3):
        take(pair, step)
        assert is_open(pair)
        pair.run.flush()
        assert not is_open(pair)
        expected = {name: p.detach() for name, p in pair.alone.named_parameters()}
        assert_same({name: torch.from_numpy(view) for name, view in views.items()}, expected)
    end(pair)


@pytest.mark.parametrize("check", [looked_at, moving_average, flushed])
def test_readers_of_parameters(check):
    run_ranks(2, check)


# Beginnings and ends


def undone_on_the_way(rank, world_size):
    """Detached, or put under another plan, before the step and after it."""
    for stepped in (False, True):
        pair = make_pair(rank, world_size)
        for step in range(3):
            take(pair, step)
        pair.backward(3)
        pair.backward_alone(3)
        if stepped:
            finish(pair)
        pair.run.adopt(defer("first")(pair.run.plan))
        if not stepped:
            pair.compare()
            finish(pair)
        take(pair, 4)
        pair.backward(5)
        pair.backward_alone(5)
        if stepped:
            finish(pair)
        pair.run.detach()
        found = {name: p.grad for name, p in pair.model.named_parameters()}
        assert_same(found, {name: p.grad for name, p in pair.alone.named_parameters()})
        if not stepped:
            finish(pair)
        pair.compare_parameters()
        assert not pair.optimizer._optimizer_state_dict_pre_hooks
        assert not any(module._forward_pre_hooks for module in pair.model.modules())


def other_order(rank, world_size):
    """Gradients that arrive in another order than planned: new buckets, while some are deferred."""
    pair = make_pair(rank, world_size, "small_buckets", arrival=(*MIX, "never"))
    for step in range(10):
        take(pair, step)
    end(pair)


def planned_together(rank, world_size):
    """Buckets and an order that the plan names, some of them deferred, after backward and over two connections."""
    for change in ({}, {"wait_free": False}, {"connections": 2}):
        pair = make_pair(
            *(rank, world_size, "all_reduce", "sgd", ("table", "first", "norm")),
            buckets=(("never", "last"), ("branches.1", "branches.0"), ("norm", "first", "table")),
            order=("table", "first", "norm", "branches.0", "branches.1", "last", "never"),
            **change,
        )
        assert len(pair.run._deferral._all) == 1
        for step in range(5):
            take(pair, step)
        end(pair)


def beside_a_server(rank, world_size):
    """A layer whose optimizer runs on shards, and deferred layers in the same optimizer."""
    schemes = {"last": ShardedServer(), "first": SufficientFactor()}
    pair = Pair(
        *(rank, world_size, Net(), schemes, square, lookups, OPTIMIZERS["adamw"]), plan=defer("first", "norm", "table")
    )
    for step in range(6):
        take(pair, step)
        assert is_open(pair)
    end(pair)


def broken(rank, world_size):
    """An exception in backward, and one in forward, while transfers are under way."""
    with slow():
        pair = make_pair(rank, world_size)
        take(pair, 0)
        with pytest.raises(IndexError):
            pair.model(torch.tensor([99]))
        take(pair, 1)
        pair.run.flush()
        pair.compare_parameters()
        take(pair, 2)

        def fail(_):
            raise ValueError("not this time")

        handle = pair.model.norm.weight.register_hook(fail)
        with pytest.raises(ValueError, match="not this time"):
            square(pair.model, lookups(rank, 3)).backward()
        handle.remove()
        pair.compare_parameters()
        with pytest.raises(CommError, match=f"rank {rank}: the last backward pass broke off"):
            square(pair.model, lookups(rank, 4))
        pair.run.detach()
    assert not torch.overrides._get_current_function_mode_stack()


def lost(rank, world_size):
    """Transfers that failed are said to have failed wherever they are needed, and nothing is left behind."""
    gone = threading.Event()
    advance = Transfer.advance

    def fail(transfer, stage):
        if transfer.name == "counts":
            return advance(transfer, stage)
        assert gone.wait(20)
        raise CommError("the link is gone")

    pair = make_pair(rank, world_size, "all_reduce")
    take(pair, 0)
    pair.run.flush()
    with mock.patch.object(Transfer, "advance", fail):
        square(pair.model, lookups(rank, 1)).backward()
        pair.optimizer.step()
        gone.set()
        with pytest.raises(CommError, match="the link is gone"):
            pair.model.state_dict()
        with pytest.raises(CommError, match="the link is gone"):
            pair.model(*lookups(rank, 2))
        pair.run.detach()
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(isinstance(p.grad, StandIn) for p in pair.model.parameters())


@pytest.mark.parametrize("check", [undone_on_the_way, other_order, planned_together, beside_a_server, broken, lost])
def test_beginnings_and_ends(check):
    run_ranks(2, check)


# What the timeline says


def seen_in_the_timeline(rank, world_size):
    """Each transfer is noted once, in the steps in which it was under way; waiting is noted where it happened."""
    with slow(0.05):
        pair = make_pair(rank, world_size)
        before = pair.run.group.bytes_sent
        for step in range(4):
            take(pair, step)
        pair.run.flush()
        counted = pair.run.group.bytes_sent - before
        square(pair.model, lookups(rank, 4)).backward()
        steps = pair.run.timeline.steps
        later = pair.run.group.bytes_sent - before - counted
        pair.run.detach()
    assert [step.index for step in steps] == list(range(5))
    for step in steps:
        assert all(step.start <= i.start <= i.end <= step.end for i in step.intervals), "inside the step"
    for name in {i.name for step in steps for i in step.intervals if i.activity == "transfer"}:
        mine = [i for step in steps for i in step.intervals if i.activity == "transfer" and i.name == name]
        assert sum(i.num_bytes > 0 for i in mine) >= 4
        assert all(a.end <= b.start for a, b in pairwise(mine)), "never twice at a time"
    assert counted <= sum(step.bytes_sent for step in steps) <= counted + later
    waited = [i for step in steps[1:] for i in step.intervals if i.activity == "exposed"]
    forwards = [i for step in steps[1:] for i in step.intervals if i.activity == "forward"]
    assert any(f.start <= w.start <= f.end for w in waited for f in forwards), "in the next forward"


def hidden_behind_the_loop(rank, world_size):
    """What the loop does between two steps, loading data say, is time in which deferred transfers go on."""
    with slow(0.02):
        pair = make_pair(rank, world_size, "all_reduce")
        for step in range(4):
            square(pair.model, lookups(rank, step)).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            wait_for_transfers(pair)
        steps = pair.run.timeline.steps
        pair.run.detach()
    assert len(steps) == 4
    assert {i.name for step in steps for i in step.intervals if i.activity == "exposed"} <= {"counts"}


def wait_for_transfers(pair):
    for exchange in pair.run._exchanges:
        for transfer in exchange.transfers:
            assert transfer.done.wait(20)


@pytest.mark.parametrize("check", [seen_in_the_timeline, hidden_behind_the_loop])
def test_timeline(check):
    run_ranks(2, check)


# Refusals


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


class Muon(torch.optim.SGD):
    """Not known to be elementwise."""


def refused(rank, world_size):
    group = Group.of_default()

    def refuse(model, make_optimizer, schemes, message, names=None):
        plan = uniform_plan(profile_structure(model), world_size, schemes)
        plan = defer(*(names or ()))(plan)
        optimizer = make_optimizer and make_optimizer(model)
        with pytest.raises(
            InfeasibleError, match=f"layer .* cannot be deferred: .*{message}.*take it out of plan.defer"
        ):
            attach(model, optimizer, plan, group)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    refuse(nn.Linear(3, 3), None, AllReduce(), r"distribute\(\) was given no optimizer")
    refuse(nn.Linear(3, 3), lambda m: Muon(m.parameters()), AllReduce(), "Muon is not known to update each number")
    refuse(nn.Linear(3, 3), sgd, ShardedServer(), "sharded_server gathers its parameters")
    refuse(nn.Linear(3, 3), lambda m: torch.optim.SGD([m.bias]), AllReduce(), "optimizer does not update its weight")
    refuse(Tied(), sgd, AllReduce(), "another module uses its weight too")
    refuse(nn.Sequential(nn.Embedding(5, 3, sparse=True)), sgd, SparseRows(), "its gradients are sparse")
    compiled = nn.Sequential(nn.Linear(3, 3))
    compiled[0].compile()
    refuse(compiled, sgd, AllReduce(), "a part of the model is compiled")


def test_refused():
    run_ranks(2, refused)


def alone(rank, world_size):
    """One rank: there is nothing to defer."""
    pair = make_pair(rank, world_size)
    for step in range(3):
        take(pair, step)
        pair.compare_parameters()
    pair.run.flush()
    pair.run.detach()


def test_one_rank():
    run_ranks(1, alone)
