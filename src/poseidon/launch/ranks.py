"""The processes of one launch: their output, their end, and which one failed first."""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from poseidon.cluster.children import Keeper, signal_group
from poseidon.errors import LaunchError
from poseidon.launch.engine import OnLine
from poseidon.launch.output import LineSplitter

_TAIL_LINES = 20
_TICK_S = 0.1
"""Longest time by which an action or a deadline is late."""
_TERM_S = 5.0
"""From being asked to end to being killed."""
_KILL_S = 10.0
"""From being killed to being given up."""
_READ_BYTES = 65536

TimedAction = tuple[float, Callable[[], None]]
"""Seconds after the start, and what to do then."""


@dataclass(kw_only=True, eq=False)
class RankProcess:
    """One rank of the launch, or a process that serves the ranks."""

    label: str
    """What its output lines begin with."""
    what: str
    """What errors call it."""
    process: subprocess.Popen[bytes]
    serves: bool = False
    """It has to outlive the ranks: its end before theirs is a failure, and nobody waits for it."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    splitter: LineSplitter = field(default_factory=LineSplitter)

    @property
    def output(self) -> IO[bytes]:
        """Standard output and error, in one pipe."""
        assert self.process.stdout is not None
        return self.process.stdout

    def failure(self) -> str:
        """How it ended and its last lines, as the text of an error."""
        code = self.process.returncode
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        lines = "".join(f"\n    {line}" for line in self.tail)
        return f"{self.what} failed first, with {how}{f'; its last lines:{lines}' if lines else ' and no output'}"


class Supervision:
    """Watches the processes of one launch until the last has ended; used by one thread."""

    def __init__(
        self, on_line: OnLine, *, grace_s: float, actions: Sequence[TimedAction] = (), keeper: Keeper | None = None
    ) -> None:
        self._on_line = on_line
        self._keeper = keeper
        self._grace_s = grace_s
        self._start = time.monotonic()
        self._due = sorted(actions, key=lambda action: action[0])
        self._running: list[RankProcess] = []
        self._failed: RankProcess | None = None
        self._selector = selectors.DefaultSelector()

    def add(self, rank: RankProcess) -> None:
        """Puts a started process under supervision, and its group under the keeper's care."""
        if self._keeper is not None:
            self._keeper.keep("group", rank.process.pid)
        self._running.append(rank)
        os.set_blocking(rank.output.fileno(), False)
        self._selector.register(rank.output, selectors.EVENT_READ, (rank, self._read))
        # epoll hands events on in the order in which they came about: the first failure is the first one seen
        self._selector.register(os.pidfd_open(rank.process.pid), selectors.EVENT_READ, (rank, self._ended))

    def wait(self) -> None:
        """Hands on output and does what is due, until every rank has ended.

        Raises:
            LaunchError: A rank failed.
        """
        while self._ranks_running() and self._failed is None:
            self._step()
        self._end_after(self._grace_s)
        if self._failed is not None:
            raise LaunchError(self._failed.failure())

    def stop(self) -> None:
        """Ends what still runs: SIGTERM first, SIGKILL five seconds later."""
        try:
            self._end_after(0.0)
        finally:
            for rank in self._running:  # interrupted once more, or nobody takes the output
                signal_group(rank.process, signal.SIGKILL)
                rank.process.wait(_KILL_S)
                rank.output.close()
            for key in self._selector.get_map().values():
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
            self._running.clear()
            self._selector.close()

    def _end_after(self, seconds: float) -> None:
        """Lets ranks end by themselves for some seconds, then asks what is left to end, then kills it."""
        deadline = time.monotonic() + seconds
        while self._ranks_running() and time.monotonic() < deadline:
            self._step()
        for number, pause in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            for rank in self._running:
                signal_group(rank.process, number)
            deadline = time.monotonic() + pause
            while self._running and time.monotonic() < deadline:
                self._step()
        if self._running:
            raise LaunchError(f"{self._running[0].what} cannot be killed: look for state D in ps")

    def _ranks_running(self) -> bool:
        return any(not rank.serves for rank in self._running)

    def _step(self) -> None:
        """One round: output that is there, processes that have ended, actions that are due."""
        for key, _ in self._selector.select(_TICK_S):
            rank, take = key.data
            if rank in self._running:
                take(rank, key.fd)
        while self._due and self._due[0][0] <= time.monotonic() - self._start:
            self._due.pop(0)[1]()

    def _read(self, rank: RankProcess, fd: int) -> bool:
        """Hands on what one read returns; False once there is nothing to read, for now or for good."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._ignore(fd)
        self._hand_on(rank, rank.splitter.feed(data) if data else rank.splitter.flush())
        return bool(data)

    def _ended(self, rank: RankProcess, pidfd: int) -> None:
        """Takes in the rest of the output and the exit code of a process that has ended."""
        self._ignore(pidfd)
        os.close(pidfd)
        signal_group(rank.process, signal.SIGKILL)  # what it left running, while its number is still taken
        code = rank.process.wait(_KILL_S)
        if self._keeper is not None:
            self._keeper.forget("group", rank.process.pid)
        while self._read(rank, rank.output.fileno()):
            pass
        self._ignore(rank.output.fileno())
        self._hand_on(rank, rank.splitter.flush())
        rank.output.close()
        self._running.remove(rank)
        if self._failed is None and (self._ranks_running() if rank.serves else code):
            self._failed = rank

    def _hand_on(self, rank: RankProcess, lines: Sequence[str]) -> None:
        for line in lines:
            rank.tail.append(line)
            if not rank.serves:
                self._on_line(rank.label, line)

    def _ignore(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
