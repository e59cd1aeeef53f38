"""The figures of a run as a person reads them in a terminal."""

from collections.abc import Iterator

from rich.console import Group as Stacked
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poseidon.breakdown import LABELS
from poseidon.report.figures import Efficiency, ExchangeFigures, Figures, LinkUse, Prediction
from poseidon.report.record import RunRecord
from poseidon.report.summary import round_to
from poseidon.runtime.surroundings import counted
from poseidon.units import format_bandwidth, format_seconds, format_traffic

MOST_ROWS = 20
"""Of the table of layers: those that are exposed longest; the page has all."""


def draw_report(record: RunRecord, figures: Figures) -> RenderableType:
    """Everything, readable at 80 columns."""
    facts = record.facts
    blocks: list[RenderableType] = [Text(f"{facts.task}: {facts.surroundings.sentence()}", style="bold")]
    if facts.plan:
        blocks.append(Text(facts.plan))
    blocks += [Text(note, style="red") for note in record.notes]
    blocks += [Text(), _figures_table(figures), Text(), _parts_table(figures)]
    if figures.exchanges:
        blocks += [Text(), _exchanges_table(figures.exchanges)]
    if facts.events:
        blocks += [Text(), *(Text(f"exchange {event.exchange}: {event.text}") for event in facts.events)]
    return Stacked(*blocks)


def _figures_table(figures: Figures) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in _lines(figures):
        table.add_row(name, Text(text))
    return table


def _lines(figures: Figures) -> Iterator[tuple[str, str]]:
    yield "achieved", f"{figures.samples_per_s:,.0f} samples/s"
    if figures.efficiency is not None:
        yield "efficiency", _efficiency(figures.efficiency)
    seconds = figures.step_seconds
    spread = f"eight in ten from {format_seconds(seconds.p10)} to {format_seconds(seconds.p90)}"
    yield "step", f"{format_seconds(seconds.median)}, {spread}, over {counted(figures.summary.num_steps, 'step')}"
    if figures.prediction is not None:
        yield "predicted", _prediction(figures.prediction)
    if figures.link is not None:
        yield "link", _link(figures.link)
    if figures.overlap is not None:
        yield "overlap", f"{figures.overlap:.0%} of communication is hidden"
    yield "limited by", f"{figures.bottleneck.kind}. {figures.bottleneck.text}"


def _efficiency(efficiency: Efficiency) -> str:
    text = (
        f"{efficiency.share:.0%}: {efficiency.speedup:.2f} times one rank alone, which has "
        f"{efficiency.alone_samples_per_s:,.0f} samples/s ({efficiency.note})"
    )
    return text if efficiency.most > 0.995 else f"{text}; sharing cores, at most {efficiency.most:.0%} can be reached"


def _prediction(prediction: Prediction) -> str:
    return f"{format_seconds(prediction.step_seconds)}, {prediction.in_words}"


def _link(link: LinkUse) -> str:
    sent = f"{format_traffic(link.bytes_per_host)} per host and step"
    floor = f"at least {format_seconds(link.floor_seconds)} at {format_bandwidth(link.bandwidth)} ({link.source})"
    use = f"{link.of_step:.0%} used, {link.of_transfers:.0%} while transfers are under way"
    return f"{sent} take {floor}; {use}"


def _parts_table(figures: Figures) -> Table:
    prediction = figures.prediction
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part of a step", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if prediction is not None:
        table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    percentages = round_to(100, list(figures.summary.parts.shares().values()))
    for (part, label), percent in zip(LABELS.items(), percentages, strict=True):
        predicted = [] if prediction is None else [format_seconds(getattr(prediction.parts, part))]
        measured = format_seconds(getattr(figures.summary.parts, part))
        table.add_row(label, measured, f"{percent} %", *predicted, "█" * round(percent / 5))
    return table


def _exchanges_table(exchanges: tuple[ExchangeFigures, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layers", max_width=24, overflow="ellipsis", no_wrap=True)
    table.add_column("scheme", no_wrap=True)
    for heading in ("sent", "on the wire", "predicted", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    longest = sorted(exchanges, key=lambda one: one.exposed_seconds, reverse=True)[:MOST_ROWS]
    for one in exchanges:
        if one in longest:
            predicted = one.predicted_transfer_seconds
            table.add_row(
                Text(one.label),
                one.scheme,
                format_traffic(one.bytes_sent),
                format_seconds(one.transfer_seconds),
                "" if predicted is None else format_seconds(predicted),
                format_seconds(one.exposed_seconds),
            )
    if len(exchanges) > len(longest):
        table.add_row(f"and {len(exchanges) - len(longest)} more")
    return table
