"""PyTorch's DDP and Poseidon side by side: the same model and data in the same processes, gradients compared.

One check for each behavior that DDP documents, and what DDP refuses beside it.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from poseidon.runtime.ignored import ignored_names
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks
from support.steps import assert_on_all_ranks, assert_same, rows

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


def square(output):
    return output.square().mean()


def features(rank, step, count=4):
    return rows(rank, step, count, 6)


class Beside:
    """A model under Poseidon and a copy of it under DDP.

    Args:
        rank: This rank.
        world_size: How many there are.
        scheme: By which Poseidon's layers go where they can.
        model: Any model.
        ddp: Arguments of DDP.
        options: Arguments of Poseidon's options.
        loss: From a model and a batch to the loss.
    """

    def __init__(
        self,
        rank,
        world_size,
        scheme,
        model,
        *,
        ddp=None,
        options=None,
        loss=lambda model, x: square(model(x)),
        data=features,
    ):
        self.rank, self.loss, self.data = rank, loss, data
        theirs = copy.deepcopy(model)
        self.ddp = DistributedDataParallel(theirs, **(ddp or {}))
        self.model = model
        profile = profile_structure(model, ignored=ignored_names(model))
        plan = uniform_plan(profile, world_size, SCHEMES[scheme]())
        self.optimizer, self.optimizer_ddp = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, self.ddp))
        self.run = attach(model, self.optimizer, plan, Group.of_default(), RunOptions(**(options or {})))
        served = [name for name, one in plan.schemes.items() if one.kind == "sharded_server"]
        self.served = {f"{name}.{p.name}" if name else p.name for name in served for p in plan.layers[name].parameters}

    def backward(self, step):
        for model in (self.ddp, self.model):
            self.loss(model, self.data(self.rank, step)).backward()

    def compare(self, *, alike=True):
        """Gradients of both, and Poseidon's between ranks."""
        mine, theirs = (
            {n: p.grad for n, p in m.named_parameters() if n not in self.served} for m in (self.model, self.ddp.module)
        )
        assert_same(mine, theirs)
        if alike:
            assert_on_all_ranks(mine)

    def update(self):
        """Both optimizers step; parameters agree."""
        for optimizer in (self.optimizer, self.optimizer_ddp):
            optimizer.step()
            optimizer.zero_grad()
        mine, theirs = (dict(m.named_parameters()) for m in (self.model, self.ddp.module))
        assert_same({n: p.detach() for n, p in mine.items()}, {n: p.detach() for n, p in theirs.items()})

    def steps(self, count=4, **how):
        for step in range(count):
            self.backward(step)
            self.compare(**how)
            self.update()
        self.run.detach()
        return self


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


# Unused parameters


class Branches(nn.Module):
    """Which branch is used depends on the rank and the step; one is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.uses = ("left",)

    def forward(self, x):
        x = self.stem(x)
        return sum(getattr(self, name)(x) for name in self.uses)


def use(model, x, uses):
    module = getattr(model, "module", model)
    module.uses = uses
    return square(model(x))


USES = [("left",), ("left", "right"), ("right",), ("left",)]
"""By step; on rank 1 the other way round in the third."""


def unused(rank, world_size, scheme):
    def loss(model, batch):
        step, x = batch
        return use(model, x, USES[step] if rank != 1 or step != 2 else ("left",))

    beside = Beside(
        *(rank, world_size, scheme, Branches()),
        ddp={"find_unused_parameters": True},
        loss=loss,
        data=lambda rank, step: (step, features(rank, step)),
    )
    beside.steps()


def unused_is_refused_by_ddp_unless_it_looks_for_it(rank, world_size, scheme):
    beside = Beside(rank, world_size, scheme, Branches())
    beside.backward(0)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        beside.ddp(features(rank, 1))
    for step in range(1, 3):
        beside.run.optimizer.zero_grad()
        use(beside.model, features(rank, step), USES[step]).backward()
    assert beside.model.never.weight.grad is None
    beside.run.detach()


def conditional(rank, world_size, scheme):
    """Parameters that only come into use later, with the graph declared static where it is from then on."""

    def loss(model, batch):
        step, x = batch
        return use(model, x, ("left", "right") if step >= 2 else ("left",))

    beside = Beside(
        *(rank, world_size, scheme, Branches()),
        ddp={"find_unused_parameters": True},
        loss=loss,
        data=lambda rank, step: (step, features(rank, step)),
    )
    beside.steps()


# Accumulation


def accumulation(rank, world_size, scheme):
    beside = Beside(rank, world_size, scheme, make_mlp())
    for step in range(0, 9, 3):
        with beside.ddp.no_sync(), beside.run.no_sync():
            beside.backward(step)
            beside.backward(step + 1)
        beside.backward(step + 2)
        beside.compare()
        beside.update()
    beside.run.detach()


def accumulation_counts_by_forward_in_ddp(rank, world_size, scheme):
    """DDP decides in forward whether backward will sync; here it is the backward pass that counts."""
    beside = Beside(rank, world_size, scheme, make_mlp())
    with beside.ddp.no_sync(), beside.run.no_sync():
        losses = [beside.loss(model, features(rank, 0)) for model in (beside.ddp, beside.model)]
    for loss in losses:
        loss.backward()
    theirs = {n: p.grad.clone() for n, p in beside.ddp.module.named_parameters()}
    whole = {n: g.clone() for n, g in theirs.items()}
    for gradient in whole.values():
        dist.all_reduce(gradient)
        gradient /= world_size
    mine = {n: p.grad for n, p in beside.model.named_parameters()}
    expected = {n: whole[n] for n in mine if n not in beside.served}
    assert_same({n: mine[n] for n in expected}, expected)  # DDP's own are still this rank's alone
    assert any(not torch.allclose(theirs[n], whole[n]) for n in whole)
    beside.run.detach()


# Buffers


def make_normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))


def buffers(rank, world_size, scheme):
    """DDP sends rank 0's buffers before each forward, Poseidon after each step: forward sees the same."""
    beside = Beside(
        *(rank, world_size, scheme, make_normed()),
        ddp={"forward_sync_buffers": True},
        options={"buffers": "after_step"},
    )
    for step in range(3):
        beside.backward(step)
        beside.compare()
        beside.update()
        expected = {n: b.clone() for n, b in beside.ddp.module.named_buffers()}
        for buffer in expected.values():
            dist.broadcast(buffer, 0)
        found = dict(beside.model.named_buffers())
        for name, buffer in expected.items():
            torch.testing.assert_close(found[name], buffer)
    beside.run.detach()


def own_buffers(rank, world_size, scheme):
    """Neither sends them: each rank's statistics are its own, and the same under both."""
    beside = Beside(rank, world_size, scheme, make_normed(), ddp={"forward_sync_buffers": False})
    beside.steps()
    for (name, mine), theirs in zip(beside.model.named_buffers(), beside.ddp.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


# Uneven inputs


def uneven(rank, world_size, scheme):
    """The ranks that have run out count as zero, divided by all ranks: DDP's default, and `mean="ranks"` here."""
    beside = Beside(rank, world_size, scheme, make_mlp())
    count = 2 + 2 * rank
    with Join([beside.ddp]):
        for step in range(count):
            beside.optimizer_ddp.zero_grad()
            beside.loss(beside.ddp, features(rank, step)).backward()
            beside.optimizer_ddp.step()
    with beside.run.join():
        for step in range(count):
            beside.optimizer.zero_grad()
            beside.loss(beside.model, features(rank, step)).backward()
            beside.optimizer.step()
    last = dict(beside.ddp.module.named_parameters())
    for parameter in last.values():  # DDP hands on the parameters of the rank that ran longest
        dist.broadcast(parameter.data, world_size - 1)
    assert_same({n: p.detach() for n, p in beside.model.named_parameters()}, {n: p.detach() for n, p in last.items()})
    beside.run.detach()


# Ignored


def ignored(rank, world_size, scheme):
    model = make_normed()
    with torch.no_grad():
        model[0].weight += rank
        model[1].running_mean += rank
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "1.running_mean"])
    beside = Beside(rank, world_size, scheme, model, ddp={"forward_sync_buffers": False})
    assert torch.equal(model[1].running_mean, torch.full((8,), float(rank)))
    for step in range(3):
        beside.backward(step)
        beside.compare(alike=False)
        beside.update()
    weights = [torch.zeros(8, 6) for _ in range(world_size)]
    dist.all_gather(weights, model[0].weight.detach())
    assert not torch.allclose(weights[0], weights[1])
    beside.run.detach()


# The same graph in each step


class Stages(nn.Module):
    """Three stages of which the middle one is computed again in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(lambda y: self.second(y).tanh(), self.first(x), use_reentrant=self.use_reentrant)
        return self.third(x)


def static_graph(rank, world_size, scheme):
    Beside(rank, world_size, scheme, Stages(True), ddp={"static_graph": True}).steps()


def checkpointing(rank, world_size, scheme):
    model = Stages(False)
    del model.unused
    Beside(rank, world_size, scheme, model).steps()


def reentrant_checkpointing(rank, world_size, scheme):
    model = Stages(True)
    del model.unused
    Beside(rank, world_size, scheme, model).steps()


class Twice(nn.Module):
    """The same layer in two checkpointed calls."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=self.use_reentrant)
        return x


def checkpointed_twice(rank, world_size, scheme):
    Beside(rank, world_size, scheme, Twice(True), ddp={"static_graph": True}).steps()


def checkpointed_twice_is_refused_by_ddp(rank, world_size, scheme):
    """Without `static_graph`, DDP does not know that a gradient is added to twice."""
    beside = Beside(rank, world_size, scheme, Twice(True))
    with pytest.raises(RuntimeError, match=r"mark a variable ready only once"):
        beside.loss(beside.ddp, features(rank, 0)).backward()
    for step in range(3):
        beside.optimizer.zero_grad()
        beside.loss(beside.model, features(rank, step)).backward()
    beside.run.detach()


# Outputs


@dataclass
class Answer:
    score: torch.Tensor
    others: dict


class Outputs(nn.Module):
    """Gives its outputs in the form that it is told."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.stem, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        return FORMS[self.form][0](self.a(x), self.b(x))


def model_output(a, b):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=a, hidden_states=(b,))


FORMS = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0] + out[1]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out["a"] + out["b"]),
    "ordered": (lambda a, b: OrderedDict(a=a, b=b), lambda out: out["a"] + out["b"]),
    "nested": (lambda a, b: {"a": [a, {"b": (b, "text", None)}]}, lambda out: out["a"][0] + out["a"][1]["b"][0]),
    "dataclass": (lambda a, b: Answer(a, {"b": b}), lambda out: out.score + out.others["b"]),
    "model_output": (model_output, lambda out: out.last_hidden_state + out.hidden_states[0]),
}
"""How the outputs are given, and how they are put together."""


def outputs(rank, world_size, scheme):
    for form, (_, together) in FORMS.items():
        Beside(*(rank, world_size, scheme, Outputs(form)), loss=lambda model, x, f=together: square(f(model(x)))).steps(
            2
        )


def one_of_several_outputs(rank, world_size, scheme):
    """The loss is of one output only: the other's layer is unused."""
    Beside(
        *(rank, world_size, scheme, Outputs("tuple")),
        ddp={"find_unused_parameters": True},
        loss=lambda model, x: square(model(x)[rank % 2]),
    ).steps()


# Memory of the gradients


def gradients_as_views(rank, world_size, scheme):
    beside = Beside(rank, world_size, scheme, make_mlp(), ddp={"gradient_as_bucket_view": True})
    for step in range(3):
        beside.backward(step)
        beside.compare()
        for optimizer in (beside.optimizer, beside.optimizer_ddp):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    beside.run.detach()


# Several backward passes


def retained(rank, world_size, scheme):
    """Two backward passes through one graph. DDP syncs the first only; here each is an exchange."""
    beside = Beside(rank, world_size, scheme, make_mlp())
    single = copy.deepcopy(make_mlp())
    for model in (beside.ddp, beside.model):
        loss = beside.loss(model, features(rank, 0))
        loss.backward(retain_graph=True)
        loss.backward()
    for other in range(world_size):
        loss = square(single(features(other, 0))) / world_size
        loss.backward(retain_graph=True)
        loss.backward()
    expected = {n: p.grad for n, p in single.named_parameters() if n not in beside.served}
    assert_same({n: p.grad for n, p in beside.model.named_parameters() if n in expected}, expected)
    theirs = {n: p.grad for n, p in beside.ddp.module.named_parameters()}
    digests = [torch.zeros(()) for _ in range(world_size)]
    dist.all_gather(digests, theirs["0.weight"].sum())
    assert len(set(map(float, digests))) > 1  # its ranks differ
    beside.run.detach()


def two_losses(rank, world_size, scheme):
    """Two forwards, then one backward of both losses."""

    def loss(model, batch):
        return sum(square(model(x)) for x in batch)

    Beside(
        *(rank, world_size, scheme, make_mlp()),
        loss=loss,
        data=lambda rank, step: (features(rank, step), features(rank, step + 100)),
    ).steps()


def frozen(rank, world_size, scheme):
    model = make_mlp()
    model[2].requires_grad_(False)
    Beside(rank, world_size, scheme, model).steps()


def all_frozen(rank, world_size, scheme):
    """DDP refuses a model without trainable parameters; here it is no error, since nothing is to be done."""
    model = make_mlp().requires_grad_(False)
    with pytest.raises(RuntimeError, match="is not needed when a module doesn't have any parameter"):
        DistributedDataParallel(copy.deepcopy(model))


CHECKS = [
    unused,
    unused_is_refused_by_ddp_unless_it_looks_for_it,
    conditional,
    accumulation,
    accumulation_counts_by_forward_in_ddp,
    own_buffers,
    uneven,
    static_graph,
    checkpointing,
    reentrant_checkpointing,
    checkpointed_twice,
    checkpointed_twice_is_refused_by_ddp,
    outputs,
    one_of_several_outputs,
    gradients_as_views,
    retained,
    two_losses,
    frozen,
    buffers,
    ignored,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_beside_ddp(check):
    run_ranks(2, under_each_scheme, check)


@pytest.mark.parametrize("check", [all_frozen], ids=lambda check: check.__name__)
def test_refused_alike(check):
    run_ranks(2, check, "all_reduce")
