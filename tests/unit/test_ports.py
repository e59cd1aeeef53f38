"""Listening inside a range of ports: bound before anybody is told, and a range that is full says so."""

import socket
from contextlib import ExitStack

import pytest

from poseidon.comm.ports import PortRange, listen
from poseidon.errors import CommError, ConfigError


@pytest.mark.parametrize("text", ["20000", "20100-20000", "0-10", "1-70000", "a-b", "20000-20100-20200", "-5", "1-2 3"])
def test_what_is_no_range_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_PORT_RANGE", text)
    with pytest.raises(ConfigError, match=r"POSEIDON_PORT_RANGE=.* is no range of ports: it takes two numbers"):
        PortRange.find()


def test_a_range_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PortRange.find() is None
    monkeypatch.setenv("POSEIDON_PORT_RANGE", " 20000 - 20100 ")
    ports = PortRange.find()
    assert ports == PortRange(first=20000, last=20100)
    assert list(PortRange.parse("7-9").numbers) == [7, 8, 9]


def free_range(count: int) -> PortRange:
    """Neighboring ports that nobody has at this moment."""
    for first in range(21000, 32000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return PortRange(first=first, last=first + count - 1)
    raise AssertionError("no free ports")


def test_every_port_of_the_range_is_used_and_no_other() -> None:
    ports = free_range(4)
    with ExitStack() as stack:
        taken = [stack.enter_context(listen("127.0.0.1", ports=ports)).getsockname()[1] for _ in range(4)]
        assert sorted(taken) == list(ports.numbers)
        with pytest.raises(CommError, match=rf"on none of the ports {ports} \(POSEIDON_PORT_RANGE\).*in use"):
            listen("127.0.0.1", ports=ports)
    with listen("127.0.0.1", ports=ports, usable=lambda port: port == ports.last) as one:
        assert one.getsockname()[1] == ports.last


def test_the_environment_names_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_range(2)
    monkeypatch.setenv("POSEIDON_PORT_RANGE", str(ports))
    with listen("::1") as one:
        assert one.getsockname()[1] in ports.numbers


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(CommError, match=r"cannot listen on 192\.0\.2\.77, where the other ranks are to connect"):
        listen("192.0.2.77")
