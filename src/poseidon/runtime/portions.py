"""Which part of a global batch each rank takes: whole samples in proportion to given numbers, which may change."""

import math
from collections.abc import Sequence
from fractions import Fraction

from poseidon.errors import ConfigError


class Portions:
    """What each global batch is cut by on this rank. A change holds from one batch on, the same one on every rank.

    Loaders cut batches ahead of the training, one rank further than another. `num_cut` says how far this one is, so
    that a change can begin at a batch that no rank has cut yet: then all cut each batch alike, and no sample is lost
    or seen twice.

    Args:
        portions: One number for each rank, as for `cut`.
    """

    def __init__(self, portions: Sequence[float]) -> None:
        cut(0, portions)
        self._changes = [(0, tuple(portions))]
        """From which batch on which portions hold, in order; those that no batch is cut by any more are gone."""
        self.num_cut = 0
        """Global batches that this rank has cut."""

    @property
    def latest(self) -> tuple[float, ...]:
        """As last changed, whether in force already or not."""
        return self._changes[-1][1]

    def cut(self, count: int) -> list[int]:
        """Cuts the next global batch: each rank's number of samples."""
        while len(self._changes) > 1 and self._changes[1][0] <= self.num_cut:
            del self._changes[0]
        self.num_cut += 1
        return cut(count, self._changes[0][1])

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


def _total(portions: Sequence[float]) -> Fraction:
    if any(not math.isfinite(portion) or portion < 0 for portion in portions):
        raise ConfigError(f"cannot cut by portions {tuple(portions)}: each is zero or more")
    total = sum(map(Fraction, portions), Fraction(0))
    if not total:
        raise ConfigError(f"cannot cut by portions {tuple(portions)}: at least one must be more than zero")
    return total
