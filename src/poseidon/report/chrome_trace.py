"""A run as a Chrome trace, which Perfetto and chrome://tracing open.

A process is a rank. Its first thread shows what the training thread does, the next ones what is on the wire, as many as
transfers overlap, the last one the steps. The predicted step is a process of its own beside each rank, drawn where the
typical measured step begins.

Source: the trace event format of Chromium's "Trace Event Format" document: complete (`X`) and metadata (`M`) events,
times in microseconds.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from poseidon.artifact import write_whole
from poseidon.report.lanes import nested, side_by_side, training_thread, transfers
from poseidon.report.record import RunRecord
from poseidon.timeline import Activity, Interval, Step
from poseidon.units import MICROSECONDS

MEASURED_PID, PREDICTED_PID, PIDS_PER_RANK = 100, 200, 200
"""Of rank 0. In between is room for threads: viewers take the one with the number of its process as the main one."""
COLORS = {
    Activity.FORWARD: "thread_state_running",
    Activity.BACKWARD: "rail_animation",
    Activity.REBUILD: "rail_idle",
    Activity.OPTIMIZER: "rail_load",
    Activity.LOADER: "thread_state_iowait",
    Activity.TRANSFER: "rail_response",
    Activity.EXPOSED: "terrible",
}
"""Names of chrome://tracing's own palette; Perfetto colors by name by itself."""

Event = dict[str, Any]


def write_trace(path: Path, record: RunRecord) -> None:
    """Writes the steps that were read, and the predicted one, as a trace.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_whole(path, json.dumps(make_trace(record)) + "\n")


def make_trace(record: RunRecord) -> Event:
    """The trace as it is written."""
    start = min((step.start for timeline in record.timelines for step in timeline.steps), default=0.0)
    events: list[Event] = []
    for timeline in record.timelines:
        if timeline.steps:
            rank = timeline.steps[0].rank
            events += _process(MEASURED_PID + PIDS_PER_RANK * rank, f"rank {rank}", timeline.steps, start, record)
    events += _predicted(record, start)
    facts = record.facts
    about = {"task": facts.task, "run": str(record.folder), "where": facts.surroundings.sentence(), "plan": facts.plan}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _predicted(record: RunRecord, start: float) -> Iterator[Event]:
    index = record.typical_index()
    for measured in [] if index is None else record.steps_at(index):
        step = record.predicted_of(measured.rank)
        if step is not None:
            moved = step.shifted(measured.start - step.start)
            name = f"rank {measured.rank}, predicted step"
            yield from _process(PREDICTED_PID + PIDS_PER_RANK * measured.rank, name, [moved], start, record)


def _process(pid: int, name: str, steps: Sequence[Step], start: float, record: RunRecord) -> Iterator[Event]:
    yield _metadata("process_name", pid, pid, name=name)
    yield _metadata("process_sort_index", pid, pid, sort_index=pid)
    intervals = [interval for step in steps for interval in step.intervals]
    lanes = [("training thread", lane) for lane in nested(training_thread(intervals))]
    lanes += [("on the wire", lane) for lane in side_by_side(transfers(intervals))]
    for tid, (label, lane) in enumerate(lanes, start=pid):
        yield from _thread(pid, tid, label)
        yield from (_event(pid, tid, interval, start, record) for interval in lane)
    tid = pid + len(lanes)
    yield from _thread(pid, tid, "steps")
    for step in steps:
        label = f"step {step.index}" if pid % PIDS_PER_RANK == MEASURED_PID else "predicted step"
        yield _slice(pid, tid, label, "step", (step.start, step.end), start, scheme=step.scheme)


def _thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", pid, tid, name=name)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _event(pid: int, tid: int, interval: Interval, start: float, record: RunRecord) -> Event:
    activity = interval.activity
    words = {Activity.EXPOSED: f"wait for {interval.name}", Activity.TRANSFER: interval.name}
    name = words.get(activity, f"{activity} {interval.name}".strip())
    args: dict[str, Any] = {}
    if activity is Activity.TRANSFER:
        args["bytes"] = interval.num_bytes
        if interval.end > interval.start:
            args["bytes_per_s"] = round(interval.num_bytes / interval.seconds)
    if layers := record.layers_of(interval.name):
        args["layers"] = ", ".join(layers)
    event = _slice(pid, tid, name, activity.value, (interval.start, interval.end), start, **args)
    return {**event, "cname": COLORS[activity]}


def _slice(pid: int, tid: int, name: str, category: str, span: tuple[float, float], start: float, **args: Any) -> Event:
    """Both ends are rounded, not the length: what lies within stays within."""
    first, last = (round((moment - start) * MICROSECONDS, 3) for moment in span)
    duration = round(last - first, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": first,
        "dur": duration,
        "args": args,
    }


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
