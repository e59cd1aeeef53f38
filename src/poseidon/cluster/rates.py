"""What a group of ranks has at hand: how long transfers take by size, and what computing costs. Data for cost faces.

Comes in: a probe's curves, or the plain figures of a cluster that somebody described. Goes out: `Rates` for one group
of ranks, from which every scheme's cost, the rule and the simulator are computed.
"""

from typing import Self

from pydantic import Field, model_validator

from poseidon.artifact import MOST_RANKS, Value
from poseidon.cluster.curve import Curve
from poseidon.units import Bandwidth, FlopsPerSecond, Seconds

UNLIMITED = 1e30
"""Stands for what is not there to limit anything; JSON knows no infinity."""


class HostRates(Value):
    """One host of the group."""

    name: str = "host"
    num_ranks: int = Field(default=1, ge=1)
    compute_scale: float = Field(default=1.0, gt=0)
    """How many times the profile's seconds a rank here needs, while all ranks of the group compute."""
    send_bandwidth: Bandwidth = UNLIMITED
    """Bytes per second that its link can send; all its ranks together."""
    receive_bandwidth: Bandwidth = UNLIMITED
    """Bytes per second that its link can receive; all its ranks together."""


class Rates(Value):
    """What the ranks of one group have at hand while all of them are busy."""

    world_size: int = Field(ge=1, le=MOST_RANKS)
    hosts: tuple[HostRates, ...] = ()
    """Host by host, in the order of ranks; one host per rank, all equal, where nothing is said."""
    all_reduce: dict[int, Curve]
    """Over all ranks, by the number of connections to each peer. Size 2(P-1)/P of the tensor."""
    exchange: dict[int, Curve]
    """Every rank to every other, point to point, by the number of connections. Size: what a rank sends to all peers."""
    inner: Curve | None = None
    """All-reduce among the ranks of one host, all hosts at once; None where a host has one rank."""
    outer: Curve | None = None
    """All-reduce among one rank of each host; None where a host has one rank."""
    flops_per_s: FlopsPerSecond = Field(default=UNLIMITED, gt=0)
    """Rate at which a rank rebuilds a gradient from factors; `UNLIMITED` makes the rebuild free, as in the paper."""
    memory_bandwidth: Bandwidth = UNLIMITED
    """Bytes per second that a rank reads and writes when it copies gradients or fills a rebuilt one."""
    compute_slowdown: float = Field(default=1.0, ge=1)
    """Computing takes so many times as long while a transfer is under way at the rank's host."""
    transfer_slowdown: float = Field(default=1.0, ge=1)
    """A transfer takes so many times as long while its ranks compute."""
    connections: int = Field(default=1, ge=1)
    """Connections to each peer that are used unless a plan says otherwise; the fastest as measured."""

    @model_validator(mode="before")
    @classmethod
    def _equal_hosts(cls, value: object) -> object:
        if isinstance(value, dict) and not value.get("hosts") and isinstance(value.get("world_size"), int):
            return {**value, "hosts": tuple(HostRates(name=f"host{i}") for i in range(value["world_size"]))}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(host.num_ranks for host in self.hosts) != self.world_size:
            raise ValueError(f"the hosts have not {self.world_size} ranks together")
        for what, curves in (("all_reduce", self.all_reduce), ("exchange", self.exchange)):
            if self.connections not in curves:
                raise ValueError(f"{what} has no curve for {self.connections} connections")
        return self

    @classmethod
    def of(
        cls,
        *,
        world_size: int,
        all_reduce_bandwidth: float,
        exchange_bandwidth: float,
        latency: Seconds = 0.0,
        flops_per_s: float = UNLIMITED,
        connections: int = 1,
    ) -> Self:
        """Straight lines in place of curves.

        Args:
            world_size: How many ranks.
            all_reduce_bandwidth: Bytes per second that a rank sends in an all-reduce.
            exchange_bandwidth: Bytes per second that a rank sends while every rank sends to every other.
            latency: Seconds of a message of no length, in an exchange.
            flops_per_s: Rate of the rebuild.
            connections: With which these were reached.
        """
        return cls(
            world_size=world_size,
            all_reduce={connections: Curve.line(latency=latency, bandwidth=all_reduce_bandwidth)},
            exchange={connections: Curve.line(latency=latency, bandwidth=exchange_bandwidth)},
            flops_per_s=min(flops_per_s, UNLIMITED),
            connections=connections,
        )

    @classmethod
    def equal(cls, *, world_size: int, bandwidth: float, flops_per_s: float = UNLIMITED, latency: float = 0.0) -> Self:
        """One bandwidth for every kind of transfer; the paper's assumptions when the other arguments are left out."""
        return cls.of(
            world_size=world_size,
            all_reduce_bandwidth=bandwidth,
            exchange_bandwidth=bandwidth,
            flops_per_s=flops_per_s,
            latency=latency,
        )

    @property
    def all_reduce_bandwidth(self) -> float:
        """Bytes per second that a rank sends in a large all-reduce."""
        return self.all_reduce[self.connections].bandwidth

    @property
    def exchange_bandwidth(self) -> float:
        """Bytes per second that a rank sends in a large exchange."""
        return self.exchange[self.connections].bandwidth

    @property
    def latency(self) -> float:
        """Seconds of the smallest exchange."""
        return self.exchange[self.connections].latency

    @property
    def num_hosts(self) -> int:
        """How many hosts."""
        return len(self.hosts)

    @property
    def ranks_per_host(self) -> int:
        """Of the host with the most."""
        return max(host.num_ranks for host in self.hosts)

    def with_connections(self, connections: int) -> Self:
        """The same group with another number of connections, which must have been measured."""
        return self.model_validate({**dict(self), "connections": connections})
