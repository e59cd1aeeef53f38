"""Runs a model under a plan on every rank and, beside it, an untouched copy on the batches of all ranks."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from poseidon.comm import CommScheme
from poseidon.comm.group import Group
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import Run, attach

Schemes = CommScheme | Mapping[str, CommScheme] | None
Loss = Callable[[nn.Module, Any], torch.Tensor]
TOLERANCE = 1e-5


def plan_for(model: nn.Module, world_size: int, schemes: Schemes, sample: Callable[[], torch.Tensor]) -> Plan:
    """A plan from one watched backward pass."""
    watch = StepWatch(model)
    sample().backward()
    profile = watch.profile()
    model.zero_grad()
    return uniform_plan(profile, world_size, schemes)


class Pair:
    """A model under a plan, and the same model trained alone on the batches of all ranks.

    Args:
        rank: This rank.
        world_size: How many there are.
        model: Any model; its copy is made here.
        schemes: One for all layers that can use it, or by layer name.
        loss: From model and batch to the loss.
        data: From rank and step to that rank's batch; None where it has none.
        make_optimizer: Plain SGD if left out.
        tolerance: Of gradients and parameters, relative to their own length.
        hosts: Which ranks are to share a host.
        plan: Changes the plan before it is put to work.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        schemes: Schemes,
        loss: Loss,
        data: Callable[[int, int], Any],
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        tolerance: float = TOLERANCE,
        hosts: Sequence[Sequence[int]] = (),
        plan: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.rank, self.world_size = rank, world_size
        self.loss, self.data, self.tolerance = loss, data, tolerance
        self.alone = copy.deepcopy(model)
        self.model = model
        self.optimizer = make_optimizer(model.parameters())
        self.optimizer_alone = make_optimizer(self.alone.parameters())
        made = plan(plan_for(model, world_size, schemes, lambda: loss(model, data(0, 0))))
        self.run: Run = attach(model, self.optimizer, made, Group.of_default(hosts=hosts))

    def step(self, index: int) -> None:
        """One step of both, their gradients and then their parameters compared."""
        self.backward(index)
        self.backward_alone(index)
        self.compare()
        self.update()

    def backward(self, index: int) -> None:
        """Zeroes the gradients and takes this rank's part."""
        self.optimizer.zero_grad()
        batch = self.data(self.rank, index)
        if batch is None:
            self.run.empty_step()
        else:
            self.loss(self.model, batch).backward()

    def backward_alone(self, index: int) -> None:
        """The mean over what every rank does."""
        self.optimizer_alone.zero_grad()
        self.accumulate_alone(index)

    def accumulate_alone(self, index: int) -> None:
        """As `backward_alone`, added to the gradients that are there."""
        for rank in range(self.world_size):
            batch = self.data(rank, index)
            if batch is not None:
                (self.loss(self.alone, batch) / self.world_size).backward()

    def compare(self) -> None:
        """Gradients agree with those of the copy, and bit by bit between ranks."""
        served = {
            f"{layer}.{tensor.name}" if layer else tensor.name
            for layer, spec in self.run.plan.layers.items()
            for tensor in spec.parameters
            if self.run.plan.schemes[layer].kind == "sharded_server"
        }
        found = {n: p.grad for n, p in self.model.named_parameters() if n not in served}
        expected = {n: p.grad for n, p in self.alone.named_parameters() if n not in served}
        assert_same(found, expected, self.tolerance)
        assert_on_all_ranks(found)

    def update(self) -> None:
        """Both optimizers step; parameters agree."""
        self.optimizer.step()
        self.optimizer_alone.step()
        self.compare_parameters()

    def compare_parameters(self) -> None:
        """Parameters agree with those of the copy, and bit by bit between ranks."""
        found = {n: p.detach() for n, p in self.model.named_parameters()}
        assert_same(found, {n: p.detach() for n, p in self.alone.named_parameters()}, self.tolerance)
        assert_on_all_ranks(found)

    def steps(self, count: int = 3) -> "Pair":
        """Several steps from the first on."""
        for index in range(count):
            self.step(index)
        return self


def check_steps(*args: Any, steps: int = 3, **kwargs: Any) -> None:
    """A whole `Pair`: made, stepped, detached."""
    Pair(*args, **kwargs).steps(steps).run.detach()


def assert_same(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], tolerance: float = TOLERANCE
) -> None:
    """Relative to each tensor's own length; None agrees with None only."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        mine = found[name]
        assert (mine is None) == (value is None), f"{name}: {mine} where {value} was expected"
        if mine is not None and value is not None:
            error = torch.linalg.vector_norm(mine.to_dense().double() - value.to_dense().double())
            length = torch.linalg.vector_norm(value.to_dense().double())
            assert error <= tolerance * length + 1e-12, f"{name}: off by {error:.2e} of {length:.2e}"


def digest(tensors: Mapping[str, torch.Tensor | None]) -> str:
    """The bits of tensors as a short text."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        hashed.update(name.encode())
        if tensor is not None:
            hashed.update(tensor.detach().to_dense().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def assert_on_all_ranks(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Every rank has the same bits."""
    mine = int(digest(tensors), 16) % 2**62
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([mine]))
    assert {int(one) for one in everyone} == {mine}, "ranks differ"


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on nothing but the numbers."""
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


def rows(rank: int, step: int, count: int, width: int) -> torch.Tensor:
    """Random rows of one rank and step."""
    return torch.randn(count, width, generator=seeded(rank, step, count, width))
