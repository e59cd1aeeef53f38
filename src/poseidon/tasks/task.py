"""Task: what can be trained, as one value: model, optimizer, loss, data and how a result is scored.

The built-in tasks are functions that return a Task, and so is a user's own (`path/to/file.py:function`). A Task is
cheap to make: the model and the data are made when they are asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import default_collate

from poseidon.errors import ConfigError

Batch: TypeAlias = Sequence[Tensor]
"""What `collate` makes of samples: tensors whose first dimension counts the samples."""


class Samples(Protocol):
    """A map-style data set of fixed length, as `torch.utils.data.Dataset` with `__len__`."""

    def __len__(self) -> int:
        """How many samples there are; the same on every rank."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample, usually a tuple of tensors; the same index gives the same sample."""


def accuracy_and_loss(counts: Mapping[str, float]) -> dict[str, float]:
    """`accuracy` and `loss` from the summed counts `correct`, `loss_sum` and `samples`."""
    return {"accuracy": counts["correct"] / counts["samples"], "loss": counts["loss_sum"] / counts["samples"]}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training lowers and how a trained model is scored."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """Calls the model; the mean over the samples of the batch, a scalar."""
    evaluate: Callable[[nn.Module, Batch], dict[str, Tensor]]
    """Calls the model; sums over the samples of the batch, as scalars, with their number as `samples`: sums of
    batches and of ranks add up, so each sample counts once."""
    metric: str = "accuracy"
    """Which of the figures of `score` is the headline."""
    metric_falls: bool = False
    """Whether a better model has a smaller one, as with a loss."""
    score: Callable[[Mapping[str, float]], dict[str, float]] = accuracy_and_loss
    """From the counts, summed over all batches and ranks, to figures."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Where the samples come from. Read-only, and the same on every rank."""

    make_train: Callable[[], Samples]
    make_test: Callable[[], Samples]
    collate: Callable[[list[Any]], Batch] = default_collate
    """From a list of samples, never empty, to a batch."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how it is trained.

    Example:
        ```python
        def my_task() -> Task:
            return Task(
                name="mine",
                note="real images: my own",
                make_model=lambda: nn.Linear(784, 10),
                make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                objective=CLASSIFICATION,
                data=TaskData(make_train=make_my_train_data, make_test=make_my_test_data),
                batch_size=64,
            )
        ```

    Raises:
        ConfigError: A field cannot be used.
    """

    name: str
    note: str
    """One sentence on the data: real or synthetic, and from where."""
    make_model: Callable[[], nn.Module]
    """The model with fresh parameters, drawn from torch's global generator: whoever calls seeds it."""
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    objective: Objective
    data: TaskData
    batch_size: int
    """Samples per rank and step."""
    epochs: int = 1
    """How often the training data is seen unless the user says otherwise."""

    def __post_init__(self) -> None:
        """Refuses what cannot be trained, before any rank starts."""
        for field in ("name", "note"):
            if not getattr(self, field):
                raise ConfigError(f"cannot use the task {self.name!r}: its {field} is empty; write one")
        for field in ("batch_size", "epochs"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"cannot use the task {self.name!r}: {field} is {value!r}; make it 1 or more")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the samples of the batch, a scalar; `model` is called inside."""
        return self.objective.loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Counts summed over the samples of the batch, scalars, without gradients; the caller sets the model's mode."""
        with torch.no_grad():
            return self.objective.evaluate(model, batch)

    def score(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Figures such as `accuracy` and `loss` from counts that were summed over all batches and ranks."""
        return self.objective.score(counts)

    @property
    def metric(self) -> str:
        """The key of the headline figure in what `score` returns."""
        return self.objective.metric

    def make_train_data(self) -> Samples:
        """The samples to train on."""
        return self.data.make_train()

    def make_test_data(self) -> Samples:
        """The samples to score on, none of which is trained on."""
        return self.data.make_test()

    def collate(self, samples: list[Any]) -> Batch:
        """A batch from one or more samples."""
        return self.data.collate(samples)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _count_correct(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    inputs, labels = batch
    logits = model(inputs)
    return {
        "correct": (logits.argmax(dim=1) == labels).sum(),
        "loss_sum": F.cross_entropy(logits, labels, reduction="sum"),
        "samples": torch.full((), len(labels), device=labels.device),
    }


CLASSIFICATION = Objective(loss=_cross_entropy, evaluate=_count_correct)
"""Batches `(inputs, labels)`, a model from inputs to logits of shape `(samples, classes)`: cross entropy, accuracy."""
