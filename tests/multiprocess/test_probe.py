"""Probing on loopback: what is found has the shape that is promised, the same on every rank. How fast is no matter."""

import os

import pytest

from poseidon.cluster.curve import Curve
from poseidon.cluster.spec import ClusterSpec
from poseidon.cluster.topology import rates_of
from poseidon.comm import cluster_probe, probe
from poseidon.comm.group import Group
from poseidon.comm.probe import measure_rates
from poseidon.profile import device
from poseidon.runtime import join
from poseidon.runtime.probing import probe_cluster
from poseidon.units import KIB, MIB
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]


def rates_twice(rank, world_size, faster):
    group = Group.of_default(max_connections=2)
    real = measure_rates(group)
    probe._curve = lambda group, transfer, share: Curve.line(latency=1e-4, bandwidth=1e8 * group.connections**faster)
    return real, measure_rates(group), group.connections


@pytest.mark.parametrize(("faster", "connections"), [(0, 1), (1, 2), (-1, 1)])
def test_rates_are_agreed_on_and_more_connections_are_used_only_where_they_are_faster(faster, connections):
    results = run_ranks(2, rates_twice, faster)
    assert results[0][0] == results[1][0]
    real, faked, used = results[0]
    assert set(real.all_reduce) == set(real.exchange) == {1, 2}
    assert 0 < real.latency < 5
    assert 0 < real.memory_bandwidth < 1e13
    assert faked.connections == used == connections


def probed(rank, world_size, ranks_per_host):
    os.environ["GROUP_RANK"] = str(rank // ranks_per_host)
    cluster_probe.SIZES = (KIB, 64 * KIB, MIB)
    cluster_probe.SPLIT_SIZES = (MIB,)
    cluster_probe.RECORD_SIZES = (KIB, 16 * KIB)
    cluster_probe.BATCH_SECONDS = 0.002
    cluster_probe.DISTURBED_SECONDS = 0.05
    cluster_probe.IDLE_SECONDS = 0.01
    cluster_probe.MOST_BUSY = -1.0  # every machine is
    device.SECONDS_EACH = 0.01
    group = join.init(max_connections=2)
    phases = []
    cluster = probe_cluster(group, on_phase=lambda what, index, count: phases.append((index, count)))
    state = group.bytes_sent, group.connections
    join.shutdown()
    return cluster, phases, state


def test_everything_is_measured_and_everybody_knows_it(tmp_path):
    results = run_ranks(3, probed, 1, init=False)
    cluster, phases, state = results[0]
    assert all(one[0] == cluster for one in results)
    assert phases == [(index, len(phases) - 1) for index in range(len(phases))]
    num_bytes, connections = state
    assert num_bytes < KIB, "what was measured is not counted as training's traffic"
    assert connections == 1
    assert [(host.name, host.num_ranks) for host in cluster.hosts] == [("host0", 1), ("host1", 1), ("host2", 1)]
    for host in cluster.hosts:
        assert host.interface.name == "lo"
        assert set(host.device.flops_per_s_by_busy) == set(host.device.memory_bandwidth_by_busy) == {2, 3}
        assert host.device.memory_num_bytes > MIB
    measured = cluster.measured
    assert set(measured.all_reduce) == set(measured.exchange) == {1, 2}
    # 2(P-1)/P of 192 floats, (P-1) times 128 floats
    assert measured.all_reduce[1].num_bytes[0] == 1024
    assert measured.exchange[1].num_bytes[0] == 1024
    assert (measured.inner, measured.outer) == (None, None)
    assert measured.broadcast.num_bytes == measured.all_gather.num_bytes == (KIB, 16 * KIB)
    (note,) = [note for note in measured.notes if "busy" in note]
    assert note.startswith("the machine of host0 was "), "its three hosts share it: said once"
    names = [host.name for host in cluster.hosts]
    assert [(p.sender, p.receiver) for p in measured.pairs] == [(a, b) for a in names for b in names if a != b]
    cluster.save(tmp_path / "cluster.toml")
    assert ClusterSpec.load(tmp_path / "cluster.toml") == cluster
    assert rates_of(cluster).all_reduce == measured.all_reduce


def test_hosts_with_several_ranks_have_two_levels():
    cluster, _, _ = run_ranks(4, probed, 2, init=False)[3]
    assert [host.num_ranks for host in cluster.hosts] == [2, 2]
    assert len(cluster.measured.pairs) == 2, "one rank speaks for its host"
    assert cluster.measured.inner.num_bytes[0] == cluster.measured.outer.num_bytes[0] == KIB
    rates = rates_of(cluster, num_hosts=1)
    assert rates.all_reduce[1] == cluster.measured.inner


def test_one_host_has_no_pairs():
    cluster, _, _ = run_ranks(2, probed, 2, init=False)[0]
    assert cluster.measured.pairs == ()
    assert set(rates_of(cluster).all_reduce) == {1, 2}
