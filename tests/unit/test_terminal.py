"""Names that others gave are shown as text: no markup, no command to the terminal, in whatever they are printed."""

import logging
from io import StringIO
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from poseidon.cli import main as main_module
from poseidon.cli.terminal import make_console
from poseidon.reading import printable
from poseidon.report.figures import compute_figures
from poseidon.report.record import RunRecord
from poseidon.report.terminal import draw_report
from support import runs

HOSTILE = "[red]\x1b]0;owned\x07\x1b[2J\x9b2J\u202egnp.exe[/red]:warning:"
SHOWN = r"[red]\x1b]0;owned\x07\x1b[2J\x9b2J\u202egnp.exe[/red]:warning:"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand ümläuts – 名前", "two\nlines\tand ümläuts – 名前"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("over\rdrawn\x08", r"over\rdrawn\x08"),
        ("\x7f\x85\u2028\u2066\u200f", r"\x7f\x85\u2028\u2066\u200f"),
    ],
)
def test_what_commands_a_terminal_becomes_visible(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_colors_of_a_rank_may_stay_and_nothing_else() -> None:
    assert (
        printable("\x1b[1;31mred\x1b[m \x1b[2J\x1b]8;;x", colors=True) == "\x1b[1;31mred\x1b[m " + r"\x1b[2J\x1b]8;;x"
    )


def test_everything_that_a_console_prints_is_text() -> None:
    out = StringIO()
    console = make_console(file=out, width=200, force_terminal=False)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE)
    console.print(Text(HOSTILE), table)
    assert out.getvalue().count("[red]") == 5
    assert out.getvalue().count(r"\u202egnp.") == 5
    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e")


def test_a_bar_still_moves_the_cursor_and_its_texts_do_not() -> None:
    out = StringIO()
    console = make_console(file=out, force_terminal=True, width=200)
    with Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False) as bar:
        bar.add_task(HOSTILE, total=1)
        bar.refresh()
    assert "\x1b[?25l" in out.getvalue(), "the cursor is hidden while a bar is drawn"
    assert r"[red]\x1b]0;owned" in out.getvalue()
    assert "\x1b]0;owned" not in out.getvalue()


def test_the_report_of_a_run_with_hostile_names(tmp_path: Path) -> None:
    record = RunRecord.load(runs.write_run(tmp_path / "run", hostile=HOSTILE))
    out = StringIO()
    make_console(file=out, width=400).print(draw_report(record, compute_figures(record)))
    assert out.getvalue().count("gnp.exe[/red]:warning:") == 2  # the layer's name is cut
    assert "\x1b" not in out.getvalue()


def test_errors_and_log_lines_are_text_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("poseidon", logging.WARNING, __file__, 1, "rank 1 ended with: %s", (HOSTILE,), None)
    assert main_module._Lines().format(record) == f"poseidon: warning: rank 1 ended with: {SHOWN}"
    monkeypatch.setattr("sys.argv", ["poseidon", "report", f"none{HOSTILE}"])
    with pytest.raises(SystemExit):
        main_module.app(prog_name="poseidon")
    assert f"cannot report on none{SHOWN}: " in capsys.readouterr().err
