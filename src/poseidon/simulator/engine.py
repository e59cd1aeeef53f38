"""Runs operations against the clock: event driven, deterministic, pure.

A processor does one operation at a time. Transfers over the same links between the same ranks go over the same
connections, where bytes keep their order: one after the other, each round of a collective behind what was sent since
the round before. Those over different connections share a link in proportion to what each would take alone. When what
is under way changes, the rates of what it disturbs change, and with them the times at which they will end. The same
operations in the same order give the same times, whatever else; nothing here is random, and nothing depends on the
order of a set.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from poseidon.errors import InfeasibleError
from poseidon.simulator.ops import NOWHERE, Machine, Op, TransferOp


def run(ops: Sequence[Op], machine: Machine) -> float:
    """Simulates all operations and leaves in each when it started and ended.

    Args:
        ops: All of them; what they come after is among them.
        machine: What they run on.

    Returns:
        Seconds until the last one has ended.

    Raises:
        InfeasibleError: Operations wait for one another in a circle.
    """
    engine = _Engine(machine)
    engine.run(ops)
    if engine.num_ended != len(ops):
        stuck = next(op for op in ops if op.end < 0)
        raise InfeasibleError(
            f"cannot simulate {len(ops)} operations: {stuck.activity} of {stuck.name!r} waits for itself, or for "
            "something that is not among them"
        )
    return engine.now


class _Route:
    """The connections over the same links between the same ranks."""

    def __init__(self, links: tuple[int, ...], processors: tuple[int, ...]) -> None:
        self.links = links
        self.processors = processors
        self.queue: deque[TransferOp] = deque()
        """Pieces of transfers in the order in which they were sent; the first is on the wire."""
        self.num_under_way = 0
        """Transfers that have started and not ended, those in their latency among them."""
        self.left = 0.0
        """Seconds that the piece on the wire still needs on an idle link."""
        self.rate = 1.0
        self.since = 0.0
        self.version = 0


class _Engine:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._slowdown = machine.compute_slowdown or (1.0,) * machine.num_processors
        self._current: list[Op | None] = [None] * machine.num_processors
        self._queues: list[deque[Op]] = [deque() for _ in range(machine.num_processors)]
        self._channels: list[deque[TransferOp]] = [deque() for _ in range(machine.num_channels)]
        self._in_channel = [0] * machine.num_channels
        self._usage = [0.0] * machine.num_links
        self._routes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Route] = {}
        self._routes_at = [0] * machine.num_processors
        """By processor: over how many routes something is under way there."""
        self._events: list[tuple[float, int, int, Op | _Route]] = []
        self._serial = count()
        self._ready: deque[Op] = deque()
        self._network_changed = False
        self._disturbed: dict[int, None] = {}
        """Processors at which the first transfer has started or the last one has ended."""
        self._was_computing = [False] * machine.num_processors
        self._touched: dict[int, None] = {}
        """Processors that have ended or started something at this moment."""
        self.now = 0.0
        self.num_ended = 0

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            op.num_pending = len(op.after)
            for before in op.after:
                before.waiters.append(op)
        self._ready.extend(op for op in ops if not op.num_pending)
        self._settle()
        events = self._events
        while events:
            self.now = events[0][0]
            while events and events[0][0] <= self.now:
                _, _, version, what = heappop(events)
                if version != what.version:
                    continue
                if isinstance(what, _Route):
                    self._cross(what)
                elif isinstance(what, TransferOp):
                    self._arrive(what)
                else:
                    self._end(what)
            self._settle()

    def _settle(self) -> None:
        """Starts all that can start now, then gives everything that was disturbed its new rate."""
        while self._ready:
            op = self._ready.popleft()
            if isinstance(op, TransferOp):
                self._take_channel(op)
            elif op.processor == NOWHERE:
                self._start(op)
            elif self._current[op.processor] is None:
                self._compute(op)
            else:
                self._queues[op.processor].append(op)
        self._notice_computing()
        if self._network_changed:
            self._network_changed = False
            for route in self._routes.values():
                if route.queue:
                    self._set_route_rate(route)
        if self._disturbed:
            for processor in self._disturbed:
                current = self._current[processor]
                if current is not None:
                    self._set_rate(current, self._compute_rate(processor))
            self._disturbed.clear()

    def _notice_computing(self) -> None:
        """A processor that has begun or ceased to compute changes the rate of what is under way there."""
        if self._machine.transfer_slowdown != 1.0:
            for processor in self._touched:
                computing = self._current[processor] is not None
                if computing != self._was_computing[processor] and self._routes_at[processor]:
                    self._network_changed = True
                self._was_computing[processor] = computing
        self._touched.clear()

    # Computing

    def _compute(self, op: Op) -> None:
        if op.seconds <= 0.0:
            self._start(op)
            return
        self._current[op.processor] = op
        self._touched[op.processor] = None
        op.start = op.since = self.now
        op.rate = self._compute_rate(op.processor)
        self._schedule(op)

    def _compute_rate(self, processor: int) -> float:
        return 1.0 / self._slowdown[processor] if self._routes_at[processor] else 1.0

    def _start(self, op: Op) -> None:
        """What takes no time, or needs no resource."""
        op.start = op.since = self.now
        if op.seconds <= 0.0:
            self._end(op)
        else:
            self._schedule(op)

    def _set_rate(self, op: Op, rate: float) -> None:
        if rate == op.rate:
            return
        op.left = max(0.0, op.left - (self.now - op.since) * op.rate)
        op.since, op.rate = self.now, rate
        op.version += 1
        self._schedule(op)

    def _schedule(self, op: Op) -> None:
        heappush(self._events, (self.now + op.left / op.rate, next(self._serial), op.version, op))

    def _end(self, op: Op) -> None:
        op.end = self.now
        self.num_ended += 1
        if op.processor != NOWHERE:
            if self._current[op.processor] is op:
                self._current[op.processor] = None
                self._touched[op.processor] = None
            queue = self._queues[op.processor]
            if queue and self._current[op.processor] is None:
                self._compute(queue.popleft())
        for waiter in op.waiters:
            waiter.num_pending -= 1
            if not waiter.num_pending:
                self._ready.append(waiter)

    # Transfers

    def _take_channel(self, transfer: TransferOp) -> None:
        channel = transfer.channel
        if channel == NOWHERE:
            self._begin(transfer)
        elif self._in_channel[channel] < self._machine.slots:
            self._in_channel[channel] += 1
            self._begin(transfer)
        else:
            self._channels[channel].append(transfer)

    def _begin(self, transfer: TransferOp) -> None:
        transfer.start = self.now
        if transfer.seconds <= 0.0:
            self._leave_channel(transfer)
            self._end(transfer)
            return
        route = self._route(transfer)
        route.num_under_way += 1
        if route.num_under_way == 1:
            self._note_route(route, 1)
        self._send(route, transfer)

    def _route(self, transfer: TransferOp) -> _Route:
        key = (tuple(link for link, _ in transfer.shares), transfer.processors)
        return self._routes.get(key) or self._routes.setdefault(key, _Route(*key))

    def _send(self, route: _Route, transfer: TransferOp) -> None:
        """The next piece goes to the end of the queue."""
        route.queue.append(transfer)
        if len(route.queue) == 1:
            self._put_on_wire(route)

    def _put_on_wire(self, route: _Route) -> None:
        transfer = route.queue[0]
        route.left = (transfer.seconds - transfer.latency_seconds) / transfer.pieces
        route.since = self.now
        for link, share in transfer.shares:
            self._usage[link] += share
        self._network_changed = True  # which sets the route's rate and when the piece has crossed

    def _cross(self, route: _Route) -> None:
        """The piece on the wire has crossed; after its latency the transfer goes on, or ends."""
        transfer = route.queue.popleft()
        route.version += 1
        for link, share in transfer.shares:
            self._usage[link] -= share
        self._network_changed = True
        transfer.pieces_left -= 1
        if route.queue:
            self._put_on_wire(route)
        elif not any(one.queue for one in self._routes.values()):
            self._usage = [0.0] * len(self._usage)  # no rounding error outlives a quiet moment
        latency = transfer.latency_seconds / transfer.pieces
        if latency:
            latency *= self._slowdown_of(route)
            heappush(self._events, (self.now + latency, next(self._serial), transfer.version, transfer))
        else:
            self._arrive(transfer)

    def _arrive(self, transfer: TransferOp) -> None:
        """A piece is there."""
        route = self._route(transfer)
        if transfer.pieces_left:
            self._send(route, transfer)
            return
        route.num_under_way -= 1
        if not route.num_under_way:
            self._note_route(route, -1)
        self._leave_channel(transfer)
        self._end(transfer)

    def _note_route(self, route: _Route, change: int) -> None:
        for processor in route.processors:
            self._routes_at[processor] += change
            if self._routes_at[processor] == max(0, change):
                self._disturbed[processor] = None

    def _leave_channel(self, transfer: TransferOp) -> None:
        if transfer.channel != NOWHERE:
            waiting = self._channels[transfer.channel]
            if waiting:
                self._begin(waiting.popleft())
            else:
                self._in_channel[transfer.channel] -= 1

    def _slowdown_of(self, route: _Route) -> float:
        slowdown = self._machine.transfer_slowdown
        return slowdown if slowdown != 1.0 and any(self._current[p] is not None for p in route.processors) else 1.0

    def _set_route_rate(self, route: _Route) -> None:
        usage = max((self._usage[link] for link in route.links), default=0.0)
        route.left = max(0.0, route.left - (self.now - route.since) * route.rate)
        route.since = self.now
        route.rate = (1.0 / usage if usage > 1.0 else 1.0) / self._slowdown_of(route)
        route.version += 1
        heappush(self._events, (self.now + route.left / route.rate, next(self._serial), route.version, route))
