"""Replicas that are compared every few exchanges; what stays each rank's own; parameters that nothing reached."""

import pytest
import torch
from torch import nn

from poseidon.auto import distribute
from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.errors import CommError, ConfigError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, rows

pytestmark = pytest.mark.multiprocess


def features(rank, step):
    return rows(rank, step, 4, 6)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_run(world_size, scheme="all_reduce", **options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = uniform_plan(profile_structure(model), world_size, SCHEMES[scheme]())
    return model, optimizer, distribute(model, optimizer, plan, group=Group.of_default(), **options)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(features(rank, step)).square().mean().backward()
        optimizer.step()


# Drift


def parameter_changed(rank, world_size, scheme):
    model, optimizer, _ = make_run(world_size, scheme, check_every=3)
    train(model, optimizer, rank, range(4))  # compared before the fourth step
    if rank == 1:
        with torch.no_grad():
            model[2].bias[1] += 1e-6
    with pytest.raises(CommError) as caught:
        train(model, optimizer, rank, range(4, 20))
    return str(caught.value)


@pytest.mark.parametrize("scheme", ["all_reduce", "sufficient_factor"])  # a server sends its own again after each step
def test_a_parameter_that_drifts_is_named_within_the_interval(scheme):
    for message in run_ranks(3, parameter_changed, scheme):
        assert "drifted apart after exchange 6 (equal after exchange 3): parameter '2.bias' on rank(s) 1" in message
        assert "differs from rank 0's" in message


def rank_0_is_odd(rank, world_size):
    model, optimizer, _ = make_run(world_size, check_every=2)
    if rank == 0:
        with torch.no_grad():
            model[0].weight += 1
    with pytest.raises(CommError, match=r"parameter '0\.weight' on rank\(s\) 0 differs from rank 1's"):
        train(model, optimizer, rank, range(5))


def scheduler_skipped(rank, world_size):
    model, optimizer, _ = make_run(world_size, check_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def go_on():
        for step in range(5):
            train(model, optimizer, rank, [step])
            if rank != 2 or step != 1:
                scheduler.step()

    with pytest.raises(CommError) as caught:
        go_on()
    message = str(caught.value)
    assert (
        "the optimizers have drifted apart after exchange 2: 'lr' of parameter group 0 is 0.05 on rank(s) 2" in message
    )
    assert "0.025 on rank 0" in message


def buffers_changed(rank, world_size):
    """Where they are kept equal they are compared, else not."""
    model, optimizer, run = make_run(world_size, check_every=1)
    train(model, optimizer, rank, range(3))  # batch normalization has seen other rows on each rank
    run.detach()
    model, optimizer, run = make_run(world_size, check_every=1, buffers="after_step")
    train(model, optimizer, rank, range(3))
    model[1].running_mean += rank
    with pytest.raises(CommError, match=r"buffer '1\.running_mean' on rank\(s\) 1 differs from rank 0's"):
        train(model, optimizer, rank, range(3, 5))


def uneven(rank, world_size):
    """A rank that has run out takes part in the comparison too."""
    model, optimizer, run = make_run(world_size, check_every=1)
    with run.join():
        train(model, optimizer, rank, range(2 + 3 * rank))
    run.detach()


def nothing_drifts(rank, world_size):
    model, optimizer, run = make_run(world_size, "sufficient_factor", check_every=1)
    with run.no_sync():
        model(features(rank, 0)).square().mean().backward()
    model(features(rank, 1)).square().mean().backward()
    optimizer.step()
    for step in range(1, 4):
        model.train()
        train(model, optimizer, rank, [step])
        model.eval()
        model(features(rank, step))  # with a graph, but without a backward
    run.detach()


@pytest.mark.parametrize(
    ("check", "world_size"),
    [(rank_0_is_odd, 3), (scheduler_skipped, 3), (buffers_changed, 2), (uneven, 2), (nothing_drifts, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_drift(check, world_size):
    run_ranks(world_size, check)


# Ignored


def ignored(rank, world_size, scheme):
    """Neither made equal, nor exchanged, nor compared; trained all the same."""
    model = make_model()
    with torch.no_grad():
        model[0].weight += rank
        model[1].running_var += rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = uniform_plan(profile_structure(model, ignored={"0.weight"}), world_size, SCHEMES[scheme]())
    run = distribute(
        *(model, optimizer, plan),
        group=Group.of_default(),
        ignore=["0", "1.running_var"],
        buffers="after_step",
        check_every=1,
    )
    before = model[0].weight.detach().clone()
    train(model, optimizer, rank, range(3))
    run.check_replicas()
    assert not torch.equal(model[0].weight, before)
    others = {name: p for name, p in model.named_parameters() if name != "0.weight"}
    assert_on_all_ranks({**others, "mean": model[1].running_mean})
    assert "0.weight" in run.explain(full=True)
    assert "ignored" in run.explain()
    run.detach()
    return float(model[0].weight.detach().sum()), float(model[1].running_var.sum())


@pytest.mark.parametrize("scheme", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_ignored(scheme):
    first, second = run_ranks(2, ignored, scheme)
    assert first[0] != second[0]
    assert first[1] != second[1]


def ignored_under_an_automatic_plan(rank, world_size):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = distribute(model, optimizer, group=Group.of_default(), ignore=["2"])
    train(model, optimizer, rank, range(40))
    assert run.settled
    assert "2" not in run.plan.schemes
    run.check_replicas()
    run.detach()
    return float(model[2].weight.detach().sum())


def test_ignored_under_an_automatic_plan():
    first, second = run_ranks(2, ignored_under_an_automatic_plan)
    assert first != second


def ignored_in_other_shapes(rank, world_size):
    """What is each rank's own need not even be alike."""
    model = make_model()
    model.own = nn.Linear(3, 1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = distribute(model, optimizer, "all_reduce", group=Group.of_default(), ignore=["own"])
    run.check_replicas()
    run.detach()
    with pytest.raises(ConfigError, match=r"cannot ignore 'owm': .* did you mean 'own'\?"):
        distribute(model, optimizer, "all_reduce", group=Group.of_default(), ignore=["owm"])


def test_ignored_in_other_shapes():
    run_ranks(2, ignored_in_other_shapes)


# Unused


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.uses = ()

    def forward(self, x):
        x = self.stem(x)
        return sum(getattr(self, name)(x) for name in self.uses)


def unused(rank, world_size, scheme, deferred):
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = uniform_plan(profile_structure(model), world_size, SCHEMES[scheme]())
    if deferred:
        plan = plan.model_copy(update={"deferred": tuple(plan.schemes)})
    run = distribute(model, optimizer, plan, group=Group.of_default())
    for step in range(5):
        model.uses = ("left",) if step < 2 else ("left", "right") if rank else ("left",)
        train(model, optimizer, rank, [step])
    run.empty_step()
    text = run.explain(full=True)
    run.detach()
    return [event["text"] for event in run.events if event["kind"] == "unused"], text


@pytest.mark.parametrize(
    ("scheme", "deferred"),
    [("all_reduce", False), ("sufficient_factor", False), ("sharded_server", False), ("sufficient_factor", True)],
)
def test_unused_parameters_are_named_once_and_alike(scheme, deferred):
    (first, text), (second, _) = run_ranks(2, unused, scheme, deferred)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("4 parameters got no gradient on any rank in exchange 0: ")
    for name in ("never.weight", "never.bias", "right.weight", "right.bias"):
        assert name in first[0]
    assert "frozen" not in first[0]
    assert "no gradient on any rank in exchange 0" in text


def on_some_ranks(rank, world_size, scheme):
    model = Branches()
    del model.never
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = uniform_plan(profile_structure(model), world_size, SCHEMES[scheme]())
    run = distribute(model, optimizer, plan, group=Group.of_default())
    for step in range(3):
        model.uses = ("left", "right") if rank else ("left",)
        if rank < 2 or step < 2:
            train(model, optimizer, rank, [step])
        else:
            run.empty_step()
            optimizer.step()
    run.detach()
    return [event["text"] for event in run.events if event["kind"] == "unused"]


@pytest.mark.parametrize("scheme", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_what_only_some_ranks_reach_is_named(scheme):
    first, *others = run_ranks(3, on_some_ranks, scheme)
    assert all(other == first for other in others)
    assert len(first) == 1
    assert "right.weight (2 of 3)" in first[0]
    assert "right.bias (2 of 3)" in first[0]
