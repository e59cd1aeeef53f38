"""Which intervals can be drawn in one row: pure placing, for the trace and for the page."""

from collections.abc import Iterable, Sequence

from poseidon.timeline import Activity, Interval


def training_thread(intervals: Iterable[Interval]) -> list[Interval]:
    """What the training thread does, in order."""
    return _in_order(i for i in intervals if i.activity is not Activity.TRANSFER)


def transfers(intervals: Iterable[Interval]) -> list[Interval]:
    """What is on the wire, in order."""
    return _in_order(i for i in intervals if i.activity is Activity.TRANSFER)


def side_by_side(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """As few rows as it takes for no two intervals of a row to share any time; each goes to the first that is free."""
    lanes: list[list[Interval]] = []
    for interval in _in_order(intervals):
        free = next((lane for lane in lanes if lane[-1].end <= interval.start), None)
        if free is None:
            lanes.append([interval])
        else:
            free.append(interval)
    return lanes


def nested(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Rows in which two intervals share time only where one lies within the other, as a call within a call."""
    lanes: list[list[Interval]] = []
    open_ends: list[list[float]] = []
    """By row, when what has begun there ends: the innermost last."""
    for interval in _in_order(intervals):
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= interval.start:
                ends.pop()
            if not ends or interval.end <= ends[-1]:
                lane.append(interval)
                ends.append(interval.end)
                break
        else:
            lanes.append([interval])
            open_ends.append([interval.end])
    return lanes


def _in_order(intervals: Iterable[Interval]) -> list[Interval]:
    return sorted(intervals, key=lambda i: (i.start, -i.end))
