"""Filters on listening sockets, in the kernel and by the meaning of each instruction; native sockets that are found."""

import selectors
import socket
import struct

import pytest
from torch._C._distributed_c10d import ProcessGroupGloo

from poseidon.comm import sockets
from poseidon.comm.sockets import admit, attach_filter


def passes(program: list[sockets.Instruction], source: str) -> bool:
    """What the kernel does with a packet from an address, instruction by instruction."""
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    header = bytes(8 if ":" in source else 12) + socket.inet_pton(family, source)
    place, loaded = 0, 0
    while True:
        code, if_equal, if_not, operand = program[place]
        place += 1
        if code == sockets._RETURN:
            return operand != 0
        if code == sockets._LOAD_WORD:
            loaded = struct.unpack_from("!I", header, operand - sockets._NETWORK_HEADER)[0]
        else:
            assert code == sockets._JUMP_IF_EQUAL
            place += if_equal if loaded == operand else if_not


@pytest.mark.parametrize(
    ("admitted", "others"),
    [
        (["10.0.0.1"], ["10.0.0.2", "1.0.0.10"]),
        (["10.0.0.1", "10.0.0.2", "192.168.7.9"], ["10.0.0.3", "192.168.7.8", "0.0.0.0"]),
        (["fd00::1", "fd00::2", "::1"], ["fd00::3", "::2", "fd00:0:0:1::1"]),
        ([], ["10.0.0.1", "::1"]),
    ],
)
def test_a_filter_admits_its_addresses_only(admitted: list[str], others: list[str]) -> None:
    program = admit(admitted)
    assert all(passes(program, source) for source in admitted)
    assert not any(passes(program, source) for source in others)


def test_the_largest_filter_is_small_enough_for_the_kernel() -> None:
    sources = [f"fd00::{number:x}" for number in range(1, sockets._MOST_SOURCES + 1)]
    assert len(admit(sources)) <= 4096
    assert passes(admit(sources), sources[-1])
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert attach_filter(listener, sources)
        assert not attach_filter(listener, [*sources, "::1"])


def reaches(listener: socket.socket, source: str) -> bool:
    with socket.socket(listener.family) as stranger:
        stranger.bind((source, 0))
        stranger.settimeout(0.3)
        try:
            stranger.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


def test_the_kernel_drops_strangers_and_keeps_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        attach_filter(listener, ["127.0.0.1", "127.0.0.5"])
        assert reaches(listener, "127.0.0.5")
        assert not reaches(listener, "127.0.0.6")
        with socket.create_connection(listener.getsockname()) as here:
            while (there := listener.accept()[0]).getpeername() != here.getsockname():
                there.close()
            with there:
                attach_filter(listener, [])
                assert not reaches(listener, "127.0.0.1")
                here.sendall(b"still here")
                assert there.recv(100) == b"still here"


def test_the_listener_of_a_device_is_found_and_replaced() -> None:
    before = set(sockets.foreign_listeners())
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    (found,) = set(sockets.foreign_listeners()) - before
    end = sockets.own_end(found)
    assert end is not None
    assert end[0] == "127.0.0.1"
    assert sockets.find_listener(end) == found
    assert sockets.connections_beside(found) == []
    with socket.create_server(("127.0.0.1", 0)) as new:
        moved = sockets.replace_listener(found, new)
        told = new.getsockname()
    assert sockets.own_end(moved) == told
    assert sockets.find_listener(end) is None
    with socket.create_connection(told) as stranger:  # gloo accepts on the new one, and waits for a number
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1)
    del device
    assert sockets.own_end(moved) is None


def test_what_python_waits_for_is_nothing_foreign() -> None:
    before = sockets.foreign_listeners()
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.EpollSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        assert any(one.fd == listener.fileno() for instance in sockets.watched() for one in instance)
        assert sockets.foreign_listeners() == before


def test_a_number_that_means_another_socket_by_now_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_connection(one.getsockname()) as other:
        gone = sockets.Watched(epoll=0, fd=other.fileno(), events=1, data=1, inode=1)
        assert not sockets.shut_down(gone)
        assert sockets.ends(gone) is None
