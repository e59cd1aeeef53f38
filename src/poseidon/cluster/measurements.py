"""What a probe found out between the ranks of a cluster, as a cluster's file keeps it; data only."""

from pydantic import Field

from poseidon.artifact import Value
from poseidon.cluster.curve import Curve
from poseidon.units import Bandwidth, Seconds


class Interface(Value):
    """The network card over which a host's ranks talk to the others."""

    name: str
    address: str
    """Under which the others reach it."""
    reason: str
    """Why this one."""


class PairRate(Value):
    """One direction between two hosts, while no other pair uses either of them."""

    sender: str
    receiver: str
    latency: Seconds = Field(ge=0)
    """Half of a median round trip of a message without content."""
    bandwidth: Bandwidth = Field(gt=0)
    """Payload bytes per second of one large transfer."""


class Measurements(Value):
    """Seconds of collectives by size, over all ranks of the cluster together, and what disturbs what."""

    all_reduce: dict[int, Curve]
    """By the number of connections to each peer; size 2(P-1)/P of the tensor, as a rank sends it."""
    exchange: dict[int, Curve]
    """Every rank to every other, by the number of connections; size: what a rank sends to all peers together."""
    inner: Curve | None = None
    """All-reduce among the ranks of one host, all hosts at once; None where a host has one rank."""
    outer: Curve | None = None
    """All-reduce among one rank of each host; None where a host has one rank."""
    broadcast: Curve | None = None
    """From rank 0 to all others; size: the tensor. For the record: no scheme uses it."""
    all_gather: Curve | None = None
    """Size (P-1) times a rank's tensor. For the record: no scheme uses it."""
    connections: int = Field(default=1, ge=1)
    """The fastest number of connections for large all-reduces."""
    compute_slowdown: float = Field(default=1.0, ge=1)
    """Computing takes so many times as long while all ranks are in an all-reduce."""
    transfer_slowdown: float = Field(default=1.0, ge=1)
    """An all-reduce takes so many times as long while all ranks compute."""
    endpoint_bandwidth: Bandwidth | None = None
    """Bytes per second that a rank can send and receive at once when no link limits it, while all ranks do so."""
    pairs: tuple[PairRate, ...] = ()
    """Every ordered pair of hosts."""
    notes: tuple[str, ...] = ()
    """What a reader should know: links below their siblings, names that lead to loopback."""


def rounded(value: float) -> float:
    """As many digits as a measurement means, so that its file can be read."""
    return float(f"{value:.4e}")
