"""Which network card leads to the other ranks, and whether every rank reaches every other over it.

The rendezvous store shows only that everybody reaches rank 0. Gloo then connects every pair, and waits for ever for one
that cannot; so each pair is tried here first, with plain TCP, in milliseconds, and one that fails is named.
"""

import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import psutil
from torch._C._distributed_c10d import Store

from poseidon.artifact import Value
from poseidon.cluster.measurements import Interface
from poseidon.comm.dialing import resolve
from poseidon.comm.ports import listen
from poseidon.errors import CommError, ConfigError
from poseidon.units import format_seconds

CONNECT_SECONDS = 5.0
"""How long a connection between two ranks may take; TCP tries three times meanwhile."""
HOSTS_FILE = Path("/etc/hosts")
_OUTSIDE = "192.0.2.1"
"""An address kept for documentation: the route to it is the default route, and nothing is sent there."""


def route_to(address: str, port: int = 1) -> str:
    """The address of this host from which packets to another leave; nothing is sent.

    Raises:
        OSError: The name is not known, or there is no route.
    """
    failure: OSError | None = None
    for family, there in resolve(address, port or 1):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                local: str = probe.getsockname()[0]
                return local
        except OSError as error:  # another family may lead there
            failure = failure or error
    assert failure is not None
    raise failure


def interface_to(address: str, port: int = 1) -> Interface:
    """The card that leads to an address.

    Raises:
        CommError: The name is not known, or there is no route.
    """
    try:
        local = route_to(address, port)
    except OSError as error:
        raise CommError(
            f"cannot find a route to MASTER_ADDR={address}: {error.strerror or error}; check the name and the network"
        ) from error
    return Interface(name=_card_of(local), address=local, reason=f"it leads to {address}")


def default_interface() -> Interface | None:
    """The card of the default route, or the only one beside loopback; None where there is neither."""
    try:
        local = route_to(_OUTSIDE)
        return Interface(name=_card_of(local), address=local, reason="the default route leaves by it")
    except (OSError, CommError):
        others = {name: found for name in psutil.net_if_addrs() if (found := _address_of(name))}
        others = {name: found for name, found in others.items() if not is_loopback(found)}
        if len(others) != 1:
            return None
        ((name, address),) = others.items()
        return Interface(name=name, address=address, reason="it is the only one beside loopback")


def interfaces() -> list[Interface]:
    """Every card with each of its addresses, IPv4 first as gloo takes it; no link-local ones, which need a zone."""
    found = [
        Interface(name=name, address=entry.address.split("%")[0], reason="")
        for name, entries in psutil.net_if_addrs().items()
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in entries
        if entry.family == family
    ]
    return [card for card in found if not ipaddress.ip_address(card.address).is_link_local]


def named_interface(name: str, *, by: str = "GLOO_SOCKET_IFNAME") -> Interface:
    """The card of a name, the first where several are listed.

    Raises:
        ConfigError: This host has no such card, or it has no address.
    """
    first = name.split(",")[0]
    address = _address_of(first)
    if address is None:
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise ConfigError(f"{by} names the interface {first!r}, which this host has not or without address: {known}")
    return Interface(name=first, address=address, reason=f"{by} names it")


def interface_in_use() -> Interface | None:
    """The card over which this process's ranks talk, and why; None where nobody chose one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name:
        return None
    chosen = named_interface(name)
    coordinator = os.environ.get("MASTER_ADDR")
    if coordinator is None:
        return chosen
    try:
        routed = interface_to(coordinator)
    except CommError:
        return chosen
    if routed.name == chosen.name:
        return routed
    return chosen.model_copy(update={"reason": f"{chosen.reason}; {routed.name} leads to {coordinator}"})


def is_loopback(address: str) -> bool:
    """Whether nobody else can reach it."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def loopback_entry(name: str) -> str | None:
    """The line of the hosts file that maps a name to loopback, as `/etc/hosts line 2: "127.0.1.1 node1"`."""
    try:
        lines = HOSTS_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for number, line in enumerate(lines, start=1):
        address, *names = line.partition("#")[0].split() or [""]
        if name in names and is_address(address) and is_loopback(address):
            return f'{HOSTS_FILE} line {number}: "{" ".join([address, *names])}"'
    return None


class Place(Value):
    """Where one rank listens."""

    host: str
    address: str
    port: int


class Tried(Value):
    """What became of one rank's connections, by peer."""

    failures: dict[int, str]
    """Why it could not connect."""
    sources: dict[int, str]
    """From which of its addresses it has connected."""


def check_pairs(
    store: Store, rank: int, world_size: int, *, address: str, host: str, patience: float, coordinator: str
) -> list[str]:
    """Tries a TCP connection from every rank to every other; called by all ranks together.

    Args:
        store: Where they meet.
        rank: This rank.
        world_size: How many there are.
        address: Where this rank listens.
        host: What errors call this rank's host.
        patience: Seconds to wait for the others to come here.
        coordinator: What errors call the store.

    Returns:
        The addresses from which the others connect to this rank, each once.

    Raises:
        CommError: A pair cannot connect, the same on every rank: from where to where, and why.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(listen(address, backlog=max(128, world_size)))
        mine = Place(host=host, address=address, port=listener.getsockname()[1])
        texts = _gather(store, "place", rank, world_size, mine.model_dump_json(), patience, coordinator)
        places = [Place.model_validate_json(text) for text in texts]
        tried = _try_all(rank, places).model_dump_json()
        # The listener stays open until everybody has tried; the kernel completes connections without any accept.
        texts = _gather(store, "reach", rank, world_size, tried, patience + CONNECT_SECONDS, coordinator)
        found = [Tried.model_validate_json(text) for text in texts]
    failed = [(sender, peer, why) for sender, one in enumerate(found) for peer, why in one.failures.items()]
    if failed:
        with suppress(RuntimeError, CommError):  # whoever serves the store stays until all have read
            _gather(store, "heard", rank, world_size, "", CONNECT_SECONDS, coordinator)
        raise CommError(_no_way(places, failed, coordinator))
    return sorted({one.sources[rank] for peer, one in enumerate(found) if peer != rank})


def _gather(
    store: Store, what: str, rank: int, world_size: int, text: str, patience: float, coordinator: str
) -> list[str]:
    keys = [f"poseidon/{what}/{other}" for other in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timedelta(seconds=patience))
        return [value.decode() for value in store.multi_get(keys)]
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        who = "rank" if len(missing) == 1 else "ranks"
        raise CommError(
            f"rank {rank} reached the rendezvous store at {coordinator} and waited {format_seconds(patience)} there "
            f"for {who} {', '.join(missing)} in vain; look at what became of {who} {', '.join(missing)}"
        ) from error


def _try_all(rank: int, places: Sequence[Place]) -> Tried:
    """Connects this rank to all others at once, and says what became of it."""
    failures: dict[int, str] = {}
    sources: dict[int, str] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for peer, place in enumerate(places):
            if peer == rank:
                continue
            family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            code = connection.connect_ex((place.address, place.port))
            if code in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, peer)
            else:
                failures[peer] = os.strerror(code)
        deadline = time.monotonic() + CONNECT_SECONDS
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failures[key.data] = os.strerror(code)
                else:
                    sources[key.data] = key.fileobj.getsockname()[0]
        for key in selector.get_map().values():
            failures[key.data] = f"no answer within {format_seconds(CONNECT_SECONDS)}"
    return Tried(failures=dict(sorted(failures.items())), sources=sources)


def _no_way(places: Sequence[Place], failed: Sequence[tuple[int, int, str]], coordinator: str) -> str:
    """The first failure in words, how many others there are, and what to do."""
    sender, receiver, reason = failed[0]
    here, there = places[sender], places[receiver]
    others = f" ({len(failed) - 1} more of {len(places) * (len(places) - 1)} fail)" if len(failed) > 1 else ""
    text = (
        f"all ranks reached the rendezvous store at {coordinator}, but rank {sender} ({here.host}, {here.address}) "
        f"cannot connect to rank {receiver} ({there.host}) at {there.address}:{there.port}: {reason}{others}; "
    )
    if is_loopback(there.address) and here.host != there.host:
        return text + f"rank {receiver} listens on loopback: set GLOO_SOCKET_IFNAME on {there.host} to another card"
    return text + f"check the firewalls and the route between the two, or set GLOO_SOCKET_IFNAME on {there.host}"


def _card_of(local: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == local for entry in addresses):
            return name
    raise CommError(f"no interface of this host has the address {local}, from which packets would leave")


def _address_of(name: str) -> str | None:
    """IPv4 first, as gloo takes it."""
    entries = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return entry.address.split("%")[0]
    return None


def is_address(text: str) -> bool:
    """Whether a text is an address already, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
