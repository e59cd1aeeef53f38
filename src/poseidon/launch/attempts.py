"""Whether and with which hosts a job is started again after an attempt has ended: pure decisions.

Comes in: how each attempt ended, how far it had come, and which hosts the coordinator reaches. Goes out: the hosts of
the next attempt with a line about it, or an error that says why there is none.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from poseidon.cluster.handover import LEAVING_CODE
from poseidon.errors import LaunchError

ALIKE = 3
"""The same end so many times in a row, without a step more, is the program's own."""
_LONGEST_REASON = 300
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one attempt ended."""

    what: str
    """Who ended first, such as `host2 (rank 2)`."""
    code: int
    """Its exit code; minus the number of the signal that ended it."""
    last_line: str = ""
    """Of its output."""
    step: int | None = None
    """The furthest step that a rank has reported; None where nobody reports any."""
    leaving: frozenset[str] = frozenset()
    """The hosts that had been asked to leave."""

    @property
    def how(self) -> str:
        """Exit code or signal, in words."""
        return describe_code(self.code)

    @property
    def planned(self) -> bool:
        """Whether the ranks have ended because one of them leaves."""
        return self.code == LEAVING_CODE and bool(self.leaving)


def describe_code(code: int) -> str:
    """An exit code as `subprocess` gives it, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"


@dataclass(kw_only=True)
class Attempts:
    """The attempts of one job."""

    hosts: Sequence[str]
    """All that it was given, in order."""
    restarts: int
    """Failures after which it is started again."""
    min_hosts: int | None = None
    """With fewer it does not go on; None for half of those of the attempt before."""
    number: int = 0
    """Of the present attempt."""
    present: tuple[str, ...] = ()
    """The hosts of the present attempt."""
    used: int = 0
    """Restarts after failures so far."""
    _left: set[str] = field(default_factory=set)
    _furthest: int | None = None
    _alike: int = 0
    _last: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        """Every host takes part in the first attempt."""
        self.present = tuple(self.hosts)

    def take_in(self, ending: Ending) -> None:
        """The present attempt has ended so.

        Raises:
            LaunchError: There is no further attempt: restarts are used up, or it is the program's own failure.
        """
        self._left |= ending.leaving
        if ending.planned:
            self._last = None
            return
        self._count_alike(ending)
        if self._alike >= ALIKE:
            at = "before the first step" if ending.step is None else f"at step {ending.step}"
            raise LaunchError(
                f"not started again: it ended {self._alike} times in a row with {ending.how} {at}, so it would again"
            )
        if self.used >= self.restarts:
            raise LaunchError(f"not started again: its restarts ({self.restarts}) are used up")
        self.used += 1

    def next(self, ending: Ending, reachable: Collection[str]) -> str:
        """Begins the next attempt with the hosts that are reachable and have not left.

        Returns:
            A line that says how the last attempt ended, and what goes on.

        Raises:
            LaunchError: Too few hosts are left.
        """
        before = self.present
        present = tuple(host for host in self.hosts if host in reachable and host not in self._left)
        least = self.min_hosts or (len(before) - len(ending.leaving) + 1) // 2 or 1
        if len(present) < least:
            raise LaunchError(
                f"not started again: {len(present)} of {len(before)} hosts reach the coordinator "
                f"({', '.join(present) or 'none'}), and {least} are needed"
            )
        ended = self._describe_end(ending)
        self.number, self.present = self.number + 1, present
        return f"{ended}; attempt {self.number} starts with {self._describe_hosts(before)}"

    def _count_alike(self, ending: Ending) -> None:
        came_further = ending.step is not None and (self._furthest is None or ending.step > self._furthest)
        if came_further:
            self._furthest = ending.step
        this = (ending.code, ending.last_line)
        if ending.code in _FROM_OUTSIDE:
            self._alike, self._last = 0, None
        elif this == self._last and not came_further:
            self._alike += 1
        else:
            self._alike, self._last = 1, this

    def _describe_end(self, ending: Ending) -> str:
        at = "" if ending.step is None else f" after step {ending.step}"
        leaving = ", ".join(host for host in self.hosts if host in ending.leaving)
        if ending.planned:
            return f"attempt {self.number}: {leaving} leaves{at}, as asked"
        why = _shortened(ending.last_line) if ending.code > 0 else ""  # one that was killed has not said it
        return (
            f"attempt {self.number}: {ending.what} failed first{at}, with {ending.how}{why} "
            f"(restart {self.used} of {self.restarts}){f'; {leaving} leaves, as asked' if leaving else ''}"
        )

    def _describe_hosts(self, before: Sequence[str]) -> str:
        lost = [host for host in before if host not in self.present and host not in self._left]
        back = [host for host in self.present if host not in before]
        if len(self.present) == len(self.hosts) == len(before):
            return "all again"
        text = f"{len(self.present)} of {len(self.hosts)}: {', '.join(self.present)}"
        text += f"; {', '.join(lost)} cannot be reached" if lost else ""
        return text + (f"; {', '.join(back)} can be reached again" if back else "")


def _shortened(line: str) -> str:
    """The last line of who failed, which says why, or whom it misses."""
    text = line.strip()
    return f": {text[:_LONGEST_REASON]}{'...' if len(text) > _LONGEST_REASON else ''}" if text else ""
