"""What conftest.py promises: a test that leaves something behind fails, and CI fails where no netns test ran."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

LEAKY = """
import os, subprocess, threading
import pytest

end = threading.Event()
started = []

def test_thread():
    threading.Thread(target=end.wait, name="plain").start()

def test_daemon_of_ours():
    threading.Thread(target=end.wait, name="poseidon-comm", daemon=True).start()

def test_other_daemon_may_stay():
    threading.Thread(target=end.wait, daemon=True).start()

def test_child_process():
    started.append(subprocess.Popen(["sleep", "60"]))

def test_variable():
    os.environ["LEFT"] = "1"

def test_variable_is_gone_again(monkeypatch):
    assert "LEFT" not in os.environ
    monkeypatch.setenv("LEFT", "2")

def test_end():
    end.set()
    started[0].kill()
    started[0].wait()
"""

NETNS = """
import pytest

@pytest.mark.netns
@pytest.mark.skipif({skip}, reason="no namespaces")
def test_link():
    pass
"""


def run_pytest(folder: Path, text: str, *options: str) -> tuple[int, str]:
    ours = (Path(__file__).parents[1] / "conftest.py").read_text()
    (folder / "conftest.py").write_text(ours.replace("GRACE_SECONDS = 2.0", "GRACE_SECONDS = 0.1"))
    (folder / "test_inner.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, LEAKY)
    assert "7 passed, 4 errors" in output
    assert re.findall(r"^the test left behind: ([^\d\n]+)(?: \d+ \(sleep 60\))?$", output, flags=re.MULTILINE) == [
        "thread 'plain'",
        "thread 'poseidon-comm'",
        "child process",
        "environment variable LEFT",
    ]


@pytest.mark.parametrize(("skip", "code"), [(False, 0), (True, 1)])
def test_ci_needs_a_netns_test_that_ran(tmp_path: Path, skip: bool, code: int) -> None:
    found, output = run_pytest(tmp_path, NETNS.format(skip=skip), "--require-netns")
    assert found == code
    assert ("no netns test ran" in output) == skip
    assert "in 0." in output.splitlines()[-1]


ALONE = """
import os, pathlib, time
import pytest

def note(what):
    with open("notes", "a") as notes:
        print(what, os.environ["PYTEST_XDIST_WORKER"], file=notes)

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    note("alone from")
    time.sleep(0.1)
    note("alone to")

@pytest.mark.parametrize("number", range(6))
def test_beside(number):
    note("beside from")
    time.sleep(0.1)
    note("beside to")
"""


def test_what_watches_time_comes_last_and_has_the_machine_alone(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, ALONE, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    assert code == 0
    assert "9 passed" in output.splitlines()[-1]
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert {worker for _, _, worker in notes} == {"gw0", "gw1"}
    from_alone = next(place for place, (what, _, _) in enumerate(notes) if what == "alone")
    assert [(what, which) for what, which, _ in notes[from_alone:]] == [("alone", "from"), ("alone", "to")] * 3
