"""`poseidon report` in a terminal."""

import sys
from pathlib import Path

import pytest

from poseidon.cli.report import report
from poseidon.errors import ConfigError
from support import runs


def test_the_terminal_says_it_all_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report(runs.write_run(tmp_path / "run"))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    words = " ".join(output.split())
    for expected in (
        "synthetic: 2 hosts on 2 cores, 1Gbit/s, shaped",
        "160 samples/s",
        "80%: 1.60 times one rank alone",
        "90ms, 10 % too short",
        "3.5MB per host and step take at least 28ms at 1Gbit/s",
        "33% of communication is hidden",
        "network. Training stands still",
        "exposed communication 20ms 20 %",
        "head + 1 all_reduce 3MB 25ms",
        "exchange 3: something happened",
    ):
        assert expected in words, expected


def test_text_of_a_run_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(runs.write_run(tmp_path / "run", hostile="[red]x[/nothing]"))
    assert "synthetic[red]x[/nothing]" in capsys.readouterr().out


def test_page_and_trace_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.write_run(tmp_path / "run")
    report(folder, html=tmp_path / "page.html", trace=tmp_path / "trace.json")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "trace.json").exists()
    assert str(tmp_path / "trace.json") in capsys.readouterr().out.replace("\n", "")


def test_without_plotly_the_page_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(ConfigError, match=r"plotly is not installed; pip install 'poseidon-dl\[report\]'"):
        report(tmp_path / "nowhere", html=tmp_path / "page.html")
