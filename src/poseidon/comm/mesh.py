"""Watches over the sockets of gloo: who may connect, on which port, that nobody is in between, and how to end them.

Gloo connects every pair of ranks with plain TCP. It neither authenticates nor encrypts: whoever connects to a listener
and sends the right number is taken for the rank. What is done about that here:

- Gloo publishes where it listens, and learns where its peers do, through a store. Ours is authenticated, so a stranger
  learns no address and can publish none.
- While a group is being made, its listener takes connections from the addresses of the ranks only. That holds from the
  moment when gloo publishes it; in the short time before, only somebody who tries all ports would find it.
- Once a group is made, its listener takes no connections at all.
- All ranks then tell each other over the store what their connections end in. One that does not end in the right
  rank's socket, because somebody was quicker or stands in between, is an error; one that is nobody's is ended.

What is not protected: the content of the connections, against somebody who can read or change packets on the way.

Listeners are bound to any free port by gloo. Where a range is set, each is replaced by one inside the range at the
moment when gloo publishes it, and the published address is changed. Only Linux allows any of this.
"""

import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from poseidon.artifact import Value
from poseidon.comm.ports import VARIABLE as PORTS_VARIABLE
from poseidon.comm.ports import PortRange, listen
from poseidon.comm.sockets import (
    Endpoint,
    Watched,
    attach_filter,
    borrowed,
    connections_beside,
    ends,
    find_listener,
    foreign_listeners,
    own_end,
    replace_listener,
    shut_down,
)
from poseidon.errors import CommError, ConfigError

log = logging.getLogger(__name__)

BACKEND = "poseidon_gloo"
"""What torch calls gloo where a range of ports is set: gloo all the same, on listeners that we choose."""
BACKEND_NAMES = ("gloo", "custom")
"""What a group's `name()` says that was made with either."""
CHECK_SECONDS = 60.0
"""How long ranks wait for each other's account of their connections; all have just connected."""
GLOO_BACKLOG = 512
_ADDRESS_BYTES = 136
"""A `sockaddr_storage` and a sequence number."""
_PROC = "/proc/self/fdinfo"
"""Where Linux shows what a process waits for; other systems have no such thing."""
_LONGEST_HOST_NAME = 256
_LARGEST_PORT = 65535
_MOST_DEVICES_TRIED = 4096


@dataclass(frozen=True)
class Published:
    """What gloo tells its peers about where it listens."""

    data: bytes
    start: int
    """Where the socket address begins."""

    @classmethod
    def find(cls, data: bytes) -> "Published | None":
        """From a value of the store; None where it is something else."""
        if len(data) < 8:
            return None
        (name_bytes,) = struct.unpack_from("=Q", data)
        start = 16 + name_bytes
        if name_bytes > _LONGEST_HOST_NAME or len(data) < start + _ADDRESS_BYTES:
            return None
        (address_bytes,) = struct.unpack_from("=Q", data, 8 + name_bytes)
        (family,) = struct.unpack_from("=H", data, start)
        known = address_bytes == _ADDRESS_BYTES and family in (socket.AF_INET, socket.AF_INET6)
        return cls(data, start) if known else None

    @property
    def endpoint(self) -> Endpoint:
        """The address and port in it."""
        family, port = struct.unpack_from("=H", self.data, self.start)[0], self._port
        if family == socket.AF_INET:
            return socket.inet_ntop(family, self.data[self.start + 4 : self.start + 8]), port
        return socket.inet_ntop(family, self.data[self.start + 8 : self.start + 24]), port

    @property
    def _port(self) -> int:
        port: int = struct.unpack_from("!H", self.data, self.start + 2)[0]
        return port

    def with_port(self, port: int) -> bytes:
        """The same with another port."""
        return self.data[: self.start + 2] + struct.pack("!H", port) + self.data[self.start + 4 :]


class Connections(Value):
    """What one rank says about the sockets of one group."""

    listener: Endpoint
    connections: tuple[tuple[Endpoint, Endpoint], ...]
    """Own and other end of each."""


def strangers(said: Sequence[Connections], what: str) -> list[list[tuple[Endpoint, Endpoint]]]:
    """For each rank the connections that end in no other rank's socket.

    Args:
        said: By rank, what each says.
        what: What errors call the group.

    Raises:
        CommError: Two ranks have no connection of which both hold an end: whose ends are where.
    """
    left = [list(one.connections) for one in said]
    for rank, mine in enumerate(said):
        for peer in range(rank):
            pairs = [
                (here, there)
                for here, there in left[rank]
                if (there, here) in left[peer] and (here == mine.listener or there == said[peer].listener)
            ]
            if not pairs:
                raise CommError(_in_between(what, rank, left[rank], peer, left[peer]))
            here, there = pairs[0]
            left[rank].remove((here, there))
            left[peer].remove((there, here))
    return left


def _in_between(
    what: str,
    rank: int,
    mine: Sequence[tuple[Endpoint, Endpoint]],
    peer: int,
    theirs: Sequence[tuple[Endpoint, Endpoint]],
) -> str:
    return (
        f"rank {rank} and rank {peer} are not connected to each other in {what}: rank {rank} holds {_list(mine)}, "
        f"rank {peer} holds {_list(theirs)}; somebody else has connected, or a proxy or a translated address is "
        "between them: let the ranks reach each other under their own addresses"
    )


def _list(connections: Sequence[tuple[Endpoint, Endpoint]]) -> str:
    shown = [f"{here[0]}:{here[1]} with {there[0]}:{there[1]}" for here, there in connections[:3]]
    return ", ".join(shown + ["…"] * (len(connections) > 3)) or "nothing"


@dataclass(frozen=True)
class _Device:
    """One device of gloo, with the group that it serves."""

    prefix: str
    """Of the keys under which its addresses are published: `0//1//cpu//0` for group 1, `0//cpu//0` for the default."""
    listener: Watched
    address: Endpoint
    """Where gloo itself bound; it decides by this who connects to whom."""
    told: Endpoint
    """Where the listener is."""
    rank: int

    @property
    def group(self) -> str:
        """The name of the group that it serves."""
        return self.prefix.rsplit("//", 2)[0].rpartition("//")[2]


class Mesh(Store):
    """The store through which gloo's devices learn of each other; hands on everything to another store.

    Args:
        store: Where the ranks meet; authenticated, or nothing here protects.
        sources: The addresses from which the ranks connect; empty where they are not known.
        ports: Where gloo is to listen; any port if left out.
    """

    def __init__(self, store: Store, *, sources: Sequence[str] = (), ports: PortRange | None = None) -> None:
        super().__init__()
        self._store = store
        self._sources = list(dict.fromkeys(sources))
        self._ports = ports
        self._devices: list[_Device] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Hands on; where gloo says at which address it listens, its listener is guarded and moved first."""
        published = Published.find(value) if isinstance(value, bytes) else None
        self._store.set(key, value if published is None else self._opened(key, published))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Hands on; what gloo reads of a peer that shares its address may be changed."""
        value = self._store.get(key)
        published = Published.find(value)
        return value if published is None else self._found(key, published)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Hands on."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        """Hands on."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Hands on."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Hands on."""
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Hands on."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Hands on."""
        return self._store.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Hands on."""
        return [self.get(key) for key in keys]

    def set_timeout(self, timeout: timedelta) -> None:
        """Hands on."""
        self._store.set_timeout(timeout)

    def clone(self) -> "Mesh":
        """Itself: the devices of all groups are kept in one place."""
        return self

    def has_extended_api(self) -> bool:
        """No: values pass one by one."""
        return False

    def seal(self, group: dist.ProcessGroup) -> None:
        """Checks both ends of each connection of a group that has just been made, and closes its listeners.

        Called by all ranks of the group together.

        Raises:
            CommError: A connection does not end in the rank that it should, the same on every rank.
        """
        if _is_lazy():
            log.info("gloo connects when it first sends, as TORCH_GLOO_LAZY_INIT says: its listeners stay open")
            return
        for index, device in enumerate(self._devices_of(group)):
            where = f"gloo's group {device.group!r}"
            self._close_listener(device)
            held = [pair for one in connections_beside(device.listener) if (pair := ends(one)) is not None]
            mine = Connections(listener=device.told, connections=tuple(held))
            keys = [f"poseidon/ends/{device.group}/{index}/{rank}" for rank in range(group.size())]
            self._store.set(keys[group.rank()], mine.model_dump_json())
            try:
                self._store.wait(keys, timedelta(seconds=CHECK_SECONDS))
            except RuntimeError as error:
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                raise CommError(
                    f"rank {group.rank()}: rank {', '.join(missing)} of {where} did not say within "
                    f"{CHECK_SECONDS:g} s what its connections end in; look at what became of it"
                ) from error
            said = [Connections.model_validate_json(self._store.get(key)) for key in keys]
            odd = strangers(said, where)[group.rank()]
            self._end_strangers(device, [pair for pair in held if pair not in odd])

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Ends everything that is under way on these groups: each pending operation fails within milliseconds."""
        for group in groups:
            for device in self._devices_of(group):
                for connection in connections_beside(device.listener):
                    shut_down(connection)

    def _devices_of(self, group: dist.ProcessGroup) -> list[_Device]:
        return [device for device in self._devices if device.group == group.group_name]

    def _opened(self, key: str, published: Published) -> bytes:
        """Guards and moves the listener that gloo is about to publish; what it publishes then."""
        listener = find_listener(published.endpoint)
        if listener is None:
            why = f"cannot find the listener of gloo at {published.endpoint[0]}:{published.endpoint[1]} in {_PROC}"
            if self._ports is not None:
                raise CommError(f"{why}, so it cannot be moved into the ports {self._ports}; unset {PORTS_VARIABLE}")
            log.warning("%s: it stays open to everybody", why)
            return published.data
        address = told = published.endpoint
        if self._ports is None:
            with borrowed(listener.fd, listener.inode) as sock:
                assert sock is not None
                self._admit_ranks(sock)
        else:
            with listen(
                address[0],
                backlog=GLOO_BACKLOG,
                ports=self._ports,
                usable=_usable(self._ports).__contains__,
                before=self._admit_ranks,
            ) as new:
                told = (address[0], new.getsockname()[1])
                listener = replace_listener(listener, new)
        prefix, _, rank = key.rpartition("/")
        self._devices = [device for device in self._devices if own_end(device.listener) == device.told]
        self._devices.append(_Device(prefix, listener, address, told, int(rank)))
        return published.with_port(told[1])

    def _admit_ranks(self, sock: socket.socket) -> None:
        sources = [source for source in self._sources if (":" in source) == (sock.family == socket.AF_INET6)]
        if sources and not attach_filter(sock, sources):
            log.info(
                "the listener of gloo takes connections from anywhere until all ranks have come: there are too many"
            )

    def _found(self, key: str, published: Published) -> bytes:
        """What gloo is to read about a peer.

        Of two ranks with one address, gloo has the one with the larger port connect to the other. It compares its own
        port before the move with the other's after it. So the one that has the larger port after the move is left to
        find its own larger (`make_device` saw to that), and the other is told of the largest port there is.
        """
        prefix, _, rank = key.rpartition("/")
        device = next((one for one in self._devices if one.prefix == prefix), None)
        if device is None or int(rank) == device.rank:
            return published.data
        peer = published.endpoint
        listens = device.told != device.address and peer[0] == device.told[0] and peer[1] > device.told[1]
        return published.with_port(_LARGEST_PORT) if listens else published.data

    @staticmethod
    def _close_listener(device: _Device) -> None:
        with borrowed(device.listener.fd, device.listener.inode) as sock:
            if sock is not None:
                attach_filter(sock, [])

    @staticmethod
    def _end_strangers(device: _Device, ranks: Sequence[tuple[Endpoint, Endpoint]]) -> None:
        """Ends every connection but those of the ranks."""
        for one in connections_beside(device.listener):
            if (pair := ends(one)) is not None and pair not in ranks:
                shut_down(one)
                log.warning("%s:%d connected to gloo's listener and is no rank: the connection was ended", *pair[1])


def abort_all() -> None:
    """Ends everything that is under way on gloo in this process, where no `Mesh` knows which group it belongs to."""
    for listener in foreign_listeners():
        for connection in connections_beside(listener):
            shut_down(connection)


def backend_for(ports: PortRange | None) -> str:
    """The backend to make groups with: gloo, or where a range of ports is set gloo on devices of our choice.

    Args:
        ports: As for `Mesh`.
    """
    if ports is None:
        return "gloo"
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_backend, devices=["cpu"])
    return BACKEND


def _make_backend(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [make_device(PortRange.find())]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def make_device(ports: PortRange | None) -> ProcessGroupGloo.Device:
    """A device of gloo that can stand beside others with the same address after its listener has moved into a range.

    Its own port must compare as larger than all that may be told: see `Mesh`. A few tries find one.

    Raises:
        ConfigError: None was found.
    """
    usable = _usable(ports) if ports is not None else {}
    for _ in range(_MOST_DEVICES_TRIED):
        before = set(foreign_listeners())
        device = ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"].split(",")[0])
        bound = [own_end(one) for one in set(foreign_listeners()) - before]
        if all(end is not None and _rank_of(end[1]) > max(map(_rank_of, usable), default=0) for end in bound):
            return device
    raise ConfigError(f"gloo gets no port that fits beside the range {ports}: choose one below 32768")


def _usable(ports: PortRange) -> dict[int, None]:
    """Ports of the range that compare as small to gloo; all of them where less than a third does."""
    small = [port for port in ports.numbers if port % 256 < 128]
    return dict.fromkeys(small if 3 * len(small) >= len(ports.numbers) else ports.numbers)


def _rank_of(port: int) -> int:
    """The place of a port in gloo's order, which reads its two bytes the wrong way round."""
    return socket.ntohs(port)


def _is_lazy() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "true", "on", "yes")
