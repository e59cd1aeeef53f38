"""Unequal batches, masked tokens, ranks without samples: the mean is over what all ranks have together."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from tests.equivalence.situation import Net, Side, Situation, numbers, scaled, tokens
from torch import nn

COUNTS = (3, 8, 1, 5)
"""Samples of each rank."""


class Unequal(Situation):
    """Batches of 3, 8, 1 and 5 samples; the run counts them."""

    mean = "samples"
    num_steps = 4
    steps_under_auto = 16

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, COUNTS[(rank + step // 2) % 4])


class UnequalRanksAlike(Situation):
    """Batches of 3, 8, 1 and 5 samples, ranks weighted alike as in DDP: a mean of means."""

    joins_batches = False

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, COUNTS[rank])


class Indivisible(Situation):
    """A last batch that does not divide, in which ranks have a sample less or none."""

    mean = "samples"
    num_steps = 4

    def batch(self, rank: int, step: int) -> Any:
        samples = tokens(0, step, 12 if step != 2 else 2)
        mine = samples.tensor_split(self.world_size)[rank]
        return mine if len(mine) else None

    world_size: ClassVar[int] = 4

    def begin(self, side: Side) -> None:
        self.world_size = side.world_size


class RunsOut(Situation):
    """Ranks run out of samples, one after the other, and answer the exchanges of the others; a scheduler counts."""

    mean = "samples"
    num_steps = 1
    totals: ClassVar[tuple[int, ...]] = (4, 2, 5, 1)

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, COUNTS[rank]) if step < self.totals[rank] else None

    def begin(self, side: Side) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, step_size=2, gamma=0.5)

    def step(self, side: Side) -> None:
        def update() -> None:
            side.optimizer.step()
            self.scheduler.step()
            side.optimizer.zero_grad()

        with side.join(update):
            for index in range(max(self.totals[: side.world_size])):
                if not side.work(index):
                    break
                side.backward(step=index)
                update()


class RunsOutAccumulating(RunsOut):
    """Ranks run out of samples while all accumulate over two micro-batches."""

    totals: ClassVar[tuple[int, ...]] = (6, 6, 2, 4)

    def step(self, side: Side) -> None:
        def update() -> None:
            side.optimizer.step()
            side.optimizer.zero_grad()

        with side.join(update):
            for index in range(0, max(self.totals[: side.world_size]), 2):
                if not side.work(index):
                    break
                self.accumulate(side, index)
                update()

    def accumulate(self, side: Side, index: int) -> None:
        if side.is_alone:
            works = [batch for part in range(2) for batch, _ in side.work(index + part)]
            self.loss(side.model, torch.cat(works)).backward()
            return
        with side.no_sync():
            side.backward(lambda batch: self.loss(side.model, batch) / 2, step=index)
        side.backward(lambda batch: self.loss(side.model, batch) / 2, step=index + 1)


class Masked(Situation):
    """Tokens of which unequal numbers are masked on each rank; `run.weight` says how many count."""

    mean = "samples"
    num_steps = 4

    def model(self) -> nn.Module:
        return Net()

    def batch(self, rank: int, step: int) -> Any:
        x = tokens(rank, step, 4)
        kept = torch.rand(4, 3, generator=torch.Generator().manual_seed(97 * rank + step)) < (0.2, 0.9, 0.5, 0.7)[rank]
        if (rank + step) % 4 == 3:
            kept[:] = False  # nothing of this rank counts
        elif not kept.any():
            kept[0, 0] = True
        return x, x % 5, kept

    def sample(self, models: Any) -> None:
        x, y, _ = self.batch(0, 0)
        self.loss(models[""], (x, y, torch.ones_like(x, dtype=torch.bool))).backward()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, kept = batch
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        return (losses * kept.flatten()).sum() / max(1, int(kept.sum()))

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        self.micro_step(side, side.index, 1)
        side.note_gradients()
        side.optimizer.step()

    def micro_step(self, side: Side, part: int, num_parts: int) -> None:
        for batch, share in side.work(part):
            side.weight(int(batch[2].sum()))
            (scaled(self.loss(side.model, batch), share) / num_parts).backward()


class MaskedAccumulating(Masked):
    """Masked tokens, uneven across ranks and across three micro-batches."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        if side.is_alone:
            works = [batch for part in self.parts(side) for batch, _ in side.work(part)]
            self.loss(side.model, tuple(torch.cat(tensors) for tensors in zip(*works, strict=True))).backward()
        else:
            *first, last = self.parts(side)
            with side.no_sync():
                for part in first:
                    self.micro_step(side, part, 3)
            self.micro_step(side, last, 3)
        side.note_gradients()
        side.optimizer.step()

    def parts(self, side: Side) -> Iterator[int]:
        yield from range(10 * side.index, 10 * side.index + 3)


class UnequalMicroBatches(Situation):
    """One rank accumulates once, the next twice, the third three times, before they exchange."""

    mean = "samples"

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        most = max(self.num_parts(rank) for rank in range(side.world_size))
        if side.is_alone:
            parts = [
                self.batch(rank, 10 * side.index + part)
                for rank in range(side.world_size)
                for part in range(self.num_parts(rank))
            ]
            self.loss(side.model, torch.cat(parts)).backward()
        else:
            mine = self.num_parts(side.rank)
            with side.no_sync():
                for part in range(mine - 1):
                    self.micro_step(side, part, most)
            self.micro_step(side, mine - 1, most)
        side.note_gradients()
        side.optimizer.step()

    def num_parts(self, rank: int) -> int:
        return 1 + rank % 3

    def micro_step(self, side: Side, part: int, num_parts: int) -> None:
        side.backward(lambda batch: self.loss(side.model, batch) / num_parts, step=10 * side.index + part)


class LoggedLoss(Unequal):
    """The loss that is logged is the mean over the samples of all ranks, by `run.mean`."""

    steps_under_auto = 0

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for batch, share in side.work():
            loss = scaled(self.loss(side.model, batch), share)
            loss.backward()
            side.note("loss", {"loss": torch.tensor(side.mean(loss.detach(), len(batch)))})
        side.optimizer.step()


class Dealt(Situation):
    """Samples dealt by `run.shard`, two epochs of a data set that does not divide."""

    mean = "samples"
    num_steps = 2
    size: ClassVar[int] = 27

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 6)

    def data(self) -> torch.Tensor:
        return numbers(0, 0, self.size, 6)

    def begin(self, side: Side) -> None:
        self.loader: Any = self.data().split(4 * side.world_size)
        if not side.is_alone:
            self.loader = side.runs[""].shard(list(self.data()), batch_size=4, shuffle=False)

    def step(self, side: Side) -> None:
        for batch in self.loader:
            self.take(side, batch)

    def take(self, side: Side, batch: torch.Tensor) -> None:
        side.optimizer.zero_grad()
        self.loss(side.model, batch).backward()
        side.optimizer.step()


class DealtResumed(Dealt):
    """Dealt samples, gone on with in the middle of an epoch by another loader."""

    def step(self, side: Side) -> None:
        if side.is_alone or side.index:
            super().step(side)
            return
        loader = side.runs[""].shard(list(self.data()), batch_size=4, shuffle=False)
        for _, batch in zip(range(1), loader, strict=False):
            self.take(side, batch)
        self.loader.load_state_dict(loader.state_dict())
        for batch in self.loader:
            self.take(side, batch)
