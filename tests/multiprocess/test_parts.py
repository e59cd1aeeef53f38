"""A loop that calls the model's parts and never the model, as with a LightningModule's `training_step`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon
from poseidon.comm.group import Group
from poseidon.errors import CommError
from poseidon.runtime.attach import attach
from support.exactness import SCHEME_CHOICES, assert_close, make_plan
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


class Steps(nn.Module):
    """Has no forward: what is called are its parts, most of them with a backward pass of their own inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh())
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 5)

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        for block in self.blocks:
            h = checkpoint(lambda h, block=block: block(h).tanh(), h, use_reentrant=True)
        return F.cross_entropy(checkpoint(self.head, h, use_reentrant=True), y)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 12, generator=generator), torch.randint(0, 5, (6,), generator=generator)) for _ in range(5)]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Steps()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_by_step(rank: int, world_size: int, choice: str) -> tuple[dict[str, torch.Tensor], int]:
    model, optimizer = make_model()
    batches = [(x[rank::world_size], y[rank::world_size]) for x, y in make_batches()]
    run = attach(
        model,
        optimizer,
        make_plan(model, choice, world_size, 3, lambda: model.training_step(*batches[0])),
        Group.of_default(),
    )
    for x, y in batches:
        optimizer.zero_grad()
        model.training_step(x, y).backward()
        optimizer.step()
    run.check_replicas()
    num_exchanges = run.num_exchanges
    run.detach()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, num_exchanges


@pytest.mark.parametrize("choice", SCHEME_CHOICES)
def test_parts_are_called_and_never_the_model(choice: str) -> None:
    model, optimizer = make_model()
    for x, y in make_batches():
        optimizer.zero_grad()
        model.training_step(x, y).backward()
        optimizer.step()
    for parameters, num_exchanges in run_ranks(2, step_by_step, choice):
        assert num_exchanges == len(make_batches())
        assert_close(parameters, {name: p.detach() for name, p in model.named_parameters()})


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


def broken(rank: int, world_size: int) -> None:
    model, optimizer = make_model()
    x, y = make_batches()[0]
    plan = make_plan(model, "all_reduce", world_size, 6, lambda: model.training_step(x, y))
    run = attach(model, optimizer, plan, Group.of_default())
    with pytest.raises(ValueError, match="on purpose"):
        F.cross_entropy(model.head(_Broken.apply(model.encoder(x))), y).backward()
    with pytest.raises(CommError, match="the last backward pass broke off"):
        model.training_step(x, y).backward()
    run.detach()


def test_a_broken_pass_is_noticed_without_a_forward_of_the_model() -> None:
    run_ranks(2, broken)


def make_lightning(calls_itself: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh())
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x))

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self(x) if calls_itself else self.head(self.encoder(x)), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    model = Classifier()
    return model, model.configure_optimizers()


def lightning_module(rank: int, world_size: int) -> None:
    """One rank has four samples of each batch, the other two, and nobody says so; each compares with one process."""
    for calls_itself in (True, False):
        alone, optimizer = make_lightning(calls_itself)
        for index, batch in enumerate(make_batches()):
            optimizer.zero_grad()
            alone.training_step(batch, index).backward()
            optimizer.step()
        model, optimizer = make_lightning(calls_itself)
        plan = make_plan(model, "mix", world_size, 6, lambda model=model: model.training_step(make_batches()[0], 0))
        run = poseidon.distribute(model, optimizer, plan)
        for index, (x, y) in enumerate(make_batches()):
            optimizer.zero_grad()
            model.training_step((x.split([4, 2])[rank], y.split([4, 2])[rank]), index).backward()
            optimizer.step()
        run.check_replicas()
        run.detach()
        assert_close({name: p.detach() for name, p in model.named_parameters()}, dict(alone.named_parameters()))


@pytest.mark.timeout(150)  # to import lightning takes seconds on an idle machine
def test_a_lightning_module_as_a_plain_module() -> None:
    run_ranks(2, lightning_module, timeout=120.0)
