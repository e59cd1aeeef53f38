"""Which samples each rank sees, and the batches made of them.

An epoch is one order of all samples, the same on every rank, cut into global batches of `world_size *
local_batch_size`. Each rank takes its contiguous part of each. So N ranks see, step by step, exactly the samples that
one process with N times the batch would see; nothing is padded, repeated or left out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from poseidon.errors import ConfigError
from poseidon.runtime.portions import Portions, cut, keep_in_step
from poseidon.runtime.seeding import draws_of
from poseidon.tasks.task import Batch, Samples


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of one global batch."""

    start: int
    """How many samples of the epoch come before the global batch."""
    indices: tuple[int, ...]
    """The rank's samples; none when the last global batch has fewer samples than there are ranks."""
    global_count: int
    """Samples of all ranks together, at least one."""

    @property
    def end(self) -> int:
        """How many samples of the epoch lie behind all ranks once the global batch does."""
        return self.start + self.global_count


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
    """Samples per rank and step, the mean over the ranks."""
    seed: int | None = None
    """Of the order, which is another one in each epoch; None keeps the data set's own order."""
    portions: tuple[float, ...] | None = None
    """How much of each global batch each rank takes, in relation to the others; None for equal parts.

    No rank goes without a sample in a batch that has enough for all.
    """
    drop_last: bool = False
    """Whether an epoch ends before a last global batch that is not full."""
    kept_batch_size: int | None = None
    """Samples of all ranks per step, for another number of ranks than those that began: it stays what it was."""

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
        if self.portions is not None and len(self.portions) != self.world_size:
            raise ConfigError(
                f"cannot deal samples by {len(self.portions)} portions to {self.world_size} ranks: give one for each"
            )
        if self.kept_batch_size is not None and self.kept_batch_size < 1:
            raise ConfigError(f"cannot make batches of {self.kept_batch_size} samples of all ranks: use 1 or more")
        self.parts(self.global_batch_size)  # refuses portions that cannot be cut by

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks per step, but for the last step of an epoch."""
        return self.kept_batch_size or self.world_size * self.local_batch_size

    @property
    def num_steps(self) -> int:
        """Steps per epoch, the same on every rank."""
        full, more = divmod(self.num_samples, self.global_batch_size)
        return full + (more > 0 and not self.drop_last)

    def epoch(self, epoch: int = 0, *, start: int = 0, portions: Portions | None = None) -> Iterator[Share]:
        """The rank's share of each global batch of an epoch.

        Args:
            epoch: Which one.
            start: How many of its samples all ranks together have seen already; an epoch that was begun by another
                number of ranks goes on with the samples that are left, in the same order.
            portions: What batches are cut by when they are asked for; the shares' own portions if left out.
        """
        order = self.order(epoch)
        while count := self.count(start):
            yield self.share(order, start, self.parts(count) if portions is None else portions.cut(count))
            start += count

    def count(self, start: int) -> int:
        """Samples of the global batch that begins at place `start` of an epoch; none at its end."""
        left = self.num_samples - start
        if self.drop_last and left < self.global_batch_size:
            return 0
        return max(0, min(self.global_batch_size, left))

    def share(self, order: np.ndarray, start: int, parts: Sequence[int]) -> Share:
        """The rank's part of the global batch that begins at place `start` of an order, cut in `parts`."""
        first = start + sum(parts[: self.rank])
        return Share(
            start=start,
            indices=tuple(order[first : first + parts[self.rank]].tolist()),
            global_count=sum(parts),
        )

    def order(self, epoch: int = 0) -> np.ndarray:
        """All samples as they come in an epoch, the same on every rank."""
        if self.seed is None:
            return np.arange(self.num_samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)

    def parts(self, count: int) -> tuple[int, ...]:
        """How many of `count` samples each rank takes; where they do not divide, the first ranks have one more."""
        return _parts(count, self.portions or (1.0,) * self.world_size)


@lru_cache(maxsize=16)
def _parts(count: int, portions: tuple[float, ...]) -> tuple[int, ...]:
    return keep_in_step(cut(count, portions))


class Batches:
    """Loads the samples of shares through one `DataLoader`, in one pass after another.

    Neither the order nor the global random state of torch depends on the loader, so a run that is resumed sees and
    draws what the uninterrupted one would have. A share is asked for when its samples begin to be loaded, which with
    workers is up to `num_workers * prefetch_factor` shares early.

    Args:
        dataset: Map-style.
        collate: From a list of samples to a batch, as a Task has it.
        sample_seed: Makes what a data set draws at random for a sample depend on this seed, the epoch and the sample
            only; None leaves the draws to the global generators.
        options: Of the `DataLoader`, such as `num_workers`.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        collate: Callable[[list[Any]], Any],
        sample_seed: int | None = None,
        **options: Any,
    ) -> None:
        self._dealer = _Dealer()
        self._loader: DataLoader[Any] = DataLoader(
            _Picked(dataset, sample_seed),
            batch_sampler=cast("Any", self._dealer),
            collate_fn=_CollateIfAny(collate),
            **{"generator": torch.Generator(), **options},
        )

    def load(self, shares: Iterable[Share], *, epoch: int = 0) -> Iterator[tuple[Share, Any]]:
        """Each share with its batch, or with None where the rank has no sample in this step.

        A pass that is not finished ends when another one begins.
        """
        self._dealer.begin(shares, epoch)
        for batch in self._loader:
            yield self._dealer.dealt.popleft(), batch


def batches(
    dataset: Samples,
    shares: Iterable[Share],
    *,
    collate: Callable[[list[Any]], Batch],
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[Share, Batch | None]]:
    """Loads the samples of each share, once: see `Batches`."""
    return Batches(dataset, collate=collate, num_workers=num_workers, pin_memory=pin_memory).load(shares)


class _Dealer:
    """Tells a `DataLoader` what to load, and keeps the shares that it has begun to load."""

    def __init__(self) -> None:
        self.dealt: deque[Share] = deque()
        self._shares: Iterable[Share] = ()
        self._epoch = 0

    def begin(self, shares: Iterable[Share], epoch: int) -> None:
        self.dealt = deque()
        self._shares, self._epoch = shares, epoch

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        for share in self._shares:
            self.dealt.append(share)
            yield self._epoch, share.indices


class _Picked(Dataset[Any]):
    """The samples of a share, in the process that loads them."""

    def __init__(self, dataset: Samples, sample_seed: int | None) -> None:
        self.dataset = dataset
        self._sample_seed = sample_seed

    def __getitems__(self, asked: tuple[int, tuple[int, ...]]) -> list[Any]:
        epoch, indices = asked
        if self._sample_seed is not None:
            return [self._with_own_draws(self._sample_seed, epoch, index) for index in indices]
        get_many = getattr(self.dataset, "__getitems__", None)
        if get_many and indices:
            return list(get_many(list(indices)))
        return [self.dataset[index] for index in indices]

    def _with_own_draws(self, seed: int, epoch: int, index: int) -> Any:
        with draws_of(seed, epoch, index):
            return self.dataset[index]


@dataclass(frozen=True)
class _CollateIfAny:
    """Leaves out the batch of a share without samples."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else None
