"""What one job has for itself while it runs: an id, a secret, and folders in memory that no other user can read.

The folder is `/dev/shm/poseidon-UID-JOB`. In it, each host has a folder for what its ranks keep in memory, and
`job.json` says which process is which rank, for `poseidon drain`. The launcher holds a lock in it while it lives. What
one has left that was killed together with all that cleans up after it, the next of the same user removes.
"""

import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from poseidon.artifact import write_whole
from poseidon.cluster.handover import LEAVING_FILE, MEMORY_VARIABLE, PROGRESS_FILE
from poseidon.errors import LaunchError

_JOB_FILE = "job.json"
_LOCK_FILE = "launcher"
_TMPFS = Path("/dev/shm")


class Job:
    """Makes the folder; `close` removes it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(6)
        self.secret = secrets.token_hex(32)
        """In hexadecimal digits; made for this job and known to nobody else."""
        for folder in _folders():
            if not _has_launcher(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self.folder = _TMPFS / f"poseidon-{os.getuid()}-{self.id}"
        try:
            self.folder.mkdir(mode=0o700)
            self._lock = _locked(self.folder / _LOCK_FILE)
        except OSError as error:
            raise LaunchError(f"cannot make a folder for the job in memory, {self.folder}: {error.strerror}") from error

    def memory(self, host: str) -> Path:
        """The folder in memory of one host."""
        folder = self.folder / host
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def variables(self, host: str, *, attempt: int, restarts: int, coordinator: str) -> dict[str, str]:
        """What each rank on a host is told about the job."""
        return {
            "POSEIDON_JOB": self.id,
            "POSEIDON_SECRET": self.secret,
            "POSEIDON_COORDINATOR": coordinator,
            MEMORY_VARIABLE: str(self.memory(host)),
            "POSEIDON_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }

    @property
    def coordinator_log(self) -> Path:
        """What the coordinator needs to go on where one before it ended."""
        return self.folder / "coordinator.log"

    def variables_of_coordinator(self) -> dict[str, str]:
        """What the process is told that serves the store of the job."""
        return {"POSEIDON_JOB": self.id, "POSEIDON_SECRET": self.secret}

    def write_ranks(self, ranks: Sequence[tuple[str, int]]) -> None:
        """Notes the label and the process of each rank of the present attempt, by rank."""
        listed = [{"rank": rank, "label": label, "pid": pid} for rank, (label, pid) in enumerate(ranks)]
        write_whole(self.folder / _JOB_FILE, json.dumps({"job": self.id, "launcher": os.getpid(), "ranks": listed}))

    def furthest_step(self) -> int | None:
        """The furthest step that a rank has reported; None where none reports any."""
        steps = []
        for path in self.folder.glob(f"*/{PROGRESS_FILE}"):
            with suppress(OSError, ValueError):
                steps.append(int(path.read_text("ascii")))
        return max(steps, default=None)

    def take_leaving(self) -> list[int]:
        """The ranks that have left since this was last called."""
        found = []
        for path in self.folder.glob(f"*/{LEAVING_FILE}*"):
            found.append(int(path.name.removeprefix(LEAVING_FILE)))
            path.unlink()
        return sorted(found)

    def close(self) -> None:
        """Removes the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def running_jobs() -> list[dict[str, Any]]:
    """What `job.json` says, of each job of this user on this machine whose launcher lives."""
    found = []
    for folder in sorted(_folders()):
        with suppress(OSError, ValueError):
            if _has_launcher(folder):
                found.append(json.loads((folder / _JOB_FILE).read_text("utf-8")))
    return found


def _folders() -> Iterator[Path]:
    """Those of this user's launchers, dead ones included."""
    for path in _TMPFS.glob(f"poseidon-*/{_LOCK_FILE}"):  # in a user namespace, a user has two numbers
        with suppress(OSError):
            found = path.parent.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield path.parent


def _locked(path: Path) -> BinaryIO:
    """A new file that this process holds locked from the moment on when others see it."""
    hidden = path.with_name(f".{path.name}")
    file = hidden.open("xb")
    fcntl.flock(file, fcntl.LOCK_EX)
    hidden.rename(path)
    return file


def _has_launcher(folder: Path) -> bool:
    """Whether the launcher lives that has made a folder; where that cannot be seen, it does."""
    try:
        with (folder / _LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
