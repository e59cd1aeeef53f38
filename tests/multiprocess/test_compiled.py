"""`torch.compile` of the model or of a part, before and after `distribute`: exact, and what is lost is said."""

import copy

import pytest
import torch
from torch import nn

from poseidon.auto import distribute
from poseidon.comm.group import Group
from poseidon.planner import judge
from poseidon.profile.structure import say_compiled
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, assert_same, rows

pytestmark = pytest.mark.multiprocess


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4)
    )


def compiled_before(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_part(model, backend):
    model[2] = torch.compile(model[2], backend=backend)
    return model


def compiled_part_in_place(model, backend):
    model[2].compile(backend=backend)
    return model


BEFORE = {
    "before": compiled_before,
    "in_place": compiled_in_place,
    "part": compiled_part,
    "part_in_place": compiled_part_in_place,
}
AFTER = {"after": compiled_before, "after_in_place": compiled_in_place, "after_part_in_place": compiled_part_in_place}


def train(rank, world_size, how, backend, plan):
    judge.MOST_STEPS = judge.FEWEST_STEPS  # which plan comes out is of no interest
    model = make_net()
    alone = copy.deepcopy(model)
    if how in BEFORE:
        model = BEFORE[how](model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    run = distribute(model, optimizer, plan, group=Group.of_default())
    called = AFTER[how](model, backend) if how in AFTER else model
    for index in range(9 if plan == "auto" else 4):
        optimizer.zero_grad()
        optimizer_alone.zero_grad()
        called(rows(rank, index, 5, 6)).square().mean().backward()
        for other in range(world_size):
            (alone(rows(other, index, 5, 6)).square().mean() / world_size).backward()
        optimizer.step()
        optimizer_alone.step()
        run.flush()
    found = {n.replace("_orig_mod.", ""): p.detach() for n, p in model.named_parameters()}
    assert_same(found, {n: p.detach() for n, p in alone.named_parameters()})
    assert_on_all_ranks(found)
    run.check_replicas()
    events = [(event["kind"], event["text"]) for event in run.events]
    run.detach()
    return events


def train_all(rank, world_size, hows, backend, plan):
    """In the same processes: what `torch.compile` imports at its first use takes long."""
    found = {}
    for how in hows:
        torch._dynamo.reset()
        found[how] = train(rank, world_size, how, backend, plan)
    return found


@pytest.mark.parametrize("hows", [BEFORE, AFTER], ids=["before", "after"])
def test_a_compiled_model_is_exact_and_says_what_that_costs(hows):
    for found in run_ranks(2, train_all, list(hows), "eager", "all_reduce"):
        for how, events in found.items():
            said = [text for kind, text in events if kind == "compiled"]
            if how in AFTER:
                assert not said, "what is compiled later is not known then"
            else:
                what = "2" if "part" in how else "the model"
                assert [text.split(":")[0] for text in said] == [f"{what} is compiled"]


@pytest.mark.thorough
def test_a_compiled_model_finds_its_plan():
    for found in run_ranks(2, train_all, ["before", "part"], "aot_eager", "auto"):
        for events in found.values():
            assert {"measured", "compiled"} <= {kind for kind, _ in events}


def test_compiled_blocks_are_named():
    model = make_net()
    assert say_compiled(model) == ""
    model[0].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    assert say_compiled(model).startswith("0 and 1 more parts are compiled")
