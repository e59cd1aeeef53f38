"""Embeddings, dense and sparse, and batches that touch few rows or none."""

from typing import Any, ClassVar

import torch
from tests.equivalence.situation import Net, Side, Situation, tokens
from torch import nn


class SparseGradients(Situation):
    """An embedding with `sparse=True`."""

    def model(self) -> nn.Module:
        return Net(sparse=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class SparseAdam(SparseGradients):
    """A sparse embedding under SparseAdam, the rest under another optimizer."""

    class Both(torch.optim.SGD):
        pass

    def begin(self, side: Side) -> None:
        self.rows = torch.optim.SparseAdam([side.model.table.weight], lr=0.05)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p is not model.table.weight], lr=0.1)

    def step(self, side: Side) -> None:
        side.model.zero_grad()
        side.backward()
        side.note_gradients()
        side.optimizer.step()
        self.rows.step()


class EmptyBatch(Situation):
    """A rank whose batch has no samples in some steps, and all of them in one; the model runs all the same."""

    joins_batches = False
    num_steps = 4
    sparse: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return Net(sparse=self.sparse)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, 0 if step == 2 or rank == step else 4)

    def sample(self, models: Any) -> None:
        self.loss(models[""], tokens(0, 0, 4)).backward()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().sum() / 60


class EmptyBatchSparse(EmptyBatch):
    """A rank whose batch has no samples, with sparse gradients."""

    sparse = True


class PaddingOnly(Situation):
    """A rank whose batch is padding in some steps, and that of all ranks in one."""

    num_steps = 4
    sparse: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return Net(padding_idx=3, sparse=self.sparse)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(self, rank: int, step: int) -> Any:
        return torch.full((4, 3), 3) if step == 2 or rank == step else tokens(rank, step, 4)


class PaddingOnlySparse(PaddingOnly):
    """Batches of padding only, with sparse gradients."""

    sparse = True


class Tables(nn.Module):
    """Three tables: one always used, one sometimes, one never."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4, sparse=sparse) for _ in range(3))
        self.top = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.tables[0](x) + (self.tables[1](x + 1) if both else 0.0)
        return self.top(torch.tanh(y))


class TableUnused(EmptyBatch):
    """One table is used by some ranks in some steps, one never."""

    def model(self) -> nn.Module:
        return Tables(sparse=self.sparse)

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, 4, size=19), step != 1 and rank % 2 == step % 2

    def sample(self, models: Any) -> None:
        self.loss(models[""], (tokens(0, 0, 4, size=19), True)).backward()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(*batch).square().mean()


class TableUnusedSparse(TableUnused):
    """Tables that some ranks do not use, and one that none does, with sparse gradients."""

    sparse = True


class Bags(Situation):
    """Bags of embeddings, by mean and by sum, one of them sparse."""

    class Bagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.EmbeddingBag(20, 4, mode="mean")
            self.sum = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
            self.top = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(torch.tanh(torch.cat([self.mean(x), self.sum(x)], dim=1)))

    def model(self) -> nn.Module:
        return self.Bagged()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class MoreRowsThanBefore(Situation):
    """Batches grow from step to step, beyond what any buffer was made for."""

    num_steps = 4

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, 2 * 3**step)
