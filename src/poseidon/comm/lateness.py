"""Waiting is not silence: whoever waits for long says for whom, again and again, at growing intervals.

The line is said aloud on one rank, the first of those that wait, and goes to the log of the others.
"""

import logging
import time
from collections.abc import Mapping

from poseidon.units import format_seconds

log = logging.getLogger(__name__)

FIRST_REMINDER_SECONDS = 10.0
"""After so long of waiting it is said who is late."""
LONGEST_PAUSE_SECONDS = 600.0
"""Between two such lines, however long the waiting takes."""


class Reminders:
    """When somebody who waits says so again: each time at twice the seconds, at last every ten minutes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = FIRST_REMINDER_SECONDS

    def due(self) -> float | None:
        """How long it has waited, where that is to be said now."""
        waited = time.monotonic() - self._start
        if waited < self._next:
            return None
        self._next = waited + min(waited, LONGEST_PAUSE_SECONDS)
        return waited


def say_who_is_late(rank: int, late: Mapping[int, str], what: str, waited: float) -> None:
    """One line about ranks that live but have not come.

    Args:
        rank: This rank, which waits.
        late: What each of the late ones is called.
        what: For what they have to come.
        waited: Seconds so far.
    """
    if not late:
        return
    first = next(other for other in range(rank + 1) if other not in late)
    log.log(
        logging.WARNING if rank == first else logging.INFO,
        "rank %d: waiting %s for %s, which %s alive, in %s",
        rank,
        format_seconds(round(waited)),
        " and ".join(late.values()),
        "is" if len(late) == 1 else "are",
        what,
    )
