"""Which part of a global batch each rank takes: whole samples in proportion to given numbers, which may change.

Loaders cut batches ahead of the training, one rank further than another. So a change holds from a batch on that no rank
has cut yet: all ranks cut each batch alike, and no sample is lost or seen twice.
"""

import json
import math
from collections.abc import Sequence
from fractions import Fraction

from poseidon.comm.group import Group
from poseidon.errors import ConfigError


class Portions:
    """What one loader cuts its global batches by, on this rank.

    Args:
        portions: One number for each rank, as for `cut`.
    """

    def __init__(self, portions: Sequence[float]) -> None:
        cut(0, portions)
        self._changes = [(0, tuple(portions))]
        """From which batch of the epoch on which portions hold, in order."""
        self.num_cut = 0
        """Global batches of the epoch that this rank has cut."""
        self.largest = 0
        """Samples of the largest batch so far: those of any but an epoch's last."""

    def begin_epoch(self, changes: Sequence[tuple[int, Sequence[float]]] = ()) -> None:
        """Forgets what was cut, on every rank: whoever left an epoch early may have cut more than others.

        Args:
            changes: From which batch on which portions hold, where the epoch is gone on with: see `changes_from`.
        """
        self._changes = [(first, tuple(portions)) for first, portions in changes] or [(0, self.latest)]
        self.num_cut = 0

    def changes_from(self, num_batches: int) -> list[tuple[int, tuple[float, ...]]]:
        """Which portions hold from batch number `num_batches` of the epoch on, from which batch on, counted from it."""
        before = [change for change in self._changes if change[0] <= num_batches]
        after = self._changes[len(before) :]
        return [(0, before[-1][1]), *((first - num_batches, portions) for first, portions in after)]

    @property
    def latest(self) -> tuple[float, ...]:
        """As last changed, whether in force already or not."""
        return self._changes[-1][1]

    def cut(self, count: int) -> tuple[int, ...]:
        """Cuts the next global batch: each rank's number of samples."""
        portions = next(portions for first, portions in reversed(self._changes) if first <= self.num_cut)
        self.num_cut += 1
        self.largest = max(self.largest, count)
        return keep_in_step(cut(count, portions))

    def change(self, portions: Sequence[float], first: int) -> None:
        """Cuts by other portions from global batch number `first` on, counted from 0; none of them may be cut yet.

        Raises:
            ConfigError: The portions cannot be used, or that batch has been cut already.
        """
        cut(0, portions)
        if len(portions) != len(self.latest) or first < max(self.num_cut, self._changes[-1][0]):
            raise ConfigError(
                f"cannot cut by {len(portions)} portions from batch {first} on: there are {len(self.latest)} ranks, "
                f"{self.num_cut} batches have been cut, and the last change is from batch {self._changes[-1][0]} on"
            )
        self._changes.append((first, tuple(portions)))


class Dealing:
    """What all loaders of one run cut by, to be changed on all ranks together.

    Args:
        group: The ranks.
        portions: One number for each rank, as for `cut`.
    """

    def __init__(self, group: Group, portions: Sequence[float]) -> None:
        self._group = group
        self._loaders: list[Portions] = []
        self.latest = tuple(portions)
        """As last changed."""

    def join(self) -> Portions:
        """For one more loader, made on all ranks in the same order."""
        portions = Portions(self.latest)
        self._loaders.append(portions)
        return portions

    def resume(self, portions: Sequence[float]) -> None:
        """Has all loaders cut by these from their next pass on; on all ranks alike."""
        self.latest = tuple(portions)
        for loader in self._loaders:
            loader.begin_epoch([(0, self.latest)])

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Samples by rank of a full global batch; None where no loader has cut any."""
        largest = max((loader.largest for loader in self._loaders), default=0)
        return keep_in_step(cut(largest, self.latest)) if largest else None

    def change(self, portions: Sequence[float]) -> tuple[float, ...]:
        """Has all loaders cut by other portions, rank 0's, from the first batch on that no rank has cut yet.

        All ranks call this after the same exchange.

        Returns:
            The portions.
        """
        mine = json.dumps([[loader.num_cut for loader in self._loaders], list(portions)])
        everyone = [json.loads(text) for text in self._group.all_gather_text(mine, "changing each rank's samples")]
        self.latest = tuple(map(float, everyone[0][1]))
        for loader, *nums_cut in zip(self._loaders, *(nums for nums, _ in everyone), strict=True):
            loader.change(self.latest, max(nums_cut))
        return self.latest


def cut(count: int, portions: Sequence[float]) -> list[int]:
    """Cuts samples into whole parts, one for each rank, as near to the portions as can be.

    Every rank gets its quota rounded down; what is left goes, one by one, to those that lost most by it, and among
    equals to the lower rank. Computed in fractions, so that every host comes to the same parts.

    Args:
        count: How many samples there are.
        portions: One number for each rank, none negative; only their ratios count.

    Returns:
        Each rank's number of samples; their sum is `count`.

    Raises:
        ConfigError: The count or a portion is negative or not finite, or no portion is more than zero.

    Example:
        >>> cut(10, [2.0, 1.0, 1.0])
        [5, 3, 2]
    """
    if count < 0:
        raise ConfigError(f"cannot cut {count} samples into parts: a count is zero or more")
    total = _total(portions)
    quotas = [count * Fraction(portion) / total for portion in portions]
    parts = [math.floor(quota) for quota in quotas]
    by_loss = sorted(range(len(parts)), key=lambda rank: parts[rank] - quotas[rank])
    for rank in by_loss[: count - sum(parts)]:
        parts[rank] += 1
    return parts


def keep_in_step(parts: Sequence[int]) -> tuple[int, ...]:
    """The same parts, but no rank goes without a sample while others have two: all have equally many batches."""
    parts = list(parts)
    while 0 in parts and max(parts) > 1:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


def _total(portions: Sequence[float]) -> Fraction:
    if any(not math.isfinite(portion) or portion < 0 for portion in portions):
        raise ConfigError(f"cannot cut by portions {tuple(portions)}: each is zero or more")
    total = sum(map(Fraction, portions), Fraction(0))
    if not total:
        raise ConfigError(f"cannot cut by portions {tuple(portions)}: at least one must be more than zero")
    return total
