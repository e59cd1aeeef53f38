"""The right mean, equal to one process: batches of unequal sizes, ranks that run out early, uneven micro-batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poseidon.comm import SCHEMES, AllReduce, SparseRows, SufficientFactor
from poseidon.comm.group import Group
from poseidon.errors import CommError, ConfigError
from poseidon.plan import Plan
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, assert_same, plan_for, seeded

pytestmark = pytest.mark.multiprocess

EXACT = 1e-12
SIZES = ((3, 8, 1, 5), (4, 4, 4, 4), (2, 0, 7, 1), (1, 3, 2, 9))
"""Rows by step and rank."""
MIX = {"table": SparseRows(), "layers.0": SufficientFactor(), "layers.2": AllReduce(), "layers.3": SufficientFactor()}
CHOICES = (*SCHEMES, "mix", "deferred")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6, dtype=torch.double)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4)).double()

    def forward(self, x):
        return self.layers(self.table(x))


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def make_batch(rank, step, count):
    generator = seeded(rank, step, count)
    return (
        torch.randint(0, 20, (count, 5), generator=generator),
        torch.randint(0, 4, (count, 5), generator=generator),
    )


def join(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def make_words():
    torch.manual_seed(0)
    return Words()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def put_under(model, optimizer, choice, world_size, mean="samples"):
    scheme = {"mix": MIX, "deferred": AllReduce()}.get(choice) or SCHEMES[choice]()
    plan = plan_for(model, world_size, scheme, lambda: mean_loss(model, make_batch(0, 0, 3)))
    if choice == "deferred":
        plan = Plan.model_validate({**dict(plan), "deferred": ("layers.0", "layers.2")})
    return attach(model, optimizer, plan, Group.of_default(), RunOptions(mean=mean))


class Beside:
    """A model under a plan, and its twin that one process trains on the union."""

    def __init__(self, choice, world_size, mean="samples"):
        self.model, self.twin = make_words(), make_words()
        self.optimizer, self.twins = make_optimizer(self.model), make_optimizer(self.twin)
        self.run: Run = put_under(self.model, self.optimizer, choice, world_size, mean)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_alone(self, *batches):
        """One step on all of them together."""
        self.twins.zero_grad()
        mean_loss(self.twin, join(batches)).backward()
        self.twins.step()

    def compare(self):
        found = {name: p.detach() for name, p in self.model.named_parameters()}
        assert_same(found, {name: p.detach() for name, p in self.twin.named_parameters()}, EXACT)
        assert_on_all_ranks(found)


def each_choice(rank, world_size, check):
    for choice in CHOICES:
        check(rank, world_size, choice)


def unequal(rank, world_size, choice):
    """Each rank's batch is of another size, and one has none; the rows of the input count."""
    beside = Beside(choice, world_size)
    for step, sizes in enumerate(SIZES):
        batches = [make_batch(r, step, size) for r, size in enumerate(sizes[:world_size]) if size]
        if sizes[rank]:
            mean_loss(beside.model, make_batch(rank, step, sizes[rank])).backward()
        else:
            beside.run.empty_step()
        beside.update()
        beside.step_alone(*batches)
        beside.compare()
    notes = [event["text"] for event in beside.run.events if event["kind"] == "weighted"]
    assert len(notes) == (world_size > 1), "said once"
    assert all("3, 8" in note for note in notes)
    beside.run.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_unequal_batches(world_size):
    run_ranks(world_size, each_choice, unequal)


def masked(rank, world_size, choice):
    """Tokens that count are spread unevenly over ranks and micro-batches; the loop says how many there are."""
    beside = Beside(choice, world_size)

    def token_loss(model, batch, keep):
        x, y = batch
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        return losses[keep.flatten()].mean()

    def make(r, step, micro):
        x, y = make_batch(r, 10 * step + micro, 3)
        keep = torch.rand(3, 5, generator=seeded(r, step, micro)) < 0.5
        keep[0, 0] = True
        return (x, y), keep

    for step in range(4):
        for micro in range(3):
            batch, keep = make(rank, step, micro)
            beside.run.weight(int(keep.sum()))
            loss = token_loss(beside.model, batch, keep) / 3
            if micro < 2:
                with beside.run.no_sync():
                    loss.backward()
            else:
                loss.backward()
        beside.update()
        beside.twins.zero_grad()
        parts = [make(r, step, micro) for r in range(world_size) for micro in range(3)]
        token_loss(beside.twin, join([b for b, _ in parts]), torch.cat([k for _, k in parts])).backward()
        beside.twins.step()
        beside.compare()
    assert not [event for event in beside.run.events if event["kind"] == "weighted"], "the loop has said it"
    beside.run.detach()


@pytest.mark.parametrize("world_size", [1, 3])
def test_masked_tokens_and_accumulation(world_size):
    run_ranks(world_size, each_choice, masked)


def running_out(rank, world_size, choice):
    """Rank r has r + 2 batches, with a schedule of learning rates that goes on for all; then on again together."""
    beside = Beside(choice, world_size)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in (beside.optimizer, beside.twins)]

    def update():
        beside.update()
        schedulers[0].step()

    for epoch in range(2):
        with beside.run.join(update):
            for step in range(rank + 2):
                mean_loss(beside.model, make_batch(rank, 7 * epoch + step, 3 + step)).backward()
                update()
        for step in range(world_size + 1):
            alive = [r for r in range(world_size) if step < r + 2]
            beside.step_alone(*(make_batch(r, 7 * epoch + step, 3 + step) for r in alive))
            schedulers[1].step()
        beside.compare()
    assert beside.run.num_exchanges == 2 * (world_size + 1), "nothing is exchanged to find out that all are done"
    beside.run.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_run_out(world_size):
    run_ranks(world_size, each_choice, running_out)


def forgotten_forward(rank, world_size):
    """The last batch's forward is not followed by a backward pass on one rank."""
    for choice in ("sufficient_factor", "mix", "deferred"):
        beside = Beside(choice, world_size)
        with beside.run.join():
            for step in range(2 + rank):
                mean_loss(beside.model, make_batch(rank, step, 4)).backward()
                beside.update()
            if rank == 0:
                beside.model(make_batch(rank, 9, 4)[0])
        for step in range(1 + world_size):
            beside.step_alone(*(make_batch(r, step, 4) for r in range(world_size) if step < r + 2))
        beside.compare()
        beside.run.detach()


def nothing_to_do(rank, world_size):
    """One rank never has a batch; and nobody has one."""
    beside = Beside("mix", world_size)
    with beside.run.join():
        for step in range(3 * (rank == 1)):
            mean_loss(beside.model, make_batch(rank, step, 4)).backward()
            beside.update()
    with beside.run.join():
        pass
    for step in range(3):
        beside.step_alone(make_batch(1, step, 4))
    beside.compare()
    beside.run.detach()


def other_updates(rank, world_size):
    """What a rank does meanwhile is not what the others do: said at the end, nothing goes on."""
    beside = Beside("all_reduce", world_size)
    for step in range(2 + rank):
        mean_loss(beside.model, make_batch(rank, step, 4)).backward()
        beside.update()
    with pytest.raises(CommError, match=r"drifted apart.*table\.weight"):
        beside.run.drain(lambda: None)
    beside.run.detach()


def without_items(rank, world_size):
    """A mean over nothing is no number; a rank that says 0 is left out."""
    for choice in CHOICES:
        beside = Beside(choice, world_size)
        loss = mean_loss(beside.model, make_batch(rank, 0, 4))
        beside.run.weight(0 if rank == 0 else 4)
        (loss * float("nan") if rank == 0 else loss).backward()
        beside.update()
        beside.step_alone(*(make_batch(r, 0, 4) for r in range(1, world_size)))
        beside.compare()
        for wrong in (-1, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="how many items"):
                beside.run.weight(wrong)
        beside.run.detach()


def by_ranks(rank, world_size):
    """As DDP has it: each rank counts alike, whatever its batch."""
    for choice in CHOICES:
        beside = Beside(choice, world_size, mean="ranks")
        for step, sizes in enumerate(((3, 8), (5, 1))):
            beside.run.weight(100 * rank + 1)
            mean_loss(beside.model, make_batch(rank, step, sizes[rank])).backward()
            beside.update()
            beside.twins.zero_grad()
            for r in range(world_size):
                (mean_loss(beside.twin, make_batch(r, step, sizes[r])) / world_size).backward()
            beside.twins.step()
            beside.compare()
        beside.run.detach()


def kept_gradients(rank, world_size):
    """A loop that does not zero: what is there is kept once, whatever the weights."""
    for choice in ("all_reduce", "sufficient_factor", "mix"):
        beside = Beside(choice, world_size)
        for step in range(3):
            mean_loss(beside.model, make_batch(rank, step, 2 + 3 * rank)).backward()
            mean_loss(beside.twin, join([make_batch(r, step, 2 + 3 * r) for r in range(world_size)])).backward()
            found = {name: p.grad for name, p in beside.model.named_parameters()}
            assert_same(found, {name: p.grad for name, p in beside.twin.named_parameters()}, EXACT)
            assert_on_all_ranks(found)
        beside.run.detach()


@pytest.mark.parametrize(
    "check",
    [forgotten_forward, nothing_to_do, other_updates, without_items, by_ranks, kept_gradients],
)
def test_unusual(check):
    run_ranks(2, check)
