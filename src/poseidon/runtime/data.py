"""Which samples each rank sees, and the batches made of them.

An epoch is one order of all samples, the same on every rank, cut into global batches of `world_size *
local_batch_size`. Each rank takes its contiguous part of each. So N ranks see, step by step, exactly the samples that
one process with N times the batch would see; nothing is padded, repeated or left out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from poseidon.errors import ConfigError
from poseidon.tasks.task import Batch, Samples


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of one global batch."""

    step: int
    """Position of the global batch in its epoch."""
    indices: tuple[int, ...]
    """The rank's samples; none when the last global batch has fewer samples than there are ranks."""
    global_count: int
    """Samples of all ranks together, at least one."""
    world_size: int

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss by, so that the mean over the ranks is the mean over all samples."""
        return len(self.indices) * self.world_size / self.global_count


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How the samples of a data set are dealt to the ranks, epoch by epoch: a pure function of its fields.

    For evaluation leave `seed` out: every sample is seen once over all ranks then too, in the data set's order.

    Example:
        `for share in Shares(num_samples=60_000, rank=0, world_size=4, local_batch_size=64, seed=0).epoch(0): ...`

    Raises:
        ConfigError: A field cannot be used.
    """

    num_samples: int
    """Length of the data set."""
    rank: int
    world_size: int
    local_batch_size: int
    """Samples per rank and step."""
    seed: int | None = None
    """Of the order, which is another one in each epoch; None keeps the data set's own order."""

    def __post_init__(self) -> None:
        """Refuses what would deal samples twice or never."""
        if self.num_samples < 1:
            raise ConfigError(f"cannot deal {self.num_samples} samples to ranks: the data set is empty")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"cannot deal samples to rank {self.rank} of {self.world_size}: ranks count from 0")
        if self.local_batch_size < 1:
            raise ConfigError(f"cannot make batches of {self.local_batch_size} samples per rank: use 1 or more")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"cannot shuffle with the seed {self.seed}: use 0 or more")

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks per step, but for the last step of an epoch."""
        return self.world_size * self.local_batch_size

    @property
    def num_steps(self) -> int:
        """Steps per epoch, the same on every rank."""
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Share]:
        """The rank's share of each global batch of an epoch, from step `start` on, as if it had begun with step 0."""
        order = self._order(epoch)
        for step in range(start, self.num_steps):
            global_batch = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
            yield Share(
                step=step,
                indices=tuple(self._part(global_batch).tolist()),
                global_count=len(global_batch),
                world_size=self.world_size,
            )

    def _order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.num_samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)

    def _part(self, global_batch: np.ndarray) -> np.ndarray:
        """The rank's contiguous part; where the batch does not divide, the first ranks have one sample more."""
        size, more = divmod(len(global_batch), self.world_size)
        start = self.rank * size + min(self.rank, more)
        return global_batch[start : start + size + (self.rank < more)]


def batches(
    dataset: Samples,
    shares: Iterable[Share],
    *,
    collate: Callable[[list[Any]], Batch],
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[Share, Batch | None]]:
    """Loads the samples of each share.

    Neither the order nor the global random state of torch depends on the loader, so a run that is resumed sees and
    draws what the uninterrupted one would have.

    Args:
        dataset: Map-style, of fixed length.
        shares: As `Shares.epoch` deals them.
        collate: From a list of samples to a batch, as a Task has it.
        num_workers: Processes that load ahead; 0 loads in this one.
        pin_memory: Copy batches to page-locked memory, from which a copy to a GPU can overlap with compute.

    Yields:
        Each share with its batch, or with None where the rank has no sample in this step.
    """
    shares = tuple(shares)
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", dataset),
        batch_sampler=[list(share.indices) for share in shares if share.indices],
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    loaded = iter(loader)
    for share in shares:
        yield share, next(loaded) if share.indices else None
