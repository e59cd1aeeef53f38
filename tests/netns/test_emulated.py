"""Emulated hosts: their links carry what they are set to, and change while things run."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poseidon.cluster.emulated import INTERFACE, EmulatedCluster, why_unavailable
from poseidon.cluster.link_meter import LinkRates
from poseidon.cluster.spec import ClusterSpec, Link, LinkChange
from poseidon.errors import ClusterError
from poseidon.units import parse_bandwidth

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

TOLERANCE = 0.05
TRIES = 5


def measure(cluster: EmulatedCluster, host: str) -> LinkRates:
    """The best of a few: another process may take both cores meanwhile."""
    found = cluster.measure(host, seconds=0.4)
    for _ in range(TRIES - 1):
        if found.deviation > TOLERANCE:
            found = min(found, cluster.measure(host, seconds=0.4), key=lambda rates: rates.deviation)
    return found


@pytest.fixture
def pair() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(ClusterSpec.uniform(num_hosts=2, bandwidth="200Mbit/s")) as cluster:
        yield cluster


@pytest.mark.parametrize("bandwidth", ["50Mbit/s", "1Gbit/s", "2Gbit/s"])
def test_links_carry_what_they_are_set_to(bandwidth: str) -> None:
    with EmulatedCluster(ClusterSpec.uniform(num_hosts=2, bandwidth=bandwidth)) as cluster:
        for host in ("host0", "host1"):
            rates = measure(cluster, host)
            assert rates.set_up == rates.set_down == parse_bandwidth(bandwidth)
            assert rates.deviation < TOLERANCE, str(rates)


@pytest.mark.thorough
def test_links_may_differ_between_hosts_and_directions() -> None:
    spec = ClusterSpec.uniform(num_hosts=3, bandwidth="400Mbit/s").with_link("host1", Link.symmetric("100Mbit/s"))
    spec = spec.with_link("host2", Link(up="20Mbit/s", down="300Mbit/s"))
    with EmulatedCluster(spec) as cluster:
        for host in spec.hosts:
            rates = measure(cluster, host.name)
            assert (rates.set_up, rates.set_down) == (host.link.up, host.link.down)
            assert rates.deviation < TOLERANCE, str(rates)


def test_rates_change_while_bytes_flow(pair: EmulatedCluster) -> None:
    """Down to a small part of the rate and up again: what was queued before must not block the link."""
    stop = threading.Event()
    flow = threading.Thread(target=_exchange, args=(pair, stop))
    flow.start()
    time.sleep(0.3)
    pair.set_bandwidth("host1", parse_bandwidth("2Gbit/s"))
    time.sleep(0.3)
    pair.set_bandwidth("host1", parse_bandwidth("10Mbit/s"))
    time.sleep(0.3)
    stop.set()
    flow.join()
    assert measure(pair, "host1").deviation < TOLERANCE
    assert pair.spec.host("host1").link == Link.symmetric("10Mbit/s")
    pair.set_bandwidth("host1", parse_bandwidth("500Mbit/s"), parse_bandwidth("50Mbit/s"))
    assert measure(pair, "host1").deviation < TOLERANCE


def _exchange(cluster: EmulatedCluster, stop: threading.Event) -> None:
    """Sends from host0 to host1 as fast as it goes, until told to stop."""
    with (
        cluster.run("host1", socket.create_server, (cluster.address("host1"), 0)) as server,
        cluster.run("host0", socket.create_connection, server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        sender.setblocking(False)
        receiver.setblocking(False)
        while not stop.is_set():
            for move in (lambda: sender.send(bytes(65536)), lambda: receiver.recv(65536)):
                try:
                    move()
                except BlockingIOError:
                    time.sleep(0.0005)


def test_a_cut_link_is_silent_and_a_restored_one_goes_on(pair: EmulatedCluster) -> None:
    with (
        pair.run("host1", socket.create_server, (pair.address("host1"), 0)) as server,
        pair.run("host0", socket.create_connection, server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        receiver.settimeout(20.0)
        sender.sendall(b"a")
        assert receiver.recv(1) == b"a"
        pair.cut("host1")
        sender.sendall(b"b")
        receiver.settimeout(0.5)
        with pytest.raises(TimeoutError):
            receiver.recv(1)
        pair.restore("host1")
        receiver.settimeout(20.0)
        assert receiver.recv(1) == b"b"
    assert measure(pair, "host1").deviation < TOLERANCE


@pytest.mark.thorough
def test_changes_are_applied_by_name(pair: EmulatedCluster) -> None:
    pair.apply(LinkChange.parse("0s:host0=20Mbit/s"))
    assert measure(pair, "host0").deviation < TOLERANCE
    pair.apply(LinkChange.parse("0s:host0=cut"))
    pair.apply(LinkChange.parse("0s:host0=restore"))
    assert measure(pair, "host0").set_up == parse_bandwidth("20Mbit/s")


def test_a_host_sees_its_own_network_only(pair: EmulatedCluster) -> None:
    outside = [name for _, name in socket.if_nameindex()]
    names = [name for _, name in pair.run("host0", socket.if_nameindex)]
    assert names == ["lo", INTERFACE]
    assert outside == [name for _, name in socket.if_nameindex()]
    with pair.run("host0", socket.create_server, ("127.0.0.1", 0)) as server:
        pair.run("host0", socket.create_connection, server.getsockname()).close()
        with pytest.raises(OSError, match="refused"):
            pair.run("host1", socket.create_connection, server.getsockname())


def test_hosts_know_each_other_by_name(pair: EmulatedCluster) -> None:
    done = pair.start(["getent", "ahostsv4", "host1"], host="host0")
    output, _ = done.communicate(timeout=20)
    assert output.split()[0].decode() == pair.address("host1")


def test_a_command_runs_where_this_process_is(
    pair: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output, _ = pair.start(["pwd"], host="host0").communicate(timeout=20)
    assert output.decode() == f"{tmp_path}\n"


def test_what_runs_on_a_host_ends_with_the_cluster() -> None:
    """Also what has left its process group and session."""
    nap = f"86401.{os.getpid()}"
    with EmulatedCluster(ClusterSpec.uniform(num_hosts=1, bandwidth="1Gbit/s")) as cluster:
        script = f"setsid sleep {nap} & sleep {nap} & echo started; wait"
        process = cluster.start(["sh", "-c", script], host="host0")
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
    with process:
        pass
    found = subprocess.run(["pgrep", "-f", f"sleep {nap}"], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_threads_and_descriptors_are_given_back() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    why_unavailable()
    before = opened()
    for _ in range(3):
        with EmulatedCluster(ClusterSpec.uniform(num_hosts=3, bandwidth="1Gbit/s")) as cluster:
            cluster.run("host0", os.getpid)
    assert opened() == before


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda cluster: cluster.cut("host9"), "no host is named 'host9': this cluster has host0, host1"),
        (lambda cluster: cluster.set_bandwidth("host0", 1e12), "cannot emulate a link of 8000Gbit/s"),
    ],
)
def test_what_cannot_be_done_is_said(
    pair: EmulatedCluster, use: Callable[[EmulatedCluster], None], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        use(pair)


def test_a_closed_cluster_says_so(pair: EmulatedCluster) -> None:
    closed = EmulatedCluster(pair.spec)
    with pytest.raises(ClusterError, match="not there yet"):
        closed.start(["true"], host="host0")
    with pytest.raises(ClusterError, match="not there yet"):
        closed.cut("host0")
