"""What happened when on this rank, as steps of a `Timeline`.

A step lasts from the end of the one before to the end of its own exchange of gradients, so that the steps add up to the
wall time, the loader and the optimizer included.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from poseidon.comm.scheme import Transfer
from poseidon.timeline import Activity, Interval, Step, Timeline

KEPT_STEPS = 1000
"""Steps that stay in memory; a run folder gets all of them through `on_step`."""


class Recorder:
    """Collects the intervals of the current step and closes it into a `Step`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._intervals: list[Interval] = []
        self._open: dict[Activity, float] = {}
        self._start = self._last_end = time.time()
        self.on_step: list[Callable[[Step], None]] = []
        """Called with each finished step, on the training thread."""

    def begin(self, activity: Activity) -> None:
        """An activity of the training thread starts; what had started under the same name before is forgotten."""
        self._open[activity] = time.time()

    def end(self, activity: Activity) -> None:
        """The activity ends; without a beginning nothing is noted."""
        start = self._open.pop(activity, None)
        if start is not None:
            self._last_end = time.time()
            self.add(activity, "", start, self._last_end)

    def add_since_last(self, activity: Activity, name: str) -> None:
        """Notes what has passed since the last activity that was ended."""
        start, self._last_end = self._last_end, time.time()
        self.add(activity, name, start, self._last_end)

    def add(self, activity: str, name: str, start: float, end: float, num_bytes: int = 0) -> None:
        """Notes an interval."""
        self._intervals.append(
            Interval(activity=Activity(activity), name=name, start=start, end=end, num_bytes=num_bytes)
        )

    @contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        """Notes that the training thread does nothing but take part in a transfer, from when on it is ready for it."""
        start = time.time()
        yield
        end = time.time()
        self.add(Activity.TRANSFER, name, start, end)
        self.add(Activity.EXPOSED, name, start, end)

    def add_transfers(self, transfers: Iterable[Transfer]) -> None:
        """Notes transfers that have ended; of one that began in an earlier step, what lies in this one."""
        for transfer in transfers:
            start = max(transfer.start, self._start)
            self.add(Activity.TRANSFER, transfer.name, start, max(start, transfer.end), transfer.num_bytes)

    def add_under_way(self, transfers: Iterable[Transfer]) -> None:
        """Notes what lies in this step of transfers that will end in the next; their bytes are counted there."""
        for transfer in transfers:
            if transfer.start:
                self.add(Activity.TRANSFER, transfer.name, transfer.start, time.time())

    def close_step(self, index: int, scheme: str) -> None:
        """Ends the step."""
        end = time.time()
        step = Step(
            rank=self._rank,
            index=index,
            start=self._start,
            end=end,
            scheme=scheme,
            intervals=tuple(sorted(self._intervals, key=lambda interval: interval.start)),
        )
        self._intervals = []
        self._start = end
        self._steps.append(step)
        for callback in self.on_step:
            callback(step)

    def restart(self) -> None:
        """What passed since the last step belongs to no step: an evaluation, or measuring the links."""
        self._intervals = []
        self._start = self._last_end = time.time()

    @property
    def timeline(self) -> Timeline:
        """The steps that are kept."""
        return Timeline(steps=tuple(self._steps))
