"""The trace: what viewers need of it, and what the numbers in it mean."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from poseidon.report.chrome_trace import MEASURED_PID, PIDS_PER_RANK, PREDICTED_PID, make_trace, write_trace
from poseidon.report.record import RunRecord
from support import runs

Event = dict[str, Any]


@pytest.fixture
def trace(tmp_path: Path) -> Event:
    return make_trace(RunRecord.load(runs.write_run(tmp_path / "run")))


def slices(trace: Event, **wanted: Any) -> list[Event]:
    events = (event for event in trace["traceEvents"] if event["ph"] == "X")
    return [event for event in events if all(event[key] == value for key, value in wanted.items())]


def test_events_have_the_fields_that_viewers_need(trace: Event) -> None:
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert min(event["pid"], event["tid"]) > 0  # zero is the idle process
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            assert event["args"]


def test_events_of_one_thread_never_overlap_in_part(trace: Event) -> None:
    by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in slices(trace):
        by_thread[event["pid"], event["tid"]].append(event)
    for events in by_thread.values():
        for index, first in enumerate(sorted(events, key=lambda e: (e["ts"], -e["dur"]))):
            for second in sorted(events, key=lambda e: (e["ts"], -e["dur"]))[index + 1 :]:
                first_end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
                assert second["ts"] >= first_end - 1e-3 or second_end <= first_end + 1e-3


def test_every_thread_and_process_has_a_name(trace: Event) -> None:
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {(event["pid"], event["tid"]) for event in slices(trace)} == named
    assert processes == {
        MEASURED_PID: "rank 0",
        MEASURED_PID + PIDS_PER_RANK: "rank 1",
        PREDICTED_PID: "rank 0, predicted step",
        PREDICTED_PID + PIDS_PER_RANK: "rank 1, predicted step",
    }


def test_times_are_microseconds_since_the_first_step(trace: Event) -> None:
    steps = slices(trace, cat="step", pid=MEASURED_PID)
    assert [event["name"] for event in steps] == [f"step {index}" for index in range(runs.NUM_STEPS)]
    assert [event["ts"] for event in steps] == pytest.approx([1e5 * i for i in range(runs.NUM_STEPS)], abs=1)
    assert all(event["dur"] == pytest.approx(1e5, abs=1) for event in steps)


def test_a_transfer_says_what_it_carries(trace: Event) -> None:
    first = slices(trace, cat="transfer", pid=MEASURED_PID, name="head..conv")[0]
    assert first["args"]["bytes"] == 3_000_000
    assert first["args"]["bytes_per_s"] == pytest.approx(1e8, rel=1e-3)
    assert first["args"]["layers"] == "head, conv"
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[first["tid"]] == "on the wire"


def test_the_predicted_step_begins_where_the_typical_one_does(tmp_path: Path) -> None:
    record = RunRecord.load(runs.write_run(tmp_path / "run"))
    (predicted,) = slices(make_trace(record), cat="step", pid=PREDICTED_PID)
    assert predicted["ts"] == pytest.approx(1e5 * (record.typical_index() or 0), abs=1)
    assert predicted["dur"] == pytest.approx(9e4, abs=1)


def test_the_file_is_json(tmp_path: Path) -> None:
    record = RunRecord.load(runs.write_run(tmp_path / "run", predicted=False))
    write_trace(tmp_path / "trace.json", record)
    loaded = json.loads((tmp_path / "trace.json").read_text())
    assert loaded["otherData"]["task"] == "synthetic"
    assert {event["pid"] for event in loaded["traceEvents"]} == {MEASURED_PID, MEASURED_PID + PIDS_PER_RANK}


def test_a_run_without_steps_gives_an_empty_trace(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", predicted=False)
    (folder / "timeline.jsonl").write_text("")
    assert make_trace(RunRecord.load(folder))["traceEvents"] == []
