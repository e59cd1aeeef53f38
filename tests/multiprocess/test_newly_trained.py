"""Parameters that come to be trained while a run goes on, and those that go."""

import copy
import random

import pytest
import torch
from torch import nn

from poseidon.auto import distribute
from poseidon.comm import SCHEMES, liveness
from poseidon.comm.group import Group
from poseidon.errors import CommError
from poseidon.runtime import join
from support.ranks import run_ranks
from support.steps import Pair, assert_on_all_ranks, assert_same, rows

pytestmark = pytest.mark.multiprocess

SCHEME_CHOICES = ("all_reduce", "sufficient_factor", "sharded_server")


def under_each_scheme(rank, world_size, check, *args):
    """In the same processes, one after the other."""
    for scheme in SCHEME_CHOICES:
        try:
            check(rank, world_size, scheme, *args)
        except BaseException as error:
            error.add_note(f"under {scheme}")
            raise


def square(model, x):
    return model(x).square().mean()


def features(rank, step):
    return rows(rank, step, 4, 6)


def make_model(frozen=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def make_pair(rank, world_size, scheme, *, frozen=(), **how):
    return Pair(rank, world_size, make_model(frozen), SCHEMES[scheme](), square, features, **how)


def trained_in(run):
    return [event["text"] for event in run.events if event["kind"] == "trained"]


def end(pair):
    pair.run.check_replicas()
    pair.run.detach()


# Layers that were frozen


def unfrozen_one_after_the_other(rank, world_size, scheme):
    pair = make_pair(rank, world_size, scheme, frozen=[0, 2])
    pair.step(0)
    for step, index in ((1, 2), (2, 0)):
        for model in (pair.model, pair.alone):
            model[index].requires_grad_(True)
        pair.step(step)
    pair.steps()
    assert len(trained_in(pair.run)) == 2
    assert "'2.weight', '2.bias' newly trained" in trained_in(pair.run)[0]
    assert list(pair.run.plan.schemes) == ["0", "2", "4"]
    end(pair)


def a_weight_whose_bias_was_trained(rank, world_size, scheme):
    model = make_model()
    model[2].weight.requires_grad_(False)
    pair = Pair(rank, world_size, model, SCHEMES[scheme](), square, features)
    pair.step(0)
    for one in (pair.model, pair.alone):
        one[2].weight.requires_grad_(True)
    pair.steps()
    end(pair)


def frozen_and_back(rank, world_size, scheme):
    """As a GAN does: no change, no message, no other plan."""
    pair = make_pair(rank, world_size, scheme)
    plan = pair.run.plan
    for step in range(6):
        for model in (pair.model, pair.alone):
            model[2].requires_grad_(step % 2 == 0)
        pair.step(step)
    assert pair.run.plan is plan
    assert not trained_in(pair.run)
    end(pair)


def unfrozen_while_others_are_frozen_for_now(rank, world_size, scheme):
    pair = make_pair(rank, world_size, scheme, frozen=[0])
    pair.step(0)
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
        model[4].requires_grad_(False)
    pair.step(1)
    assert list(pair.run.plan.schemes) == ["0", "2", "4"]
    for model in (pair.model, pair.alone):
        model[4].requires_grad_(True)
    pair.steps()
    assert len(trained_in(pair.run)) == 1
    end(pair)


# Modules that were not there


def a_new_layer(rank, world_size, scheme):
    """Made with other numbers on each rank; all get rank 0's."""
    pair = make_pair(rank, world_size, scheme)
    pair.step(0)
    for model, seed in ((pair.model, 10 + rank), (pair.alone, 10)):
        torch.manual_seed(seed)
        model.append(nn.BatchNorm1d(3))
        model.append(nn.Linear(3, 2))
    for optimizer, model in ((pair.optimizer, pair.model), (pair.optimizer_alone, pair.alone)):
        optimizer.add_param_group({"params": [*model[5].parameters(), *model[6].parameters()], "lr": 0.2})
    pair.run.model.eval(), pair.alone.eval()  # one process normalizes over all rows, ranks over their own
    for step in range(1, 4):
        pair.step(step)
    assert "'5.weight', '5.bias', '6.weight', '6.bias' newly trained" in trained_in(pair.run)[0]
    assert_on_all_ranks(dict(pair.model.named_buffers()))
    end(pair)


def a_layer_replaced(rank, world_size, scheme):
    pair = make_pair(rank, world_size, scheme)
    pair.step(0)
    for model, seed in ((pair.model, 10 + rank), (pair.alone, 10)):
        torch.manual_seed(seed)
        model[4] = nn.Linear(8, 5)
    for optimizer, model in ((pair.optimizer, pair.model), (pair.optimizer_alone, pair.alone)):
        optimizer.add_param_group({"params": [*model[4].parameters()]})
    for step in range(1, 4):
        pair.step(step)
    text = trained_in(pair.run)[0]
    assert "'4.weight', '4.bias' newly trained, '4.weight', '4.bias' gone from the model" in text
    end(pair)


def a_layer_taken_away(rank, world_size, scheme):
    pair = make_pair(rank, world_size, scheme)
    pair.step(0)
    for model in (pair.model, pair.alone):
        del model[4]
    for step in range(1, 4):
        pair.step(step)
    assert list(pair.run.plan.schemes) == ["0", "2"]
    end(pair)


def a_sparse_table(rank, world_size, scheme):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 6, sparse=True)
            self.table.requires_grad_(False)
            self.top = nn.Linear(6, 3)

        def forward(self, x):
            return self.top(self.table(x))

    pair = Pair(
        *(rank, world_size, Tables(), SCHEMES[scheme](), square),
        lambda rank, step: torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(10 * step + rank)),
    )
    pair.step(0)
    for model in (pair.model, pair.alone):
        model.table.requires_grad_(True)
    for step in range(1, 4):
        pair.step(step)
    assert pair.run.plan.schemes["table"].kind == "sparse_rows"
    end(pair)


# In the middle of things


def while_accumulating(rank, world_size, scheme):
    """What has accumulated on each rank by then is exchanged first."""
    pair = make_pair(rank, world_size, scheme, frozen=[0])
    pair.step(0)
    pair.optimizer.zero_grad()
    pair.optimizer_alone.zero_grad()
    with pair.run.no_sync():
        square(pair.model, features(rank, 1)).backward()
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    square(pair.model, features(rank, 2)).backward()
    for step in (1, 2):
        for model in (pair.alone,):
            model[0].requires_grad_(step == 2)
        pair.accumulate_alone(step)
    if scheme != "sharded_server":
        pair.compare()
    pair.update()
    end(pair)


def after_a_forward_without_backward(rank, world_size, scheme):
    pair = make_pair(rank, world_size, scheme, frozen=[0])
    pair.step(0)
    pair.optimizer.zero_grad()
    if rank == 0:
        pair.model(features(rank, 5))
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    pair.step(1)
    pair.step(2)
    end(pair)


def with_deferred_layers(rank, world_size, scheme):
    if scheme == "sharded_server":
        return  # it cannot be deferred
    pair = make_pair(
        *(rank, world_size, scheme), frozen=[0], plan=lambda plan: plan.model_copy(update={"deferred": ("2", "4")})
    )
    for step in range(2):
        pair.step(step)
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    for step in range(2, 5):
        pair.step(step)
    assert pair.run.plan.deferred == ("2", "4")
    end(pair)


@pytest.mark.parametrize(
    "check",
    [
        unfrozen_one_after_the_other,
        a_weight_whose_bias_was_trained,
        frozen_and_back,
        unfrozen_while_others_are_frozen_for_now,
        a_new_layer,
        a_layer_replaced,
        a_layer_taken_away,
        a_sparse_table,
        while_accumulating,
        after_a_forward_without_backward,
        with_deferred_layers,
    ],
    ids=lambda check: check.__name__,
)
def test_newly_trained(check):
    run_ranks(2, under_each_scheme, check)


# Anything after anything


def change(draw, models, optimizers, rank):
    """One change of both models; a new layer has other numbers on each rank."""
    kind = draw.choice(["freeze", "thaw", "thaw all", "replace", "insert", "remove", "nothing"])
    index = draw.randrange(len(models[0]))
    seed = draw.randrange(1000)
    for model, optimizer, own in zip(models, optimizers, (rank, 0), strict=True):
        torch.manual_seed(seed + own)
        if kind in ("freeze", "thaw"):
            model[index].requires_grad_(kind == "thaw")
        elif kind == "thaw all":
            model.requires_grad_(True)
        elif kind == "remove" and len(model) > 2:
            del model[index]
        elif kind in ("replace", "insert"):
            layer = nn.Linear(6, 6)
            if kind == "replace":
                model[index] = layer
            else:
                model.insert(index, layer)
            optimizer.add_param_group({"params": [*layer.parameters()]})
    if not any(p.requires_grad for p in models[0].parameters()):
        for model in models:
            model.requires_grad_(True)


def any_changes(rank, world_size, scheme, seed):
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model[draw.randrange(3)].requires_grad_(False)
    deferred = scheme != "sharded_server" and draw.random() < 0.5
    pair = Pair(
        *(rank, world_size, model, SCHEMES[scheme](), square, features),
        plan=lambda plan: plan.model_copy(update={"deferred": tuple(plan.schemes)[:1] if deferred else ()}),
    )
    for step in range(12):
        change(draw, (pair.model, pair.alone), (pair.optimizer, pair.optimizer_alone), rank)
        if draw.random() < 0.3:
            with pair.run.no_sync():
                square(pair.model, features(rank, 50 + step)).backward()
            pair.run.flush()
        pair.step(step)
    end(pair)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_any_changes_in_any_order(seed):
    run_ranks(2, under_each_scheme, any_changes, seed)


# Where the loop never calls the model


def parts_only(rank, world_size):
    """The change is seen when backward has begun, which is too late; `refresh` is in time."""
    pair = make_pair(rank, world_size, "all_reduce", frozen=[0])
    run_parts = lambda model, x: nn.Sequential.forward(model, x).square().mean()  # noqa: E731
    pair.loss = run_parts
    pair.step(0)
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    loss = run_parts(pair.model, features(rank, 1))
    with pytest.raises(CommError, match=r"'0\.weight', '0\.bias' newly trained.* call run\.refresh\(\)"):
        loss.backward()


def parts_and_refresh(rank, world_size):
    pair = make_pair(rank, world_size, "all_reduce", frozen=[0])
    pair.loss = lambda model, x: nn.Sequential.forward(model, x).square().mean()
    pair.step(0)
    for model in (pair.model, pair.alone):
        model[0].requires_grad_(True)
    pair.run.refresh()
    pair.step(1)
    pair.step(2)
    end(pair)


def made_in_forward(rank, world_size):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 4)

        def forward(self, x):
            if not hasattr(self, "second"):
                self.second = nn.Linear(4, 3)
            return self.second(self.first(x))

    model = Lazy()
    run = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce", group=Group.of_default())
    loss = square(model, features(rank, 0))
    with pytest.raises(CommError, match=r"'second\.weight', 'second\.bias' newly trained.* before the forward pass"):
        loss.backward()
    del run


@pytest.mark.parametrize("check", [parts_only, parts_and_refresh, made_in_forward], ids=lambda check: check.__name__)
def test_changes_that_a_forward_does_not_show(check):
    run_ranks(2, check)


# Refusals


def differently(rank, world_size):
    pair = make_pair(rank, world_size, "all_reduce", frozen=[0, 2])
    pair.step(0)
    pair.model[2 * rank].requires_grad_(True)
    with pytest.raises(CommError, match=r"changed differently .*'0\.weight'.* on rank 0, '2\.weight'.* on rank 1"):
        pair.model(features(rank, 1))


def in_other_shapes(rank, world_size):
    pair = make_pair(rank, world_size, "all_reduce")
    pair.step(0)
    pair.model.append(nn.Linear(3, 2 + rank))
    with pytest.raises(
        CommError, match=r"\(2, 3\) torch\.float32 new on rank 0, .*\(3, 3\) torch\.float32 new on rank 1"
    ):
        pair.model(features(rank, 1))


def converted(rank, world_size):
    pair = make_pair(rank, world_size, "all_reduce")
    pair.step(0)
    pair.model.double()
    with pytest.raises(CommError, match=r"parameter '0\.weight' is torch\.float64 on cpu now .* run\.detach\(\)"):
        pair.model(features(rank, 1).double())


@pytest.mark.parametrize("check", [differently, in_other_shapes, converted], ids=lambda check: check.__name__)
def test_changes_that_are_refused(check):
    run_ranks(2, check)


def on_one_rank_only(rank, world_size):
    """No rank hangs: those that go on learn that the other waits, and it learns that they have ended."""
    liveness.PATIENCE_SECONDS = 1.0
    group = join.init()
    model = make_model([0])
    run = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce", group=group)
    square(model, features(rank, 0)).backward()
    if rank == 1:
        model[0].requires_grad_(True)
    try:
        square(model, features(rank, 1)).backward()
    except CommError as error:
        join.shutdown("what it trains has changed on one rank only")
        return str(error)
    finally:
        del run
    return ""


def test_a_change_on_one_rank_only_ends_on_all():
    first, second = run_ranks(2, on_one_rank_only, init=False)
    assert "rank 1 has left the exchanges behind" in first
    assert "agreeing on what the model trains: '0.weight', '0.bias' newly trained on rank 1" in first
    assert "'0.weight', '0.bias' newly trained before exchange 1, but another rank did not follow" in second


# Under a plan that is still looked for


def automatic(rank, world_size, at):
    """Observed again, planned again; every step exact."""
    model = make_model([0])
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.05)
    run = distribute(model, optimizer, group=Group.of_default())
    settled_at = None
    for step in range(at + 30):
        if step == at:
            for one in (model, alone):
                one[0].requires_grad_(True)
        optimizer.zero_grad()
        square(model, features(rank, step)).backward()
        optimizer.step()
        optimizer_alone.zero_grad()
        for other in range(world_size):
            (square(alone, features(other, step)) / world_size).backward()
        optimizer_alone.step()
        if run.settled and settled_at is None and step > at:
            settled_at = step
    assert settled_at is not None
    assert_same(
        {n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in alone.named_parameters()}, 1e-4
    )
    assert "0" in run.plan.schemes
    assert run.plan.layers["0"].rows == 4  # seen while it was observed
    run.check_replicas()
    run.detach()
    return [event["kind"] for event in run.events]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(2, id="observing"),
        pytest.param(6, id="comparing", marks=pytest.mark.thorough),
        pytest.param(25, id="settled", marks=pytest.mark.thorough),
    ],
)
def test_an_automatic_plan_is_looked_for_again(at):
    first, second = run_ranks(2, automatic, at)
    assert first == second
    assert first.count("trained") == 1
    assert "adopted" in first[first.index("trained") :] or "planned" in first[first.index("trained") :]
