"""Where the time of a step went, with numbers that can be checked by hand."""

import io

import pytest
from rich.console import Console

from poseidon.breakdown import LABELS, StepParts, find_last_starts, split_step
from poseidon.report.summary import Summary, draw, summarize
from poseidon.timeline import Activity, Interval, Step, Timeline


def interval(activity: Activity, start: float, end: float, name: str = "", num_bytes: int = 0) -> Interval:
    return Interval(activity=activity, name=name, start=start, end=end, num_bytes=num_bytes)


def fast_rank(index: int = 0) -> Step:
    """Loads until 1, computes until 5, stands still from 5 to 9; its transfer is under way from 3 to 9."""
    return Step(
        rank=0,
        index=index,
        start=0.0,
        end=10.0,
        intervals=(
            interval(Activity.LOADER, 0, 1),
            interval(Activity.FORWARD, 1, 2),
            interval(Activity.BACKWARD, 2, 5),
            interval(Activity.TRANSFER, 3, 9, "fc", num_bytes=600),
            interval(Activity.EXPOSED, 5, 9, "fc"),
        ),
    )


def slow_rank(index: int = 0) -> Step:
    """Computes until 8 and has its part of the transfer ready at 7."""
    return Step(
        rank=1,
        index=index,
        start=0.0,
        end=12.0,
        intervals=(
            interval(Activity.FORWARD, 0, 4),
            interval(Activity.BACKWARD, 4, 8),
            interval(Activity.TRANSFER, 7, 9, "fc", num_bytes=400),
            interval(Activity.EXPOSED, 8, 9, "fc"),
        ),
    )


def test_standing_still_counts_as_waiting_until_the_last_rank_is_ready() -> None:
    parts = split_step(fast_rank(), {"fc": 7.0})
    assert parts == StepParts(loader=1, computing=2, hidden=2, waiting=2, exposed=2, other=1)
    assert parts.total == 10


def test_nobody_was_late() -> None:
    parts = split_step(fast_rank(), {"fc": 3.0})
    assert (parts.waiting, parts.exposed) == (0, 4)


def test_a_rank_that_comes_after_the_end_cannot_be_waited_for_longer_than_one_stood_still() -> None:
    parts = split_step(fast_rank(), {"fc": 99.0})
    assert (parts.waiting, parts.exposed) == (4, 0)


def test_an_exposed_interval_without_a_transfer_of_its_name_is_exposed() -> None:
    step = Step(rank=0, index=0, start=0, end=2, intervals=(interval(Activity.EXPOSED, 0, 1, "fc (gather)"),))
    assert split_step(step, {"fc": 1.0}) == StepParts(exposed=1, other=1)


def test_what_overlaps_counts_once() -> None:
    step = Step(
        rank=0,
        index=0,
        start=0,
        end=4,
        intervals=(
            interval(Activity.BACKWARD, 0, 3),
            interval(Activity.REBUILD, 2, 3),
            interval(Activity.TRANSFER, 0, 2, "a"),
            interval(Activity.TRANSFER, 1, 2.5, "b"),
        ),
    )
    assert split_step(step, {}) == StepParts(computing=0.5, hidden=2.5, other=1)


def test_what_lies_outside_of_the_step_does_not_count() -> None:
    step = Step(rank=0, index=0, start=1, end=2, intervals=(interval(Activity.FORWARD, 0, 3),))
    assert split_step(step, {}) == StepParts(computing=1)


def test_the_last_start_is_the_latest_of_all_ranks() -> None:
    assert find_last_starts([fast_rank(), slow_rank()]) == {"fc": 7}


def test_the_summary_of_two_ranks() -> None:
    summary = summarize([Timeline(steps=(fast_rank(),)), Timeline(steps=(slow_rank(),))])
    assert summary.num_steps == 1
    assert summary.num_ranks == 2
    assert summary.median_step_seconds == 11  # of ten and twelve
    assert summary.bytes_sent_per_rank == 500
    # fast: loader 1, computing 2, hidden 2, waiting 2, exposed 2, other 1
    # slow: computing 7, hidden 1, exposed 1, other 3
    expected = StepParts(loader=0.5, computing=4.5, hidden=1.5, waiting=1, exposed=1.5, other=2)
    assert summary.parts.model_dump() == pytest.approx(expected.model_dump())


def test_only_steps_that_every_rank_has_count() -> None:
    summary = summarize([Timeline(steps=(fast_rank(0), fast_rank(1))), Timeline(steps=(slow_rank(1), slow_rank(2)))])
    assert summary.num_steps == 1


@pytest.mark.parametrize("timelines", [[], [Timeline(), Timeline()], [Timeline(steps=(fast_rank(),)), Timeline()]])
def test_without_steps_all_is_zero(timelines: list[Timeline]) -> None:
    summary = summarize(timelines)
    assert summary.num_steps == 0
    assert sum(summary.shares_in_percent().values()) == 0


def test_percentages_add_up_to_a_hundred() -> None:
    third = Summary(
        num_steps=1,
        num_ranks=1,
        median_step_seconds=3.0,
        parts=StepParts(computing=1, hidden=1, exposed=1),
        bytes_sent_per_rank=0,
    )
    assert list(third.shares_in_percent().values()) == [34, 33, 33, 0, 0, 0]


def test_the_table_fits_80_columns_and_counts_bytes_by_host() -> None:
    summary = summarize([Timeline(steps=(fast_rank(),)), Timeline(steps=(slow_rank(),))])
    output = io.StringIO()
    console = Console(width=80, file=output)
    console.print(draw(summary, num_hosts=1))
    text = output.getvalue()
    assert "1kB" in text  # both ranks are on this host
    assert all(label in text for label in LABELS.values())
    assert max(map(len, text.splitlines())) <= 80
