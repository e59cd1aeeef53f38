"""Laws of placing intervals in rows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from poseidon.report.lanes import nested, side_by_side
from poseidon.timeline import Activity, Interval

moments = st.integers(0, 30)
intervals = st.lists(
    st.tuples(moments, moments).map(
        lambda pair: Interval(activity=Activity.TRANSFER, start=float(min(pair)), end=float(max(pair)))
    ),
    max_size=25,
)


def all_of(lanes: list[list[Interval]]) -> list[Interval]:
    return sorted((i for lane in lanes for i in lane), key=lambda i: (i.start, i.end))


@given(intervals)
def test_nothing_is_lost_or_doubled(given_intervals: list[Interval]) -> None:
    expected = sorted(given_intervals, key=lambda i: (i.start, i.end))
    assert all_of(side_by_side(given_intervals)) == expected
    assert all_of(nested(given_intervals)) == expected


@given(intervals)
def test_side_by_side_shares_no_time_and_takes_as_few_rows_as_overlap_at_once(given_intervals: list[Interval]) -> None:
    lanes = side_by_side(given_intervals)
    for lane in lanes:
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))
    lasting = [i for i in given_intervals if i.end > i.start]
    most = max((sum(i.start <= at.start < i.end for i in lasting) for at in lasting), default=0)
    if len(lasting) == len(given_intervals):
        assert len(lanes) == most


@given(intervals)
def test_what_shares_time_in_a_nested_row_lies_within(given_intervals: list[Interval]) -> None:
    for lane in nested(given_intervals):
        for index, a in enumerate(lane):
            for b in lane[index + 1 :]:
                assert a.end <= b.start or b.end <= a.end
