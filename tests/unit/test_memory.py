"""The folder in memory: whose it is, when it is stale, what it remembers."""

import json
import os
import time
from pathlib import Path

import pytest

from poseidon.comm.group import Group
from poseidon.errors import CheckpointError
from poseidon.runtime import memory
from poseidon.runtime.memory import MemoryFolder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TMPFS", tmp_path)
    for name in ("POSEIDON_MEMORY", "POSEIDON_JOB", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POSEIDON_JOB", "mine")


def age(path: Path, seconds: float) -> None:
    os.utime(path / memory.ALIVE, (time.time() - seconds,) * 2)


def test_a_dead_jobs_folder_goes_and_a_living_ones_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {}
    for job in ("dead", "alive", "paused"):
        monkeypatch.setenv("POSEIDON_JOB", job)
        folders[job] = MemoryFolder(memory.folder_of_host(), 0)
        age(folders[job].path, memory.STALE_SECONDS - 60 if job == "paused" else memory.STALE_SECONDS + 60)
    folders["dead"].release()
    folders["paused"].release()
    monkeypatch.setenv("POSEIDON_JOB", "mine")
    assert memory.remove_stale() == [folders["dead"].path]
    assert folders["alive"].path.is_dir()
    assert folders["paused"].path.is_dir()
    folders["alive"].release()


def test_a_job_does_not_remove_what_it_has_kept_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", number)
        folder = MemoryFolder(memory.folder_of_host(), 0)
        age(folder.path, memory.STALE_SECONDS + 60)
        folder.release()
    assert memory.remove_stale() == []
    monkeypatch.setenv("POSEIDON_JOB", "another")
    assert len(memory.remove_stale()) == 2


def test_a_job_that_makes_steps_without_committing_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder(memory.folder_of_host(), 0)
    folder.release()
    age(folder.path, memory.STALE_SECONDS + 60)
    folder = MemoryFolder(folder.path, 0)  # to open it is to use it
    assert time.time() - (folder.path / memory.ALIVE).stat().st_mtime < memory.STALE_SECONDS
    age(folder.path, memory.STALE_SECONDS + 60)
    folder.note(1)
    assert time.time() - (folder.path / memory.ALIVE).stat().st_mtime > memory.STALE_SECONDS  # not at every step
    monkeypatch.setattr(memory, "TOUCH_SECONDS", 0.0)
    folder.note(2)
    assert time.time() - (folder.path / memory.ALIVE).stat().st_mtime < memory.STALE_SECONDS
    folder.release()


def test_a_folder_that_others_could_write_is_not_trusted(tmp_path: Path) -> None:
    path = memory.folder_of_host()
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(CheckpointError, match="only this user can write"):
        MemoryFolder(path, 0)
    path.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="only this user can write"):
        MemoryFolder(path, 0)


def test_the_last_step_is_known_after_the_ranks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, step in enumerate((7, 9)):
        folder = MemoryFolder(memory.folder_of_host(), rank)
        folder.note(step)
        folder.release()
    assert memory.last_noted(0) == 9
    monkeypatch.setenv("GROUP_RANK", "3")  # hosts are numbered anew
    assert memory.last_noted(0) == 9
    folder = MemoryFolder(memory.folder_of_host(), 0)
    assert memory.remove_former() == [folder.path.with_name(folder.path.name[:-1] + "0")]
    assert memory.last_noted(0) == 0
    folder.release()


def test_what_is_made_anew_is_forgotten() -> None:
    folder = MemoryFolder(memory.folder_of_host(), 0)
    for step in (5, 9):
        draft = folder.shelf.begin(step)
        draft.seal([draft.write("job", {"step": step})], {})
    other = MemoryFolder(folder.path, 1)
    other.note(12)
    other.release()
    folder.note(5)
    folder.go_on_from(5, [0])
    assert [found.step for found in folder.shelf.found()] == [5]
    assert memory.last_noted(0) == 5
    folder.release()


def test_jobs_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder(memory.folder_of_host(), 0)
    folder.note(4)
    monkeypatch.setenv("POSEIDON_JOB", "min")
    assert memory.last_noted(0) == 0
    assert memory.folders_of_job() == [memory.folder_of_host()]
    folder.release()


def test_a_job_that_ended_well_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = MemoryFolder(memory.folder_of_host(), 0)
    folder.release()
    named = tmp_path / "named"
    monkeypatch.setenv("POSEIDON_MEMORY", str(named))
    MemoryFolder(memory.folder_of_host(), 0).release()
    memory.remove_opened()
    assert not folder.path.exists()
    assert named.is_dir()  # whoever named it removes it


def test_a_start_that_torchrun_has_not_counted_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_agreed", {})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("GROUP_RANK", "1")
    memory.agree_on_attempt(Group([]))
    memory.agree_on_attempt(Group([]))
    assert memory.attempt() == 0  # the same process is no further start
    (note,) = memory.folder_of_host().glob("started*")
    note.write_text(json.dumps([1, 0]))
    monkeypatch.setenv("GROUP_RANK", "0")  # hosts are numbered anew
    memory.agree_on_attempt(Group([]))
    assert memory.attempt() == 1
    monkeypatch.setattr(memory, "_agreed", {})
    note.rename(note.with_name("started0-1-1"))  # of an agent of an earlier job of this name
    (memory.folder_of_host() / note.name).unlink()
    memory.agree_on_attempt(Group([]))
    assert memory.attempt() == 0


def test_the_attempt_is_that_of_the_rank_that_counts_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_agreed", {})
    group = Group([])
    monkeypatch.setattr(group, "all_gather_text", lambda text, what: [text, "2"])
    memory.agree_on_attempt(group)
    assert memory.attempt() == 2
