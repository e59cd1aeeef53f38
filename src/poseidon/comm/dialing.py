"""Names to addresses, and connections to names: all address families at once, the first that answers wins.

A host with two families may be known under an address of one that leads nowhere from here. Tried one after the other,
each would take its time; tried together, the one that works is found as soon as it answers.
"""

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

RESOLVE_SECONDS = 5.0
"""How long a name service may take."""

Address = tuple[socket.AddressFamily, Any]
"""A family, and the socket address in it."""


def resolve(name: str, port: int, *, seconds: float = RESOLVE_SECONDS) -> list[Address]:
    """Every address of a name, for TCP.

    Raises:
        OSError: The name is not known, or the name service did not answer in time.
    """
    with suppress(OSError):  # an address needs no service, and no thread
        return _look_up(name, port, socket.AI_NUMERICHOST)
    found: list[Address] = []
    failure: list[OSError] = []

    def ask() -> None:
        try:
            found.extend(_look_up(name, port))
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not found:
        raise TimeoutError(errno.ETIMEDOUT, f"the name service did not answer within {seconds:g} s")
    return found


def _look_up(name: str, port: int, flags: int = 0) -> list[Address]:
    infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((info[0], info[4]) for info in infos))


def dial(name: str, port: int, *, seconds: float) -> socket.socket:
    """A connection to the first address of a name that takes one.

    Args:
        name: A name or an address.
        port: Where somebody listens.
        seconds: How long it may take once the name is known, and the timeout of the connection that is returned.

    Raises:
        ConnectionRefusedError: All that answer refuse.
        OSError: The name is not known, no address answers, or no route leads there.
    """
    addresses = resolve(name, port)
    failures: list[OSError] = []
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for family, address in addresses:
            try:
                sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:  # the kernel has this family switched off
                failures.append(error)
                continue
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE)
            else:
                failures.append(OSError(code, os.strerror(code)))
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                selector.unregister(sock)
                if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failures.append(OSError(code, os.strerror(code)))
                else:
                    return _kept(sock, seconds)
        failures += [TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} s")] * len(selector.get_map())
    raise _worst(failures)


def _kept(sock: socket.socket, seconds: float) -> socket.socket:
    """The same connection under a number of its own, so that it outlives the others."""
    kept = sock.dup()
    kept.settimeout(seconds)
    return kept


def _worst(failures: Sequence[OSError]) -> OSError:
    """What to report of several: a refusal says most, as a machine is there; then silence."""
    for kind in (ConnectionRefusedError, TimeoutError):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    return failures[0]
