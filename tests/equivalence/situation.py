"""A situation: a model, its optimizer, the batches of each rank, and what a script does with them in a step.

The same program runs on every rank of several and, as the reference, in one process that has the batches of all ranks.
What differs between the two is hidden in a `Side`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from tests.support.steps import seeded
from torch import nn
from torch.utils._pytree import tree_leaves

from poseidon.runtime.attach import Run
from poseidon.runtime.options import Mean

Loss = Callable[[Any], torch.Tensor]
Tensors = dict[str, torch.Tensor | None]


class Side(ABC):
    """One rank of several, or one process in place of all of them."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    is_alone: ClassVar[bool]

    def __init__(self, situation: "Situation", world_size: int, rank: int = 0) -> None:
        self.situation = situation
        self.world_size = world_size
        self.rank = rank
        self.index = 0
        """Of the present step."""
        self.records: list[tuple[str, Tensors]] = []
        """What is compared, by what it is, in the order in which it was noted."""
        self.models = situation.models()
        self.optimizers = {name: situation.optimizer(model) for name, model in self.models.items()}

    @property
    def model(self) -> nn.Module:
        """The first model."""
        return next(iter(self.models.values()))

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.models[next(iter(self.models))] = model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first model's."""
        return next(iter(self.optimizers.values()))

    def note(self, label: str, tensors: Tensors) -> None:
        """Keeps what has to be equal on both sides and bit-identical on all ranks."""
        kept = {name: None if t is None else t.detach().to_dense().clone() for name, t in tensors.items()}
        self.records.append((f"{label} of step {self.index}", kept))

    def note_parameters(self) -> None:
        """Keeps the parameters."""
        self.note("parameters", dict(self.named_parameters()))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of all models."""
        return [
            (f"{name}.{key}".lstrip("."), parameter)
            for name, model in self.models.items()
            for key, parameter in model.named_parameters()
        ]

    @abstractmethod
    def note_gradients(self) -> None:
        """Keeps the gradients that the loop may look at."""

    @abstractmethod
    def work(self, step: int | None = None) -> list[tuple[Any, float]]:
        """Batches of the present step, or of another one, and what to multiply their loss by."""

    def backward(self, loss: Loss | None = None, *, step: int | None = None, **kwargs: Any) -> None:
        """A backward pass from the situation's loss, or from another one."""
        loss = loss or (lambda batch: self.situation.loss(self.model, batch))
        work = self.work(step)
        for batch, share in work:
            scaled(loss(batch), share).backward(**kwargs)
        if not work:
            self.no_samples()

    @abstractmethod
    def no_samples(self) -> None:
        """Takes part in an exchange all the same."""

    @property
    @abstractmethod
    def runs(self) -> Mapping[str, Run]:
        """By model; none in one process alone."""

    def detach(self) -> None:
        """Undoes every run."""
        for run in self.runs.values():
            run.detach()

    @abstractmethod
    def no_sync(self, *, silent: bool = True) -> AbstractContextManager[None]:
        """Accumulates, and where it has to be silent proves that nothing is sent meanwhile."""

    @abstractmethod
    def weight(self, num_items: int) -> None:
        """Says what the next loss is a mean over."""

    @abstractmethod
    def join(self, update: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Around a loop that may be shorter on some ranks."""

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Of the first model, by the run where there is one."""

    @abstractmethod
    def mean(self, value: torch.Tensor, num_items: int) -> float:
        """Over the items of all ranks."""


def scaled(loss: torch.Tensor, share: float) -> torch.Tensor:
    """The loss itself where the share is 1."""
    return loss if share == 1.0 else loss * share


class Situation:
    """What training scripts do, one thing at a time; the first line of a class says which.

    One object serves one side, so it may keep what the script keeps between steps.
    """

    dtype: ClassVar[torch.dtype] = torch.float64
    """Of parameters and data where nothing else is said."""
    tolerance: ClassVar[float] = 1e-10
    """Of gradients and parameters, each relative to its own length."""
    num_steps: ClassVar[int] = 3
    mean: ClassVar[Mean] = "ranks"
    """How ranks are weighted: alike, or by what their losses are means over."""
    steps_under_auto: ClassVar[int] = 0
    """So many under a plan that is found while training; 0 leaves it out."""
    joins_batches: ClassVar[bool] = True
    """Whether one process sees one batch of all samples; else each rank's, one after the other."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Schemes that say themselves that they cannot do it, with a part of what they say."""
    left_out: ClassVar[Mapping[str, str]] = {}
    """Schemes that are documented to be no match for it, with the reason."""

    def models(self) -> dict[str, nn.Module]:
        """By name; most scripts have one, without a name."""
        torch.manual_seed(0)
        return {"": self.model()}

    def model(self) -> nn.Module:
        """The one model."""
        return Net()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over the parameters of a model."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def batch(self, rank: int, step: int) -> Any:
        """A rank's samples; None where it has none."""
        return tokens(rank, step, 4)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """A mean over the samples of a batch."""
        return model(batch).square().mean()

    def sample(self, models: Mapping[str, nn.Module]) -> None:
        """A backward pass that shows the structure of every gradient."""
        self.loss(next(iter(models.values())), self.batch(0, 0)).backward()

    def begin(self, side: Side) -> None:
        """Before the first step, the plan at work."""

    def step(self, side: Side) -> None:
        """One step of the script."""
        side.optimizer.zero_grad()
        side.backward()
        side.note_gradients()
        side.optimizer.step()

    def end(self, side: Side) -> None:
        """After the last step, the plan still at work."""

    def afterwards(self, side: Side) -> None:
        """After `detach`."""


class Net(nn.Module):
    """A layer for each scheme: touched rows, outer products, dense gradients."""

    def __init__(self, **table: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, **table)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(self.table(x)))))


class Branches(Net):
    """Takes one of two ways, or neither; a third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(8, 8, bias=bool(index)) for index in range(2))
        self.never = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, way: int | None) -> torch.Tensor:
        x = self.norm(self.first(self.table(x)))
        return self.last(x if way is None else torch.tanh(self.ways[way](x)))


def tokens(rank: int, step: int, count: int, length: int = 3, size: int = 20) -> torch.Tensor:
    """Random row numbers of one rank and step."""
    return torch.randint(0, size, (count, length), generator=seeded(rank, step, count))


def numbers(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Random numbers of one rank and step."""
    return torch.randn(*shape, generator=seeded(rank, step, *shape))


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor."""
    return int(next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)).shape[0])
