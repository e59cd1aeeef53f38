"""On which ports this process listens: any that is free, or one of a range that a firewall leaves open.

A socket is bound first and its port told after, so that nobody takes it in between.
"""

import os
import random
import re
import socket
from collections.abc import Callable

from poseidon.artifact import Value
from poseidon.errors import CommError, ConfigError

VARIABLE = "POSEIDON_PORT_RANGE"
_SHAPE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*")
_LARGEST = 65535


class PortRange(Value):
    """Ports from the first to the last, both included."""

    first: int
    last: int

    @classmethod
    def find(cls) -> "PortRange | None":
        """The range that the environment names; None where it names none.

        Raises:
            ConfigError: The text is no range of ports.
        """
        text = os.environ.get(VARIABLE, "")
        return cls.parse(text) if text else None

    @classmethod
    def parse(cls, text: str) -> "PortRange":
        """From a text such as `20000-20100`.

        Raises:
            ConfigError: It is no range of ports.
        """
        found = _SHAPE.fullmatch(text)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 0 < first <= last <= _LARGEST:
            raise ConfigError(
                f"{VARIABLE}={text!r} is no range of ports: it takes two numbers from 1 to {_LARGEST}, as 20000-20100"
            )
        return cls(first=first, last=last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def numbers(self) -> range:
        """All of its ports."""
        return range(self.first, self.last + 1)


def listen(
    address: str,
    *,
    backlog: int = 128,
    ports: PortRange | None = None,
    usable: Callable[[int], bool] = lambda port: True,
    before: Callable[[socket.socket], object] = lambda sock: None,
) -> socket.socket:
    """A socket that listens on an address, on a port that the system chooses or a free one of a range.

    Args:
        address: IPv4 or IPv6, of this host.
        backlog: Connections that may wait.
        ports: The range; the one that the environment names if left out.
        usable: Which ports of the range may be taken.
        before: Called with the socket when it is bound and takes no connection yet.

    Raises:
        CommError: The address is not this host's, or no port of the range is free.
    """
    ports = ports or PortRange.find()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    candidates = [0] if ports is None else [port for port in ports.numbers if usable(port)]
    random.shuffle(candidates)  # several processes that start at once do not all try the same ones
    reason = "none of them may be used"
    for port in candidates:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            before(sock)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
        else:
            return sock
    where = address if ports is None else f"{address}, on none of the ports {ports} ({VARIABLE})"
    raise CommError(f"cannot listen on {where}, where the other ranks are to connect: {reason}")
