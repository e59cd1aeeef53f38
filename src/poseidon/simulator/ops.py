"""What a simulation consists of: operations that wait for one another, and the resources that they need.

Everything refers to everything else by reference; nothing is looked up by name. An operation is built once, simulated
once, and then holds when it started and ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from poseidon.timeline import Activity

NOWHERE = -1
"""The processor of what needs none."""


class Op:
    """One piece of work.

    Args:
        name: The layer, bucket or transfer.
        activity: What the timeline calls it.
        seconds: With all its resources for itself; zero for a mere point in time.
        after: What must have ended before.
        processor: What computes it, by its number; one operation at a time, in the order in which they become ready.
    """

    __slots__ = (
        "activity",
        "after",
        "end",
        "left",
        "name",
        "num_pending",
        "processor",
        "rate",
        "seconds",
        "since",
        "start",
        "version",
        "waiters",
    )

    def __init__(
        self,
        name: str,
        activity: Activity,
        seconds: float = 0.0,
        after: Iterable["Op"] = (),
        processor: int = NOWHERE,
    ) -> None:
        self.name = name
        self.activity = activity
        self.seconds = seconds
        self.after = tuple(after)
        self.processor = processor
        self.start = 0.0
        self.end = -1.0
        """Below zero until it has ended."""
        # The engine's own, while it runs:
        self.left = seconds
        self.rate = 1.0
        self.since = 0.0
        self.version = 0
        self.num_pending = 0
        self.waiters: list[Op] = []


class TransferOp(Op):
    """A message between hosts.

    Args:
        name: What the timeline calls it.
        wire_seconds: On a link that is idle.
        latency_seconds: In which it is under way without using the link.
        after: What must have ended before.
        pieces: In how many rounds it goes: each waits at the link behind what was sent meanwhile.
        shares: Of each link side, by its number, the share of its rate that it takes while it is on the wire.
        processors: Those of the ranks that take part: a transfer slows their computing, and the other way round.
        channel: Transfers of one channel start in the order of becoming ready, at most `Machine.slots` at a time;
            `NOWHERE` for those that start at once.
        num_bytes: Payload that one rank sends.
    """

    __slots__ = ("channel", "latency_seconds", "num_bytes", "pieces", "pieces_left", "processors", "shares")

    def __init__(
        self,
        name: str,
        wire_seconds: float,
        after: Iterable[Op] = (),
        *,
        latency_seconds: float = 0.0,
        pieces: int = 1,
        shares: tuple[tuple[int, float], ...] = (),
        processors: tuple[int, ...] = (),
        channel: int = NOWHERE,
        num_bytes: float = 0.0,
    ) -> None:
        super().__init__(name, Activity.TRANSFER, wire_seconds + latency_seconds, after)
        self.latency_seconds = latency_seconds
        self.pieces = pieces
        self.pieces_left = pieces
        self.shares = shares
        self.processors = processors
        self.channel = channel
        self.num_bytes = num_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How many resources there are, and how they disturb one another."""

    num_processors: int
    num_links: int
    """Sending and receiving sides count each for itself."""
    num_channels: int = 0
    slots: int = 2
    """Transfers of one channel that are under way at a time: gloo runs collectives on two threads."""
    compute_slowdown: tuple[float, ...] = field(default=())
    """By processor: computing takes so many times as long while a transfer is under way there; 1 if left out."""
    transfer_slowdown: float = 1.0
    """A transfer takes so many times as long while one of its processors computes."""
