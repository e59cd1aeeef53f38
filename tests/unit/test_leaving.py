"""A rank that leaves: what a run does about it, and how it is asked."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from poseidon.cli.drain import drain
from poseidon.comm.group import Group
from poseidon.errors import LaunchError
from poseidon.launch import job as jobs
from poseidon.launch.job import Job, running_jobs
from poseidon.runtime import leaving
from poseidon.runtime import memory as kept
from poseidon.runtime.leaving import Leaving


class Ranks:
    """Two ranks of which the other says what it is told to."""

    def __init__(self, rank: int, other: str = "") -> None:
        self.rank = rank
        self.other = other

    def all_gather_text(self, text: str, what: str) -> list[str]:
        return [text, self.other]

    def barrier(self) -> None:
        """Both are here."""


def leaving_on(rank: int, other: str = "") -> tuple[Leaving, list[str]]:
    said: list[str] = []
    return Leaving(cast(Group, Ranks(rank, other)), said.append), said


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A launcher's folder for this host, and nobody who was asked to leave before or after."""
    monkeypatch.setenv("POSEIDON_MEMORY", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    before = signal.getsignal(signal.SIGUSR1)
    yield tmp_path
    signal.signal(signal.SIGUSR1, before)
    leaving._asked.clear()


def test_who_was_asked_is_told_once_and_the_steps_are_reported(memory: Path) -> None:
    one, said = leaving_on(0)
    one.after_exchange(1, [])
    one.after_exchange(2, [1])
    one.after_exchange(3, [1])
    assert one.ranks == (1,)
    assert [line.partition(":")[0] for line in said] == ["rank 1 was asked to leave"]
    assert (memory / "progress").read_text() == "3\n"


@pytest.mark.parametrize(("rank", "marks"), [(0, []), (1, ["leaving-1"])])
def test_all_end_with_the_code_of_leaving_and_who_leaves_marks_it(rank: int, marks: list[str], memory: Path) -> None:
    one, _ = leaving_on(rank)
    one.after_exchange(4, [1])
    with pytest.raises(SystemExit) as ended:
        one.end(4, "")
    assert ended.value.code == 75
    assert sorted(path.name for path in memory.glob("leaving*")) == marks


def test_nobody_ends_where_one_rank_could_not_keep_the_state(memory: Path) -> None:
    one, said = leaving_on(0, other="no space left")
    one.after_exchange(4, [0])
    for step in (4, 5):
        one.end(step, "")
    assert said[1:] == ["nobody leaves, since the state could not be kept: no space left"]
    assert not list(memory.glob("leaving*"))


@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_kept_where_nobody_else_keeps_it_outlives_ranks_that_leave(
    leaves: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSEIDON_MEMORY")
    monkeypatch.setattr(kept, "TMPFS", memory)
    folder = kept.MemoryFolder(kept.folder_of_host(), 0)
    one, _ = leaving_on(0)
    if leaves:
        with pytest.raises(SystemExit):
            one.end(4, "")
    kept.remove_opened()  # as at the end of every program
    folder.release()
    assert folder.path.is_dir() == leaves


def test_progress_that_cannot_be_told_ends_no_training(memory: Path) -> None:
    one, _ = leaving_on(0)
    memory.rename(memory.with_name("away"))
    one.after_exchange(1, [1])
    assert one.ranks == (1,)
    memory.with_name("away").rename(memory)


def test_the_signal_asks_unless_the_program_has_other_plans_for_it() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    leaving_on(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert leaving.is_asked()
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    leaving_on(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    monkeypatch.setattr(jobs, "_TMPFS", tmp_path)
    made = Job()
    yield made
    made.close()
    assert not list(tmp_path.glob("poseidon-*"))


def test_a_job_tells_its_ranks_and_learns_from_them(job: Job) -> None:
    told: dict[str, Any] = job.variables("host1", attempt=2, restarts=3, coordinator="10.0.0.1:5")
    folder = Path(told["POSEIDON_MEMORY"])
    assert folder.stat().st_mode & 0o777 == job.folder.stat().st_mode & 0o777 == 0o700
    assert (told["TORCHELASTIC_RESTART_COUNT"], told["POSEIDON_COORDINATOR"]) == ("2", "10.0.0.1:5")
    assert job.furthest_step() is None
    (folder / "progress").write_text("17\n")
    (job.memory("host0") / "progress").write_text("16\n")
    assert job.furthest_step() == 17
    (folder / "leaving-3").touch()
    assert (job.take_leaving(), job.take_leaving()) == ([3], [])


def test_drain_asks_only_a_process_that_listens(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    listens = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print(flush=True); signal.pause()"
    )
    environment = {**os.environ, **job.variables("host0", attempt=0, restarts=0, coordinator="")}
    command = [sys.executable, "-S", "-c", listens]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        job.write_ranks([("host0", os.getpid()), ("host1", process.pid)])
        with pytest.raises(LaunchError, match=f"process {os.getpid()} does not listen"):
            drain(rank=0)
        with pytest.raises(LaunchError, match="no rank 2 in job"):
            drain(rank=2)
        drain(rank=1)
        assert process.wait(20) == 5
    assert "rank 1 (host1, process" in capsys.readouterr().out


def test_what_a_launcher_has_left_is_no_running_job_and_the_next_removes_it(job: Job) -> None:
    dead = Job()
    for one in (job, dead):
        one.write_ranks([("host0", 1)])
    dead._lock.close()  # as the kernel does
    assert [found["job"] for found in running_jobs()] == [job.id]
    Job().close()
    assert (job.folder.is_dir(), dead.folder.exists()) == (True, False)


def test_drain_wants_to_know_which_job_where_there_are_several(job: Job) -> None:
    with pytest.raises(LaunchError, match="no job nothing of this user"):
        drain(rank=0, job="nothing")
    other = Job()
    for one in (job, other):
        one.write_ranks([("host0", 1)])
    assert {found["job"] for found in running_jobs()} == {job.id, other.id}
    with pytest.raises(LaunchError, match="say which of"):
        drain(rank=0)
    assert json.loads((other.folder / "job.json").read_text())["ranks"] == [{"rank": 0, "label": "host0", "pid": 1}]
    other.close()
