"""Click prediction: large embedding tables, of which a batch touches few rows, and a small fully connected network."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from poseidon.tasks.models import fully_connected
from poseidon.tasks.task import Batch, Objective, Task, TaskData

_RULE_SEED = 2017
_NUM_TRAIN, _NUM_TEST = 65_536, 8_192
_HISTORY = 8
_POPULARITY = 10  # ids follow rows * u^10, u uniform: half of all look-ups fall on a thousandth of the rows


@dataclass(frozen=True, kw_only=True)
class TableSizes:
    """Rows of each embedding table; by default 550 000 rows of 32 numbers, 70 MB, against 0.3 MB of network."""

    users: int = 200_000
    items: int = 200_000
    history: int = 100_000
    contexts: int = 50_000

    def scaled(self, scale: float) -> "TableSizes":
        """The same tables with this share of the rows, at least eight each."""
        rows = {name: max(8, round(count * scale)) for name, count in vars(self).items()}
        return TableSizes(**rows)


class ClickModel(nn.Module):
    """Four embeddings side by side through a fully connected network to one logit.

    The items' table has sparse gradients (`sparse=True`), the others dense ones that are zero but for the touched rows.

    Args:
        sizes: Rows of the tables.
        width: Numbers per row.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
    figure 1, simplified: no dense features, and concatenation in place of pairwise products.
    """

    def __init__(self, *, sizes: TableSizes, width: int = 32) -> None:
        super().__init__()
        self.users = nn.Embedding(sizes.users, width)
        self.items = nn.Embedding(sizes.items, width, sparse=True)
        self.history = nn.EmbeddingBag(sizes.history, width, mode="mean")
        self.contexts = nn.Embedding(sizes.contexts, width)
        self.network = fully_connected((4 * width, 256, 128, 1))
        for table in (self.users, self.items, self.history, self.contexts):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: Tensor, history: Tensor) -> Tensor:
        """Logits `(samples,)` from ids `(samples, 3)` of user, item and context and a history `(samples, 8)`."""
        users, items, contexts = ids.unbind(dim=1)
        parts = (self.users(users), self.items(items), self.history(history), self.contexts(contexts))
        logits: Tensor = self.network(torch.cat(parts, dim=1))
        return logits.squeeze(1)


def recsys(*, scale: float = 1.0, width: int = 32) -> Task:
    """Clicks on 17.6 M embedding parameters, with plain SGD, which takes dense and sparse gradients alike.

    Args:
        scale: Share of the rows of the tables.
        width: Numbers per row.
    """
    sizes = TableSizes().scaled(scale)
    return Task(
        name="recsys",
        note="synthetic clicks: popular ids are frequent, and every id has a planted liking that adds up to the label",
        make_model=partial(ClickModel, sizes=sizes, width=width),
        make_optimizer=partial(torch.optim.SGD, lr=1.0),
        objective=CLICK,
        data=TaskData(
            make_train=partial(_clicks, sizes, num_samples=_NUM_TRAIN, seed=1),
            make_test=partial(_clicks, sizes, num_samples=_NUM_TEST, seed=2),
        ),
        batch_size=256,
    )


def _clicks(sizes: TableSizes, *, num_samples: int, seed: int) -> TensorDataset:
    """Samples `(ids, history, label)`; a click where the likings of all ids together are above zero."""
    rule = torch.Generator().manual_seed(_RULE_SEED)
    own = torch.Generator().manual_seed(seed)
    columns, likings = [], torch.zeros(num_samples)
    for num_rows, shape in (
        (sizes.users, (num_samples,)),
        (sizes.items, (num_samples,)),
        (sizes.contexts, (num_samples,)),
        (sizes.history, (num_samples, _HISTORY)),
    ):
        ids = (num_rows * torch.rand(shape, generator=own, dtype=torch.float64) ** _POPULARITY).long()
        columns.append(ids)
        likings += _liking_by_id(num_rows, rule)[ids].view(num_samples, -1).mean(dim=1)
    *single, history = columns
    return TensorDataset(torch.stack(single, dim=1), history, (likings > 0).float())


def _liking_by_id(num_rows: int, generator: torch.Generator) -> Tensor:
    """A fixed number per id, zero in the mean over look-ups, so that about half of all samples are clicks."""
    likings = torch.randn(num_rows, generator=generator)
    below = (torch.arange(num_rows + 1, dtype=torch.float64) / num_rows) ** (1 / _POPULARITY)
    return likings - (below.diff() @ likings.double()).float()


def _click_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, history, labels = batch
    return F.binary_cross_entropy_with_logits(model(ids, history), labels)


def _count_clicks(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    ids, history, labels = batch
    logits = model(ids, history)
    return {
        "correct": ((logits > 0) == (labels > 0)).sum(),
        "loss_sum": F.binary_cross_entropy_with_logits(logits, labels, reduction="sum"),
        "samples": torch.full((), len(labels), device=labels.device),
    }


CLICK = Objective(loss=_click_loss, evaluate=_count_clicks)
"""Batches `(ids, history, labels)`, labels 0 or 1: binary cross entropy, accuracy."""
