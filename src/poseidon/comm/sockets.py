"""Sockets of this process that something else has opened: found, filtered, moved to another port, shut down.

Gloo opens its sockets itself and hands none of them out. Linux shows all descriptors of a process, and for each epoll
instance what it waits for, with the pointer that it hands back. Each gloo device has an epoll instance of its own, in
which its listener and its connections are: a listener leads to its instance, and that to the device's connections.
Elsewhere than on Linux nothing is found.

And sockets of our own, kept from copies of the process, so that a connection ends with the process whose it is.
"""

import ctypes
import os
import platform
import re
import select
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from poseidon.errors import CommError

_DESCRIPTORS = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)\s+pos:\S+ ino:([0-9a-f]+)")

_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Instructions of classic BPF: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K."""
_NETWORK_HEADER = 0x100000000 - 0x100000
"""SKF_NET_OFF: offsets from here count from the start of the IP header."""
_WHOLE_PACKET, _NOTHING = 0xFFFFFFFF, 0

_EPOLL_CTL_ADD = 1
_LOWER_HALF = 0xFFFFFFFF
_MOST_SOURCES = 400
"""A program may have 4096 instructions; an IPv6 address takes nine."""

_kept_from_children: WeakSet[socket.socket] = WeakSet()

Endpoint = tuple[str, int]
"""An address and a port."""
Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


@dataclass(frozen=True)
class Watched:
    """One descriptor in an epoll instance."""

    epoll: int
    fd: int
    events: int
    data: int
    """What epoll hands back: gloo's pointer to whom it tells."""
    inode: int
    """Tells whether the number still means the same socket."""


@contextmanager
def borrowed(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """A TCP socket by its number, through a duplicate; None where the number means something else by now."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    found = os.fstat(copy)
    if not stat.S_ISSOCK(found.st_mode) or found.st_ino != inode:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as sock:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield sock if is_tcp else None


def watched() -> list[list[Watched]]:
    """What each epoll instance of this process waits for; empty where there is no such list."""
    instances = []
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                if os.readlink(_DESCRIPTORS / name) == "anon_inode:[eventpoll]":
                    text = (_DETAILS / name).read_text(encoding="ascii")
                    instances.append(
                        [
                            Watched(int(name), int(fd), int(events, 16), int(data, 16), int(inode, 16))
                            for fd, events, data, inode in _WATCHED.findall(text)
                        ]
                    )
    return instances


def foreign_listeners() -> list[Watched]:
    """The listening sockets that native code waits for: its epoll instances hand back pointers, Python's numbers.

    Python leaves the upper half of what is handed back as it finds it.
    """
    found = []
    for one in (one for instance in watched() for one in instance if one.data & _LOWER_HALF != one.fd):
        with borrowed(one.fd, one.inode) as sock:
            if sock is not None and is_listening(sock):
                found.append(one)
    return found


def find_listener(endpoint: Endpoint) -> Watched | None:
    """The one of them that listens on an address and port."""
    return next((one for one in foreign_listeners() if own_end(one) == endpoint), None)


def own_end(one: Watched) -> Endpoint | None:
    """Where a socket is bound; None where it is gone."""
    with borrowed(one.fd, one.inode) as sock:
        if sock is None:
            return None
        name: Endpoint = sock.getsockname()[:2]
        return name


def connections_beside(listener: Watched) -> list[Watched]:
    """The connections that the same epoll instance waits for: those of the listener's device."""
    for instance in watched():
        if any((one.fd, one.inode, one.data) == (listener.fd, listener.inode, listener.data) for one in instance):
            return [one for one in instance if ends(one) is not None]
    return []


def ends(one: Watched) -> tuple[Endpoint, Endpoint] | None:
    """Own and other end of a connection; None where it is not connected, or no connection."""
    with borrowed(one.fd, one.inode) as sock:
        if sock is None or is_listening(sock):
            return None
        try:
            local, remote = sock.getsockname(), sock.getpeername()
        except OSError:
            return None
        return local[:2], remote[:2]


def is_listening(sock: socket.socket) -> bool:
    """Whether a socket takes connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def shut_down(one: Watched) -> bool:
    """Ends a connection in both directions, whoever owns it; whether it was there."""
    with borrowed(one.fd, one.inode) as sock:
        if sock is None or is_listening(sock):
            return False
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        return True


def admit(sources: Sequence[str]) -> list[Instruction]:
    """A filter that lets packets pass from these addresses and drops all others.

    Args:
        sources: IPv4 or IPv6 addresses, all of one family; none drops everything.
    """
    program: list[Instruction] = []
    for source in sources:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        packed = socket.inet_pton(family, source)
        words = struct.unpack(f"!{len(packed) // 4}I", packed)
        start = 8 if family == socket.AF_INET6 else 12
        for index, word in enumerate(words):
            to_next_source = 2 * (len(words) - 1 - index) + 1
            program += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + start + 4 * index)]
            program += [(_JUMP_IF_EQUAL, 0, to_next_source, word)]
        program.append((_RETURN, 0, 0, _WHOLE_PACKET))
    return [*program, (_RETURN, 0, 0, _NOTHING)]


def attach_filter(sock: socket.socket, sources: Sequence[str]) -> bool:
    """Has a listening socket take connections from these addresses only; those that exist stay as they are.

    Returns:
        Whether it was done: not with more sources than a filter can tell apart.
    """
    if len(sources) > _MOST_SOURCES:
        return False
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in admit(sources))
    memory = ctypes.create_string_buffer(program)
    count = len(program) // struct.calcsize("HBBI")
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", count, ctypes.addressof(memory)))
    return True


class _EpollEvent(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def replace_listener(old: Watched, new: socket.socket) -> Watched:
    """Puts another listening socket in the place of one; whoever accepts there goes on with the new one.

    Args:
        old: Nobody has connected there yet.
        new: Listens already. It may be closed afterwards.

    Returns:
        What the epoll instance waits for now.

    Raises:
        CommError: The system does not allow it.
    """
    new.setblocking(False)
    os.dup2(new.fileno(), old.fd, inheritable=False)
    event = _EpollEvent(select.EPOLLIN, old.data)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.epoll_ctl(old.epoll, _EPOLL_CTL_ADD, old.fd, ctypes.byref(event)) != 0:
        raise CommError(f"cannot move a listener into the port range: epoll_ctl: {os.strerror(ctypes.get_errno())}")
    return Watched(old.epoll, old.fd, old.events, old.data, os.fstat(old.fd).st_ino)


def keep_from_children(sock: socket.socket) -> None:
    """Has a socket closed in each copy of this process that is forked, as a loader's workers are.

    A copy that holds it would keep the connection open, or the port, after this process has ended.
    """
    _kept_from_children.add(sock)


def _close_in_child() -> None:
    for sock in list(_kept_from_children):
        sock.close()  # without a shutdown, which would end the connection for the parent too


os.register_at_fork(after_in_child=_close_in_child)
