"""Shares by speed with real ranks: the slow one gets less, no sample is lost, training is that of one process."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from poseidon.auto import distribute
from poseidon.comm import AllReduce, CommScheme, ShardedServer, SufficientFactor
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from support.exactness import assert_close, make_mlp
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

WORLD_SIZE, BATCH, EPOCHS, NUM_SAMPLES = 3, 8, 2, 16 * 24 + 13
SECONDS_PER_SAMPLE = (0.001, 0.001, 0.012)
"""By rank."""


class Sleeper(nn.Module):
    """Takes its time for each sample, as a slow processor does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = make_mlp()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return self.net(x)


def make_data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.arange(NUM_SAMPLES), torch.randn(NUM_SAMPLES, 12), torch.randint(0, 5, (NUM_SAMPLES,)))


def train(rank: int, world_size: int, scheme: CommScheme, portions: tuple[float, ...] = ()):
    torch.manual_seed(rank)
    model = Sleeper(SECONDS_PER_SAMPLE[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = uniform_plan(profile_structure(model), world_size, scheme).model_copy(update={"portions": portions})
    run = distribute(model, optimizer, plan, shares="equal" if portions else "speed", group=Group.of_default())
    loader = run.shard(make_data(), batch_size=BATCH)
    seen = []
    for _ in range(EPOCHS):
        for index, x, y in loader:
            seen.append(index.tolist())
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    run.check_replicas()
    run.detach()
    end = {name: p.detach().clone() for name, p in model.named_parameters()}
    return start, end, seen, [event["text"] for event in run.events if event["kind"] == "shared"]


def train_alone(start, batches):
    model = Sleeper(0.0)
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, xs, ys = make_data().tensors
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(xs[batch]), ys[batch]).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_exact(results) -> list[list[int]]:
    """That each sample came once per epoch, and what was trained; the sizes of each global batch, by rank."""
    steps = [[index for _, _, seen, _ in results for index in seen[step]] for step in range(len(results[0][2]))]
    per_epoch = len(steps) // EPOCHS
    for epoch in range(EPOCHS):
        in_epoch = [index for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for index in step]
        assert sorted(in_epoch) == list(range(NUM_SAMPLES))
    expected = train_alone(results[0][0], steps)
    for _, end, _, _ in results:
        assert_close(end, expected, 1e-6)
    return [[len(seen[step]) for _, _, seen, _ in results] for step in range(len(steps))]


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(AllReduce(), marks=pytest.mark.thorough),
        pytest.param(SufficientFactor(), marks=pytest.mark.thorough),
        ShardedServer(),
    ],
    ids=lambda scheme: scheme.kind,
)
def test_shares_change_on_the_way_and_the_training_is_that_of_one_process(scheme: CommScheme) -> None:
    results = run_ranks(WORLD_SIZE, train, scheme)
    sizes = check_exact(results)
    assert sizes[0] == [BATCH] * WORLD_SIZE
    assert all(sum(step) == WORLD_SIZE * BATCH for step in sizes[:16])
    assert sizes[-2][2] < BATCH  # by how much depends on what else the machine does
    said = [texts for _, _, _, texts in results]
    assert said[0]
    assert said == [said[0]] * WORLD_SIZE
    assert f"of {WORLD_SIZE * BATCH} from now on" in said[0][0]


def test_shares_of_a_plan_hold_from_the_first_batch_on() -> None:
    results = run_ranks(WORLD_SIZE, train, AllReduce(), (10.0, 9.0, 5.0))
    sizes = check_exact(results)
    assert sizes[0] == sizes[-2] == [10, 9, 5]
    assert not any(texts for _, _, _, texts in results)


def load_by_hand(rank: int, world_size: int) -> list[str]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = distribute(model, optimizer, "all_reduce", shares="speed", group=Group.of_default())
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).sum().backward()
        optimizer.step()
    run.detach()
    return [event["text"] for event in run.events if event["kind"] == "shared"]


def test_a_loop_that_deals_its_own_samples_is_told_so_once() -> None:
    results = run_ranks(2, load_by_hand)
    assert results == [["shares stay as they are: the loop does not load through run.shard"]] * 2
