"""The figures of a run whose numbers can be checked by hand."""

import json
from pathlib import Path

import pytest

from poseidon.breakdown import StepParts
from poseidon.cluster.rates import Rates
from poseidon.errors import ConfigError
from poseidon.plan import uniform_plan
from poseidon.report.figures import Figures, compute_figures
from poseidon.report.record import RunRecord, exchange_of
from poseidon.timeline import Timeline
from support import runs


def figures_of(folder: Path, **changes: object) -> Figures:
    return compute_figures(RunRecord.load(runs.write_run(folder, **changes)))


def test_what_was_achieved(tmp_path: Path) -> None:
    figures = figures_of(tmp_path / "run")
    assert figures.samples_per_s == pytest.approx(160)
    assert figures.step_seconds.median == pytest.approx(0.1)
    assert figures.efficiency is not None
    assert figures.efficiency.speedup == pytest.approx(1.6)  # 160 against 100 of one rank alone
    assert figures.efficiency.share == pytest.approx(0.8)
    assert figures.efficiency.most == 1.0


def test_the_parts_add_up_to_the_step(tmp_path: Path) -> None:
    # rank 0: computing 10 + 20 + 30 - 10, hidden 10, waiting 10, exposed 20, loader 5, other 5
    # rank 1: computing 10 + 20 + 40 - 10, hidden 10, exposed 20, loader 5, other 5
    parts = figures_of(tmp_path / "run").summary.parts
    expected = StepParts(computing=0.055, hidden=0.010, exposed=0.020, waiting=0.005, loader=0.005, other=0.005)
    assert parts.model_dump() == pytest.approx(expected.model_dump(), abs=1e-6)
    assert parts.total == pytest.approx(0.1)


def test_the_link(tmp_path: Path) -> None:
    figures = figures_of(tmp_path / "run")
    link = figures.link
    assert link is not None
    assert link.bandwidth == 125_000_000
    assert link.bytes_per_host == runs.BYTES_PER_RANK
    assert link.floor_seconds == pytest.approx(0.028)
    assert link.of_step == pytest.approx(0.28)
    assert link.of_transfers == pytest.approx(0.028 / 0.035, rel=1e-3)  # under way for 40 and for 30 ms
    assert figures.overlap == pytest.approx(10 / 30, rel=1e-3)


def test_a_link_that_was_not_limited_has_no_rate(tmp_path: Path) -> None:
    surroundings = {**runs.make_facts()["surroundings"], "shaped": False}
    assert figures_of(tmp_path / "run", surroundings=surroundings).link is None


def test_what_stays_on_a_host_is_not_told_from_what_leaves_it(tmp_path: Path) -> None:
    surroundings = {**runs.make_facts()["surroundings"], "hosts": 1}
    assert figures_of(tmp_path / "run", surroundings=surroundings).link is None


def test_without_a_limit_the_measured_rate_counts(tmp_path: Path) -> None:
    surroundings = {**runs.make_facts()["surroundings"], "shaped": False}
    rates = Rates.equal(world_size=2, bandwidth=1e9).model_dump(mode="json")
    link = figures_of(tmp_path / "run", surroundings=surroundings, rates=rates).link
    assert link is not None
    assert link.bandwidth == pytest.approx(1e9)
    assert "measured" in link.source


def test_the_network_is_what_limits(tmp_path: Path) -> None:
    bottleneck = figures_of(tmp_path / "run").bottleneck
    assert bottleneck.kind == "network"
    assert "20%" in bottleneck.text
    assert "3.5MB per host at 1Gbit/s take at least 28ms" in bottleneck.text


def test_the_exchanges(tmp_path: Path) -> None:
    first, second = figures_of(tmp_path / "run").exchanges
    assert (first.layers, first.scheme, first.bytes_sent) == (("fc",), "sufficient_factor", 500_000)
    assert first.plain_bytes == 16_000_000
    assert first.transfer_seconds == pytest.approx(0.010, rel=1e-3)
    assert first.exposed_seconds == 0
    assert second.layers == ("head", "conv")
    assert second.transfer_seconds == pytest.approx(0.025, rel=1e-3)  # 30 and 20 ms
    assert second.exposed_seconds == pytest.approx(0.025, rel=1e-3)
    assert first.predicted_transfer_seconds == pytest.approx(0.010, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "held", "words"),
    [(1.09, True, "10 % too short"), (1.3, False, "200 % too long"), (1.1, True, "to the")],
)
def test_whether_the_prediction_held(tmp_path: Path, seconds: float, held: bool, words: str) -> None:
    folder = runs.write_run(tmp_path / "run")
    step = runs.make_predicted().model_copy(update={"end": seconds})
    Timeline(steps=(step,)).save(folder / "predicted.jsonl")
    prediction = compute_figures(RunRecord.load(folder)).prediction
    assert prediction is not None
    assert prediction.step_seconds == pytest.approx(seconds - 1.0)
    assert prediction.held == held
    assert words in prediction.in_words


def test_nothing_was_predicted(tmp_path: Path) -> None:
    assert figures_of(tmp_path / "run", predicted=False).prediction is None


def test_another_plan_is_predicted_with_the_rates_of_the_run(tmp_path: Path) -> None:
    plan = runs.make_plan()
    layers = [layer.model_copy(update={"backward_seconds": 0.1}) for layer in plan.profile.layers]
    profile = plan.profile.model_copy(update={"layers": tuple(layers)})
    uniform_plan(profile, 2).save(tmp_path / "other.json")
    rates = Rates.equal(world_size=2, bandwidth=1e12).model_dump(mode="json")
    record = RunRecord.load(runs.write_run(tmp_path / "run", rates=rates), tmp_path / "other.json")
    prediction = compute_figures(record).prediction
    assert prediction is not None
    assert prediction.step_seconds == pytest.approx(0.3, rel=0.01)
    assert record.predicted_of(1) == record.predicted_of(0)  # they are of one kind


def test_another_run_is_the_baseline(tmp_path: Path) -> None:
    record = RunRecord.load(runs.write_run(tmp_path / "two"))
    surroundings = {**runs.make_facts()["surroundings"], "world_size": 1, "hosts": 1}
    alone = RunRecord.load(runs.write_run(tmp_path / "one", surroundings=surroundings))
    efficiency = compute_figures(record, alone).efficiency
    assert efficiency is not None
    assert efficiency.alone_samples_per_s == pytest.approx(160)
    assert efficiency.share == pytest.approx(0.5)
    assert "one" in efficiency.note


def test_ranks_that_share_cores_cannot_all_be_as_fast_as_one(tmp_path: Path) -> None:
    surroundings = {**runs.make_facts()["surroundings"], "threads": 2}
    efficiency = figures_of(tmp_path / "run", surroundings=surroundings).efficiency
    assert efficiency is not None
    assert efficiency.most == 0.5


def test_without_a_baseline_nothing_is_said_about_efficiency(tmp_path: Path) -> None:
    assert figures_of(tmp_path / "run", baseline=None).efficiency is None


def test_the_loader_is_what_limits(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run")
    timelines = [Timeline(steps=tuple(_loading(step) for step in t.steps)) for t in RunRecord.load(folder).timelines]
    Timeline(steps=tuple(s for t in timelines for s in t.steps)).save(folder / "timeline.jsonl")
    bottleneck = compute_figures(RunRecord.load(folder)).bottleneck
    assert bottleneck.kind == "loader"
    assert "50%" in bottleneck.text


def _loading(step):
    wait = step.intervals[1].model_copy(update={"start": step.start, "end": step.start + 0.05})
    return step.model_copy(update={"intervals": (wait,)})


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run")
    steps = [_slow(step) for t in RunRecord.load(folder).timelines for step in t.steps]
    Timeline(steps=tuple(steps)).save(folder / "timeline.jsonl")
    bottleneck = compute_figures(RunRecord.load(folder)).bottleneck
    assert bottleneck.kind == "a slow rank"
    assert "Rank 1 computes 90ms a step, the others 30ms" in bottleneck.text


def test_ranks_that_take_turns_in_being_slow(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", baseline=None)
    steps = [_slow(step, late=step.index % 2) for t in RunRecord.load(folder).timelines for step in t.steps]
    Timeline(steps=tuple(steps)).save(folder / "timeline.jsonl")
    bottleneck = compute_figures(RunRecord.load(folder)).bottleneck
    assert bottleneck.kind == "uneven ranks"
    assert "30% of a step" in bottleneck.text


def _slow(step, late=1):
    """One rank computes 90 ms, the other 30; what follows takes 10 ms."""
    backward, transfer, exposed = step.intervals[3], step.intervals[5], step.intervals[6]
    ready, end = step.start + (0.09 if step.rank == late else 0.03), step.start + 0.1
    return step.model_copy(
        update={
            "intervals": (
                backward.model_copy(update={"start": step.start, "end": ready}),
                transfer.model_copy(update={"start": ready, "end": end}),
                exposed.model_copy(update={"start": ready, "end": end}),
            )
        }
    )


def test_computing_is_what_limits_when_all_else_is_small(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run")
    steps = [
        step.model_copy(update={"intervals": (_computing(step),)})
        for t in RunRecord.load(folder).timelines
        for step in t.steps
    ]
    Timeline(steps=tuple(steps)).save(folder / "timeline.jsonl")
    bottleneck = compute_figures(RunRecord.load(folder)).bottleneck
    assert bottleneck.kind == "computing"
    assert "1.33 times as long as on one rank alone" in bottleneck.text  # 100 ms against 75


def _computing(step):
    return step.intervals[3].model_copy(update={"start": step.start, "end": step.end})


def test_a_run_that_was_killed_is_read_all_the_same(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", result=None, clocks=None)
    record = RunRecord.load(folder)
    for timeline in record.timelines:
        timeline.save(folder / f"timeline.rank{timeline.steps[0].rank}.jsonl")
    (folder / "timeline.jsonl").unlink()
    (folder / "plan.json").unlink()
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 10, "ep')
    again = RunRecord.load(folder)
    assert [len(timeline.steps) for timeline in again.timelines] == [10, 10]
    assert len(again.results) == 10
    assert any("did not come to its end" in note for note in again.notes)
    assert compute_figures(again).summary.num_steps == 10


def test_steps_before_the_last_change_of_plan_do_not_count(tmp_path: Path) -> None:
    events = [{"kind": "adopted", "exchange": 6, "seconds": 1.0, "text": "another plan"}]
    record = RunRecord.load(runs.write_run(tmp_path / "run", events=events))
    assert record.common_indices == [7, 8, 9]
    assert [result.step for result in record.settled_results] == [7, 8, 9]
    assert any("3 steps under the last plan: too few" in note for note in record.notes)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json is not there.*poseidon train --out"):
        RunRecord.load(tmp_path)


def test_facts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"task": 7}))
    with pytest.raises(ConfigError, match=r"cannot use .*run\.json as the facts of a run"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("transfer", "exchange"),
    [("a..b", "a..b"), ("fc (first factor)", "fc"), ("fc (gather)", "fc"), ("", ""), ("odd (name", "odd (name")],
)
def test_the_exchange_of_a_transfer(transfer: str, exchange: str) -> None:
    assert exchange_of(transfer) == exchange
