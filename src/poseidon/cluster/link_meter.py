"""What a link really carries: a plain TCP transfer of a second, nothing in the way but Python's own sockets.

Comes in: where the two ends run and the receiver's address. Goes out: payload bytes per second.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from poseidon.artifact import Value
from poseidon.errors import ClusterError
from poseidon.units import GIB, KIB, Bandwidth, format_bandwidth

Runner = Callable[..., Any]
"""Runs a function with its arguments at one end of the link and returns what it returns."""

_WARM_UP_S = 0.2
"""Left out of the measurement: the sender's first window and the bucket that is full at the start."""
_PATIENCE_S = 5.0
"""How long one end waits for the other before the link counts as dead."""
_MOST_BYTES = GIB
_CHUNK = 256 * KIB


class LinkRates(Value):
    """Payload rates of one host's link, measured one direction after the other."""

    host: str
    set_up: Bandwidth
    """Bytes per second that the specification gives the direction to the switch."""
    up: Bandwidth
    """Bytes per second measured to the switch."""
    set_down: Bandwidth
    """Bytes per second that the specification gives the direction from the switch."""
    down: Bandwidth
    """Bytes per second measured from the switch."""

    @property
    def deviation(self) -> float:
        """The larger distance of the two from what is set, as a share of it."""
        return max(abs(self.up / self.set_up - 1), abs(self.down / self.set_down - 1))

    def __str__(self) -> str:
        """Both directions, set against measured."""
        return (
            f"{self.host}: up {format_bandwidth(self.up)} of {format_bandwidth(self.set_up)}, "
            f"down {format_bandwidth(self.down)} of {format_bandwidth(self.set_down)}"
        )


def measure_rate(sender: Runner, receiver: Runner, address: str, seconds: float) -> float:
    """Payload bytes per second from one place to another.

    Args:
        sender: Runs functions at the sending end.
        receiver: Runs functions at the receiving end, whose address `address` is.
        address: IPv4 address of the receiver.
        seconds: How long to count bytes, after a short warm-up; at most a GiB crosses.

    Raises:
        ClusterError: Nothing arrives.
    """
    try:
        listener = receiver(_listen, address)
        with listener, ThreadPoolExecutor(max_workers=1, thread_name_prefix="poseidon-meter") as other:
            sending = other.submit(sender, _send, listener.getsockname())
            rate: float = receiver(_count, listener, seconds)
            sending.result()
    except OSError as error:
        raise ClusterError(f"cannot measure the link to {address}: {error}; is it cut?") from error
    return rate


def _listen(address: str) -> socket.socket:
    listener = socket.create_server((address, 0))
    listener.settimeout(_PATIENCE_S)
    return listener


def _send(address: tuple[str, int]) -> None:
    """Sends until the receiver has had enough and closes."""
    block = bytes(_CHUNK)
    with socket.create_connection(address, timeout=_PATIENCE_S) as connection:
        try:
            for _ in range(_MOST_BYTES // _CHUNK):
                connection.sendall(block)
        except ConnectionError:
            return


def _count(listener: socket.socket, seconds: float) -> float:
    buffer = bytearray(_CHUNK)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_PATIENCE_S)
        start = now = time.perf_counter()
        while now < start + _WARM_UP_S and connection.recv_into(buffer):
            now = time.perf_counter()
        start, num_bytes = now, 0
        while now < start + seconds and (received := connection.recv_into(buffer)):
            num_bytes += received
            now = time.perf_counter()
    if not num_bytes:
        raise ConnectionError("no byte arrived")
    return num_bytes / (now - start)
