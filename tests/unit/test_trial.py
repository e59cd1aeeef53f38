"""Two plans in turns, fed with seconds: which one is kept, after how many steps, and what is said."""

import json
from types import SimpleNamespace

import pytest

from poseidon.runtime.trial import COUNTED_STEPS, MOST_ROUNDS, WARM_UP_STEPS, Trial, Verdict
from poseidon.timeline import Step

NEW, OTHER = "new", "other"
TURN = WARM_UP_STEPS + COUNTED_STEPS


class Bench:
    """A run whose steps take what is asked for under each plan; on the other rank what it says is multiplied."""

    def __init__(self, seconds, *, elsewhere=1.0):
        self.seconds = seconds
        self.elsewhere = elsewhere
        self.adopted = []
        self.verdict = None
        self.num_flushed = 0
        self.run = SimpleNamespace(
            recorder=SimpleNamespace(on_step=[]),
            adopt=lambda plan, label: self.adopted.append((plan, label)),
            flush=self.flush,
            group=SimpleNamespace(all_gather_text=self.gather),
        )
        self.trial = Trial(self.run, NEW, OTHER, label="trial_other", on_end=self.end)

    def flush(self):
        self.num_flushed += 1

    def gather(self, text, what):
        assert self.num_flushed
        new, other = json.loads(text)
        return [text, json.dumps([[self.elsewhere * seconds for seconds in new], other])]

    def end(self, verdict):
        self.verdict = verdict

    def go(self, most=1000):
        num_steps = 0
        while self.verdict is None and num_steps < most:
            plan, _ = self.adopted[-1]
            in_turn = num_steps % TURN
            seconds = 100.0 if in_turn < WARM_UP_STEPS else self.seconds[plan]
            for callback in list(self.run.recorder.on_step):
                callback(Step(rank=0, index=num_steps, start=0.0, end=seconds))
            self.run.on_exchanged()
            num_steps += 1
        return num_steps


def test_a_plan_that_is_clearly_faster_is_kept_after_one_round():
    bench = Bench({NEW: 1.0, OTHER: 2.0})
    assert bench.go() == 2 * TURN
    assert bench.verdict == Verdict(seconds=1.0, other_seconds=2.0)
    assert bench.adopted == [(NEW, "trial"), (OTHER, "trial_other")]
    assert bench.run.recorder.on_step == []
    assert bench.run.settled is False  # whoever settles says so


@pytest.mark.parametrize(("new", "stays"), [(0.9, True), (1.0, True), (1.01, True), (1.1, False), (5.0, False)])
def test_one_that_is_not_gets_all_rounds_and_is_dropped_if_it_is_slower(new, stays):
    bench = Bench({NEW: new, OTHER: 1.0})
    assert bench.go() == MOST_ROUNDS * 2 * TURN
    assert bench.verdict.stays is stays


def test_the_slowest_rank_counts():
    bench = Bench({NEW: 1.0, OTHER: 2.0}, elsewhere=3.0)
    bench.go()
    assert bench.verdict == Verdict(seconds=3.0, other_seconds=2.0)


def test_what_is_said_has_both_times():
    faster, slower = Verdict(seconds=0.5, other_seconds=1.0), Verdict(seconds=1.0, other_seconds=0.5)
    assert faster.in_words("the plan", "plain all-reduce") == (
        "the plan stays: 500ms a step against 1s with plain all-reduce, 2.00 times as fast"
    )
    assert slower.in_words("the plan", "plain all-reduce") == (
        "the plan is dropped for plain all-reduce, which is 2.00 times as fast: 1s a step against 500ms"
    )
