"""A run as one page that needs no network: what was achieved, what limits it, whether the prediction held."""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from poseidon.artifact import write_whole
from poseidon.errors import ConfigError
from poseidon.report.figures import ExchangeFigures, Figures
from poseidon.report.record import CHANGES, RunRecord
from poseidon.runtime.surroundings import counted
from poseidon.units import format_bandwidth, format_seconds, format_traffic

TEMPLATE, SCRIPT = "page.html.j2", "page.js"


def write_page(path: Path, record: RunRecord, figures: Figures) -> None:
    """Writes the page.

    Raises:
        ConfigError: plotly or jinja2 is not installed, or the file cannot be written.
    """
    check_installed()
    write_whole(path, make_page(record, figures))


def check_installed() -> None:
    """Raises ConfigError where what draws the page is not installed."""
    for package in ("jinja2", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"cannot write the page: {package} is not installed; pip install 'poseidon-dl[report]'")


def make_page(record: RunRecord, figures: Figures) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined  # an extra, as plotly is
    from plotly.offline import get_plotlyjs

    from poseidon.report.plots import draw_curve, draw_parts, draw_step

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        seconds=format_seconds, traffic=format_traffic, bandwidth=format_bandwidth, percent=_percent, source=_source
    )
    step = draw_step(record)
    plots = {"parts": draw_parts(figures, record), "loss": draw_curve(record, "loss")}
    plots["throughput"] = draw_curve(record, "samples_per_s")
    if step is not None:
        plots["step"] = step
    template = environment.from_string(_text_of(TEMPLATE))
    return template.render(
        record=record,
        facts=record.facts,
        note=record.facts.note[:1].upper() + record.facts.note[1:],
        changed=any(event.kind in CHANGES for event in record.facts.events),
        ranks=counted(record.facts.surroundings.world_size, "rank"),
        figures=figures,
        layers=[_row(one, figures) for one in figures.exchanges],
        environment=list(_environment(record)),
        steps=counted(figures.summary.num_steps, "step"),
        step_number=(record.typical_index() or 0) + 1,
        plots={name: _embed(json.loads(figure.to_json())) for name, figure in plots.items()},
        plotlyjs=get_plotlyjs(),
        script=_text_of(SCRIPT),
    )


def _text_of(name: str) -> str:
    return files("poseidon.report").joinpath(name).read_text(encoding="utf-8")


def _source(script: str) -> Any:
    """How the page's own rules name a script: by its digest, so that no other runs, whatever texts the page shows."""
    from markupsafe import Markup  # comes with jinja2

    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return Markup(f"'sha256-{digest}'")


def _embed(value: Any) -> str:
    """JSON that can stand in a script element, whatever the texts in it are."""
    return json.dumps(value).replace("<", "\\u003c")


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _row(one: ExchangeFigures, figures: Figures) -> dict[str, Any]:
    """A row of the table of layers, as text."""
    return {
        "layers": one.layers,
        "scheme": one.scheme.replace("_", " "),
        "sent": format_traffic(one.bytes_sent),
        "of_plain": _percent(one.bytes_sent / one.plain_bytes) if one.plain_bytes else "",
        "measured": _seconds_or_dash(one.transfer_seconds),
        "predicted": _seconds_or_dash(one.predicted_transfer_seconds),
        "exposed": _seconds_or_dash(one.exposed_seconds),
        "predicted_exposed": _seconds_or_dash(one.predicted_exposed_seconds),
        "exposed_share": one.exposed_seconds / figures.summary.parts.total if figures.summary.parts.total else 0.0,
    }


def _seconds_or_dash(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds else "–"


def _environment(record: RunRecord) -> Iterator[tuple[str, str]]:
    facts, here = record.facts, record.facts.surroundings
    yield "where", here.sentence()
    yield "computing", f"{here.device}, {counted(here.threads, 'thread')} a rank, {counted(here.cores, 'core')} in all"
    if here.world_size > 1:
        limited = "limited to that" if here.shaped else "not limited"
        yield "link", f"{here.link}, {limited}" if here.link else "the hosts' own"
        if here.interface:
            yield "interface", f"{here.interface} (rank 0)"
    yield "batch", f"{facts.options.get('batch_size')} samples per rank and step"
    yield "versions", f"poseidon {facts.poseidon}, torch {here.torch}, python {here.python}"
    if facts.clocks is not None and here.world_size > 1:
        yield "clocks", f"aligned, uncertain by {format_seconds(facts.clocks.uncertainty_seconds)}"
    yield "folder", str(record.folder)
