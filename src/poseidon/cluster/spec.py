"""The hosts of a cluster and their links, as a person writes them down; data only.

Comes in: a TOML file, or the options `--hosts`, `--link`, `--cpu` and `--at`. Goes out: a `ClusterSpec`, and the
`LinkChange`s that a link goes through while a command runs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from poseidon.artifact import Artifact, Value
from poseidon.cluster.measurements import Interface, Measurements
from poseidon.errors import ClusterError, ConfigError
from poseidon.units import (
    Bandwidth,
    Bytes,
    Cores,
    FlopsPerSecond,
    Seconds,
    format_bandwidth,
    format_cores,
    parse_bandwidth,
    parse_cores,
    parse_seconds,
)

_PRESETS = Path(__file__).parent / "presets"
_MOST_HOSTS = 250
"""As many as one emulated switch has addresses for."""
_MOST_RANKS_PER_HOST = 256


def preset_names() -> list[str]:
    """The clusters that come with Poseidon."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


class Device(Value):
    """What each rank of a host computes on."""

    flops_per_s: FlopsPerSecond = Field(gt=0)
    """FLOPs per second that one rank's device reaches on large matrix products while no other rank computes."""
    name: str = ""
    """The processor or the GPU."""
    threads: int | None = Field(default=None, ge=1)
    """With which a rank computes."""
    memory_bandwidth: Bandwidth | None = None
    """Bytes per second read and written when one rank copies large tensors while no other does."""
    memory_num_bytes: Bytes | None = Field(default=None, gt=0)
    """Bytes that one rank may use: its share of the host's memory, or the GPU's."""
    flops_per_s_by_busy: dict[int, FlopsPerSecond] = Field(default_factory=dict)
    """The same as `flops_per_s`, by how many ranks of the cluster compute at once: emulated hosts share cores."""
    memory_bandwidth_by_busy: dict[int, Bandwidth] = Field(default_factory=dict)
    """The same as `memory_bandwidth`, by how many ranks of the cluster copy at once."""

    def flops_per_s_of(self, num_busy: int) -> float:
        """FLOPs per second of a rank while so many ranks of the cluster compute."""
        return _by_busy(self.flops_per_s, self.flops_per_s_by_busy, num_busy)

    def memory_bandwidth_of(self, num_busy: int) -> float | None:
        """Bytes per second that a rank copies while so many ranks of the cluster do; None where nobody said."""
        if self.memory_bandwidth is None:
            return None
        return _by_busy(self.memory_bandwidth, self.memory_bandwidth_by_busy, num_busy)


def _by_busy(alone: float, by_busy: dict[int, float], num_busy: int) -> float:
    """Seconds per unit of work on a line between the counts that were measured; beyond the last as the last."""
    known = {1: alone, **by_busy}
    below = max(n for n in known if n <= num_busy)
    above = min((n for n in known if n >= num_busy), default=below)
    if above == below:
        return known[below]
    share = (num_busy - below) / (above - below)
    return 1.0 / ((1 - share) / known[below] + share / known[above])


class Link(Value):
    """The cable between a host and the switch. A plain `"1Gbit/s"` stands for that rate in both directions."""

    up: Bandwidth
    """Bytes per second from the host to the switch."""
    down: Bandwidth
    """Bytes per second from the switch to the host."""
    latency: Seconds = Field(default=0.0, ge=0)
    """Seconds that a message of no length takes from host to host over this link; described, not emulated."""

    @model_validator(mode="before")
    @classmethod
    def _both_directions(cls, value: Any) -> Any:
        return {"up": value, "down": value} if isinstance(value, str | int | float) else value

    @classmethod
    def symmetric(cls, bandwidth: float | str) -> Self:
        """The same bytes per second in both directions."""
        return cls.model_validate(bandwidth)

    def __str__(self) -> str:
        """The rate as people write it, both where they differ."""
        up, down = format_bandwidth(self.up), format_bandwidth(self.down)
        return up if up == down else f"{up} up, {down} down"


class Host(Value):
    """One machine of the cluster."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)
    """What output lines, errors and options call it."""
    link: Link
    """Its only way to the other hosts."""
    num_ranks: int = Field(default=1, ge=1, le=_MOST_RANKS_PER_HOST)
    """Processes that train on it; they share its link."""
    device: Device | None = None
    """What each of its ranks computes on; None where nobody said."""
    cpu: Cores | None = None
    """Processor cores that all its processes together may use where it is emulated; None for no limit."""
    inner_bandwidth: Bandwidth | None = None
    """Bytes per second that a rank sends to another of the same host; None where nobody said."""
    interface: Interface | None = None
    """Over which card it was probed."""


class ClusterSpec(Artifact):
    """Hosts around one switch. Ranks are counted host by host, in the order given here."""

    version: int = 1
    hosts: tuple[Host, ...] = Field(min_length=1, max_length=_MOST_HOSTS)
    measured: Measurements | None = None
    """What `poseidon probe` found between all ranks of these hosts; None where nobody probed."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two hosts are named {twice[0]!r}: give each host its own name")
        return self

    @classmethod
    def uniform(cls, *, num_hosts: int, bandwidth: float | str, num_ranks: int = 1) -> Self:
        """`host0`, `host1`, … with equal links.

        Args:
            num_hosts: How many.
            bandwidth: Bytes per second, or text such as `1Gbit/s`, in each direction of each link.
            num_ranks: Ranks on each host.
        """
        link = Link.symmetric(bandwidth)
        return cls(hosts=tuple(Host(name=f"host{i}", link=link, num_ranks=num_ranks) for i in range(num_hosts)))

    @classmethod
    def load_preset(cls, name: str) -> Self:
        """A cluster that comes with Poseidon, of `preset_names()`.

        Raises:
            ConfigError: There is none of that name.
        """
        if name not in preset_names():
            raise ConfigError(f"no preset is named {name!r}: there are {', '.join(preset_names())}")
        return cls.load(_PRESETS / f"{name}.toml")

    @classmethod
    def find(cls, file_or_preset: str | Path) -> Self:
        """A cluster from its file, or a preset where a bare name is given and no file is called so.

        Raises:
            ConfigError: The file cannot be used, or there is neither.
        """
        path = Path(file_or_preset)
        if path.name != str(file_or_preset) or path.suffix in (".toml", ".json") or path.exists():
            return cls.load(path)
        return cls.load_preset(str(file_or_preset))

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return sum(host.num_ranks for host in self.hosts)

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            ClusterError: No host is named so.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise ClusterError(f"no host is named {name!r}: this cluster has {', '.join(h.name for h in self.hosts)}")

    def with_link(self, name: str, link: Link) -> Self:
        """The same cluster with another link at one host.

        Raises:
            ClusterError: No host is named so.
        """
        changed = self.host(name).model_copy(update={"link": link})
        return self.model_copy(update={"hosts": tuple(changed if h.name == name else h for h in self.hosts)})

    def with_cpu(self, name: str, cores: float) -> Self:
        """The same cluster with a limit on the processor time of one emulated host.

        Raises:
            ClusterError: No host is named so.
        """
        changed = self.host(name).model_copy(update={"cpu": cores})
        return self.model_copy(update={"hosts": tuple(changed if h.name == name else h for h in self.hosts)})


class LinkChange(Value):
    """What happens to one link at one moment of a run."""

    after: Seconds = Field(ge=0)
    """Seconds since the command was started."""
    host: str
    action: Literal["set", "cut", "cut-up", "cut-down", "restore"]
    """A new rate; no packet from now on in either direction, from the host or to it; or the rate from before."""
    bandwidth: Bandwidth | None = None
    """Bytes per second in both directions, for `set`."""

    @model_validator(mode="after")
    def _only_set_has_a_rate(self) -> Self:
        if (self.action == "set") != (self.bandwidth is not None):
            raise ValueError("a bandwidth belongs to 'set', and to 'set' only")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `5s:host2=10Mbit/s`, `9s:host2=cut`, `9s:host2=cut-up` or `12s:host2=restore`.

        Raises:
            ConfigError: The text does not have this form.
        """
        when, colon, change = text.partition(":")
        host, equals, what = change.partition("=")
        if not (colon and equals and host):
            raise ConfigError(f"cannot read {text!r} as a change of a link: write it like '5s:host2=10Mbit/s'")
        after = parse_seconds(when)
        if what in ("cut", "cut-up", "cut-down", "restore"):
            return cls.model_validate({"after": after, "host": host, "action": what})
        return cls(after=after, host=host, action="set", bandwidth=parse_bandwidth(what))


def parse_links(texts: Iterable[str], *, num_hosts: int, num_ranks: int = 1, default: str = "1Gbit/s") -> ClusterSpec:
    """A cluster from options: `1Gbit/s` sets every link, `host3=100Mbit/s` one of them, whatever the order.

    Args:
        texts: The options as given.
        num_hosts: Hosts, named `host0` and so on.
        num_ranks: Ranks on each host.
        default: Rate of the links that no option speaks of.

    Raises:
        ConfigError: A rate cannot be read, is given twice, or there are no hosts.
        ClusterError: An option names a host that is not there.
    """
    if not 1 <= num_hosts <= _MOST_HOSTS or num_ranks < 1:
        raise ConfigError(
            f"cannot make {num_hosts} hosts with {num_ranks} ranks each: 1 to {_MOST_HOSTS} hosts, 1 rank or more"
        )
    links: dict[str, Link] = {}
    for text in texts:
        host, _, rate = text.rpartition("=")
        if host in links:
            raise ConfigError(
                f"cannot use {text!r}: the link of {host or 'every host'} is already set to {links[host]}"
            )
        links[host] = Link.symmetric(parse_bandwidth(rate))
    everyone = links.pop("", None) or Link.symmetric(default)
    spec = ClusterSpec.uniform(num_hosts=num_hosts, bandwidth=everyone.up, num_ranks=num_ranks)
    for host, link in links.items():
        spec = spec.with_link(host, link)
    return spec


def limit_cpus(spec: ClusterSpec, texts: Iterable[str]) -> ClusterSpec:
    """The same cluster, its processor time limited by options: `40%` of a core for each host, `host3=10%` for one.

    Raises:
        ConfigError: A share cannot be read, or is given twice.
        ClusterError: An option names a host that is not there.
    """
    limits: dict[str, float] = {}
    for text in texts:
        host, _, share = text.rpartition("=")
        if host in limits:
            raise ConfigError(
                f"cannot use {text!r}: {host or 'every host'} already has {format_cores(limits[host])} of a core"
            )
        limits[host] = parse_cores(share)
    if (everyone := limits.pop("", None)) is not None:
        limits = {host.name: everyone for host in spec.hosts} | limits
    for host, cores in limits.items():
        spec = spec.with_cpu(host, cores)
    return spec
