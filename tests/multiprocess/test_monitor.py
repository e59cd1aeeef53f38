"""Watching over a settled run: what is said, what is left behind, and the probe of the links."""

import pytest
import torch
from torch import nn

from poseidon.auto import distribute
from poseidon.breakdown import StepParts
from poseidon.comm.group import Group
from poseidon.comm.link_probe import probe_links
from poseidon.plan import PredictedStep, uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.monitor import CHECK_EVERY, EXPECTED_FROM, WARM_UP_STEPS
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

FIRST_MAIL = WARM_UP_STEPS + EXPECTED_FROM


def watched(rank, world_size, num_steps):
    """A plan that was given, with a prediction."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    predicted = PredictedStep(step_seconds=2.0, parts=StepParts(), samples_per_s=1.0)
    plan = uniform_plan(profile_structure(model), world_size).model_copy(update={"predicted": predicted})
    group = Group.of_default()
    run = distribute(model, optimizer, plan, group=group)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    run.check_replicas()
    run.detach()
    group.barrier()  # nothing of the monitor's is in the way of what comes after
    return run.events, len(run.recorder.on_step)


@pytest.mark.parametrize("num_steps", [1, FIRST_MAIL - 1, FIRST_MAIL, FIRST_MAIL + 1, FIRST_MAIL + 1 + CHECK_EVERY])
def test_a_given_plan_is_watched_from_the_first_readings_on(num_steps):
    results = run_ranks(3, watched, num_steps)
    for events, num_callbacks in results:
        said = [event for event in events if event["kind"] == "expected"]
        assert [event["exchange"] for event in said] == [FIRST_MAIL + 1] * (num_steps > FIRST_MAIL)
        assert all("steps take" in event["text"] and "predicted 2s" in event["text"] for event in said)
        assert num_callbacks == 0


def alone(rank, world_size):
    model = nn.Linear(4, 2)
    run = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), group=Group.of_default())
    for _ in range(20):
        model(torch.randn(2, 4)).sum().backward()
    run.detach()
    return run.events


def test_one_rank_is_not_watched():
    assert run_ranks(1, alone) == [[]]


def probed(rank, world_size, leaders):
    group = Group.of_default()
    before = group.bytes_sent
    first = probe_links(group, leaders)
    second = probe_links(group, leaders, first)
    return [tuple(map(tuple, found)) for found in (first, second)], group.bytes_sent - before


@pytest.mark.parametrize(("world_size", "leaders"), [(2, [0, 1]), (3, [0, 1, 2]), (3, [0, 2])])
def test_links_are_probed_by_one_rank_of_each_host_and_all_know_the_same(world_size, leaders):
    results = run_ranks(world_size, probed, leaders)
    for found, num_bytes in results:
        assert found == results[0][0]
        assert all(len(links) == len(leaders) for links in found)
        assert all(speed > 0 for links in found for link in links for speed in link)
        assert num_bytes == 0  # measuring is no training
