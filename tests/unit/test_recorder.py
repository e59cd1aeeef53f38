"""What the recorder notes, on a clock that only moves when it is told to."""

import pytest

from poseidon.breakdown import split_step
from poseidon.runtime import recorder as module
from poseidon.runtime.recorder import Recorder
from poseidon.timeline import Activity


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_every_second_of_a_step_has_a_name(clock: Clock) -> None:
    recorder = Recorder(rank=1)
    for activity, seconds in ((Activity.LOADER, 1), (Activity.OPTIMIZER, 2), (Activity.FORWARD, 4)):
        recorder.begin(activity)
        clock.now += seconds
        recorder.end(activity)
    clock.now += 3
    recorder.add_since_last(Activity.FORWARD, "loss")
    with recorder.standing_still("losses"):
        clock.now += 5
    recorder.close_step(0, "plan")
    (step,) = recorder.timeline.steps
    assert (step.rank, step.seconds) == (1, 15)
    assert [(i.activity.value, i.name, i.seconds) for i in step.intervals] == [
        ("loader", "", 1),
        ("optimizer", "", 2),
        ("forward", "", 4),
        ("forward", "loss", 3),
        ("transfer", "losses", 5),
        ("exposed", "losses", 5),
    ]
    parts = split_step(step, {"losses": step.end - 2})  # the last rank came two seconds before the end
    assert (parts.computing, parts.loader, parts.waiting, parts.exposed, parts.other) == (9, 1, 3, 2, 0)


def test_what_passed_before_a_restart_belongs_to_no_step(clock: Clock) -> None:
    recorder = Recorder(rank=0)
    clock.now += 7
    recorder.restart()
    clock.now += 1
    recorder.add_since_last(Activity.FORWARD, "loss")
    recorder.close_step(0, "plan")
    (step,) = recorder.timeline.steps
    assert step.seconds == 1
    assert step.intervals[0].seconds == 1
