"""Several hosts on this machine: network namespaces joined by a bridge, each link shaped in both directions.

A host may be limited to a part of the processors too.

Comes in: a `ClusterSpec`. Goes out: an `EmulatedCluster`, in whose hosts commands and functions run, and whose links
can be measured, slowed down, cut and restored meanwhile. Nothing appears in the namespace that this process runs in:
the bridge has one of its own.
"""

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

from pyroute2 import IPRoute, NetlinkError

from poseidon.cluster.children import Keeper, spawn
from poseidon.cluster.cpu_quota import make_cpu_group
from poseidon.cluster.link_meter import LinkRates, measure_rate
from poseidon.cluster.namespaces import NetworkNamespace, enter_user_namespace, replace_file, why_no_namespaces
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.errors import ClusterError
from poseidon.units import KIB, MIB, format_bandwidth

__all__ = ["INTERFACE", "EmulatedCluster", "enter_user_namespace", "why_unavailable"]

logger = logging.getLogger(__name__)

INTERFACE = "eth0"
"""The interface of every host."""

_NETWORK = IPv4Network("10.77.0.0/16")
_SWITCH_ADDRESS = str(_NETWORK[-2])
_LOOPBACK_INDEX = 1
_HOSTS_FILE = Path("/etc/hosts")
_MTU = 9000
"""Jumbo frames: TCP payload is 99.3 % of what `tbf` counts, against 95.6 % with 1500 bytes."""
_LARGEST_PACKET = 32 * KIB
"""Segmentation happens at most this far below TCP. It must stay below the smallest burst: `tbf` never lets a packet go
that is larger than its burst, so lowering a rate would block the queue for good."""
_BURST_S = 1e-3
_SMALLEST_BURST = 36 * KIB
_QUEUE_S = 20e-3
_SMALLEST_QUEUE = MIB
"""Holds the first windows of several senders to one host at low rates, so that they are not dropped."""
_NO_QUEUE = 1
"""Bytes: no packet fits into it, so that all are dropped."""
_FASTEST = float(2**32 - 1)
"""Bytes per second that fit into the field of `tbf`."""
_NOT_OPEN = "the emulated hosts are not there yet, or no longer: use the cluster in a with block"

_DIRECTIONS: dict[str, Literal["up", "down", "both"]] = {"cut": "both", "cut-up": "up", "cut-down": "down"}
"""What an action of `LinkChange` cuts."""
_TRY_S = 0.5
_MOST_TRIES = 64

P = ParamSpec("P")
T = TypeVar("T")


def why_unavailable() -> str | None:
    """Why this process cannot emulate hosts, in one line; None where it can.

    An ordinary user's process cannot at first, but may be able to after `enter_user_namespace`.
    """
    reason = why_no_namespaces()
    if reason is not None:
        return f"cannot make network namespaces: {reason}"
    try:
        with EmulatedCluster(ClusterSpec.uniform(num_hosts=1, bandwidth="1Gbit/s")):
            return None
    except ClusterError as error:
        return str(error)


class EmulatedCluster:
    """Hosts of a `ClusterSpec` in network namespaces; a context manager, ready when entered.

    ```python
    with EmulatedCluster(ClusterSpec.uniform(num_hosts=4, bandwidth="1Gbit/s")) as cluster:
        process = cluster.start(["python", "train.py"], host="host0")
        cluster.cut("host2")
    ```

    Methods may be called from any thread. Latency in the specification is not emulated.

    Raises:
        ClusterError: The system does not allow namespaces, or its kernel lacks bridge, veth or tbf; or a host is to
            have a part of the processors, and the system does not allow control groups.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._links = {host.name: host.link for host in spec.hosts}
        self._addresses = {host.name: str(_NETWORK[i + 1]) for i, host in enumerate(spec.hosts)}
        self._spec = spec
        self._cut_one_way: dict[str, set[str]] = {name: set() for name in self._links}
        """Of each host, the directions in which its link drops every packet."""
        self._hosts: dict[str, NetworkNamespace] = {}
        self._cpu_groups: dict[str, Path] = {}
        self._bridge: NetworkNamespace | None = None
        self._open = ExitStack()
        for link in self._links.values():
            _check_rate(link.up)
            _check_rate(link.down)
        if any(link.latency for link in self._links.values()):
            logger.warning("the latency in the cluster's description is not emulated: only rates are")

    @property
    def spec(self) -> ClusterSpec:
        """The hosts and their present links."""
        spec = self._spec
        for name, link in self._links.items():
            spec = spec.with_link(name, link)
        return spec

    def address(self, host: str) -> str:
        """IPv4 address of a host, reachable from the others only."""
        return self._addresses[self._spec.host(host).name]

    def start(
        self,
        command: Sequence[str],
        *,
        host: str,
        env: Mapping[str, str] | None = None,
        output: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host. It is killed, with all its descendants, when the cluster closes.

        Args:
            command: Program and arguments.
            host: Name of the host.
            env: The whole environment; None for this process's own.
            output: Where standard output and error go together, as for `subprocess.Popen`.
            pass_fds: Descriptors that it inherits, beside the three standard ones.
        """
        cgroup, here = self._cpu_groups.get(host), os.getcwd()
        return self._at(host).call(spawn, command, env=env, cwd=here, output=output, pass_fds=pass_fds, cgroup=cgroup)

    def run(self, host: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function in a thread whose sockets are the host's, and returns what it returns."""
        return self._at(host).run(function, *args, **kwargs)

    def set_bandwidth(self, host: str, bandwidth: float, down: float | None = None) -> None:
        """Changes the rate of a link from now on; what is queued stays queued.

        Args:
            host: Name of the host.
            bandwidth: Bytes per second from the host, and to it too unless `down` says otherwise.
            down: Bytes per second to the host.
        """
        link = self._links[self._spec.host(host).name].model_copy(
            update={"up": _check_rate(bandwidth), "down": _check_rate(down or bandwidth)}
        )
        self._links[host] = link
        self._reshape(host)

    def cut(self, host: str, direction: Literal["up", "down", "both"] = "both") -> None:
        """Pulls the host's cable: no packet crosses, connections stay open and silent.

        Args:
            host: Name of the host.
            direction: `up` loses only what the host sends, `down` only what is sent to it.
        """
        if direction == "both":
            self._switch.call(_set_link, self._port(host), "down")
        else:
            self._cut_one_way[self._spec.host(host).name].add(direction)
            self._reshape(host)

    def restore(self, host: str) -> None:
        """Plugs the cable in again, at the rate from before."""
        self._cut_one_way[self._spec.host(host).name].clear()
        self._reshape(host)
        self._switch.call(_set_link, self._port(host), "up")

    def _reshape(self, host: str) -> None:
        link, cut = self._links[host], self._cut_one_way[host]
        self._at(host).call(_shape, INTERFACE, link.up, "change", "up" in cut)
        self._switch.call(_shape, self._port(host), link.down, "change", "down" in cut)

    def listen(self) -> socket.socket:
        """A socket that listens on the switch, at a free port: every host reaches it that is not cut off."""
        return self._switch.run(socket.create_server, (_SWITCH_ADDRESS, 0))

    def start_on_switch(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the switch, which no cut of a host's link separates from the other hosts; see `start`."""
        return self._switch.call(spawn, command, env=env, cwd=os.getcwd(), pass_fds=pass_fds)

    def reachable(self, patience_s: float) -> list[str]:
        """Names of the hosts that reach the switch, both ways, within some seconds; all are tried at the same time."""
        with self.listen() as listener, ThreadPoolExecutor(len(self._hosts)) as threads:
            address = listener.getsockname()
            listener.listen(_MOST_TRIES * len(self._hosts))
            found = threads.map(lambda host: self.run(host, _reaches, address, patience_s), self._hosts)
            return [host for host, reaches in zip(self._hosts, found, strict=True) if reaches]

    def apply(self, change: LinkChange) -> None:
        """Does what a `LinkChange` says, now."""
        logger.info(
            "link of %s: %s", change.host, format_bandwidth(change.bandwidth) if change.bandwidth else change.action
        )
        if change.bandwidth is not None:
            self.set_bandwidth(change.host, change.bandwidth)
        elif change.action == "restore":
            self.restore(change.host)
        else:
            self.cut(change.host, _DIRECTIONS[change.action])

    def measure(self, host: str, *, seconds: float = 0.8) -> LinkRates:
        """Measures the payload rate of one host's link, first up, then down, against the unshaped switch.

        Args:
            host: Name of the host.
            seconds: How long to count in each direction.

        Raises:
            ClusterError: No byte arrives.
        """
        inside, link = self._at(host).run, self._links[host]
        return LinkRates(
            host=host,
            set_up=link.up,
            up=measure_rate(inside, self._switch.run, _SWITCH_ADDRESS, seconds),
            set_down=link.down,
            down=measure_rate(self._switch.run, inside, self.address(host), seconds),
        )

    def __enter__(self) -> Self:
        """Makes the hosts and their links."""
        with ExitStack() as opened:
            namespaces = opened.enter_context(ExitStack())  # namespaces close once the keeper has emptied them
            self._bridge = _opened(NetworkNamespace("switch"), namespaces)
            keeper = opened.enter_context(Keeper())
            keeper.keep("net", self._bridge.inode)
            _configure("make the switch", self._switch.call, _make_switch)
            for host in self._spec.hosts:
                namespace = self._hosts[host.name] = _opened(NetworkNamespace(host.name), namespaces)
                keeper.keep("net", namespace.inode)
                if host.cpu is not None:
                    group = self._cpu_groups[host.name] = make_cpu_group(host.name, host.cpu)
                    keeper.keep("cgroup", group)
                what, port = f"make {host.name}", self._port(host.name)
                _configure(what, self._switch.call, _plug_in, port, namespace.fd, host.link.down)
                _configure(what, namespace.call, _set_up_host, self.address(host.name), host.link.up)
                namespace.call(_name_hosts, self._addresses)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills what runs in the hosts and lets them go."""
        self._open.close()
        self._hosts.clear()
        self._cpu_groups.clear()
        self._bridge = None

    @property
    def _switch(self) -> NetworkNamespace:
        if self._bridge is None:
            raise ClusterError(_NOT_OPEN)
        return self._bridge

    def _at(self, host: str) -> NetworkNamespace:
        namespace = self._hosts.get(self._spec.host(host).name)
        if namespace is None:
            raise ClusterError(_NOT_OPEN)
        return namespace

    def _port(self, host: str) -> str:
        return f"port{list(self._addresses).index(self._spec.host(host).name)}"


def _opened(namespace: NetworkNamespace, stack: ExitStack) -> NetworkNamespace:
    stack.callback(namespace.close)
    return namespace


def _configure(what: str, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        call(*arguments)
    except (NetlinkError, OSError) as error:
        code, text = error.args[:2]  # both kinds begin with these
        raise ClusterError(
            f"cannot {what}: the kernel answers {text} (errno {code}); "
            "it needs bridge, veth and sch_tbf, and this process the capability NET_ADMIN"
        ) from error


def _check_rate(rate: float) -> float:
    if not 1 <= rate <= _FASTEST:
        raise ClusterError(
            f"cannot emulate a link of {format_bandwidth(rate)}: the kernel shapes up to {format_bandwidth(_FASTEST)}"
        )
    return rate


# What follows runs in the thread of a namespace, where a new netlink socket speaks for that namespace.


def _make_switch() -> None:
    with IPRoute() as ip:
        ip.link("set", index=_LOOPBACK_INDEX, state="up")
        ip.link("add", ifname="switch", kind="bridge")
        (bridge,) = ip.link_lookup(ifname="switch")
        ip.link("set", index=bridge, mtu=_MTU, gso_max_size=_LARGEST_PACKET, state="up")
        ip.addr("add", index=bridge, address=_SWITCH_ADDRESS, prefixlen=_NETWORK.prefixlen)


def _plug_in(port: str, host_fd: int, rate: float) -> None:
    with IPRoute() as ip:
        ip.link(
            "add", ifname=port, kind="veth", mtu=_MTU, peer={"ifname": INTERFACE, "net_ns_fd": host_fd, "mtu": _MTU}
        )
        (index,), (bridge,) = ip.link_lookup(ifname=port), ip.link_lookup(ifname="switch")
        ip.link("set", index=index, master=bridge, gso_max_size=_LARGEST_PACKET, state="up")
    _shape(port, rate, "add")


def _set_up_host(address: str, rate: float) -> None:
    with IPRoute() as ip:
        ip.link("set", index=_LOOPBACK_INDEX, state="up")
        (index,) = ip.link_lookup(ifname=INTERFACE)
        ip.addr("add", index=index, address=address, prefixlen=_NETWORK.prefixlen)
        ip.link("set", index=index, gso_max_size=_LARGEST_PACKET, state="up")
    _shape(INTERFACE, rate, "add")


def _name_hosts(addresses: Mapping[str, str]) -> None:
    """Puts the hosts' names into what the commands see as /etc/hosts; without mounts they do with addresses.

    The mapped form of an address is what torch looks up for a peer, and says so aloud when it finds no name.
    """
    try:
        known = _HOSTS_FILE.read_text(encoding="utf-8", errors="replace")
        names = "".join(f"{address}\t{name}\n::ffff:{address}\t{name}\n" for name, address in addresses.items())
        replace_file(str(_HOSTS_FILE), names + known)
    except OSError as error:
        logger.debug("hosts have addresses only: %s", error)


def _shape(interface: str, rate: float, command: str, cut: bool = False) -> None:
    burst = max(round(rate * _BURST_S), _SMALLEST_BURST)
    limit = _NO_QUEUE if cut else burst + max(round(rate * _QUEUE_S), _SMALLEST_QUEUE)
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=interface)
        ip.tc(command, "tbf", index, handle="1:", rate=round(rate), burst=burst, limit=limit)


def _reaches(address: tuple[str, int], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    for _ in range(_MOST_TRIES):
        try:
            socket.create_connection(address, timeout=_TRY_S).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_TRY_S / 5)
        else:
            return True
    return False


def _set_link(interface: str, state: str) -> None:
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=interface)
        ip.link("set", index=index, state=state)
