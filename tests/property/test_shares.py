"""Shares by speed: the best of all splits, whatever the ranks' fixed times and times per sample."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from poseidon.planner.shares import shares_by_speed

seconds = st.integers(0, 40).map(lambda eighths: eighths / 8)
"""Sums of these are exact, so that equal times are equal."""
ranks = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4)


def every_split(count: int, world_size: int) -> list[list[int]]:
    """All ways to share so many samples with at least one for each rank."""
    found = []
    for bars in combinations(range(1, count), world_size - 1):
        edges = [0, *bars, count]
        found.append([after - before for before, after in pairwise(edges)])
    return found


def slowest(paces: list[tuple[float, float]], samples: list[int]) -> float:
    return max(fixed + each * number for (fixed, each), number in zip(paces, samples, strict=True))


@given(paces=ranks, more=st.integers(0, 10))
def test_no_split_is_faster(paces: list[tuple[float, float]], more: int) -> None:
    count = len(paces) + more
    found = shares_by_speed([fixed for fixed, _ in paces], [each for _, each in paces], count)
    assert sum(found) == count
    assert min(found) >= 1
    assert slowest(paces, found) == min(slowest(paces, split) for split in every_split(count, len(paces)))


@given(each=st.floats(1e-5, 1.0), world_size=st.integers(1, 9), more=st.integers(0, 200))
def test_equal_ranks_get_equal_shares(each: float, world_size: int, more: int) -> None:
    found = shares_by_speed([0.0] * world_size, [each] * world_size, world_size + more)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1


@given(paces=ranks, more=st.integers(0, 30))
def test_the_slowest_is_not_slower_than_with_equal_shares(paces: list[tuple[float, float]], more: int) -> None:
    world_size = len(paces)
    count = world_size + more
    size, left = divmod(count, world_size)
    equal = [size + (rank < left) for rank in range(world_size)]
    found = shares_by_speed([fixed for fixed, _ in paces], [each for _, each in paces], count)
    assert slowest(paces, found) <= slowest(paces, equal)
