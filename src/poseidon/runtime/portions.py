"""Which part of a global batch each rank takes: whole samples in proportion to given numbers."""

import math
from collections.abc import Sequence
from fractions import Fraction

from poseidon.errors import ConfigError


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
