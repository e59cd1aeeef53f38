"""Checkpoints: complete or absent whatever happens, and each kind of damage by its name."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from poseidon.errors import CheckpointError
from poseidon.runtime import checkpoint
from poseidon.runtime.checkpoint import (
    LOCK,
    MANIFEST,
    Damaged,
    Draft,
    Entry,
    Found,
    Shelf,
    open_checkpoint,
    shelf_in,
    what_is_wrong,
)
from support.states import same_bits

SYSTEM_CALLS = ("open", "mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir")
"""By which anything changes on a disk."""


def make_state(step: int) -> dict[str, Any]:
    return {"weight": torch.arange(6.0) + step, "step": step, "betas": (0.9, 0.999)}


def save(shelf: Shelf, step: int, **facts: Any) -> Found:
    draft = shelf.begin(step)
    try:
        entries = [draft.write("model", make_state(step)), draft.write("rank-00000", {"seed": step})]
        return draft.seal(entries, {"world_size": 1, **facts})
    except BaseException:
        draft.drop()
        raise


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "checkpoints")


def steps(shelf: Shelf) -> list[int]:
    return [found.step for found in shelf.found()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# As it should be


def test_what_was_saved_is_found_and_read(shelf: Shelf) -> None:
    sealed = save(shelf, 700, score=0.5)
    found = shelf.newest()
    assert found == sealed
    assert (found.step, found.world_size, found.score, found.facts["score"]) == (700, 1, 0.5, 0.5)
    assert [entry.part for entry in found.entries] == ["model", "rank-00000"]
    assert same_bits(found.read("model"), make_state(700))
    assert names(shelf.path) == {"step-000000700"}
    assert names(found.path) == {"model.safetensors", "rank-00000.safetensors", MANIFEST}


def test_parts_open_without_poseidon(shelf: Shelf) -> None:
    path = save(shelf, 1).path
    assert torch.equal(load_file(path / "model.safetensors")["weight"], make_state(1)["weight"])
    manifest = json.loads((path / MANIFEST).read_text())["manifest"]
    size = (path / "model.safetensors").stat().st_size
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["entries"][0] == {"part": "model", "size": size, "sha256": digest}


def test_a_large_part_is_written_in_pieces(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.runtime.tensor_file.PIECE", 7)
    monkeypatch.setattr(checkpoint, "PIECE", 5)
    assert same_bits(save(shelf, 1).read("model"), make_state(1))


def test_without_any_there_is_none(shelf: Shelf) -> None:
    assert shelf.newest() is None
    assert shelf.found() == []


def test_the_newest_is_that_of_the_last_step(shelf: Shelf) -> None:
    for step in (7, 1_000_000_000, 20):
        save(shelf, step)
    assert steps(shelf) == [1_000_000_000, 20, 7]


def test_several_processes_write_and_one_seals(shelf: Shelf) -> None:
    drafts = [shelf.begin(5), Shelf(shelf.path).begin(5)]
    entries = [draft.write(f"rank-{rank}", {"rank": rank}) for rank, draft in enumerate(drafts)]
    found = drafts[0].seal(entries, {"world_size": 2})
    assert [found.read(f"rank-{rank}")["rank"] for rank in range(2)] == [0, 1]


def test_a_folder_may_hold_some_of_the_parts(tmp_path: Path) -> None:
    shelves = [Shelf(tmp_path / name) for name in "ab"]
    drafts = [shelf.begin(5) for shelf in shelves]
    entries = [draft.write(f"rank-{rank}", {"rank": rank}) for rank, draft in enumerate(drafts)]
    found, other = (draft.seal(entries, {"world_size": 2}) for draft in drafts)
    assert (found.missing(), found.damage()) == (["rank-1"], "")
    assert what_is_wrong(found) == "the file of rank-1 is missing"
    assert shelves[0].newest(lambda line: None) is None
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors cannot be opened: No such file"):
        found.read("rank-1")

    draft = shelves[0].begin(6)  # a part that comes from the other host
    content = other.file("rank-1").read_bytes()
    copied = [draft.write("rank-0", {"rank": 0}), draft.copy("rank-1", [content[:10], content[10:]])]
    assert copied[1] == entries[1]
    assert draft.seal(copied, {}).read("rank-1") == {"rank": 1}


def test_a_step_that_is_saved_again_replaces_itself(shelf: Shelf) -> None:
    save(shelf, 5, score=1)
    assert save(shelf, 5, score=2).path.name == "step-000000005-1"
    assert save(shelf, 5, score=3).path.name == "step-000000005-2"
    assert [found.score for found in shelf.found()] == [3]


def test_what_a_dead_writer_left_is_removed(shelf: Shelf) -> None:
    shelf.begin(5).write("model", make_state(5))
    (shelf.path / "step-000000004.trash" / "deep").mkdir(parents=True)
    (shelf.path / "step-000000003.partial.mine").mkdir()
    shelf.begin(6).write("rank-00001", 1)
    (shelf.path / "notes.txt").touch()
    found = save(shelf, 6)
    assert names(shelf.path) == {"step-000000006", "step-000000003.partial.mine", "notes.txt"}
    assert names(found.path) == {"model.safetensors", "rank-00000.safetensors", MANIFEST}


def test_a_folder_of_a_run(tmp_path: Path) -> None:
    save(Shelf(tmp_path / "checkpoints"), 5)
    assert steps(shelf_in(tmp_path)) == [5]
    assert steps(shelf_in(tmp_path / "checkpoints")) == [5]


def test_one_by_its_own_folder(shelf: Shelf) -> None:
    kept = shelf.path / "the good one"
    save(shelf, 5).path.rename(kept)
    assert open_checkpoint(kept).step == 5
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be opened: No such file"):
        open_checkpoint(shelf.path)


# Damage


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest that says something else, with the right checksum."""
    content = json.loads(path.read_text())["manifest"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"manifest": content, "sha256": digest}))


def foreign(path: Path) -> None:
    """A file of safetensors that another program has written, listed as it is."""
    save_file({"weight": torch.zeros(3)}, path)
    content = path.read_bytes()
    entry = {"part": "model", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(path.with_name(MANIFEST), lambda manifest: manifest["entries"].__setitem__(0, entry))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("model.safetensors", Path.unlink, "the file of model is missing"),
    "short": ("model.safetensors", lambda p: cut(p, 20), r"model\.safetensors has 20 bytes instead of \d+"),
    "empty": ("rank-00000.safetensors", lambda p: cut(p, 0), r"rank-00000\.safetensors has 0 bytes instead of"),
    "flipped": ("model.safetensors", lambda p: flip(p, -1), r"model\.safetensors is not what was written"),
    "flipped header": ("model.safetensors", lambda p: flip(p, 9), r"model\.safetensors is not what was written"),
    "link": ("model.safetensors", replace_by_link, r"model\.safetensors cannot be opened: it is a symbolic link"),
    "folder": ("model.safetensors", replace_by_folder, r"model\.safetensors is not a file"),
    "pipe": ("model.safetensors", replace_by_pipe, r"model\.safetensors is not a file"),
    "no manifest": (MANIFEST, Path.unlink, r"manifest\.json cannot be opened: No such file"),
    "torn manifest": (MANIFEST, lambda p: cut(p, p.stat().st_size // 2), "its manifest is torn"),
    "manifest of zeros": (MANIFEST, lambda p: p.write_bytes(bytes(p.stat().st_size)), "its manifest is torn"),
    "manifest of nothing": (MANIFEST, lambda p: p.write_text("[]"), "its manifest is torn"),
    "manifest of bytes": (MANIFEST, lambda p: p.write_bytes(b"\xff\xfe"), "its manifest is torn"),
    "deep manifest": (MANIFEST, lambda p: p.write_text("[" * 100_000), "its manifest is torn"),
    "large manifest": (MANIFEST, lambda p: cut(p, checkpoint.MAX_MANIFEST + 1), "its manifest is larger than 64MiB"),
    "manifest link": (MANIFEST, replace_by_link, r"manifest\.json cannot be opened: it is a symbolic link"),
    "edited manifest": (
        MANIFEST,
        lambda p: p.write_text(p.read_text().replace('"step": 2', '"step": 3')),
        "its manifest is not what was written: its checksum is another",
    ),
    "other version": (
        MANIFEST,
        lambda p: rewrite(p, lambda m: m.update(version=2)),
        "its format is version 2; this Poseidon reads version 1",
    ),
    "other step": (MANIFEST, lambda p: rewrite(p, lambda m: m.update(step=9)), "its manifest is of step 9"),
    "path": (
        MANIFEST,
        lambda p: rewrite(p, lambda m: m["entries"][0].update(part="../model")),
        r"its manifest cannot be used: key 'entries\.0\.part' has '\.\./model'",
    ),
    "part twice": (
        MANIFEST,
        lambda p: rewrite(p, lambda m: m["entries"].append(m["entries"][0])),
        "a part is listed twice",
    ),
    "more in it": (
        MANIFEST,
        lambda p: rewrite(p, lambda m: m.update(run="rm -rf")),
        "its manifest cannot be used: key 'run' is not known here",
    ),
    "link to another": ("", replace_by_link, "it is a symbolic link"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_skipped_aloud(shelf: Shelf, kind: str) -> None:
    file, damage, message = DAMAGE[kind]
    save(shelf, 1)
    damage(save(shelf, 2).path / file)
    said: list[str] = []
    found = shelf.newest(said.append)
    assert found is not None
    assert found.step == 1
    assert same_bits(found.read("model"), make_state(1))
    assert len(said) == 1
    with pytest.raises(AssertionError, match=rf"^the checkpoint .*step-000000002 is skipped: .*{message}"):
        raise AssertionError(said[0])


def test_of_damaged_ones_alone_none_is_found(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    (save(shelf, 1).path / MANIFEST).unlink()
    assert shelf.newest() is None
    assert [type(each) for each in shelf.scan()] == [Damaged]
    assert "step-000000001 is skipped: manifest.json cannot be opened" in caplog.text


def test_reading_a_damaged_part_says_so(shelf: Shelf) -> None:
    found = save(shelf, 1)
    flip(found.file("model"), -1)
    with pytest.raises(CheckpointError, match=r"cannot read part 'model' of .*step-000000001: .* checksum is another"):
        found.read("model")
    assert found.read("rank-00000") == {"seed": 1}
    with pytest.raises(CheckpointError, match=r"cannot read part 'optimizer' of .*: it has model, rank-00000"):
        found.read("optimizer")


def test_a_foreign_part_is_refused_when_it_is_read(shelf: Shelf) -> None:
    found = save(shelf, 1)
    foreign(found.file("model"))
    with pytest.raises(CheckpointError, match="cannot build the saved state: its structure is damaged"):
        shelf.found()[0].read("model")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "its header cannot be read"),
        (b'{"w":{"dtype":"F32","shape":[1]}}', "its header cannot be read"),
        (b'{"w":{"dtype":"object","shape":[1],"data_offsets":[0,8]}}', "its header cannot be read"),
        (b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}', "its header cannot be read"),
        (b'{"w":{"dtype":"F32","shape":[9999999],"data_offsets":[0,8]}}', "its header cannot be read"),
        (b'{"w":{"dtype":"U8","shape":[99],"data_offsets":[0,99]}}', "the place of tensor 'w' in it is wrong"),
        (b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', "the place of tensor 'w' in it is wrong"),
        (b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "it has 4 bytes after the last tensor"),
        (b'{"w":{"dtype":"U8","shape":[0,10000000000000000000],"data_offsets":[0,0]}}', "no memory for tensor 'w'"),
        (b"\x00" * 10, "its header cannot be read"),
    ],
    ids=range(10),
)
def test_a_header_that_lies_is_refused(shelf: Shelf, header: bytes, message: str) -> None:
    draft = shelf.begin(1)
    entry = draft.copy("model", [len(header).to_bytes(8, "little"), header, bytes(8)])
    with pytest.raises(CheckpointError, match=message):
        draft.seal([entry], {}).read("model")


@pytest.mark.parametrize(("content", "message"), [(b"abc", "only 3 bytes"), (b"\xff" * 16, "its header claims")])
def test_a_file_that_is_none_is_refused(shelf: Shelf, content: bytes, message: str) -> None:
    draft = shelf.begin(1)
    with pytest.raises(CheckpointError, match=message):
        draft.seal([draft.copy("model", [content])], {}).read("model")


# Trouble while saving


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, fail: Callable[[], Any]) -> Callable[[], bool]:
    """Calls `fail` in place of the call of the system of this number, counted from 1; whether it has come to that."""
    count = 0

    def wrap(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return fail() if count == number else original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in SYSTEM_CALLS:
        wrap(name)
    return lambda: count >= number


def in_child(action: Callable[[], Any]) -> int:
    """The exit code of a process that does this."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


MOMENTS = range(1, 200)
"""More than one save makes calls: each loop over them ends by itself."""


@pytest.mark.parametrize("again", [False, True], ids=["another step", "the same step again"])
def test_killed_before_any_call_of_the_system(tmp_path: Path, again: bool) -> None:
    for number in MOMENTS:
        shelf = Shelf(tmp_path / str(number))
        save(shelf, 1, score=1)

        def save_and_prune(shelf: Shelf = shelf, number: int = number) -> None:
            fail_at(pytest.MonkeyPatch(), number, lambda: os._exit(9))
            save(shelf, 1 if again else 2, score=2)
            shelf.prune(1)

        ended = in_child(save_and_prune)
        assert all(isinstance(each, Found) and not what_is_wrong(each) for each in shelf.scan())
        found = shelf.newest()
        assert found is not None
        assert same_bits(found.read("model"), make_state(found.step))
        assert save(shelf, 3).step == 3
        assert not [name for name in names(shelf.path) if not name.startswith("step-") or "." in name]
        if ended == 0:
            assert found.score == 2
            break
        assert ended == 9
    assert ended == 0
    assert number > 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=lambda code: errno.errorcode[code])
def test_a_failing_disk_at_any_call_leaves_the_old_one_and_nothing_else(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for number in MOMENTS:
        shelf = Shelf(tmp_path / str(number))
        save(shelf, 1)
        with pytest.MonkeyPatch.context() as patch:
            has_failed = fail_at(patch, number, fail)
            draft = None
            problem = "of step 2 in"
            try:
                draft = shelf.begin(2)
                draft.seal([draft.write("model", make_state(2))], {})
            except CheckpointError as error:
                problem = str(error)
        if not has_failed():
            break
        assert "of step 2 in" in problem
        if draft is not None:
            draft.drop()
        found = shelf.newest()
        assert found is not None
        assert found.step in (1, 2)  # complete already where the last flush fails
        assert names(shelf.path) == {"step-000000001", found.path.name}
    assert number > 5


def test_a_full_disk_is_called_so(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = shelf.begin(2)

    def full(fd: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        CheckpointError,
        match=r"cannot save the checkpoint of step 2 in .*: the disk is full; what was saved before is intact",
    ):
        draft.write("model", make_state(2))
    assert names(draft.path) == set()


def test_a_write_that_takes_a_part_goes_on(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[:3]))
    assert same_bits(save(shelf, 1).read("model"), make_state(1))


def test_a_state_that_is_no_data_leaves_nothing(shelf: Shelf) -> None:
    draft = shelf.begin(1)
    with pytest.raises(CheckpointError, match="hook is a function"):
        draft.write("model", {"hook": lambda: None})
    assert names(draft.path) == set()


@pytest.mark.parametrize("path", ["file", "file/deeper"])
def test_a_file_is_no_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot begin the checkpoint of step 1 in .*: .*name a folder"):
        Shelf(tmp_path / path).begin(1)


def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(CheckpointError, match="cannot begin the checkpoint of step 1 in /sys/none: no permission"):
        Shelf("/sys/none").begin(1)


@pytest.mark.parametrize("part", ["../model", "a/b", "", ".", "a.b", "x" * 101, "model\n", "mödel"])
def test_names_that_lead_elsewhere_are_refused(shelf: Shelf, part: str) -> None:
    draft = shelf.begin(1)
    with pytest.raises(CheckpointError, match="a part cannot be named"):
        draft.write(part, 1)


def test_a_part_that_is_not_as_its_writer_said_is_not_sealed(shelf: Shelf) -> None:
    draft = shelf.begin(1)
    entry = draft.write("model", make_state(1))
    cut(draft.path / entry.file, 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 10 bytes"):
        draft.seal([entry], {})
    assert shelf.scan() == []


@pytest.mark.parametrize("facts", [{"score": torch.ones(1)}, {"plan": object()}, {1: 2}])
def test_facts_are_json(shelf: Shelf, facts: Any) -> None:
    draft = shelf.begin(1)
    with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1"):
        draft.seal([draft.write("model", 1)], facts)


def test_facts_come_back(shelf: Shelf) -> None:
    facts = {"world_size": 4, "score": float("nan"), "by_host": [[0, 1], [2]], "note": "naïve", "none": None}
    draft = shelf.begin(1)
    draft.seal([draft.write("model", 1)], facts)
    found = shelf.newest()
    assert found is not None
    assert same_bits(dict(found.facts), facts)
    assert found.score is None


def test_steps_count_from_zero(shelf: Shelf) -> None:
    with pytest.raises(CheckpointError, match="steps count from 0"):
        shelf.begin(-1)


# What stays


def test_the_newest_and_the_best_stay(shelf: Shelf) -> None:
    for step, score in enumerate([0.1, 0.9, float("nan"), 0.2, 0.9, 0.5]):
        save(shelf, step, score=score)
    removed = shelf.prune(2, 2)
    assert [found.step for found in removed] == [2, 1]
    assert steps(shelf) == [5, 4, 3, 0]
    assert [found.step for found in shelf.prune(1, 1, better="higher")] == [3, 0]
    assert names(shelf.path) == {"step-000000004", "step-000000005"}


def test_of_equal_scores_the_newest_stays(shelf: Shelf) -> None:
    for step in range(3):
        save(shelf, step, score=1)
    shelf.prune(1, 2)
    assert steps(shelf) == [2, 1]


def test_the_only_sound_one_stays(shelf: Shelf) -> None:
    for step in range(4):
        save(shelf, step)
    for found in shelf.found()[:2]:
        cut(found.file("model"), 1)
    assert [found.step for found in shelf.prune(1)] == [0]
    assert shelf.prune(0) == []
    assert shelf.newest(lambda line: None) == shelf.found()[2]
    save(shelf, 4)
    assert [found.step for found in shelf.prune(1)] == [3, 2, 1]


def test_what_is_set_aside_is_not_found_and_not_lost(shelf: Shelf) -> None:
    for step in (5, 7, 6):
        save(shelf, step)
    assert shelf.set_aside_after(6) == [shelf.path / "step-000000007.aside"]
    assert steps(shelf) == [6, 5]
    save(shelf, 7, score=1)
    save(shelf, 5)
    assert [path.name for path in shelf.set_aside_after(5)] == ["step-000000006.aside", "step-000000007.aside"]
    assert open_checkpoint(shelf.path / "step-000000007.aside").score == 1
    assert names(shelf.path) == {"step-000000005-1", "step-000000006.aside", "step-000000007.aside"}


# Two runs

HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("process 7 on another", file=file, flush=True)
    print("held", flush=True)
    time.sleep(30)
"""
TRY = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("refused")
    else:
        print("held")
"""


def test_two_runs_in_one_folder_are_refused_until_the_first_is_dead(shelf: Shelf) -> None:
    shelf.path.mkdir()
    command = [sys.executable, "-c", HOLD, str(shelf.path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=r"another run does \(process 7 on another\)"), shelf.lock():
            pass
        other.kill()
        other.wait()
        with shelf.lock():
            assert (shelf.path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_two_runs_of_one_process_are_refused(shelf: Shelf) -> None:
    with shelf.lock():
        with pytest.raises(CheckpointError, match="another run of this process"), Shelf(shelf.path).lock():
            pass
        assert _try(shelf) == "refused"  # the attempt has not let go of the lock
        save(shelf, 1)
    assert _try(shelf) == "held"
    with shelf.lock():
        pass


def test_children_do_not_inherit_the_lock(shelf: Shelf) -> None:
    reading, writing = os.pipe()
    with shelf.lock():
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        assert _try(shelf) == "held"
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_where_nothing_can_be_locked_it_is_said(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with shelf.lock():
        save(shelf, 1)
    assert "cannot lock" in caplog.text


def _try(shelf: Shelf) -> str:
    command = [sys.executable, "-c", TRY, str(shelf.path / LOCK)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_entries_and_drafts_say_where_they_are(shelf: Shelf) -> None:
    entry = Entry(part="model", size=0, sha256="0" * 64)
    assert entry.file == "model.safetensors"
    assert Draft(shelf, 7).path == shelf.path / "step-000000007.partial"
