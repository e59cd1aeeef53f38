"""From the first step to a settled plan: nothing is lost, the slower plan is dropped, and everybody agrees."""

import logging
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poseidon.auto import distribute
from poseidon.comm import probe
from poseidon.comm.all_reduce import BucketExchange
from poseidon.comm.group import Group
from poseidon.comm.sufficient_factor import FactorExchange
from poseidon.plan import uniform_plan
from poseidon.profile.structure import StepWatch, profile_structure
from poseidon.runtime.adoption import Adoption
from poseidon.runtime.attach import attach
from poseidon.units import KIB
from support.exactness import assert_close
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

STEPS = 25
SLOW_SECONDS = 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(200, 16, sparse=True)
        self.table = nn.Embedding(3000, 16)
        self.mlp = nn.Sequential(
            nn.Linear(32, 512), nn.ReLU(inplace=True), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
        )

    def forward(self, x):
        return self.mlp(torch.cat([self.items(x[:, 0] % 200), self.table(x[:, 1])], dim=1))


def make_batches():
    torch.manual_seed(3)
    return [(torch.randint(0, 3000, (8, 2)), torch.randint(0, 4, (8,))) for _ in range(STEPS)]


def train(rank, world_size, batches):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = distribute(model, optimizer, group=Group.of_default()) if world_size > 1 else None
    for x, y in batches:
        mine = torch.arange(len(x)).tensor_split(world_size)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    if run is None:
        return parameters
    run.check_replicas()
    schemes = {name: scheme.kind for name, scheme in run.plan.schemes.items()}
    labels = [step.scheme for step in run.timeline.steps]
    found = parameters, schemes, run.settled, labels
    run.detach()
    return found


def test_all_steps_on_the_way_to_a_plan_are_exact():
    batches = make_batches()
    expected = train(0, 1, batches)
    results = run_ranks(2, train, batches)
    for parameters, schemes, settled, labels in results:
        assert_close(parameters, expected)
        assert settled
        assert schemes == results[0][1]
        assert schemes["items"] == "sparse_rows"
        assert labels[0] == "observation"
        assert {"trial", "trial_plain"} <= set(labels)
        assert labels[-1] == "plan"


def settle(rank, world_size, slow):
    """A plan of factors for every layer, and either its rebuild or plain all-reduce made slow by sleeping."""
    cls, name = (FactorExchange, "combine") if slow == "plan" else (BucketExchange, "finish")
    method = getattr(cls, name)

    def slower(self, *args):
        time.sleep(SLOW_SECONDS)
        return method(self, *args)

    setattr(cls, name, slower)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("poseidon.runtime.stepping")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(model)
    run = attach(model, optimizer, uniform_plan(profile_structure(model), world_size), Group.of_default())

    def choose(profile, rates, arrival, sparse):
        schemes = {layer.name: {"kind": "sufficient_factor"} for layer in profile.trainable}
        plain = uniform_plan(profile, rates.world_size, arrival=tuple(arrival))
        return type(plain).model_validate({**dict(plain), "schemes": schemes})

    Adoption(run, watch, choose)
    steps = 0
    while not run.settled and steps < 60:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        steps += 1
    kinds = {scheme.kind for scheme in run.plan.schemes.values()}
    settled = run.settled
    run.detach()
    return settled, kinds, said


@pytest.mark.parametrize(("slow", "kept"), [("plan", "all_reduce"), ("plain", "sufficient_factor")])
def test_the_slower_one_is_dropped_aloud(slow, kept):
    results = run_ranks(2, settle, slow)
    for settled, kinds, _ in results:
        assert settled
        assert kinds == {kept}
    verdicts = [(level, text) for level, text in results[0][2] if "dropped" in text or "stays" in text]
    assert len(verdicts) == 1
    level, text = verdicts[0]
    assert (level == "WARNING") == (slow == "plan")
    assert ("dropped for plain all-reduce" in text) == (slow == "plan")
    assert not [text for _, text in results[1][2]]  # one rank speaks


SLOW_FROM, MOST_STEPS = 22, 64
"""The plan is settled, and what its steps take is known, well before rank 1 becomes slow."""


def replan(rank, world_size):
    """Plain all-reduce at first; rank 1 becomes slow; the planner then wants factors, and the loop goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(MOST_STEPS, 8, 64)
    probe.SIZES = (4 * KIB, 256 * KIB)  # what the links move does not matter here
    scales = []

    def choose(profile, rates, arrival, sparse):
        scales.append([host.compute_scale for host in rates.hosts])
        plain = uniform_plan(profile, rates.world_size, arrival=tuple(arrival))
        schemes = {layer.name: {"kind": "sufficient_factor"} for layer in profile.trainable}
        return plain if len(scales) == 1 else type(plain).model_validate({**dict(plain), "schemes": schemes})

    run = None
    if world_size > 1:
        watch = StepWatch(model)
        group = Group.of_default()
        run = attach(model, optimizer, uniform_plan(profile_structure(model), world_size), group)
        Adoption(run, watch, choose)
    for index, batch in enumerate(batches):
        mine = batch.tensor_split(world_size)[rank]
        optimizer.zero_grad()
        time.sleep(0.02 * (world_size > 1))
        slow = rank == 1 and index >= SLOW_FROM
        handle = model[0].register_forward_hook(lambda *_, slow=slow: time.sleep(SLOW_SECONDS * slow))
        model(mine).square().mean().backward()
        handle.remove()
        optimizer.step()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    if run is None:
        return parameters
    run.check_replicas()
    run.detach()
    return parameters, run.events, scales


def test_a_slow_rank_is_named_and_planned_around_while_every_step_stays_exact():
    expected = replan(0, 1)
    results = run_ranks(2, replan)
    for parameters, events, _ in results:
        assert_close(parameters, expected)
        assert [(e["kind"], e["exchange"], e["text"]) for e in events] == [
            (e["kind"], e["exchange"], e["text"]) for e in results[0][1]
        ]
    _, events, scales = results[0]
    named = next(index for index, event in enumerate(events) if "(rank 1) spends" in event["text"])
    assert events[named]["kind"] == "departed"
    assert SLOW_FROM < events[named]["exchange"] <= SLOW_FROM + 20
    assert "computing instead of" in events[named]["text"]
    assert [event["kind"] for event in events[named + 1 : named + 3]] == ["measured", "planned"]
    assert events[named + 3]["kind"] in ("kept", "dropped")
    assert max(scales[1]) > 2
    assert not results[1][2]  # rank 0 chooses
