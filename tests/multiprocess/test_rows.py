"""Touched rows: every kind of embedding and bag, dense and sparse results, ranks that touch nothing."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from poseidon.comm import SparseRows
from support.ranks import run_ranks
from support.steps import Pair, check_steps, seeded

pytestmark = pytest.mark.multiprocess

NUM_ROWS, WIDTH = 40, 3


def indices(rank, step, *shape):
    return torch.randint(0, NUM_ROWS, shape, generator=seeded(rank, step, *shape))


def make_embedding(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(NUM_ROWS, WIDTH, **options))


def square(model, x):
    return model(x).square().sum()


EMBEDDINGS = ({}, {"padding_idx": 2}, {"padding_idx": -1}, {"sparse": True}, {"sparse": True, "padding_idx": 0})


def embeddings(rank, world_size):
    for options in EMBEDDINGS:
        for dtype in (torch.int64, torch.int32):
            check_steps(
                *(rank, world_size, make_embedding(**options), SparseRows(), square),
                lambda r, step, dtype=dtype: indices(r, step, 4 + r, 5).to(dtype),
            )


def untouched(rank, world_size):
    """No lookup on one rank, on all ranks, no backward on one rank, then more rows than the plan saw."""
    counts = [[2, 2, 2], [0, 3, 1], [None, 4, 2], [0, 0, 0], [300, 2, None], [1, 1, 1]]
    for sparse in (False, True):
        pair = Pair(
            *(rank, world_size, make_embedding(sparse=sparse), SparseRows(), square),
            lambda r, step: None if counts[step][r] is None else indices(r, step, counts[step][r]),
        )
        pair.steps(len(counts))
        assert pair.model[0].weight.grad.is_sparse == sparse
        pair.run.detach()


class Bags(nn.Module):
    """A bag with whatever its forward takes."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, WIDTH, **options)

    def forward(self, given):
        return self.bag(**given)


def bags(rank, world_size):
    offsets = torch.tensor([0, 3, 3, 7])  # the second bag is empty
    for sparse in (False, True):
        for mode in ("sum", "mean"):
            for extra in ({}, {"padding_idx": 4}):
                options = {"mode": mode, "sparse": sparse, **extra}
                check_steps(
                    *(rank, world_size, Bags(**options), SparseRows(), square),
                    lambda r, step: {"input": indices(r, step, 3, 4)},
                )
                check_steps(
                    *(rank, world_size, Bags(**options), SparseRows(), square),
                    lambda r, step: {"input": indices(r, step, 9), "offsets": offsets},
                )
        check_steps(
            *(rank, world_size, Bags(mode="sum", sparse=sparse, include_last_offset=True), SparseRows(), square),
            lambda r, step: {"input": indices(r, step, 7), "offsets": offsets},
        )
        check_steps(
            *(rank, world_size, Bags(mode="sum", sparse=sparse), SparseRows(), square),
            lambda r, step: {
                "input": indices(r, step, 9),
                "offsets": offsets,
                "per_sample_weights": torch.rand(9, generator=seeded(r, step)),
            },
        )


class Weighted(nn.Module):
    """Weights of the samples that are trained as well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, WIDTH, mode="sum")
        self.weights = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return self.bag(x, per_sample_weights=self.weights.expand(x.shape))


class Twice(nn.Module):
    """One table, looked up for users and for items, the second time under a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        other = checkpoint(self._look_up, x[1], self.scale, use_reentrant=self.use_reentrant)
        return self.table(x[0]) * other

    def _look_up(self, x, scale):
        return self.table(x) * scale


def several_lookups(rank, world_size):
    check_steps(rank, world_size, Weighted(), SparseRows(), square, lambda r, step: indices(r, step, 5, 4))
    for use_reentrant in (True, False):
        check_steps(
            *(rank, world_size, Twice(use_reentrant), SparseRows(), square),
            lambda r, step: indices(r, step, 2, 6),
        )


def accumulation(rank, world_size):
    """Into a gradient that is there already: backward passes without zeroing, and inside `no_sync`."""
    for sparse in (False, True):
        pair = Pair(
            *(rank, world_size, make_embedding(sparse=sparse), SparseRows(), square),
            lambda r, step: indices(r, step, 4, 2),
        )
        for step in (0, 10):
            pair.optimizer.zero_grad()
            pair.optimizer_alone.zero_grad()
            for micro in range(3):
                square(pair.model, pair.data(rank, step + micro)).backward()
            with pair.run.no_sync():
                square(pair.model, pair.data(rank, step + 3)).backward()
            square(pair.model, pair.data(rank, step + 4)).backward()
            for micro in range(5):
                for r in range(world_size):
                    (square(pair.alone, pair.data(r, step + micro)) / world_size).backward()
            pair.compare()
            pair.update()
        pair.run.detach()


def optimizers(rank, world_size):
    def data(r, step):
        return indices(r, step, 6)

    for make in (
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ):
        check_steps(rank, world_size, make_embedding(sparse=True), SparseRows(), square, data, make, steps=4)
    check_steps(
        *(rank, world_size, make_embedding(), SparseRows(), square, data),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        steps=4,
    )


def kept_dense_gradient(rank, world_size):
    """With set_to_none=False the gradient's memory stays, and rows of earlier steps must not."""
    pair = Pair(
        *(rank, world_size, make_embedding(), SparseRows(), square),
        lambda r, step: indices(r, step, 6),
    )
    for step in range(4):
        pair.model.zero_grad(set_to_none=step % 2 == 0)
        square(pair.model, pair.data(rank, step)).backward()
        pair.backward_alone(step)
        pair.compare()
        pair.update()
    pair.run.detach()


def all_refused(rank, world_size):
    """What touched rows cannot carry goes by all-reduce all the same."""
    for options in ({"scale_grad_by_freq": True}, {"max_norm": 0.5}):
        pair = Pair(
            *(rank, world_size, make_embedding(**options), SparseRows(), square),
            lambda r, step: indices(0, step, 6),
        )
        assert pair.run.plan.is_plain
        pair.steps(2)
        pair.run.detach()


CHECKS = (
    *(embeddings, untouched, bags, several_lookups, accumulation, optimizers, kept_dense_gradient),
    all_refused,
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_touched_rows(check, world_size):
    run_ranks(world_size, check)
