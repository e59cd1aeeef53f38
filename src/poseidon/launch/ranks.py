"""The processes of one launch: their output, their end, and which one failed first."""

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from poseidon.cluster.children import Child, Keeper, signal_group
from poseidon.errors import LaunchError
from poseidon.launch.attempts import describe_code
from poseidon.launch.engine import OnLine
from poseidon.launch.output import LineSplitter

_TAIL_LINES = 20
_TICK_S = 0.1
"""Longest time by which an action or a deadline is late."""
_TERM_S = 5.0
"""From being asked to end to being killed."""
_KILL_S = 10.0
"""From being killed to being given up."""
_REST_S = 5.0
"""Where a job is started again: what is left to the last ranks once half of them have ended."""
_ASK_S = 1.0
"""There, from being asked to end to being killed."""
_MOST_AGAIN = 20
"""What serves the ranks is started so often: one that ends at once would keep doing so."""
_READ_BYTES = 65536
T = TypeVar("T")

log = logging.getLogger(__name__)

TimedAction = tuple[float, Callable[[], None]]
"""Seconds after the start, and what to do then."""


@dataclass(kw_only=True, eq=False)
class RankProcess:
    """One rank of the launch, or a process that serves the ranks."""

    label: str
    """What its output lines begin with."""
    what: str
    """What errors call it."""
    process: Child
    serves: bool = False
    """It has to outlive the ranks: its end before theirs is a failure, and nobody waits for it."""
    is_silent: bool = False
    """Its lines are kept for an error and are not handed on."""
    again: Callable[[], Child] | None = None
    """Starts it once more where it serves and has ended too early; then that is no failure."""
    num_again: int = 0
    """How often it was started once more."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    splitter: LineSplitter = field(default_factory=LineSplitter)

    @property
    def output(self) -> IO[bytes]:
        """Standard output and error, in one pipe."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def code(self) -> int:
        """How it ended, as `subprocess` says it."""
        return self.process.returncode or 0

    def failure(self) -> str:
        """How it ended and its last lines, as the text of an error."""
        how = describe_code(self.code)
        lines = "".join(f"\n    {line}" for line in self.tail)
        return f"{self.what} failed first, with {how}{f'; its last lines:{lines}' if lines else ' and no output'}"


class Supervision:
    """Watches the processes of one launch until the last has ended; used by one thread.

    Args:
        on_line: Gets every line of the ranks' output.
        grace_s: After the first failure the others have so many seconds.
        restarts: Whether ranks may be started again: then nobody waits for what can no longer say anything.
        actions: What is due when.
        keeper: Ends the processes should this one be killed.
    """

    def __init__(
        self,
        on_line: OnLine,
        *,
        grace_s: float,
        restarts: bool = False,
        actions: Sequence[TimedAction] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self._on_line = on_line
        self._restarts = restarts
        self._stopping = False
        self._keeper = keeper
        self._grace_s = grace_s
        self._start = time.monotonic()
        self._due = sorted(actions, key=lambda action: action[0])
        self._running: list[RankProcess] = []
        self._num_ranks = 0
        """Of this attempt."""
        self._failed: RankProcess | None = None
        self._selector = selectors.DefaultSelector()

    def add(self, rank: RankProcess) -> None:
        """Puts a started process under supervision, and its group under the keeper's care."""
        self._watch(rank)
        if not rank.serves:
            self._num_ranks += 1

    def wait(self) -> RankProcess | None:
        """Hands on output and does what is due, until every rank has ended; what serves them goes on.

        Returns:
            The rank that failed first; None where all ended well.

        Raises:
            LaunchError: What serves the ranks failed, and cannot be started again.
        """
        while self._ranks_left() and self._failed is None:
            self._step()
        if self._restarts:
            self._end_soon()
        else:
            self._end_patiently()
        failed, self._failed, self._num_ranks = self._failed, None, 0
        if failed is not None and failed.serves:
            raise LaunchError(failed.failure())
        return failed

    def meanwhile(self, look: Callable[[], T]) -> T:
        """Hands on output and does what is due, while something is looked at that takes its time; returns what is seen.

        Args:
            look: Runs in a thread of its own.
        """
        with ThreadPoolExecutor(max_workers=1) as thread:
            seen = thread.submit(look)
            while wait([seen], _TICK_S).not_done:
                self._step()
            return seen.result()

    def stop(self) -> None:
        """Ends what still runs: SIGTERM first, SIGKILL five seconds later."""
        self._stopping = True
        try:
            self._end(lambda: self._running, _TERM_S)
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

    def _watch(self, rank: RankProcess) -> None:
        if self._keeper is not None:
            self._keeper.keep("group", rank.process.pid)
        self._running.append(rank)
        os.set_blocking(rank.output.fileno(), False)
        self._selector.register(rank.output, selectors.EVENT_READ, (rank, self._read))
        # epoll hands events on in the order in which they came about: the first failure is the first one seen
        self._selector.register(os.pidfd_open(rank.process.pid), selectors.EVENT_READ, (rank, self._ended))

    def _end_soon(self) -> None:
        """Lets ranks say whom they lost, as long as that may take; a stopped one cannot say anything."""
        deadline = time.monotonic() + self._grace_s
        half_gone = False
        while (left := self._ranks_left()) and time.monotonic() < deadline:
            if not half_gone and 2 * len(left) <= self._num_ranks:
                half_gone, deadline = True, min(deadline, time.monotonic() + _REST_S)
            for rank in left:
                if _is_stopped(rank.process.pid):
                    signal_group(rank.process, signal.SIGKILL)
            self._step()
        self._end(self._ranks_left, _ASK_S)

    def _end_patiently(self) -> None:
        """Lets ranks end by themselves for as long as their grace is."""
        deadline = time.monotonic() + self._grace_s
        while self._ranks_left() and time.monotonic() < deadline:
            self._step()
        self._end(self._ranks_left, _TERM_S)

    def _end(self, left: Callable[[], list[RankProcess]], ask_s: float) -> None:
        """Asks processes to end, and kills those that have not after some seconds."""
        for number, pause in ((signal.SIGTERM, ask_s), (signal.SIGKILL, _KILL_S)):
            for rank in left():
                signal_group(rank.process, number)
            deadline = time.monotonic() + pause
            while left() and time.monotonic() < deadline:
                self._step()
        if stuck := left():
            raise LaunchError(f"{stuck[0].what} cannot be killed: look for state D in ps")

    def _ranks_left(self) -> list[RankProcess]:
        return [rank for rank in self._running if not rank.serves]

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
        if rank.serves and rank.again is not None and rank.num_again < _MOST_AGAIN and not self._stopping:
            self._serve_again(rank, rank.again)
        elif self._failed is None and (self._ranks_left() if rank.serves else code):
            self._failed = rank

    def _serve_again(self, rank: RankProcess, again: Callable[[], Child]) -> None:
        rank.num_again += 1
        log.warning("%s ended with %s: it is started again, and the ranks go on", rank.what, describe_code(rank.code))
        rank.process, rank.splitter = again(), LineSplitter()
        self._watch(rank)

    def _hand_on(self, rank: RankProcess, lines: Sequence[str]) -> None:
        for line in lines:
            rank.tail.append(line)
            if not rank.is_silent:
                self._on_line(rank.label, line)

    def _ignore(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and does nothing until another one lets it go on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
