"""Faults of many kinds, met by one rank at a chosen step and phase of its training.

An `Injector` is told where the program is and brings about what is due there, each fault once: after a restart, when
the step is taken again, a file says that it has happened. What happens when is said on standard output, in lines of
JSON with the time of the clock that all processes of one machine share, so that whoever started the ranks can measure.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from poseidon.comm.scheme import Transfer
from poseidon.runtime.checkpoint import Draft, Entry
from poseidon.units import GIB, KIB, MIB

SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL", "SIGSTOP")
RAISED = ("exception", "out_of_memory")
CUTS: dict[str, tuple[str, float | None]] = {
    "cut_up": ("up", None),
    "cut_down": ("down", None),
    "cut_both": ("both", None),
    "cut_3s": ("both", 3.0),
}
"""What is cut of the cable of the rank's host, and for how long; None until somebody restores it."""
DISKS = ("disk_full", "slow_disk")
FAULTS = (*SIGNALS, *RAISED, *CUTS, *DISKS)

TRANSFERS: dict[str, Callable[[str], bool]] = {
    "all-reduce": lambda name: name == "head" or ".." in name,
    "row gather": lambda name: name == "embedding (second factor)",
    "factor gather": lambda name: name.endswith("(second factor)") and not name.startswith("embedding"),
    "server push": lambda name: name.endswith("(push)"),
}
"""Phases in which a transfer is under way, and by its name which."""
START_UP = -1
"""The step of what happens before the first."""
SLOW_SYNC_S = 0.5
LEFT_BYTES = 64 * MIB
"""Of address space, once a rank runs out of memory: one large tensor no longer fits, small things do."""
PATIENCE_S = 10.0
_PREFIX = "@ "


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault."""

    fault: str
    phase: str
    rank: int
    step: int


def say(event: str, **facts: Any) -> None:
    """One line for whoever started this process."""
    line = json.dumps({"event": event, "at": time.monotonic(), **facts})
    os.write(1, f"{_PREFIX}{line}\n".encode())  # at once: the process may be about to die


def heard(line: str) -> dict[str, Any] | None:
    """What a line of a rank's output says; None where it is no such line."""
    if not line.startswith(_PREFIX):
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
    return event


class Injector:
    """Brings about the faults of one rank.

    Args:
        injections: Of all ranks.
        rank: This one.
        folder: Where ranks and whoever started them leave files for each other.
        disk: The folder that checkpoints are written to.
    """

    def __init__(self, injections: Sequence[Injection], rank: int, folder: Path, disk: Path | None = None) -> None:
        self._mine = {index: one for index, one in enumerate(injections) if one.rank == rank}
        self._folder = folder
        self._disk = disk or folder
        self._under_way = Event()
        self.step = START_UP
        """Where the training is."""

    def reach(self, phase: str, faults: Collection[str] = FAULTS) -> None:
        """The program has come to a phase of the present step: what is due there happens now.

        Args:
            phase: Where it is.
            faults: Which of them may happen at this place.
        """
        self._reach(phase, self.step, faults)

    def _reach(self, phase: str, step: int, faults: Collection[str]) -> None:
        for index, one in self._mine.items():
            if (one.phase, one.step) == (phase, step) and one.fault in faults and self._is_first(index):
                self._bring_about(index, one)

    def reach_end_of_backward(self) -> None:
        """As `reach`, for what the program itself raises while a transfer is under way."""
        for index, one in self._mine.items():
            if one.step == self.step and one.phase in TRANSFERS and one.fault in RAISED and self._is_first(index):
                self._under_way.wait(PATIENCE_S)
                self._bring_about(index, one)

    def watch_transfers(self) -> None:
        """From now on, transfers of this process are phases: a cable is cut before one begins, the rest comes after."""
        issue = Transfer.issue

        def watched(transfer: Transfer) -> None:
            self._reach_transfer(transfer.name, CUTS)
            issue(transfer)
            self._reach_transfer(transfer.name, SIGNALS)

        Transfer.issue = watched  # type: ignore[method-assign]

    def watch_saving(self) -> None:
        """From now on, this process is in the phase `save` once it has written a part of a checkpoint."""
        write = Draft.write

        def watched(draft: Draft, part: str, state: Any) -> Entry:
            entry = write(draft, part, state)
            self._reach("save", draft.step - 1, (*SIGNALS, *CUTS))  # a thread writes: the training may be further
            return entry

        Draft.write = watched  # type: ignore[method-assign]

    def _reach_transfer(self, name: str, faults: Collection[str]) -> None:
        for index, one in self._mine.items():
            if one.step == self.step and one.phase in TRANSFERS and TRANSFERS[one.phase](name):
                self._under_way.set()
                if one.fault in faults and self._is_first(index):
                    self._bring_about(index, one)

    def _is_first(self, index: int) -> bool:
        try:
            (self._folder / f"fault{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _bring_about(self, index: int, one: Injection) -> None:
        say("fault", index=index, **asdict(one))
        if one.fault in SIGNALS:
            os.kill(os.getpid(), signal.Signals[one.fault])
        elif one.fault in CUTS:
            wait_for(self._folder / f"cut{index}")
        elif one.fault == "disk_full":
            fill(self._disk)
        elif one.fault == "slow_disk":
            slow_down_sync()
        elif one.fault == "out_of_memory":
            run_out_of_memory()
        else:
            raise ValueError("the loss is not a number")


def wait_for(file: Path) -> None:
    """Returns once somebody has made a file."""
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def run_out_of_memory() -> None:
    """Raises MemoryError: this process gets little more memory than it has and asks for a lot."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LEFT_BYTES, hard))
    bytearray(GIB)


def fill(folder: Path) -> None:
    """Leaves no room on the disk of a folder: for a disk that is small, such as a tmpfs of its own."""
    with (folder / FILLING).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(KIB))
        except OSError:
            return


FILLING = "filling"
"""The file that fills a disk."""


def slow_down_sync() -> None:
    """From now on, every fsync of this process takes as long as on a disk that is overloaded."""
    sync = os.fsync

    def slow_sync(file: Any) -> None:
        time.sleep(SLOW_SYNC_S)
        sync(file)

    os.fsync = slow_sync
