"""Timelines: what of a transfer is exposed and what is hidden, and files that a crash cut short."""

from pathlib import Path

import pytest

from poseidon.errors import ConfigError
from poseidon.timeline import COMPUTING, Activity, Interval, Step, Timeline, merge, to_line


def interval(activity: Activity, start: float, end: float, num_bytes: int = 0) -> Interval:
    return Interval(activity=activity, start=start, end=end, num_bytes=num_bytes)


# Seconds   0   1   2   3   4   5   6   7   8   9  10
# forward   ------------
# backward              ------------
# transfers         --------   (2 to 4)   --- (5 to 6)
#                       ------------ (3 to 5.5)   --- (8 to 9)
# exposed                           --- (5.5 to 6.5)
STEP = Step(
    rank=1,
    index=7,
    start=0.0,
    end=10.0,
    intervals=(
        interval(Activity.FORWARD, 0.0, 3.0),
        interval(Activity.BACKWARD, 3.0, 5.5),
        interval(Activity.TRANSFER, 5.0, 6.0, 400),
        interval(Activity.TRANSFER, 2.0, 4.0, 100),
        interval(Activity.TRANSFER, 3.0, 5.5, 200),
        interval(Activity.TRANSFER, 8.0, 9.0, 50),
        interval(Activity.EXPOSED, 5.5, 6.5),
        interval(Activity.OPTIMIZER, 6.5, 7.0),
        interval(Activity.LOADER, 7.0, 7.25),
    ),
)


def test_sums() -> None:
    assert STEP.seconds == 10.0
    assert STEP.bytes_sent == 750
    assert STEP.seconds_in(Activity.TRANSFER) == pytest.approx(6.5)
    assert STEP.seconds_in(*COMPUTING) == pytest.approx(3.0 + 2.5 + 0.5)
    assert STEP.seconds_in() == 0


def test_exposed_is_standing_still_whatever_is_under_way() -> None:
    assert STEP.exposed_seconds == pytest.approx(1.0)


def test_hidden_counts_overlapping_transfers_once_and_leaves_out_what_is_exposed() -> None:
    # The transfers cover 2 to 6 and 8 to 9; of that, 5.5 to 6 is exposed.
    assert STEP.hidden_seconds == pytest.approx(5.0 - 0.5)


@pytest.mark.parametrize(
    ("transfers", "exposed", "hidden"),
    [
        ([], [], 0.0),
        ([], [(0, 1)], 0.0),
        ([(0, 2)], [], 2.0),
        ([(0, 2)], [(0, 2)], 0.0),
        ([(0, 2)], [(2, 3)], 2.0),
        ([(0, 2), (2, 3)], [(1, 2.5)], 1.5),
        ([(0, 10)], [(1, 2), (1.5, 3), (9, 12)], 7.0),
        ([(0, 10), (2, 3)], [], 10.0),
    ],
)
def test_hidden_by_hand(
    transfers: list[tuple[float, float]], exposed: list[tuple[float, float]], hidden: float
) -> None:
    intervals = [interval(Activity.TRANSFER, *pair) for pair in transfers]
    intervals += [interval(Activity.EXPOSED, *pair) for pair in exposed]
    assert Step(rank=0, index=0, start=0, end=12, intervals=tuple(intervals)).hidden_seconds == pytest.approx(hidden)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    timeline = Timeline(steps=(STEP, Step(rank=1, index=8, start=10.0, end=11.0, scheme="observation")))
    timeline.save(tmp_path / "rank1.jsonl")
    assert Timeline.load(tmp_path / "rank1.jsonl") == timeline
    assert len((tmp_path / "rank1.jsonl").read_text().splitlines()) == 2


def test_an_empty_file_is_an_empty_timeline(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").touch()
    assert Timeline.load(str(tmp_path / "rank0.jsonl")) == Timeline()


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rank1.jsonl"
    path.write_text(to_line(STEP) + to_line(STEP)[:cut])
    assert Timeline.load(path).steps == (STEP,)


def test_a_broken_line_before_the_last_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rank1.jsonl"
    path.write_text(to_line(STEP) + '{"rank": "one", "index": 3}\n' + to_line(STEP))
    with pytest.raises(ConfigError) as caught:
        Timeline.load(path)
    assert str(caught.value) == (
        f"cannot use line 2 of {path} as a step: key 'rank' has 'one': Input should be a valid integer, unable to "
        "parse string as an integer; key 'start' is missing; key 'end' is missing"
    )


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}/none.jsonl: No such file or directory"):
        Timeline.load(tmp_path / "none.jsonl")


def test_merge_sorts_by_step_and_then_by_rank() -> None:
    def step(index: int, rank: int) -> Step:
        return Step(rank=rank, index=index, start=0.0, end=1.0)

    merged = merge([Timeline(steps=(step(0, 1), step(1, 1))), Timeline(steps=(step(0, 0), step(1, 0)))])
    assert [(s.index, s.rank) for s in merged.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
