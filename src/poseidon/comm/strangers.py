"""A log of strangers that cannot fill a disk: the first ones line by line, a flood as a number."""

import logging
import time
from collections.abc import Callable

LINES_PER_PERIOD = 20
PERIOD_SECONDS = 60.0


class StrangerLog:
    """Says who was turned away and why.

    Args:
        log: Where to say it.
        where: On which socket, as in `the coordinator at 10.0.0.1:29500`.
        clock: Seconds, for tests.
    """

    def __init__(self, log: logging.Logger, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._where = where
        self._clock = clock
        self._period_began = clock()
        self._in_period = 0
        self.count = 0
        """How many in all."""

    def note(self, address: str, reason: str) -> None:
        """One was turned away."""
        self.flush()
        self.count += 1
        self._in_period += 1
        if self._in_period <= LINES_PER_PERIOD:
            self._log.warning("%s dropped a stranger at %s: %s", self._where, address, reason)
        if self._in_period == LINES_PER_PERIOD:
            self._log.warning("%s: further strangers are counted for a minute, not named", self._where)

    def flush(self) -> None:
        """Sums up a period that is over."""
        now = self._clock()
        if now - self._period_began < PERIOD_SECONDS:
            return
        if self._in_period > LINES_PER_PERIOD:
            more = self._in_period - LINES_PER_PERIOD
            self._log.warning("%s dropped %d more strangers (%d in all)", self._where, more, self.count)
        self._period_began, self._in_period = now, 0
