"""Bytes from a rank's output to whole lines, also where a progress bar draws over itself."""

import time
from collections.abc import Callable

_LONGEST_LINE = 65536
_REDRAW_SECONDS = 2.0
"""A progress bar is shown this often at most; what it looks like at the end of its line is always shown."""


class LineSplitter:
    """Cuts one rank's output into lines as they are complete.

    A carriage return draws over what stands in the line, as on a terminal: of a progress bar only a state every two
    seconds and the last one become lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete."""
        *complete, self._pending = (self._pending + data).split(b"\n")
        lines = [_last_drawn(line) for line in complete]
        if lines:
            self._shown_at = self._clock()
        return [*lines, *self._redrawn(), *self._overlong()]

    def flush(self) -> list[str]:
        """What is left when the output ends without a line end."""
        rest, self._pending = _last_drawn(self._pending), b""
        return [rest] if rest else []

    def _redrawn(self) -> list[str]:
        *drawn, self._pending = self._pending.rsplit(b"\r", 1) if b"\r" in self._pending[:-1] else [self._pending]
        if not drawn:
            return []
        state = _last_drawn(drawn[0])
        if not state or self._clock() < self._shown_at + _REDRAW_SECONDS:
            return []
        self._shown_at = self._clock()
        return [state]

    def _overlong(self) -> list[str]:
        return self.flush() if len(self._pending) > _LONGEST_LINE else []


def _last_drawn(line: bytes) -> str:
    """What a terminal would show: the text after the last carriage return that something follows."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
