"""A rank that leaves with nothing lost: asked by SIGUSR1, or by `poseidon drain`.

The rank that was asked says so in the small message that every rank sends to every other one in each step. So all know
it after the same step. At the next place where the loop commits or saves, all ranks do so and end, with an exit code
that tells the launcher to go on without the host of the rank that was asked. Nothing that was computed is lost.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from poseidon.cluster.handover import LEAVING_CODE, LEAVING_FILE, MEMORY_VARIABLE, PROGRESS_FILE
from poseidon.comm.group import Group
from poseidon.runtime.memory import leave_opened

log = logging.getLogger(__name__)

_asked = threading.Event()
"""Whether this process was asked to leave."""


def listen() -> None:
    """From now on SIGUSR1 asks this process to leave; not where the program has other plans for that signal."""
    with suppress(ValueError):  # not the main thread: whoever has it may call this
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, _ask)


def is_asked() -> bool:
    """Whether this process was asked to leave."""
    return _asked.is_set()


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.set()


class Leaving:
    """What one run knows of ranks that leave; every rank has one.

    Args:
        group: The ranks.
        note: Keeps a line among the run's events, and says it on rank 0.
    """

    def __init__(self, group: Group, note: Callable[[str], None]) -> None:
        self._group = group
        self._note = note
        self._progress = _progress_file()
        self._has_said_why_not = False
        self.ranks: tuple[int, ...] = ()
        """Those that leave; the same on every rank between two steps."""
        listen()

    def after_exchange(self, step: int, asked: Sequence[int]) -> None:
        """A step is made, on all ranks.

        Args:
            step: How many lie behind now.
            asked: The ranks that said in it that they were asked to leave.
        """
        if self._progress is not None:
            with suppress(OSError):  # memory is full, or somebody has cleaned it up: no reason to end a training
                self._progress.write_text(f"{step}\n", encoding="ascii")
        if new := [rank for rank in asked if rank not in self.ranks]:
            self.ranks = tuple(sorted({*self.ranks, *new}))
            self._note(
                f"{_listed(new)} asked to leave: all ranks end at the next run.commit() or run.save() of the loop, and "
                "the job is started again without"
            )

    def end(self, step: int, problem: str) -> None:
        """Ends this process, on all ranks together, once the state is kept; does not return.

        Args:
            step: How many steps are kept.
            problem: Why the state could not be kept on this rank; where that is so on any rank, nobody ends.
        """
        problems = self._group.all_gather_text(problem, "leaving with nothing lost")
        if found := next(filter(None, problems), ""):
            if not self._has_said_why_not:
                self._note(f"nobody leaves, since the state could not be kept: {found}")
            self._has_said_why_not = True
            return
        leaves = self._group.rank in self.ranks
        if leaves and (folder := os.environ.get(MEMORY_VARIABLE)):
            Path(folder, f"{LEAVING_FILE}{self._group.rank}").touch()
        if leaves or self._group.rank == 0:
            log.warning("%s asked to leave: step %d is kept, and all ranks end here", _listed(self.ranks), step)
        self._group.barrier()
        leave_opened()
        _exit()


def _exit() -> NoReturn:
    raise SystemExit(LEAVING_CODE)


def _progress_file() -> Path | None:
    """Where the launcher looks how far the job has come; the first rank of each host tells it."""
    folder = os.environ.get(MEMORY_VARIABLE)
    if folder is None or os.environ.get("LOCAL_RANK", "0") != "0" or not Path(folder).is_dir():
        return None
    return Path(folder, PROGRESS_FILE)


def _listed(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} was" if len(ranks) == 1 else f"ranks {names} were"
