"""The run's folder: timelines of all ranks on one clock."""

import json
from pathlib import Path

import pytest

from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.runtime import run_folder
from poseidon.runtime.clocks import ClockOffset, Clocks
from poseidon.runtime.ledger import StepResult
from poseidon.runtime.run_folder import RunFolder, is_unbegun, read_facts
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


def test_what_an_earlier_run_says_stays_until_this_one_goes_on(tmp_path: Path) -> None:
    earlier = {"options": {"command": {}}, "baseline": 3, "result": "good"}
    with RunFolder(tmp_path, Group([])) as folder:
        assert folder.begin(earlier) == {}
    with RunFolder(tmp_path, Group([]), check=lambda path: None) as folder:
        begun = folder.begin({"options": {"command": {}}, "baseline": None})
        assert begun == read_facts(tmp_path) == {"version": 1, **earlier}
        folder.write_facts({"options": {}, "baseline": 3})
        assert "result" not in read_facts(tmp_path)


def test_what_was_not_predicted_is_not_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", Group([])) as folder:
        folder.write_predicted([])
        assert not (tmp_path / "run" / "predicted.jsonl").exists()
        folder.write_predicted([Timeline(steps=(STEP,))])
    assert Timeline.load(tmp_path / "run" / "predicted.jsonl").steps == (STEP,)


def result(step: int) -> StepResult:
    return StepResult(step=step, epoch=0, loss=1.0, seconds=0.1, num_samples=4)


def test_what_is_made_anew_is_cut_off_and_what_was_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path, Group([])) as folder:
        folder.note_results([result(step) for step in range(5)])
        for index in range(5):
            folder.note_step(STEP.model_copy(update={"index": index}))
    former = path / "timeline.rank1.jsonl"  # of a rank that is not any more
    former.write_text((path / "timeline.rank0.jsonl").read_text() + '{"index": 5, "ra')
    with RunFolder(path, Group([]), check=lambda path: None) as folder:
        folder.go_on_from(3)
        folder.note_results([result(3)])
        folder.note_step(STEP.model_copy(update={"index": 3}))
    assert [json.loads(line)["step"] for line in (path / "steps.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert [step.index for step in Timeline.load(path / "timeline.rank0.jsonl").steps] == [0, 1, 2, 3]
    assert [step.index for step in Timeline.load(former).steps] == [0, 1, 2]


def test_a_run_that_goes_on_adds_to_the_timeline(tmp_path: Path) -> None:
    clock = ClockOffset(at=90.0, offset_seconds=0.0, uncertainty_seconds=0.001)
    clocks = Clocks(start=(clock,), end=(clock,))
    for index in (3, 4):
        with RunFolder(tmp_path, Group([]), check=lambda path: None) as folder:
            folder.note_step(STEP.model_copy(update={"index": index}))
            folder.merge_timelines(clocks)
    assert [step.index for step in Timeline.load(tmp_path / "timeline.jsonl").steps] == [3, 4]


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    with RunFolder(tmp_path, Group([])), pytest.raises(ConfigError, match="another run writes there now"):
        RunFolder(tmp_path, Group([]), check=lambda path: None)
    RunFolder(tmp_path, Group([]), check=lambda path: None).__exit__()


def test_a_folder_is_unbegun_until_something_is_in_it(tmp_path: Path) -> None:
    assert is_unbegun(tmp_path / "none")
    with RunFolder(tmp_path / "run", Group([])) as folder:
        assert is_unbegun(folder.path)
        folder.note_results([result(0)])
        assert not is_unbegun(folder.path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    assert not is_unbegun(tmp_path / "other")
