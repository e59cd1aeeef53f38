"""Accumulation: nothing is sent meanwhile, every way to split a pass is exact, and what is observed is one exchange."""

import pytest
import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import StepWatch, profile_structure
from poseidon.runtime.attach import attach
from poseidon.runtime.observation import Observation
from support.ranks import run_ranks
from support.steps import rows

pytestmark = pytest.mark.multiprocess

PASSES = 4


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


class Lookup(nn.Module):
    """An embedding below a fully connected layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 6)
        self.top = nn.Linear(6, 4)

    def forward(self, x):
        return self.top(self.table(x).mean(1))


# What is observed


def observe(rank, world_size, num_passes, steps):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch = StepWatch(model)
    plan = uniform_plan(profile_structure(model), world_size, wait_free=False)
    run = attach(model, optimizer, plan, Group.of_default())
    observation = Observation(run, watch)
    over = []
    run.on_exchanged = lambda: over.append(observation.is_over())
    for step in range(steps):
        optimizer.zero_grad()
        with run.no_sync():
            for index in range(num_passes - 1):
                model(rows(rank, step * num_passes + index, 5 - rank, 6)).square().mean().backward()
        model(rows(rank, step * num_passes - 1, 5 - rank, 6)).square().mean().backward()
        optimizer.step()
    assert over == [False] * (steps - 1) + [True]
    seen = observation.gather()
    run.detach()
    return seen.profile


@pytest.mark.parametrize("num_passes", [1, PASSES])
def test_what_is_observed_is_one_exchange(num_passes):
    for profile in run_ranks(2, observe, num_passes, 4):
        assert profile.accumulate == num_passes
        assert profile.batch_size == num_passes * 5
        assert [layer.rows for layer in profile.trainable] == [num_passes * 5] * 2, "of the rank that has most"
        assert [layer.calls for layer in profile.trainable] == [num_passes] * 2
        assert profile.trainable[0].activation_num_bytes == 5 * 9 * 4, "of one pass"
        assert all(layer.seconds > 0 for layer in profile.trainable)
