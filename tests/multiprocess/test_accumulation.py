"""Accumulation: nothing is sent meanwhile, every way to split a pass is exact, and what is observed is one exchange."""

import pytest
import torch
from torch import nn

from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import StepWatch, profile_structure
from poseidon.runtime.adoption import Adoption
from poseidon.runtime.attach import attach
from poseidon.runtime.observation import Observation
from support.ranks import run_ranks
from support.steps import Pair, rows

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]

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


# What is exchanged

PLANS = {
    **{kind: scheme() for kind, scheme in SCHEMES.items()},
    "mixed": {"table": SCHEMES["sparse_rows"](), "top": SCHEMES["sharded_server"]()},
    "deferred": SCHEMES["all_reduce"](),
    "deferred_factors": {"table": SCHEMES["sparse_rows"](), "top": SCHEMES["sufficient_factor"]()},
}


def look_up(rank, index):
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randint(0, 20, (3 + rank, 4), generator=generator)


def mean_of_squares(model, x):
    return model(x).square().mean()


def make_pair(rank, world_size, name):
    deferred = (lambda plan: plan.model_copy(update={"deferred": ("table", "top")})) if "deferred" in name else None
    more = {"plan": deferred} if deferred else {}
    return Pair(rank, world_size, Lookup(), PLANS[name], mean_of_squares, look_up, **more)


def whole(pair, index):
    pair.loss(pair.model, pair.data(pair.rank, index)).backward()


def forward_inside(pair, index):
    """The forward pass inside, backward outside: that is an exchange."""
    with pair.run.no_sync():
        loss = pair.loss(pair.model, pair.data(pair.rank, index))
    loss.backward()


def forward_outside(pair, index):
    """The forward pass outside, backward inside: nothing is exchanged yet."""
    loss = pair.loss(pair.model, pair.data(pair.rank, index))
    with pair.run.no_sync():
        loss.backward()


def all_inside(pair, index):
    with pair.run.no_sync():
        whole(pair, index)


LAST = {"whole": whole, "forward_inside": forward_inside}
EARLIER = {"all_inside": all_inside, "forward_outside": forward_outside}


def accumulate(rank, world_size, name):
    """Every way to accumulate twice and exchange then, one after the other under one plan."""
    pair = make_pair(rank, world_size, name)
    index = 0
    for first, earlier in EARLIER.items():
        for second, last in LAST.items():
            for _ in range(2):
                pair.optimizer.zero_grad()
                pair.optimizer_alone.zero_grad()
                exchanges = pair.run.num_exchanges
                for take in (earlier, earlier, last):
                    take(pair, index)
                    pair.accumulate_alone(index)
                    index += 1
                    assert pair.run.num_exchanges == exchanges + (take is last), (first, second)
                pair.compare()
                pair.update()
                pair.run.flush()
    pair.run.detach()


@pytest.mark.parametrize("name", PLANS)
def test_every_way_to_split_the_passes_is_exact(name):
    run_ranks(3, accumulate, name)


def count_bytes(rank, world_size, name):
    """Payload of each pass: three inside, and one outside."""
    pair = make_pair(rank, world_size, name)
    pair.step(0)
    sent = []
    pair.run.flush()
    pair.optimizer.zero_grad()
    for index in range(4):
        before = pair.run.group.bytes_sent
        (all_inside if index < 3 else whole)(pair, 1 + index)
        if index < 3:
            pair.run.flush()
        else:
            pair.optimizer.step()
            pair.run.flush()
        sent.append(pair.run.group.bytes_sent - before)
    pair.run.detach()
    return sent


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_sent_meanwhile(name):
    for sent in run_ranks(2, count_bytes, name):
        assert sent[:3] == [0, 0, 0]
        assert sent[3] > 0


# A loop that accumulates more later on


def raise_accumulation(rank, world_size):
    """Two passes at first, eight later: the plan that was made for two is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = StepWatch(model)
    run = attach(model, optimizer, uniform_plan(profile_structure(model), world_size), Group.of_default())
    asked = []

    def choose(profile, rates, arrival, sparse):
        asked.append((profile.accumulate, profile.batch_size, profile.trainable[0].rows))
        scheme = SCHEMES["sufficient_factor" if profile.accumulate < 4 else "all_reduce"]()
        return uniform_plan(profile, rates.world_size, scheme, arrival=tuple(arrival))

    Adoption(run, watch, choose)
    index = 0

    def step(num_passes):
        nonlocal index
        optimizer.zero_grad()
        with run.no_sync():
            for _ in range(num_passes - 1):
                model(rows(rank, index, 5, 40)).square().mean().backward()
                index += 1
        model(rows(rank, index, 5, 40)).square().mean().backward()
        index += 1
        optimizer.step()

    def until(done, num_passes):
        for _ in range(80):
            step(num_passes)
            if done():
                return
        raise AssertionError("not within 80 steps")

    until(lambda: run.settled, 2)
    until(lambda: any(event["kind"] == "grown" for event in run.events), 8)
    until(lambda: run.settled, 8)
    run.check_replicas()
    events = [event["text"] for event in run.events if event["kind"] == "grown"]
    run.detach()
    return asked, events


def test_a_plan_is_looked_for_anew_when_the_loop_accumulates_more():
    results = run_ranks(2, raise_accumulation)
    asked = results[0][0]  # on a busy machine in between, too
    assert (asked[0], asked[-1]) == ((2, 10, 10), (8, 40, 40))
    for _, events in results:
        assert events == ["8 backward passes to an exchange, where the plan was made for 2"]
