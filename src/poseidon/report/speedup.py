"""The picture of speed-up against hosts, one line for each link, beside the ideal."""

import html
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from poseidon.errors import ConfigError
from poseidon.planner.hosts import Scaling
from poseidon.units import format_bandwidth

HTML, PNG = ".html", ".png"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d")
IDEAL_COLOR = "#9a9fa6"

Curve = tuple[str, list[int], list[float]]
"""A line of the picture: what it is called, numbers of hosts, speed-ups."""


def draw_speedups(scalings: Sequence[Scaling], path: Path) -> None:
    """Draws the speed-ups into a file: `.html`, which needs no network, or `.png`.

    Raises:
        ConfigError: The name ends in something else, or the packages for pictures are not installed.
    """
    title = f"Predicted speed-up of {scalings[0].plan.profile.model} over one host"
    draw_curves(curves_of(scalings), path, title=title)


def draw_curves(curves: Sequence[Curve], path: Path, *, title: str) -> None:
    """Draws lines of speed-up against hosts, with the ideal beside them.

    Raises:
        ConfigError: As `draw_speedups`.
    """
    check_plot(path)
    if path.suffix == HTML:
        _draw_html(curves, path, title)
    else:
        _draw_png(curves, path, title)


def check_plot(path: Path) -> None:
    """Raises ConfigError unless a picture of this name can be drawn here."""
    if path.suffix not in (HTML, PNG):
        raise ConfigError(f"cannot draw {path}: the name must end in {HTML} or {PNG}")
    _plotly() if path.suffix == HTML else _pyplot()


def curves_of(scalings: Sequence[Scaling]) -> list[Curve]:
    """One for each link and batch, in the order in which they come."""
    batches = {one.batch_size for one in scalings}
    curves: dict[str, Curve] = {}
    for one in scalings:
        name = format_bandwidth(one.link) if one.link else "links as they are"
        if len(batches) > 1:
            name += f", {one.batch_size} samples a rank"
        _, hosts, speed_ups = curves.setdefault(name, (name, [], []))
        hosts.append(one.num_hosts)
        speed_ups.append(one.speed_up)
    return list(curves.values())


def _hosts(curves: Sequence[Curve]) -> list[int]:
    return sorted({count for _, counts, _ in curves for count in counts})


def _draw_html(curves: Sequence[Curve], path: Path, title: str) -> None:
    go = _plotly()
    hosts = _hosts(curves)
    figure = go.Figure()
    figure.add_scatter(
        x=hosts, y=hosts, name="ideal", mode="lines", line={"dash": "dash", "color": IDEAL_COLOR}, hoverinfo="skip"
    )
    for color, (name, counts, speed_ups) in zip(_cycle(len(curves)), curves, strict=True):
        figure.add_scatter(
            x=counts,
            y=speed_ups,
            name=html.escape(name),
            mode="lines+markers",
            line={"color": color},
            hovertemplate="%{x} hosts: %{y:.2f} times one",
        )
    figure.update_layout(
        title=html.escape(title),
        template="plotly_white",
        xaxis={"title": "hosts", "tickvals": hosts},
        yaxis={"title": "speed-up over one host", "rangemode": "tozero"},
        legend={"title": ""},
    )
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _draw_png(curves: Sequence[Curve], path: Path, title: str) -> None:
    pyplot = _pyplot()
    hosts = _hosts(curves)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(hosts, hosts, linestyle="--", color=IDEAL_COLOR, label="ideal")
    for color, (name, counts, speed_ups) in zip(_cycle(len(curves)), curves, strict=True):
        axes.plot(counts, speed_ups, marker="o", color=color, label=name)
    axes.set_title(title)
    axes.set_xlabel("hosts")
    axes.set_ylabel("speed-up over one host")
    axes.set_xticks(hosts)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cycle(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _plotly() -> ModuleType:
    try:
        return import_module("plotly.graph_objects")
    except ImportError as error:
        raise ConfigError(_missing("plotly")) from error


def _pyplot() -> ModuleType:
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError(_missing("matplotlib")) from error


def _missing(package: str) -> str:
    return f"cannot draw without {package}: install it with `pip install 'poseidon-dl[report]'`"
