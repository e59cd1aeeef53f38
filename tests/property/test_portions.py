"""Cutting a global batch: every sample once, no rank a whole sample away from its quota, equals alike."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.runtime.portions import Portions, cut

counts = st.integers(0, 10_000)
portion_lists = st.lists(
    st.one_of(st.just(0.0), st.integers(1, 300).map(float), st.floats(1e-6, 1e6)), min_size=1, max_size=9
).filter(any)


@given(count=counts, portions=portion_lists)
def test_every_sample_goes_to_one_rank(count: int, portions: list[float]) -> None:
    parts = cut(count, portions)
    assert len(parts) == len(portions)
    assert sum(parts) == count
    assert min(parts) >= 0


@given(count=counts, portions=portion_lists)
def test_no_part_is_a_whole_sample_away_from_its_quota(count: int, portions: list[float]) -> None:
    total = sum(map(Fraction, portions))
    for part, portion in zip(cut(count, portions), portions, strict=True):
        assert abs(part - count * Fraction(portion) / total) < 1


@given(count=counts, portions=portion_lists)
def test_a_rank_without_a_portion_gets_nothing(count: int, portions: list[float]) -> None:
    assert all(part == 0 for part, portion in zip(cut(count, portions), portions, strict=True) if not portion)


@given(count=counts, ranks=st.integers(1, 12), portion=st.floats(1e-3, 1e3))
def test_equal_portions_differ_by_one_and_the_lower_ranks_have_more(count: int, ranks: int, portion: float) -> None:
    parts = cut(count, [portion] * ranks)
    assert parts == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] <= 1


@given(portions=st.lists(st.integers(0, 500), min_size=1, max_size=9).filter(any), times=st.integers(1, 5))
def test_portions_that_are_counts_come_back(portions: list[int], times: int) -> None:
    assert cut(times * sum(portions), portions) == [times * portion for portion in portions]


@given(count=counts, portions=portion_lists, power=st.integers(-8, 8))
def test_only_ratios_count(count: int, portions: list[float], power: int) -> None:
    assert cut(count, [portion * 2.0**power for portion in portions]) == cut(count, portions)


@pytest.mark.parametrize(
    ("count", "portions", "what"),
    [
        (-1, [1.0], "-1 samples"),
        (4, [], "at least one"),
        (4, [0.0, 0.0], "at least one"),
        (4, [1.0, -1.0], "zero or more"),
        (4, [float("nan"), 1.0], "zero or more"),
        (4, [float("inf"), 1.0], "zero or more"),
    ],
)
def test_what_cannot_be_cut_is_refused(count: int, portions: list[float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        cut(count, portions)


@given(
    changes=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 6), min_size=3, max_size=3)), max_size=4),
    count=st.integers(1, 200),
    data=st.data(),
)
def test_ranks_whose_loaders_are_ahead_cut_every_batch_alike(
    changes: list[tuple[int, list[int]]], count: int, data: st.DataObject
) -> None:
    """Each change comes after some more batches were trained on, each loader ahead by another number."""
    portions = st.lists(st.floats(0.1, 9.0), min_size=3, max_size=3)
    ranks = [Portions([1.0, 1.0, 1.0]) for _ in range(3)]
    cuts: list[list[list[int]]] = [[], [], []]
    trained = 0
    for more, ahead in [*changes, (0, [60, 60, 60])]:
        trained += more
        for mine, rank, further in zip(cuts, ranks, ahead, strict=True):
            while rank.num_cut < trained + further:
                mine.append(rank.cut(count))
        after, first = data.draw(portions), max(rank.num_cut for rank in ranks)
        for rank in ranks:
            rank.change(after, first)
            assert rank.latest == tuple(after)
    shortest = min(map(len, cuts))
    assert shortest >= 60
    assert cuts[0][:shortest] == cuts[1][:shortest] == cuts[2][:shortest]
    assert all(sum(parts) == count for parts in cuts[0])


def test_a_change_from_a_batch_on_that_was_cut_is_refused() -> None:
    portions = Portions([1.0, 1.0])
    portions.cut(8)
    with pytest.raises(ConfigError, match="from batch 0 on"):
        portions.change([3.0, 1.0], first=0)
    with pytest.raises(ConfigError, match="3 portions"):
        portions.change([3.0, 1.0, 1.0], first=1)
