"""`poseidon report`: what a run achieved, what limited it, and whether the prediction held."""

from pathlib import Path
from typing import Annotated

import typer

from poseidon.cli.terminal import make_console
from poseidon.report.chrome_trace import write_trace
from poseidon.report.figures import compute_figures
from poseidon.report.html import check_installed, write_page
from poseidon.report.record import RunRecord
from poseidon.report.terminal import draw_report


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `poseidon train --out` has written.", metavar="RUN")],
    html: Annotated[Path | None, typer.Option(help="A page to write, complete in itself.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace to write, for Perfetto or chrome://tracing.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Predict from this plan instead of the run's own.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The folder of another run, on one host say, as the measure of efficiency.")
    ] = None,
) -> None:
    """Say what a run achieved, what limited it, and whether the prediction held.

    poseidon report runs/first --html report.html --trace trace.json
    """
    if html is not None:
        check_installed()
    record = RunRecord.load(run, plan)
    figures = compute_figures(record, None if baseline is None else RunRecord.load(baseline))
    console = make_console()
    console.print(draw_report(record, figures))
    if html is not None:
        write_page(html, record, figures)
        console.print(f"\nwritten to {html}", soft_wrap=True)
    if trace is not None:
        write_trace(trace, record)
        console.print(f"written to {trace}: open it at ui.perfetto.dev or chrome://tracing", soft_wrap=True)
