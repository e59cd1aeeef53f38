"""The run's folder: timelines of all ranks on one clock."""

from pathlib import Path

import pytest

from poseidon.comm.group import Group
from poseidon.runtime.clocks import ClockOffset, Clocks
from poseidon.runtime.run_folder import RunFolder
from poseidon.timeline import Activity, Interval, Step, Timeline

STEP = Step(
    rank=0, index=3, start=100.0, end=101.0, intervals=(Interval(activity=Activity.FORWARD, start=100.25, end=100.5),)
)


@pytest.mark.parametrize(("offset", "moved"), [(-40.0, -40.0), (0.0001, 0.0)])
def test_timelines_are_merged_on_rank_0s_clock(tmp_path: Path, offset: float, moved: float) -> None:
    clock = ClockOffset(at=90.0, offset_seconds=offset, uncertainty_seconds=0.001)
    with RunFolder(tmp_path / "run", Group([])) as folder:
        folder.note_step(STEP)
        assert folder.merge_timelines(Clocks(start=(clock,), end=(clock,))) == []
    (step,) = Timeline.load(tmp_path / "run" / "timeline.jsonl").steps
    assert step == STEP.shifted(moved)
    assert step.intervals[0].start == 100.25 + moved


def test_what_was_not_predicted_is_not_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", Group([])) as folder:
        folder.write_predicted([])
        assert not (tmp_path / "run" / "predicted.jsonl").exists()
        folder.write_predicted([Timeline(steps=(STEP,))])
    assert Timeline.load(tmp_path / "run" / "predicted.jsonl").steps == (STEP,)
