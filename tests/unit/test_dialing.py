"""Names with addresses of two families: whichever answers first is taken, and what failed is said."""

import errno
import os
import socket
import time

import pytest

from poseidon.comm import dialing
from poseidon.comm.dialing import dial, resolve
from poseidon.comm.ports import listen
from poseidon.comm.reach import route_to
from poseidon.comm.sockets import attach_filter


def known_as(monkeypatch: pytest.MonkeyPatch, *addresses: dialing.Address) -> None:
    """Has the name `both` mean these addresses."""
    monkeypatch.setattr(dialing, "_look_up", lambda name, port, flags=0: list(addresses))


def test_addresses_need_no_name_service() -> None:
    assert resolve("127.0.0.1", 7) == [(socket.AF_INET, ("127.0.0.1", 7))]
    assert resolve("::1", 7) == [(socket.AF_INET6, ("::1", 7, 0, 0))]
    with pytest.raises(OSError, match=r"not known|No address|failure in name resolution"):
        resolve("no.such.invalid", 7)


def test_a_slow_name_service_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(name: str, port: int, flags: int = 0) -> list[dialing.Address]:
        if flags:
            raise OSError("no address")
        time.sleep(1.0)
        return []

    monkeypatch.setattr(dialing, "_look_up", slow)
    with pytest.raises(TimeoutError, match=r"the name service did not answer within 0\.05 s"):
        resolve("both", 7, seconds=0.05)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_family_that_answers_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer listens in one family; the name has an address in each."""
    with listen(address) as listener:
        port = listener.getsockname()[1]
        known_as(monkeypatch, (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0)))
        with dial("both", port, seconds=10.0) as connection:
            assert connection.getpeername()[0] == address
            assert connection.gettimeout() == 10.0
            listener.accept()[0].close()
            assert connection.recv(1) == b""


def test_one_that_never_answers_does_not_delay_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as silent, listen("::1") as listener:
        attach_filter(silent, [])
        here, there = silent.getsockname(), listener.getsockname()
        known_as(monkeypatch, (socket.AF_INET, here), (socket.AF_INET6, there))
        start = time.monotonic()
        with dial("both", 1, seconds=30.0) as connection:
            assert connection.getpeername() == there
        assert time.monotonic() - start < 20.0


def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel with the family switched off."""
    make = socket.socket

    def refuse(family: int = -1, *args: int, **options: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return make(family, *args, **options)

    monkeypatch.setattr(socket, "socket", refuse)


def test_a_family_that_the_kernel_lacks_keeps_nobody_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as listener:
        here = listener.getsockname()
        off = (socket.AF_INET6, ("::1", here[1], 0, 0))
        known_as(monkeypatch, off, (socket.AF_INET, here))
        without_ipv6(monkeypatch)
        with dial("both", here[1], seconds=10.0) as connection:
            assert connection.getpeername() == here
        assert route_to("both") == "127.0.0.1"
    known_as(monkeypatch, off)
    for call in (lambda: dial("both", 1, seconds=10.0), lambda: route_to("both")):
        with pytest.raises(OSError, match="Address family not supported"):
            call()


def test_a_refusal_says_more_than_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets this port meanwhile
        bound.bind(("127.0.0.1", 0))
        refusing = (socket.AF_INET, bound.getsockname())
        known_as(monkeypatch, refusing)
        with pytest.raises(ConnectionRefusedError):
            dial("both", 1, seconds=5.0)
        with listen("127.0.0.1") as silent:
            attach_filter(silent, [])
            known_as(monkeypatch, (socket.AF_INET, silent.getsockname()))
            with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
                dial("both", 1, seconds=0.2)
            known_as(monkeypatch, (socket.AF_INET, silent.getsockname()), refusing)
            with pytest.raises(ConnectionRefusedError):
                dial("both", 1, seconds=0.2)
