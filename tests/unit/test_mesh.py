"""What gloo publishes, and whether the two ends of every connection belong to the right ranks."""

import socket
import struct
from itertools import combinations

import pytest

from poseidon.comm.mesh import Connections, Published, _rank_of, _usable, strangers
from poseidon.comm.ports import PortRange
from poseidon.comm.sockets import Endpoint
from poseidon.errors import CommError


def published(address: str, port: int, host: str = "vm") -> bytes:
    """As gloo writes it: a host's name, a socket address with a sequence number, the numbers of the pairs."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    middle = packed if family == socket.AF_INET else bytes(4) + packed
    storage = (struct.pack("=H", family) + struct.pack("!H", port) + middle).ljust(128, b"\0")
    name = host.encode()
    return struct.pack("=Q", len(name)) + name + struct.pack("=Q", 136) + storage + struct.pack("=qQQ", -1, 0, 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.77.0.3", "fd00::7"])
@pytest.mark.parametrize("host", ["vm", "node-17.example.org"])
def test_the_address_is_found_and_changed(address: str, host: str) -> None:
    found = Published.find(published(address, 45849, host))
    assert found is not None
    assert found.endpoint == (address, 45849)
    assert found.with_port(20017) == published(address, 20017, host)


@pytest.mark.parametrize("data", [b"", b"1", b"\0" * 400, b"\xff" * 400, published("10.0.0.1", 1)[:100], b"x" * 170])
def test_anything_else_is_left_alone(data: bytes) -> None:
    assert Published.find(data) is None


def mesh_of(count: int) -> list[Connections]:
    """Ranks that are all connected, the higher one to the lower one's listener."""
    listeners: list[Endpoint] = [(f"10.0.0.{rank + 1}", 20000) for rank in range(count)]
    held: list[list[tuple[Endpoint, Endpoint]]] = [[] for _ in range(count)]
    for low, high in combinations(range(count), 2):
        source = (listeners[high][0], 40000 + low)
        held[high].append((source, listeners[low]))
        held[low].append((listeners[low], source))
    return [
        Connections(listener=listener, connections=tuple(pairs))
        for listener, pairs in zip(listeners, held, strict=True)
    ]


def with_connections(one: Connections, *pairs: tuple[Endpoint, Endpoint]) -> Connections:
    return one.model_copy(update={"connections": pairs})


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_mesh_without_strangers(count: int) -> None:
    assert strangers(mesh_of(count), "group") == [[] for _ in range(count)]


def test_a_connection_beside_the_ranks_is_a_strangers() -> None:
    said = mesh_of(3)
    odd = (("10.0.0.2", 20000), ("10.9.9.9", 5555))
    said[1] = with_connections(said[1], *said[1].connections, odd)
    assert strangers(said, "group") == [[], [odd], []]


def test_one_who_was_quicker_is_found_by_both_ends() -> None:
    """Rank 1's own connection was not accepted: a stranger had sent its number first."""
    said = mesh_of(2)
    (real,) = said[1].connections
    said[0] = with_connections(said[0], (said[0].listener, ("10.0.0.2", 5555)))
    with pytest.raises(CommError) as caught:
        strangers(said, "gloo's group '0'")
    assert str(caught.value) == (
        "rank 1 and rank 0 are not connected to each other in gloo's group '0': rank 1 holds "
        f"10.0.0.2:{real[0][1]} with 10.0.0.1:20000, rank 0 holds 10.0.0.1:20000 with 10.0.0.2:5555; somebody else has "
        "connected, or a proxy or a translated address is between them: let the ranks reach each other under their own "
        "addresses"
    )


def test_one_who_passes_everything_on_is_in_between() -> None:
    said = mesh_of(3)
    kept = [pair for pair in said[0].connections if pair[1][0] != "10.0.0.3"]
    said[0] = with_connections(said[0], *kept, (said[0].listener, ("10.0.0.99", 40001)))
    with pytest.raises(CommError, match=r"rank 2 and rank 0 are not connected .* with 10\.0\.0\.99:40001"):
        strangers(said, "group")


def test_two_ends_that_name_each_other_but_no_listener_are_no_connection_of_gloo() -> None:
    a, b = ("10.0.0.1", 1111), ("10.0.0.2", 2222)
    said = [
        Connections(listener=("10.0.0.1", 20000), connections=((a, b),)),
        Connections(listener=("10.0.0.2", 20000), connections=((b, a),)),
    ]
    with pytest.raises(CommError, match="not connected to each other"):
        strangers(said, "group")


@pytest.mark.parametrize("text", ["20000-20100", "20100-20200", "1-65535", "20223-20224", "30000-30000"])
def test_gloo_can_have_a_port_that_compares_as_larger_than_all_of_the_range(text: str) -> None:
    ports = PortRange.parse(text)
    usable = _usable(ports)
    assert set(usable) <= set(ports.numbers)
    assert 3 * len(usable) >= len(ports.numbers)
    largest = max(map(_rank_of, usable))
    assert any(_rank_of(port) > largest for port in range(32768, 61000))
