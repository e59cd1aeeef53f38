"""The command line as a whole: help, versions, exit codes, and one line for an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from poseidon import __version__


def poseidon(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "poseidon", *arguments], capture_output=True, text=True, timeout=50)


def test_the_version() -> None:
    assert poseidon("--version").stdout == f"poseidon {__version__}\n"


def test_help_lists_the_verbs() -> None:
    done = poseidon("--help")
    assert done.returncode == 0
    assert "lab" in done.stdout


def test_the_help_of_a_verb_names_its_options() -> None:
    done = poseidon("lab", "--help")
    assert done.returncode == 0
    for option in ("--hosts", "--link", "--cluster", "--at", "--check", "--debug"):
        assert option in done.stdout


def test_importing_the_command_line_does_not_load_torch() -> None:
    code = "import poseidon.cli.main, sys; sys.exit('torch' in sys.modules or 'pyroute2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-verb"],
        ["lab"],
        ["lab", "--hosts", "many", "--", "true"],
        ["lab", "--cluster", "lab.toml", "--hosts", "2", "--", "true"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert poseidon(*arguments).returncode == 2


def test_an_error_of_ours_is_one_line_and_exits_with_1(tmp_path: Path) -> None:
    done = poseidon("lab", "--cluster", str(tmp_path / "lab.toml"), "--", "true")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"poseidon: error: cannot read {tmp_path}/lab.toml: No such file or directory\n"


@pytest.mark.parametrize("arguments", [["--debug", "lab"], ["lab", "--debug"]])
def test_debug_shows_where_an_error_comes_from(arguments: list[str]) -> None:
    done = poseidon(*arguments, "--link", "fast", "--", "true")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_an_option_behind_the_command_is_the_commands() -> None:
    assert poseidon("lab", "--link", "fast", "true", "--no-such-option").returncode == 1
