"""A stranger who reaches every port of a job: finds them, attacks them, and counts what became of each connection.

Nothing here knows the job's secret. Attacks are tables of functions that make the bytes to send; `attack` opens many
connections at once, so that a port that answers nobody costs seconds and not hours.
"""

import os
import pickle
import random
import resource
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from poseidon.comm.frames import FrameWriter, Message, Op
from poseidon.comm.handshake import GREETING_BYTES, HANDSHAKE_SECONDS, ClientHandshake, HandshakeError, ServerHandshake
from poseidon.comm.secret import Secret
from poseidon.units import KIB, MIB

AT_ONCE = 500
"""Connections that are tried side by side."""
CONNECT_S = 1.0
"""After that a port counts as one that takes nobody in."""
PATIENCE_S = HANDSHAKE_SECONDS + 1.0
"""How long a connection may stay after the last byte before it counts as left open."""
_LISTENING = "0A"


@dataclass(frozen=True, order=True)
class Port:
    """One listening socket of a job."""

    what: str
    address: str
    number: int
    pid: int = field(compare=False)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    def __str__(self) -> str:
        return f"{self.address}:{self.number}"


def find_ports(root: psutil.Process) -> list[Port]:
    """The listening TCP sockets of all descendants of a process, in whatever network namespace they are."""
    found: dict[tuple[str, int, str], Port] = {}
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess, OSError):
            network = os.readlink(f"/proc/{process.pid}/ns/net")
            for address, number in listening(process.pid):
                port = Port(describe(process), address, number, process.pid)
                found.setdefault((address, number, network), port)
    return sorted(found.values())


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Address and port of each listening TCP socket that a process holds."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(entry))
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in held:
                address, _, port = local.partition(":")
                yield to_text(address), int(port, 16)


def to_text(address: str) -> str:
    """An address as /proc/net/tcp has it: 32-bit words in the machine's order."""
    raw = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def describe(process: psutil.Process) -> str:
    """Whose port it is, by the process that holds it."""
    command = " ".join(process.cmdline())
    for part, what in (
        ("_store_host", "coordinator"),
        ("_torch_store", "torch's store"),
        ("_fork_server", "fork server"),
    ):
        if part in command:
            return what
    return f"rank {process.environ().get('RANK', '?')}"


# What is sent. Each takes the random numbers and what the port said first, and gives the bytes.

Attack = Callable[[random.Random, bytes], bytes]


def wrong_secret(draw: random.Random, greeting: bytes) -> bytes:
    """A correct proof of another secret, and a signed request right behind it."""
    stranger = Secret(draw.randbytes(32))
    try:
        proof = ClientHandshake(stranger).prove(greeting[:GREETING_BYTES].ljust(GREETING_BYTES, b"\0"))
    except HandshakeError:  # it has not greeted as a coordinator does
        proof = ClientHandshake(stranger).prove(ServerHandshake(stranger).greeting)
    return proof + FrameWriter(stranger.tag("to server")).write(Message(Op.SET, keys=("key",), values=(b"value",)))


def no_secret(draw: random.Random, greeting: bytes) -> bytes:
    """Requests of others' protocols, and a pickle that would run a command."""
    return draw.choice((_torch_store_query(), b"GET / HTTP/1.1\r\nHost: job\r\n\r\n", pickle.dumps(_Harm()), greeting))


def fuzzed(draw: random.Random, greeting: bytes) -> bytes:
    """Random bytes, a proof or a frame with some bytes changed, a part of one, or a length beyond all bounds."""
    valid = draw.choice(
        (wrong_secret(draw, greeting), _torch_store_query(), struct.pack("<QQ", 4, draw.getrandbits(64)))
    )
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 400))
    if kind == 1:
        return valid[: draw.randrange(1, len(valid))]
    if kind == 2:
        return struct.pack(draw.choice(("<Q", ">Q", "<I", ">I")), draw.getrandbits(32)) + draw.randbytes(64)
    data = bytearray(valid)
    for _ in range(draw.randrange(1, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


class _Harm:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/poseidon-was-harmed",)


def _torch_store_query() -> bytes:
    """Torch's store: validate, then set a key whose value claims to be of 2 GiB."""
    return struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 1, 3) + b"key" + struct.pack("<Q", 2**31) + b"value"


ATTACKS: dict[str, Attack] = {"wrong secret": wrong_secret, "no secret": no_secret, "fuzzed": fuzzed}


@dataclass
class Tally:
    """What became of the connections of one attack on one port."""

    tried: int = 0
    fates: Counter[str] = field(default_factory=Counter)

    @property
    def taken(self) -> int:
        return self.tried - self.fates["not taken in"]

    def __str__(self) -> str:
        return ", ".join(f"{count} {fate}" for fate, count in self.fates.most_common())


def attack(port: Port, kind: str, count: int, patience_s: float = PATIENCE_S) -> Tally:
    """Opens so many connections to a port, each with one attack, and waits until each has ended or stays open.

    Where some are taken in and others not, because there are too many at once, as many more are opened.
    """
    draw = random.Random(f"{kind} {port.what}")
    tally = Tally()
    while tally.tried < count or 0 < tally.taken < count:
        batch = min(AT_ONCE, count - (tally.taken or tally.tried))
        tally.tried += batch
        tally.fates += _one_batch(port, ATTACKS[kind], batch, draw, patience_s)
    return tally


def _one_batch(port: Port, make: Attack, count: int, draw: random.Random, patience_s: float) -> Counter[str]:
    fates: Counter[str] = Counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            connection = socket.socket(port.family, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.connect_ex((port.address, port.number))
            selector.register(connection, selectors.EVENT_WRITE, "connecting")
        try:
            _connect(selector, fates)
            for key in [key for key in selector.get_map().values() if key.data == "connecting"]:
                _end(selector, key.fileobj, "not taken in", fates)
            greeted = {key.fileobj: b"" for key in selector.get_map().values()}
            _wait(selector, 0.05, lambda key: _greeted(key, greeted))
            for connection, greeting in greeted.items():
                _send(selector, connection, make(draw, greeting), fates)
            _wait(selector, patience_s, lambda key: _answered(selector, key, fates))
        finally:
            for key in list(selector.get_map().values()):
                _end(selector, key.fileobj, "left open", fates)
    return fates


def _wait(selector: selectors.BaseSelector, seconds: float, take: Callable[[selectors.SelectorKey], None]) -> None:
    deadline = time.monotonic() + seconds
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            take(key)


def _connect(selector: selectors.BaseSelector, fates: Counter[str]) -> None:
    """Waits until each connection is made, or has failed to be for `CONNECT_S`."""
    deadline = time.monotonic() + CONNECT_S
    waiting = len(selector.get_map())
    while waiting and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if key.data != "connecting":
                time.sleep(0.001)  # it says something already, and is heard below
            elif key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                _end(selector, key.fileobj, "not taken in", fates)
                waiting -= 1
            else:
                selector.modify(key.fileobj, selectors.EVENT_READ, "connected")
                waiting -= 1


def _greeted(key: selectors.SelectorKey, greeted: dict[socket.socket, bytes]) -> None:
    with suppress(OSError):
        greeted[key.fileobj] += key.fileobj.recv(4 * KIB)


def _send(selector: selectors.BaseSelector, connection: socket.socket, data: bytes, fates: Counter[str]) -> None:
    try:
        connection.send(data)
        if len(data) % 2:
            connection.shutdown(socket.SHUT_WR)
    except OSError:
        _end(selector, connection, "dropped", fates)


def _answered(selector: selectors.BaseSelector, key: selectors.SelectorKey, fates: Counter[str]) -> None:
    try:
        data = key.fileobj.recv(64 * KIB)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if not data:
        _end(selector, key.fileobj, "dropped", fates)


def _end(selector: selectors.BaseSelector, connection: socket.socket, fate: str, fates: Counter[str]) -> None:
    selector.unregister(connection)
    connection.close()
    fates[fate] += 1


def stay_silent(port: Port, count: int) -> list[socket.socket]:
    """Connections that say nothing; the caller closes them."""
    connections = []
    for _ in range(count):
        connection = socket.socket(port.family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.connect_ex((port.address, port.number))
        connections.append(connection)
    return connections


def fates_of_silent(connections: Sequence[socket.socket]) -> Tally:
    """What has become of connections that said nothing."""
    tally = Tally(tried=len(connections))
    for connection in connections:
        tally.fates[_fate(connection)] += 1
    return tally


def _fate(connection: socket.socket) -> str:
    try:
        while data := connection.recv(4 * KIB):
            del data
    except BlockingIOError:
        return "left open" if _has_peer(connection) else "not taken in"
    except TimeoutError:
        return "not taken in"
    except OSError:
        return "dropped"
    return "dropped"


def _has_peer(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def flood(port: Port, num_bytes: int) -> tuple[int, str]:
    """Sends so many bytes over one connection; how many were taken, and what became of it."""
    sent = 0
    block = bytes(MIB)
    try:
        with socket.create_connection((port.address, port.number), timeout=CONNECT_S) as connection:
            connection.settimeout(PATIENCE_S)
            while sent < num_bytes:
                sent += connection.send(block[: num_bytes - sent])
    except TimeoutError:
        return sent, "left open, nothing more is read" if sent else "not taken in"
    except OSError:
        return sent, "dropped" if sent else "not taken in"
    return sent, "all was read"


def allow_many_files() -> None:
    """Raises the limit on open files of this process as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
