"""The pictures of a report's page, as plotly figures without colors of a theme: the page puts these on."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from poseidon.breakdown import LABELS, StepParts, find_last_starts
from poseidon.report.figures import Figures
from poseidon.report.lanes import nested, side_by_side, training_thread, transfers
from poseidon.report.record import CHANGES, RunRecord
from poseidon.timeline import Activity, Interval, Step
from poseidon.units import MILLISECONDS, format_seconds, format_traffic

PART_COLORS = {
    "computing": "#4c78a8",
    "hidden": "#54a24b",
    "exposed": "#e45756",
    "waiting": "#f58518",
    "loader": "#b279a2",
    "other": "#9a9fa6",
}
DRAWN: Mapping[str, tuple[str, str]] = {
    "forward": ("forward", "#7fa6d6"),
    "backward": ("backward", "#3f6ea5"),
    "rebuild": ("rebuild", "#2a9d8f"),
    "optimizer": ("optimizer", "#8d7fc7"),
    "loader": ("loader", "#b279a2"),
    "transfer": ("on the wire", "#54a24b"),
    "exposed": ("standing still for the network", "#e45756"),
    "waiting": ("standing still for a slow rank", "#f58518"),
}
"""What the timeline's bars are called and their colors, good on light and dark."""
MOST_RANKS = 4
"""In the picture of a step; the trace has all of them."""
MOST_POINTS = 1000
"""Of a curve: more than that cannot be told apart on a screen."""
TRAINING_HEIGHT, WIRE_HEIGHT, GAP, BETWEEN_RANKS = 1.0, 0.42, 0.25, 0.45
"""Of the rows of the timeline, in units of the first."""
PIXELS_PER_UNIT = 30
MARGINS = {"l": 8, "r": 8, "t": 8, "b": 44}


def draw_parts(figures: Figures, record: RunRecord) -> go.Figure:
    """Where the time of a step goes: measured, predicted, and on one rank alone."""
    rows: list[tuple[str, StepParts]] = [("measured", figures.summary.parts)]
    if figures.prediction is not None:
        rows.append(("predicted", figures.prediction.parts))
    if record.facts.baseline is not None:
        rows.append(("one rank alone", record.facts.baseline.parts))
    figure = go.Figure()
    for part, label in LABELS.items():
        seconds = [getattr(parts, part) for _, parts in rows]
        if not any(seconds):
            continue
        shares = [parts.shares()[part] for _, parts in rows]
        figure.add_bar(
            orientation="h",
            name=label,
            y=[name for name, _ in rows],
            x=[value * MILLISECONDS for value in seconds],
            text=[f"{share:.0%}" if share >= 0.04 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "white"},
            textangle=0,
            hovertext=[f"{label}: {format_seconds(v)}, {s:.1%}" for v, s in zip(seconds, shares, strict=True)],
            hoverinfo="text",
            marker={"color": PART_COLORS[part], "line": {"width": 0}},
        )
    figure.update_layout(barmode="stack", bargap=0.35, height=110 + 46 * len(rows), **_base("milliseconds"))
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True, ticksuffix="  ")
    return figure


def draw_step(record: RunRecord) -> go.Figure | None:
    """One step, rank by rank, measured above predicted; None where no step was recorded on all ranks."""
    index = record.typical_index()
    if index is None:
        return None
    steps = record.steps_at(index)
    starts = find_last_starts(steps)
    begin = min(step.start for step in steps)
    canvas = _Canvas(record)
    for step in _chosen(steps):
        canvas.add_rank(step, begin, f"rank {step.rank}", _by_kind(step, starts))
        predicted = record.predicted_of(step.rank)
        if predicted is not None:
            canvas.add_rank(predicted, predicted.start, "predicted", _by_kind(predicted, {}), follows=True)
    return canvas.draw()


def _chosen(steps: Sequence[Step]) -> Sequence[Step]:
    """All ranks, or the slowest and the first others."""
    if len(steps) <= MOST_RANKS:
        return steps
    slowest = min(steps, key=lambda step: step.exposed_seconds)
    others = [step for step in steps if step is not slowest][: MOST_RANKS - 1]
    return sorted([*others, slowest], key=lambda step: step.rank)


def _by_kind(step: Step, last_starts: Mapping[str, float]) -> list[tuple[str, Interval]]:
    """The training thread by what is drawn: standing still is cut in two where the last rank was ready."""
    found: list[tuple[str, Interval]] = []
    for lane in nested(training_thread(step.intervals)):
        for interval in lane:
            if interval.activity is not Activity.EXPOSED:
                found.append((interval.activity.value, interval))
                continue
            cut = min(interval.end, max(interval.start, last_starts.get(interval.name, interval.start)))
            parts = (("waiting", interval.start, cut), ("exposed", cut, interval.end))
            found += [(k, interval.model_copy(update={"start": a, "end": b})) for k, a, b in parts if b > a]
    return found


class _Canvas:
    """Collects bars row by row, from the top down."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._bars: dict[str, list[dict[str, Any]]] = {kind: [] for kind in DRAWN}
        self._ticks: list[tuple[float, str]] = []
        self._top = 0.0

    def add_rank(
        self, step: Step, begin: float, label: str, training: list[tuple[str, Interval]], *, follows: bool = False
    ) -> None:
        """The rows of one rank: its training thread, and under it what is on the wire."""
        if self._top and not follows:
            self._top -= BETWEEN_RANKS
        self._top -= TRAINING_HEIGHT
        middle = self._top + TRAINING_HEIGHT / 2
        self._ticks.append((middle, label))
        for kind, interval in training:
            self._add(kind, interval, begin, middle, TRAINING_HEIGHT)
        for lane in side_by_side(transfers(step.intervals)):
            self._top -= WIRE_HEIGHT
            for interval in lane:
                self._add("transfer", interval, begin, self._top + WIRE_HEIGHT / 2, WIRE_HEIGHT * 0.84)
        self._top -= GAP

    def _add(self, kind: str, interval: Interval, begin: float, middle: float, height: float) -> None:
        lines = [f"<b>{DRAWN[kind][0]}</b> {html.escape(interval.name)}", format_seconds(interval.seconds)]
        if interval.num_bytes:
            lines.append(f"{format_traffic(interval.num_bytes)} sent")
        if len(layers := self._record.layers_of(interval.name)) > 1:
            lines.append("<br>".join(["layers", *map(html.escape, layers[:12]), *(["…"] if len(layers) > 12 else [])]))
        self._bars[kind].append(
            {
                "base": (interval.start - begin) * MILLISECONDS,
                "x": interval.seconds * MILLISECONDS,
                "y": middle,
                "width": height,
                "hovertext": "<br>".join(lines),
            }
        )

    def draw(self) -> go.Figure:
        """The figure."""
        figure = go.Figure()
        for kind, bars in self._bars.items():
            label, color = DRAWN[kind]
            if bars:
                columns = {key: [bar[key] for bar in bars] for key in bars[0]}
                marker = {"color": color, "line": {"width": 0}}
                figure.add_bar(orientation="h", name=label, marker=marker, hoverinfo="text", **columns)
        height = round(-self._top * PIXELS_PER_UNIT) + 120
        figure.update_layout(barmode="overlay", height=height, dragmode="zoom", **_base("milliseconds"))
        positions, labels = zip(*self._ticks, strict=True)
        figure.update_yaxes(
            tickvals=positions,
            ticktext=labels,
            range=[self._top, 0.1],
            fixedrange=True,
            automargin=True,
            showgrid=False,
            zeroline=False,
            ticksuffix="  ",
        )
        ends = [bar["base"] + bar["x"] for bars in self._bars.values() for bar in bars]
        figure.update_xaxes(zeroline=False, range=[0, 1.01 * max(ends)])
        return figure


def draw_curve(record: RunRecord, what: str) -> go.Figure:
    """Loss or throughput over the steps; `what` is an attribute of a step's result."""
    results = record.results[:: max(1, math.ceil(len(record.results) / MOST_POINTS))]
    values = [getattr(result, what) for result in results]
    figure = go.Figure()
    figure.add_scatter(
        x=[result.step + 1 for result in results],
        y=[value if math.isfinite(value) else None for value in values],
        mode="lines",
        line={"color": PART_COLORS["computing"], "width": 2},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )
    for event in record.facts.events:
        if event.kind in CHANGES:
            figure.add_vline(x=event.exchange + 0.5, line={"width": 1, "dash": "dot", "color": PART_COLORS["other"]})
    layout = {**_base("step"), "showlegend": False}
    figure.update_layout(height=260, **layout)
    figure.update_yaxes(rangemode="tozero", automargin=True, fixedrange=True)
    return figure


def _base(x_title: str) -> dict[str, Any]:
    return {
        "template": "none",
        "margin": MARGINS,
        "xaxis": {"title": {"text": x_title, "standoff": 8}, "automargin": True},
        "legend": {
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        "hoverlabel": {"align": "left"},
    }
