"""The few numbers that decide between schemes: what the link moves and what a rank computes, as measured."""

from pydantic import Field

from poseidon.artifact import Value
from poseidon.units import Bandwidth, FlopsPerSecond, Seconds


class Rates(Value):
    """What one rank of a group of equal ranks has at hand while all of them are busy."""

    world_size: int = Field(ge=1)
    all_reduce_bandwidth: Bandwidth
    """Bytes per second that a rank sends while an all-reduce of several MiB is under way."""
    exchange_bandwidth: Bandwidth
    """Bytes per second that a rank sends while every rank sends to every other, point to point."""
    latency: Seconds = 0.0
    """Seconds that a message of no length takes."""
    flops_per_s: FlopsPerSecond = Field(gt=0)
    """Rate at which a rank rebuilds a gradient from factors; infinity makes the rebuild free, as the paper has it."""

    connections: int = Field(default=1, ge=1)
    """Connections to each peer with which the all-reduce bandwidth was reached."""

    @classmethod
    def equal(
        cls, *, world_size: int, bandwidth: float, flops_per_s: float = float("inf"), latency: float = 0.0
    ) -> "Rates":
        """One bandwidth for every kind of transfer; the paper's assumptions when the other arguments are left out."""
        return cls(
            world_size=world_size,
            all_reduce_bandwidth=bandwidth,
            exchange_bandwidth=bandwidth,
            latency=latency,
            flops_per_s=flops_per_s,
        )
