"""The folder in memory in which a host keeps what its ranks have committed: it survives them, but not the host.

It lies on a tmpfs, so that a process that is killed leaves it whole. Its name says whose it is, of which job and of
which host; a launcher may name another. Ranks hold a lock in it while they live. What a dead job of the same user has
left is removed by the next that starts. What is found here is trusted only where it belongs to this user alone.
"""

import fcntl
import json
import logging
import mmap
import os
import re
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import psutil

from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import Shelf

if TYPE_CHECKING:
    from poseidon.comm.group import Group

TMPFS = Path("/dev/shm")
STALE_SECONDS = 1800.0
"""After so long without a living rank, a folder counts as a dead job's: a job may wait for a lost host to return."""
TOUCH_SECONDS = 60.0
"""How often a rank that makes steps says so there."""
ALIVE = "alive"
"""The file that the ranks of a host hold locked."""
_NOTE = struct.Struct("=q")
"""The last step that a rank has made."""

_opened: set[Path] = set()
"""Folders that this process has opened, and that nobody else removes."""

_agreed: dict[int, int] = {}
"""By the count that whoever starts this rank has given it, the one that all ranks have agreed on."""

log = logging.getLogger(__name__)


def attempt() -> int:
    """Which start of the job this is, counted from zero; the same on all ranks once they have agreed on it."""
    given = _given_attempt()
    return _agreed.get(given, given)


def agree_on_attempt(group: "Group") -> None:
    """Has `attempt` say the same on all ranks; on all of them together.

    Torchrun's agents count by themselves: one that has come later begins at zero, and when hosts come or go all of them
    start their ranks again without counting it.
    """
    mine = max(attempt(), _num_earlier_starts())
    _agreed[_given_attempt()] = max(map(int, group.all_gather_text(str(mine), "agreeing on the attempt")))


def can_restart() -> bool:
    """Whether whoever started this process starts it again when it fails."""
    limits = (os.environ.get(name, "0") for name in ("POSEIDON_MAX_RESTARTS", "TORCHELASTIC_MAX_RESTARTS"))
    return attempt() > 0 or any(limit not in ("", "0") for limit in limits)


def folder_of_host() -> Path:
    """Where this host keeps what it commits."""
    if named := os.environ.get("POSEIDON_MEMORY"):
        return Path(named)
    number = os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))
    return _base() / f"{_prefix()}{_job()}-{number}"


def folders_of_job() -> list[Path]:
    """This host's folder, and those of the job that it had under other numbers: a restart may number hosts anew."""
    own = folder_of_host()
    if "POSEIDON_MEMORY" in os.environ:
        return [own]
    name = re.compile(re.escape(f"{_prefix()}{_job()}-") + "[0-9]+")
    return [own, *(path for path in _folders() if path != own and name.fullmatch(path.name) and _is_private(path))]


class MemoryFolder:
    """The folder of this host, as one rank of it holds it.

    Args:
        path: From `folder_of_host`.
        rank: Of this process.
        run: The number of the run in this process: each has its commits apart.

    Raises:
        CheckpointError: It cannot be made, or is not this user's alone.
    """

    def __init__(self, path: Path, rank: int, run: int = 0) -> None:
        self.path = path
        self._run = run
        self._touched = 0.0
        self.shelf = commits_in(path, run)
        self.received = Shelf(path / f"received{run}", durable=False)
        """What other hosts have sent, until it is read."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path)
            self._alive: BinaryIO | None = (path / ALIVE).open("ab")
            fcntl.flock(self._alive, fcntl.LOCK_SH)
            self._note = _open_note(path / _note_name(run, rank))
            self.touch()
            if "POSEIDON_MEMORY" not in os.environ:
                _opened.add(path)
        except OSError as error:
            raise CheckpointError(f"cannot keep commits in {path}: {error.strerror or error}") from error

    def note(self, step: int) -> None:
        """Keeps the number of the last step, for a line that says what was lost."""
        _NOTE.pack_into(self._note, 0, step)
        if time.monotonic() - self._touched >= TOUCH_SECONDS:
            self.touch()

    def go_on_from(self, step: int, ranks: Collection[int]) -> None:
        """Forgets what comes after a step, which is made anew, and what ranks have noted that are not here any more.

        By one rank of the host, while no other writes.
        """
        shutil.rmtree(self.received.path, ignore_errors=True)
        for found in self.shelf.found():
            if found.step > step:
                shutil.rmtree(found.path, ignore_errors=True)
        for path in self.path.glob(_note_pattern(self._run)):
            if path.name not in {_note_name(self._run, rank) for rank in ranks}:
                path.unlink(missing_ok=True)

    def touch(self) -> None:
        """The folder is in use."""
        self._touched = time.monotonic()
        with suppress(OSError):  # it is looked at by other jobs only
            os.utime(self.path / ALIVE)

    def free_bytes(self) -> int:
        """That could be written here."""
        return shutil.disk_usage(self.path).free

    def release(self) -> None:
        """Lets go of it; what is in it stays."""
        if self._alive is not None:
            self._alive.close()
            self._note.close()
            self._alive = None


def remove_opened() -> None:
    """The job has ended well on all ranks: removes what this process has kept, unless a launcher does that."""
    while _opened:
        shutil.rmtree(_opened.pop(), ignore_errors=True)


def leave_opened() -> None:
    """The job goes on with another start: what this process has kept stays when it ends."""
    _opened.clear()


def commits_in(path: Path, run: int) -> Shelf:
    """The commits of one run in a folder of this or another number of the host."""
    return Shelf(path / f"commits{run}", durable=False)


def last_noted(run: int) -> int:
    """The last step that any rank of this host has noted; zero where none has."""
    paths = [path for folder in folders_of_job() for path in folder.glob(_note_pattern(run))]
    return max(map(_read_note, paths), default=0)


def remove_stale() -> list[Path]:
    """Removes what dead jobs of this user have left in memory on this machine, and nothing of this job."""
    own = folders_of_job()
    others = [path for path in _folders() if path not in own]
    return _remove([path for path in others if time.time() - _last_touched(path) > STALE_SECONDS])


def remove_former() -> list[Path]:
    """Removes what this job has kept under other numbers of its hosts, once all of it is kept anew."""
    return _remove(folders_of_job()[1:])


def check_private(path: Path) -> None:
    """Raises CheckpointError where a folder is not this user's alone: others could have put anything there."""
    if not _is_private(path):
        raise CheckpointError(
            f"cannot keep commits in {path}: it is not a folder of this user that only this user can write; remove it, "
            "or name another by POSEIDON_MEMORY"
        )


def _is_private(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _given_attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _num_earlier_starts() -> int:
    """How often torchrun's agent on this host has started this rank before; noted for the next time."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or "POSEIDON_MEMORY" in os.environ or not can_restart():
        return 0
    process = psutil.Process()
    agent = process.parent()
    if agent is None:
        return 0
    name = f"started{os.environ.get('LOCAL_RANK', '0')}-{agent.pid}-{int(agent.create_time() * 1000)}"
    folders = [folder for folder in folders_of_job() if folder.is_dir() and _is_private(folder)]
    last, count = max((_read_start(folder / name) for folder in folders), key=lambda note: note[1], default=(0, -1))
    if last != process.pid:
        count += 1
    own = folder_of_host()
    with suppress(OSError):  # commits cannot be kept then, which is said when one is to be
        own.mkdir(mode=0o700, exist_ok=True)
        if _is_private(own):
            (own / ALIVE).touch()
            (own / name).write_text(json.dumps([process.pid, count]), "ascii")
            _opened.add(own)
    return count


def _read_start(path: Path) -> tuple[int, int]:
    """Which process was started last, and how many before it."""
    try:
        pid, count = json.loads(path.read_text("ascii"))
        return int(pid), int(count)
    except (OSError, ValueError, TypeError):
        return 0, -1


def _base() -> Path:
    """Memory, where the system has such a folder."""
    return TMPFS if TMPFS.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"poseidon-{os.getuid()}-"


def _job() -> str:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    unnamed = f"of{os.getppid()}"  # whoever has started this rank starts it again
    job = os.environ.get("POSEIDON_JOB") or (unnamed if run_id == "none" else run_id)
    return re.sub(r"[^A-Za-z0-9_.]", "_", job)


def _folders() -> Iterator[Path]:
    """All folders of this user."""
    return _base().glob(f"{_prefix()}*-*")


def _last_touched(path: Path) -> float:
    try:
        return (path / ALIVE).stat().st_mtime
    except OSError:
        return time.time()


def _remove(paths: list[Path]) -> list[Path]:
    """Those in which no rank lives."""
    removed = []
    for path in paths:
        try:
            check_private(path)
            with (path / ALIVE).open("ab") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
        except (OSError, CheckpointError):
            continue  # somebody lives there, or removes it right now
    return removed


def _note_name(run: int, rank: int) -> str:
    return f"noted{run}-{rank:05d}"


def _note_pattern(run: int) -> str:
    return f"noted{run}-*"


def _read_note(path: Path) -> int:
    content = path.read_bytes()
    return int(_NOTE.unpack(content)[0]) if len(content) == _NOTE.size else 0


def _open_note(path: Path) -> mmap.mmap:
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) != _NOTE.size:
            file.truncate(0)
            file.write(bytes(_NOTE.size))
            file.flush()
        return mmap.mmap(file.fileno(), _NOTE.size)
