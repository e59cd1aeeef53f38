"""Several runs in one program: two networks trained against each other, with one process on the union beside them."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.gan import main as train_gan
from torch import nn

from poseidon.comm import SCHEMES, AllReduce
from poseidon.comm import liveness as liveness_module
from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import Plan
from poseidon.runtime import join
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, assert_same, plan_for, rows, seeded

pytestmark = pytest.mark.multiprocess

STEPS = 10
BATCH = 4
TOLERANCE = 1e-9


class Generator(nn.Module):
    """Noise and a class to an image of 6 by 6."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(5, 3)
        self.start = nn.Linear(6, 16)
        self.norm = nn.BatchNorm2d(4)
        self.grow = nn.ConvTranspose2d(4, 2, 3, stride=2, bias=False)
        self.end = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 2, padding=1), nn.Tanh())

    def forward(self, noise: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = self.start(torch.cat([noise, self.classes(kind)], dim=1)).view(-1, 4, 2, 2)
        return self.end(self.grow(F.relu(self.norm(x))))


class Discriminator(nn.Sequential):
    """An image of 6 by 6 to how real it looks."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(48, 8),
            nn.LeakyReLU(0.2),
            nn.Linear(8, 1),
        )


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batch(ranks: Sequence[int], step: int, more: int = 0) -> Batch:
    """Images, noise and classes of these ranks together; each has so many more than the one before."""
    sizes = [(rank, BATCH + rank * more) for rank in ranks]
    images = torch.cat([rows(rank, step, size, 36) for rank, size in sizes]).double().view(-1, 1, 6, 6)
    noise = torch.cat([rows(rank + 100, step, size, 3) for rank, size in sizes]).double()
    kinds = torch.cat([torch.randint(5, (size,), generator=seeded(rank, step)) for rank, size in sizes])
    return images, noise, kinds


def score(discriminator: nn.Module, images: torch.Tensor, target: float) -> torch.Tensor:
    output = discriminator(images)
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, target))


class Pair:
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module, way: str) -> None:
        self.generator, self.discriminator, self.way = generator, discriminator, way
        self.of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        self.of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9)

    def step(self, batch: Batch) -> None:
        """One of the usual ways of a training step."""
        images, noise, kinds = batch
        fake = self.generator(noise, kinds)
        self.of_discriminator.zero_grad()
        if self.way == "two backwards":
            score(self.discriminator, images, 1.0).backward()
            score(self.discriminator, fake.detach(), 0.0).backward()
        else:
            (score(self.discriminator, images, 1.0) + score(self.discriminator, fake.detach(), 0.0)).backward()
        self.of_discriminator.step()
        self.discriminator.requires_grad_(self.way != "frozen")
        self.of_generator.zero_grad()
        score(self.discriminator, fake, 1.0).backward()
        self.of_generator.step()
        self.discriminator.requires_grad_(True)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of both."""
        return {
            **{f"generator.{name}": tensor for name, tensor in self.generator.state_dict().items()},
            **{f"discriminator.{name}": tensor for name, tensor in self.discriminator.state_dict().items()},
        }


def attach_all(
    pair: Pair, schemes: tuple[str, str], world_size: int, *, deferred: bool = False, **options: Any
) -> list[Run]:
    """Both networks under a run each; plans are found with copies."""
    images, noise, kinds = make_batch([0], 0)
    generator, discriminator = copy.deepcopy(pair.generator), copy.deepcopy(pair.discriminator)
    group = Group.of_default(max_connections=2)
    plans = [
        plan_for(generator, world_size, SCHEMES[schemes[0]](), lambda: generator(noise, kinds).square().mean()),  # type: ignore[call-arg]
        plan_for(discriminator, world_size, SCHEMES[schemes[1]](), lambda: discriminator(images).mean()),  # type: ignore[call-arg]
    ]
    if deferred:
        plans = [Plan.model_validate({**dict(plan), "deferred": plan.arrival}) for plan in plans]
    runs = [
        attach(pair.generator, pair.of_generator, plans[0], group, RunOptions(**options)),
        attach(pair.discriminator, pair.of_discriminator, plans[1], group, RunOptions(**options)),
    ]
    for run in runs:
        run.sync_batch_norm()
    return runs


def make_networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Generator().double(), Discriminator().double()


def train(
    rank: int, world_size: int, schemes: tuple[str, str], way: str, more: int = 0, deferred: bool = False
) -> None:
    ours, alone = Pair(*make_networks(), way), Pair(*make_networks(), way)
    runs = attach_all(ours, schemes, world_size, mean="samples" if more else "ranks", deferred=deferred)
    for step in range(STEPS):
        ours.step(make_batch([rank], step, more))
        alone.step(make_batch(range(world_size), step, more))
        assert_same(ours.state, alone.state, TOLERANCE)
        assert_on_all_ranks(ours.state)
    for run in runs:
        run.detach()


SCHEME_PAIRS = [
    ("all_reduce", "all_reduce"),
    ("sufficient_factor", "sharded_server"),
    ("sharded_server", "sufficient_factor"),
    ("sparse_rows", "sufficient_factor"),
]


@pytest.mark.parametrize("way", ["two backwards", "one backward", "frozen"])
@pytest.mark.parametrize("schemes", SCHEME_PAIRS, ids="-".join)
def test_two_networks_against_each_other_equal_one_process(schemes: tuple[str, str], way: str) -> None:
    run_ranks(2, train, schemes, way)


@pytest.mark.parametrize("way", ["two backwards", "one backward", "frozen"])
def test_unequal_batches_on_three_ranks(way: str) -> None:
    run_ranks(3, train, ("sufficient_factor", "sharded_server"), way, 2)


@pytest.mark.parametrize("way", ["two backwards", "one backward"])
def test_deferred_transfers_of_both(way: str) -> None:
    run_ranks(2, train, ("all_reduce", "sufficient_factor"), way, 0, True)


def with_one_optimizer(rank: int, world_size: int) -> None:
    """Actor and critic, each under a run, in one optimizer; in two levels where ranks share hosts."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width)) for width in (3, 1)]
    alone = copy.deepcopy(models)
    optimizer, optimizer_alone = (
        torch.optim.AdamW([p for model in some for p in model.parameters()], lr=0.01) for some in (models, alone)
    )
    group = Group.of_default(hosts=((0, 1), (2,)))
    schemes = AllReduce(levels=2), SCHEMES["sharded_server"]()  # type: ignore[call-arg]
    samples = copy.deepcopy(models)
    plans = [
        plan_for(sample, world_size, scheme, lambda sample=sample: sample(rows(0, 0, 3, 4)).square().mean())
        for sample, scheme in zip(samples, schemes, strict=True)
    ]
    runs = [attach(model, optimizer, plan, group) for model, plan in zip(models, plans, strict=True)]
    for step in range(5):
        optimizer.zero_grad()
        optimizer_alone.zero_grad()
        x = rows(rank, step, 3, 4)
        (models[0](x).square().mean() * models[1](x).square().mean()).backward()
        for other in range(world_size):
            x = rows(other, step, 3, 4)
            (alone[0](x).square().mean() * alone[1](x).square().mean() / world_size).backward()
        optimizer.step()
        optimizer_alone.step()
        for one, other_model in zip(models, alone, strict=True):
            assert_same(one.state_dict(), other_model.state_dict())
            assert_on_all_ranks(one.state_dict())
    for run in runs:
        run.detach()


def test_two_runs_with_one_optimizer() -> None:
    run_ranks(3, with_one_optimizer)


def out_of_samples(rank: int, world_size: int) -> None:
    """Rank 1 has no samples in every second step, and answers what the others exchange, run by run."""
    ours, alone = Pair(*make_networks(), "one backward"), Pair(*make_networks(), "one backward")
    runs = attach_all(ours, ("sufficient_factor", "all_reduce"), world_size, mean="samples")
    for step in range(4):
        present = range(world_size) if step % 2 == 0 else range(1)
        if rank in present:
            ours.step(make_batch([rank], step))
        else:
            ours.of_discriminator.zero_grad()
            runs[1].empty_step()
            ours.of_discriminator.step()
            ours.of_generator.zero_grad()
            for run in runs:
                run.empty_step()
            ours.of_generator.step()
        alone.step(make_batch(present, step))
        assert_same(ours.state, alone.state, TOLERANCE)
        assert_on_all_ranks(ours.state)
    for run in runs:
        run.detach()


def test_a_rank_without_samples_answers_both() -> None:
    run_ranks(2, out_of_samples)


class Branches(nn.Module):
    """Layers of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def both_ways_round(rank: int, world_size: int) -> None:
    """One backward pass through two models, which it reaches in another order on each rank, and not all of either."""
    torch.manual_seed(0)
    models = [Branches(), Branches()]
    alone = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    optimizers_alone = [torch.optim.SGD(model.parameters(), lr=0.1) for model in alone]
    group = Group.of_default()
    sample, scheme = copy.deepcopy(models[0]), SCHEMES["sufficient_factor"]()
    plan = plan_for(sample, world_size, scheme, lambda: sample(rows(0, 0, 3, 4), (0, 1, 2)))
    runs = [attach(model, optimizer, plan, group) for model, optimizer in zip(models, optimizers, strict=True)]

    def losses(models: Sequence[nn.Module], rank: int, step: int) -> torch.Tensor:
        order = models if rank else models[::-1]
        first, second = (model(rows(rank, step, 3, 4), (rank, 2)) for model in order)
        return first + second

    for step in range(4):
        for optimizer in (*optimizers, *optimizers_alone):
            optimizer.zero_grad()
        losses(models, rank, step).backward()
        for other in range(world_size):
            (losses(alone, other, step) / world_size).backward()
        for optimizer in (*optimizers, *optimizers_alone):
            optimizer.step()
        for one, other in zip(models, alone, strict=True):
            assert_same(one.state_dict(), other.state_dict())
    for run in runs:
        run.detach()


def test_two_models_that_a_backward_pass_reaches_in_another_order_on_each_rank() -> None:
    run_ranks(2, both_ways_round)


def refuse(rank: int, world_size: int) -> list[str]:
    del rank
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    group = Group.of_default()

    def put_under_a_run(module: nn.Module, width: int = 4) -> Run:
        sample = copy.deepcopy(module)
        plan = plan_for(sample, world_size, None, lambda: sample(rows(0, 0, 3, width)).square().mean())
        return attach(module, torch.optim.SGD(module.parameters(), lr=0.1), plan, group)

    messages = []
    run = put_under_a_run(model)
    for module in (model, model[1]):
        with pytest.raises(InfeasibleError) as caught:
            put_under_a_run(module)
        messages.append(str(caught.value))
    run.detach()
    inner = put_under_a_run(model[1])
    with pytest.raises(InfeasibleError) as caught:
        put_under_a_run(model)
    messages.append(str(caught.value))
    inner.detach()
    put_under_a_run(copy.deepcopy(model)).detach()
    return messages


def test_a_parameter_is_under_one_run_only() -> None:
    for again, inside, outside in run_ranks(2, refuse):
        assert "parameter '0.weight' is under one already, as '0.weight' of Sequential" in again
        assert "parameter '0.weight' is under one already, as '1.0.weight' of Sequential" in inside
        assert "parameter '1.0.weight' is under one already, as '0.weight' of Sequential" in outside


def share(rank: int, world_size: int) -> None:
    """Connections, bytes and exchanges of siblings."""
    groups = dist.distributed_c10d._world.pg_map
    root = Group.of_default(max_connections=2)
    before = len(groups)
    first, second = root.take_for_run(), root.take_for_run()
    assert first is root
    assert second is not root
    assert second.root is root
    assert second.max_connections == root.max_connections
    assert len(groups) == before + 2
    root.bytes_sent = 0
    mine = torch.full((4,), float(rank))
    theirs = torch.empty(4)
    received = [((rank + 1) % world_size, theirs)]
    second.exchange([((rank + 1) % world_size, mine)], received, tag=7, what="a message").wait()
    assert theirs[0] == (rank + 1) % world_size
    assert root.bytes_sent == second.bytes_sent == 16
    second.num_exchanges += 1
    assert root.num_exchanges == 1
    assert root.side() is second.side()
    second.return_from_run()
    assert len(groups) == before + 1, "the side stays"
    again = root.take_for_run()
    assert again is not root
    again.return_from_run()
    first.return_from_run()
    assert root.take_for_run() is root


def test_a_further_run_gets_connections_of_its_own() -> None:
    run_ranks(2, share)


def example(rank: int, world_size: int) -> float:
    del rank, world_size
    return train_gan(num_steps=12)


@pytest.mark.slow
@pytest.mark.thorough
def test_each_run_finds_its_plan_while_the_other_trains() -> None:
    first, second = run_ranks(2, example, init=False)
    assert 0.0 <= first <= 1.0
    assert first != second, "each rank judges by its own noise"


def go_ahead(rank: int, world_size: int) -> str:
    """Rank 0 has a step of the second model more than rank 1, which waits in the first run."""
    liveness_module.PATIENCE_SECONDS = 1.0
    group = join.init()
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    nothing = torch.zeros((), requires_grad=True)
    plans = [plan_for(copy.deepcopy(model), world_size, None, lambda: nothing) for model in models]
    runs = [attach(model, None, plan, group) for model, plan in zip(models, plans, strict=True)]
    for model in models:
        model(rows(rank, 0, 3, 4)).square().mean().backward()
    go_on = runs[0].check_replicas if rank else models[1](rows(rank, 1, 3, 4)).square().mean().backward
    with pytest.raises(CommError) as caught:
        go_on()
    join.shutdown(str(caught.value))
    return str(caught.value)


def test_a_rank_that_is_ahead_in_one_of_them_is_told() -> None:
    first, second = run_ranks(2, go_ahead, init=False)
    assert "rank 1 has left the exchanges behind after 2 of them and waits in 'comparing replicas'" in first
    assert "rank 0 ended with" in second
