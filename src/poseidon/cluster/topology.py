"""From a cluster to the rates of a group of its ranks: measured curves where there are some, else lines from links.

Comes in: a `ClusterSpec`, and what-ifs (fewer hosts, other links). Goes out: `Rates` for schemes, rules and the
simulator; the levels at which ranks sit together; the slowest link and host.
"""

import statistics
from collections.abc import Sequence
from typing import Literal, Protocol

from poseidon.artifact import Value
from poseidon.cluster.curve import Curve
from poseidon.cluster.measurements import Measurements
from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.cluster.spec import ClusterSpec, Host, Link
from poseidon.errors import ClusterError
from poseidon.units import format_bandwidth, format_flops_per_s, parse_bandwidth

ALL_REDUCE_EFFICIENCY = 0.95
"""Share of the link's rate that gloo's ring all-reduce reaches, measured over four hosts at 1 Gbit/s."""
EXCHANGE_EFFICIENCY = 0.75
"""Share of the link's rate that gloo's point-to-point messages reach when every rank sends to every other, likewise."""
LATENCY = 50e-6
"""Seconds from host to host where nobody said: a round trip between two machines on one switch takes about twice that.
"""
INNER_BANDWIDTH = parse_bandwidth("8Gbit/s")
"""Bytes per second that a rank sends to another of its host over gloo's loopback, where nobody said."""
BELOW_SIBLINGS = 0.7
"""A link or device below this share of the median of the others is named as slow."""


class ComputeSpeed(Protocol):
    """What a profile says about the device that it was measured on."""

    @property
    def flops_per_s(self) -> float:
        """On large matrix products."""

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second when large tensors are copied."""


def rates_of(
    cluster: ClusterSpec,
    *,
    device: ComputeSpeed | None = None,
    num_hosts: int | None = None,
    bandwidth: float | None = None,
) -> Rates:
    """What the ranks of the first hosts of a cluster have at hand when they train together.

    Args:
        cluster: Described or probed.
        device: What the profile was measured on, from which `HostRates.compute_scale` follows; a host of which nobody
            said what it computes on is taken to be alike. None where the profile's seconds hold anywhere, as those of
            virtual compute: then nothing computes that could disturb transfers either.
        num_hosts: How many hosts take part; all if None.
        bandwidth: Bytes per second in both directions of every link, instead of what they have.

    Raises:
        ClusterError: The cluster has not so many hosts.
    """
    part = _Part(cluster, len(cluster.hosts) if num_hosts is None else num_hosts, bandwidth)
    all_reduce, exchange = part.all_reduce(), part.exchange()
    measured = cluster.measured
    return Rates(
        world_size=part.world_size,
        hosts=tuple(_host_rates(host, link, device, part.world_size) for host, link in part.linked),
        all_reduce=all_reduce,
        exchange=exchange,
        inner=part.inner() if part.most_ranks > 1 else None,
        outer=part.outer() if part.most_ranks > 1 else None,
        flops_per_s=min(_flops_per_s(host, device, part.world_size) for host in part.hosts),
        memory_bandwidth=min(_memory_bandwidth(host, device, part.world_size) for host in part.hosts),
        compute_slowdown=part.slowdown(measured.compute_slowdown) if measured and device else 1.0,
        transfer_slowdown=part.slowdown(measured.transfer_slowdown) if measured and device else 1.0,
        connections=measured.connections if measured and measured.connections in all_reduce else 1,
    )


class _Part:
    """The hosts of a cluster that take part, with the links that they are to have."""

    def __init__(self, cluster: ClusterSpec, num_hosts: int, bandwidth: float | None) -> None:
        if not 1 <= num_hosts <= len(cluster.hosts):
            raise ClusterError(
                f"cannot tell how fast {num_hosts} hosts would be: this cluster has {len(cluster.hosts)}, from 1 on"
            )
        self.cluster = cluster
        self.hosts: Sequence[Host] = cluster.hosts[:num_hosts]
        if len(cluster.hosts) == 1:
            bandwidth = None  # nothing crosses its link
        given = None if bandwidth is None else Link.symmetric(bandwidth)
        self.linked = [(host, given or host.link) for host in self.hosts]
        self.world_size = sum(host.num_ranks for host in self.hosts)
        self.most_ranks = max(host.num_ranks for host in self.hosts)
        self.is_one_of_several = num_hosts == 1 < len(cluster.hosts)
        """Whether no link is in use, although the cluster has some."""
        self.link_latency = max(host.link.latency for host in self.hosts) or LATENCY

    @property
    def measured(self) -> Measurements | None:
        return self.cluster.measured

    @property
    def slowest_link(self) -> float:
        """Bytes per second of the slower direction of the slowest link, as it is to be."""
        return min(_slower(link) for _, link in self.linked)

    @property
    def wire_factor(self) -> float:
        """How many times as long a byte takes on the links as they are to be, against those that were measured.

        No link makes the ranks themselves faster than `endpoint_bandwidth`.
        """
        ceiling = (self.measured and self.measured.endpoint_bandwidth) or UNLIMITED
        before = min(_slower(host.link) for host in self.cluster.hosts)
        return min(before, ceiling) / min(self.slowest_link, ceiling)

    def all_reduce(self) -> dict[int, Curve]:
        """The ring sends 2(P-1)/P of the tensor over each link, however many ranks a host has."""
        if self.world_size == 1:
            return {1: _nothing()}
        if self.is_one_of_several:
            return {1: self.inner()}
        if self.measured is None:
            return {1: self.ring(self.world_size, ALL_REDUCE_EFFICIENCY * self.slowest_link)}
        rounds = (self.world_size - 1) / (self.cluster.num_ranks - 1)
        return {n: self.on_the_links(c, latency=rounds) for n, c in self.measured.all_reduce.items()}

    def exchange(self) -> dict[int, Curve]:
        """Of what a host's ranks send, only what goes to other hosts crosses its link."""
        if self.world_size == 1:
            return {1: _nothing()}
        if self.is_one_of_several:
            return {1: Curve.line(latency=self.inner_latency, bandwidth=self.inner_bandwidth)}
        if self.measured is None:
            rate = min(_slower(link) / _crossing(host, self.world_size) for host, link in self.linked)
            return {1: Curve.line(latency=self.link_latency, bandwidth=EXCHANGE_EFFICIENCY * rate)}
        crossing = max(_crossing(host, self.world_size) for host in self.hosts)
        before = max(_crossing(host, self.cluster.num_ranks) for host in self.cluster.hosts)
        share = crossing / before if before else 1.0
        return {n: self.on_the_links(c, share=share) for n, c in self.measured.exchange.items()}

    def inner(self) -> Curve:
        """All-reduce among the ranks of one host."""
        if self.measured and self.measured.inner:
            return self.measured.inner
        rounds = 2 * (self.most_ranks - 1)
        return Curve.line(latency=rounds * self.inner_latency, bandwidth=self.inner_bandwidth)

    def outer(self) -> Curve | None:
        """All-reduce among one rank of each host."""
        if len(self.hosts) == 1:
            return None
        if self.measured is None or self.measured.outer is None:
            return self.ring(len(self.hosts), ALL_REDUCE_EFFICIENCY * self.slowest_link)
        rounds = (len(self.hosts) - 1) / (len(self.cluster.hosts) - 1)
        return self.on_the_links(self.measured.outer, latency=rounds)

    @property
    def inner_bandwidth(self) -> float:
        if self.measured and self.measured.inner:
            return self.measured.inner.bandwidth
        return min(host.inner_bandwidth or INNER_BANDWIDTH for host in self.hosts)

    @property
    def inner_latency(self) -> float:
        if self.measured and self.measured.inner:
            return self.measured.inner.latency / (2 * (self.most_ranks - 1))
        return min(LATENCY, self.link_latency)

    def ring(self, num_members: int, bandwidth: float) -> Curve:
        """A line whose latency is that of the 2(P-1) rounds of a ring."""
        return Curve.line(latency=2 * (num_members - 1) * self.link_latency, bandwidth=bandwidth)

    def on_the_links(self, curve: Curve, *, latency: float = 1.0, share: float = 1.0) -> Curve:
        """A measured curve on the links as they are to be.

        Args:
            curve: Over all ranks of the cluster.
            latency: Rounds, against those that were measured.
            share: Of the bytes that cross a link, against the share that was measured.
        """
        return curve.scaled(latency=latency, wire=self.wire_factor * share)

    def slowdown(self, measured: float) -> float:
        """What bytes on the move cost the processors grows with the bytes per second."""
        return 1.0 + (measured - 1.0) / self.wire_factor


def _host_rates(host: Host, link: Link, device: ComputeSpeed | None, num_busy: int) -> HostRates:
    return HostRates(
        name=host.name,
        num_ranks=host.num_ranks,
        compute_scale=_compute_scale(host, device, num_busy),
        send_bandwidth=link.up,
        receive_bandwidth=link.down,
    )


def _compute_scale(host: Host, device: ComputeSpeed | None, num_busy: int) -> float:
    """Mean of the ratios for arithmetic and for memory: a step is made of both, in parts that no file knows."""
    if device is None or host.device is None:
        return 1.0
    arithmetic = device.flops_per_s / host.device.flops_per_s_of(num_busy)
    memory = host.device.memory_bandwidth_of(num_busy)
    return arithmetic if memory is None else (arithmetic + device.memory_bandwidth / memory) / 2


def _flops_per_s(host: Host, like: ComputeSpeed | None, num_busy: int) -> float:
    if host.device is not None:
        return host.device.flops_per_s_of(num_busy)
    return like.flops_per_s if like else UNLIMITED


def _memory_bandwidth(host: Host, like: ComputeSpeed | None, num_busy: int) -> float:
    if host.device is not None:
        return host.device.memory_bandwidth_of(num_busy) or UNLIMITED
    return like.memory_bandwidth if like else UNLIMITED


def _slower(link: Link) -> float:
    return min(link.up, link.down)


def _crossing(host: Host, world_size: int) -> float:
    """Bytes that cross a host's link for each byte that one rank sends to all peers together."""
    return host.num_ranks * (world_size - host.num_ranks) / (world_size - 1)


def _nothing() -> Curve:
    return Curve.line(latency=0.0, bandwidth=UNLIMITED)


class Level(Value):
    """A way by which ranks reach one another, from the nearest to the farthest."""

    name: Literal["host", "network"]
    size: int
    """How many members it joins: ranks of a host, or hosts."""
    bandwidth: float
    """Bytes per second that a member sends to the next one in a large all-reduce."""


def levels(cluster: ClusterSpec) -> tuple[Level, ...]:
    """Inside the hosts first where they have several ranks, then between the hosts where there are several."""
    part = _Part(cluster, len(cluster.hosts), None)
    found = []
    if part.most_ranks > 1:
        found.append(Level(name="host", size=part.most_ranks, bandwidth=part.inner_bandwidth))
    if (outer := part.outer()) is not None:
        found.append(Level(name="network", size=len(cluster.hosts), bandwidth=outer.bandwidth))
    return tuple(found)


class Slowest(Value):
    """The slowest of several alike."""

    host: str
    value: float
    """Its rate, in base units."""
    typical: float
    """Median of the others; its own where there are none."""

    @property
    def share(self) -> float:
        """Of the typical rate."""
        return self.value / self.typical

    @property
    def stands_out(self) -> bool:
        """Whether it is clearly below the others."""
        return self.share < BELOW_SIBLINGS


class Bottleneck(Value):
    """What limits a cluster: everybody waits for the slowest link and the slowest device."""

    direction: Literal["up", "down"]
    """Of the slowest link."""
    link: Slowest
    """Bytes per second."""
    device: Slowest | None
    """FLOPs per second; None where nobody said."""

    @property
    def stands_out(self) -> bool:
        """Whether link or device is clearly below the others."""
        return self.link.stands_out or (self.device is not None and self.device.stands_out)

    def sentence(self) -> str:
        """The slowest link with its figures, and the slowest device where it is clearly below the others."""
        rate, usual = format_bandwidth(self.link.value), format_bandwidth(self.link.typical)
        way = "from" if self.direction == "up" else "to"
        text = f"the slowest link is the one {way} {self.link.host}: {rate}, the others {usual}"
        if self.device is None or not self.device.stands_out:
            return text
        flops, usual = format_flops_per_s(self.device.value), format_flops_per_s(self.device.typical)
        return f"{text}; the slowest device is that of {self.device.host}: {flops}, the others {usual}"


def bottleneck(cluster: ClusterSpec) -> Bottleneck:
    """The slowest direction of all links and the slowest device, beside the median of the others."""
    up = _slowest([(host.name, host.link.up) for host in cluster.hosts])
    down = _slowest([(host.name, host.link.down) for host in cluster.hosts])
    devices = [(host.name, host.device.flops_per_s) for host in cluster.hosts if host.device]
    return Bottleneck(
        direction="up" if up.value <= down.value else "down",
        link=up if up.value <= down.value else down,
        device=_slowest(devices) if devices else None,
    )


def _slowest(rates: Sequence[tuple[str, float]]) -> Slowest:
    host, value = min(rates, key=lambda one: one[1])
    others = [rate for name, rate in rates if name != host]
    return Slowest(host=host, value=value, typical=statistics.median(others) if others else value)


def slow_links(cluster: ClusterSpec) -> list[str]:
    """In words: which hosts' links are clearly below the others, and which pairs below what both do with others."""
    said = [_slow_host(cluster, host) for host in cluster.hosts] if len(cluster.hosts) > 2 else []
    for pair in cluster.measured.pairs if cluster.measured else ():
        sender, receiver = cluster.host(pair.sender).link, cluster.host(pair.receiver).link
        both = min(sender.up, receiver.down)
        back = min(receiver.up, sender.down)
        rate, name = format_bandwidth(pair.bandwidth), f"{pair.sender} to {pair.receiver}"
        if pair.bandwidth < BELOW_SIBLINGS * both:
            said.append(f"{name} is slow: {rate}, while both move {format_bandwidth(both)} with others")
        elif len(cluster.hosts) == 2 and pair.bandwidth < BELOW_SIBLINGS * back:
            said.append(f"{name} is slow: {rate}, {format_bandwidth(back)} the other way")
    return [text for text in said if text]


def _slow_host(cluster: ClusterSpec, host: Host) -> str:
    others = [other.link for other in cluster.hosts if other.name != host.name]
    parts = []
    for way, rate, usual in (
        ("up", host.link.up, statistics.median(link.up for link in others)),
        ("down", host.link.down, statistics.median(link.down for link in others)),
    ):
        if rate < BELOW_SIBLINGS * usual:
            parts.append(f"{format_bandwidth(rate)} {way}, the others {format_bandwidth(usual)}")
    return f"the link of {host.name} is slow: {'; '.join(parts)}" if parts else ""
