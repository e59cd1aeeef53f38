"""Over which network card this process talks to the other ranks: by the route to the coordinator, or as told.

Two roles. Control, a few small messages, takes whatever route leads to the coordinator. Data, everything that gloo and
NCCL send, takes the same card, unless `POSEIDON_INTERFACES` or `GLOO_SOCKET_IFNAME` names another: a fast network
beside the one that everybody has.
"""

import fnmatch
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence

from poseidon.cluster.measurements import Interface
from poseidon.comm.reach import (
    default_interface,
    interface_in_use,
    interface_to,
    interfaces,
    is_address,
    is_loopback,
    loopback_entry,
    route_to,
)
from poseidon.errors import CommError, ConfigError

log = logging.getLogger(__name__)

PATTERNS = "POSEIDON_INTERFACES"
"""The variable: names or networks, separated by commas; `!` leaves out. As in `eth*,10.0.0.0/8,!docker*`."""

_cards: dict[str, Interface] = {}
"""What `choose_interface` found: for `data` and for `control`."""


def choose_interface(address: str, port: int) -> None:
    """Names the card for data to gloo and NCCL, unless the user has named one to them.

    A hosts file may map a host's own name to loopback, where nobody else reaches it. Such an entry is named and not
    followed.

    Args:
        address: Of the coordinator.
        port: Of the coordinator.

    Raises:
        CommError: No route leads to the coordinator.
        ConfigError: The patterns match no card.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    control, entry = _by_route(address, port)
    chosen = control
    if patterns := os.environ.get(PATTERNS, ""):
        chosen = select(patterns, interfaces(), preferred=control)
        if chosen.name != control.name:
            log.info("control goes over %s (%s): %s", control.name, control.address, control.reason)
    chosen = _as_gloo_listens(chosen)
    _cards.update(data=chosen, control=control)
    os.environ["GLOO_SOCKET_IFNAME"] = chosen.name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", chosen.name)
    log.info("using interface %s (%s): %s", chosen.name, chosen.address, chosen.reason)
    if entry is not None and not is_loopback(chosen.address) and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning(
            "%s leads the name of this host to loopback, where no other host reaches it; the others are told %s",
            entry,
            chosen.address,
        )


def _by_route(address: str, port: int) -> tuple[Interface, str | None]:
    """The card that leads to the coordinator, and the line of the hosts file that would mislead."""
    chosen = interface_to(address, port)
    entry = loopback_entry(socket.gethostname()) if spans_hosts() else None
    if is_loopback(chosen.address) and is_misled(address):
        entry = loopback_entry(address) or entry
        chosen = default_interface() or chosen
    return chosen, entry


def _as_gloo_listens(chosen: Interface) -> Interface:
    """The same card under its first address, IPv4 before IPv6: there gloo listens, whichever address led to it."""
    first = next((card.address for card in interfaces() if card.name == chosen.name), chosen.address)
    return chosen.model_copy(update={"address": first})


def select(patterns: str, known: Sequence[Interface], *, preferred: Interface | None = None) -> Interface:
    """The card that the patterns mean.

    Args:
        patterns: Names with `*`, addresses or networks, separated by commas; after `!` what is left out. Without any
            that includes, all others are meant, loopback last.
        known: The cards with an address, IPv4 first; a card with several addresses several times.
        preferred: Taken where the patterns allow it.

    Raises:
        ConfigError: None is left; lists what exists.
    """
    parts = [part.strip() for part in patterns.split(",") if part.strip()]
    includes = [part for part in parts if not part.startswith("!")]
    excludes = [part[1:] for part in parts if part.startswith("!")]
    left = [card for card in known if not any(_matches(pattern, card) for pattern in excludes)]
    found = [card for pattern in includes for card in left if _matches(pattern, card)] if includes else left
    if not found:
        there = ", ".join(f"{card.name} ({card.address})" for card in known)
        raise ConfigError(f"{PATTERNS}={patterns!r} leaves no interface of this host; there are: {there or 'none'}")
    if preferred is not None and any(card.address == preferred.address for card in found):
        return preferred
    found.sort(key=lambda card: is_loopback(card.address))
    return found[0].model_copy(update={"reason": f"{PATTERNS}={patterns} means it"})


def _matches(pattern: str, card: Interface) -> bool:
    try:
        return ipaddress.ip_address(card.address) in ipaddress.ip_network(pattern, strict=False)
    except ValueError:
        return fnmatch.fnmatchcase(card.name, pattern)


def interface_of_process() -> Interface | None:
    """The card over which this process sends its data, and why; None where nobody chose one."""
    return _cards["data"] if _cards else interface_in_use()


def control_of_process() -> Interface | None:
    """The card that leads to the coordinator, and on which this process serves one; None where nobody chose one."""
    return _cards["control"] if _cards else interface_in_use()


def forget() -> None:
    """Undoes the choice, as far as this module remembers it."""
    _cards.clear()


def spans_hosts() -> bool:
    """Whether the launcher has put ranks on other hosts too, as far as it says."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return False
    try:
        return int(os.environ["LOCAL_WORLD_SIZE"]) < int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigError(f"LOCAL_WORLD_SIZE or WORLD_SIZE is not a whole number: {error}") from error


def seen_from_here(name: str) -> str:
    """A name, or the address of this host's card where the name misleads to this host's own loopback."""
    if is_misled(name) and (chosen := control_of_process()) is not None:
        return chosen.address
    return name


def is_misled(name: str) -> bool:
    """Whether this host takes the name of the coordinator for its own loopback although ranks are on other hosts."""
    if not spans_hosts() or name == "localhost" or is_address(name):
        return False
    try:
        return is_loopback(route_to(name))
    except (OSError, CommError):
        return False


def hint(name: str) -> str:
    """What may be wrong with the name of the coordinator, as the end of an error's message; empty if nothing is."""
    if not is_misled(name):
        return ""
    return f" {loopback_entry(name) or 'The name service'} leads {name} to this host's own loopback"
