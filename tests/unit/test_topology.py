"""From clusters to rates, against figures worked out by hand."""

import pytest

from poseidon.cluster.curve import Curve
from poseidon.cluster.measurements import Measurements, PairRate
from poseidon.cluster.rates import UNLIMITED
from poseidon.cluster.spec import ClusterSpec, Device, Host, Link
from poseidon.cluster.topology import bottleneck, levels, rates_of, slow_links
from poseidon.errors import ClusterError
from poseidon.profile.graph import ComputeRates

GIGABIT = 125e6
PROFILED = ComputeRates(name="cpu", threads=2, flops_per_s=100e9, memory_bandwidth=10e9)


def probed(**changes):
    """Four hosts at 1 Gbit/s whose all-reduce has 6 ms of latency and moves 100 MB/s, its exchange 1 ms and 80 MB/s."""
    measured = Measurements(
        all_reduce={
            1: Curve.line(latency=6e-3, bandwidth=100e6),
            2: Curve.line(latency=6e-3, bandwidth=110e6),
        },
        exchange={n: Curve.line(latency=1e-3, bandwidth=80e6) for n in (1, 2)},
        connections=2,
        compute_slowdown=1.2,
        transfer_slowdown=1.1,
        **changes,
    )
    return ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT).model_copy(update={"measured": measured})


def test_links_become_lines():
    rates = rates_of(ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT))
    assert rates.world_size == 4
    assert rates.all_reduce_bandwidth == pytest.approx(0.95 * GIGABIT)
    assert rates.exchange_bandwidth == pytest.approx(0.75 * GIGABIT)
    assert rates.exchange[1].latency == pytest.approx(50e-6)
    assert rates.all_reduce[1].latency == pytest.approx(6 * 50e-6), "2(P-1) rounds"
    assert (rates.flops_per_s, rates.memory_bandwidth) == (UNLIMITED, UNLIMITED)
    assert (rates.inner, rates.outer) == (None, None)
    assert [(host.name, host.send_bandwidth) for host in rates.hosts] == [(f"host{i}", GIGABIT) for i in range(4)]


def test_the_slowest_direction_of_the_hosts_that_take_part_counts():
    links = [Link(up=100e6, down=80e6), Link(up=40e6, down=90e6), Link(up=1e6, down=1e6, latency=2e-3)]
    cluster = ClusterSpec(hosts=tuple(Host(name=name, link=link) for name, link in zip("abc", links, strict=True)))
    assert rates_of(cluster, num_hosts=2).all_reduce_bandwidth == pytest.approx(0.95 * 40e6)
    assert rates_of(cluster, num_hosts=2).latency == pytest.approx(50e-6)
    assert rates_of(cluster).all_reduce_bandwidth == pytest.approx(0.95 * 1e6)
    assert rates_of(cluster).latency == pytest.approx(2e-3)
    assert rates_of(cluster, bandwidth=1e9).all_reduce_bandwidth == pytest.approx(0.95e9)
    assert rates_of(cluster, bandwidth=1e9).hosts[2].receive_bandwidth == 1e9


def test_ranks_of_a_host_share_its_link_in_an_exchange_but_not_in_a_ring():
    rates = rates_of(ClusterSpec.uniform(num_hosts=2, bandwidth=GIGABIT, num_ranks=4))
    assert rates.all_reduce_bandwidth == pytest.approx(0.95 * GIGABIT)
    # each of 4 ranks sends 4 of 7 parts out: 16/7 of a rank's bytes cross the link
    assert rates.exchange_bandwidth == pytest.approx(0.75 * GIGABIT * 7 / 16)
    assert rates.inner is not None
    assert rates.outer is not None
    assert rates.outer.bandwidth == pytest.approx(0.95 * GIGABIT)
    assert rates.outer.latency == pytest.approx(2 * 50e-6)


def test_one_host_sends_nothing_over_its_link():
    alone = rates_of(ClusterSpec.uniform(num_hosts=2, bandwidth="1Mbit/s"), num_hosts=1)
    assert (alone.world_size, alone.all_reduce[1].at(2**30)) == (1, pytest.approx(0.0))
    several = rates_of(ClusterSpec.uniform(num_hosts=2, bandwidth="1Mbit/s", num_ranks=2), num_hosts=1)
    assert several.world_size == 2
    assert several.all_reduce_bandwidth > GIGABIT
    assert several.outer is None


def test_a_probed_cluster_gives_what_was_measured():
    cluster = probed()
    rates = rates_of(cluster, device=PROFILED)
    assert rates.all_reduce == cluster.measured.all_reduce
    assert rates.exchange == cluster.measured.exchange
    assert (rates.connections, rates.compute_slowdown, rates.transfer_slowdown) == (2, 1.2, 1.1)
    virtual = rates_of(cluster)
    assert (virtual.compute_slowdown, virtual.transfer_slowdown) == (1.0, 1.0), "nothing computes that could disturb"


def test_fewer_hosts_have_fewer_rounds_and_the_same_seconds_per_byte():
    rates = rates_of(probed(), num_hosts=2)
    assert rates.all_reduce[1].latency == pytest.approx(2e-3), "2 rounds instead of 6"
    assert rates.all_reduce[1].bandwidth == pytest.approx(100e6)
    assert rates.exchange[1].latency == pytest.approx(1e-3)
    assert rates.exchange[1].bandwidth == pytest.approx(80e6)


def test_other_links_scale_what_is_above_the_latency():
    tenth = rates_of(probed(), device=PROFILED, bandwidth=GIGABIT / 10)
    assert tenth.all_reduce[1].at(0) == pytest.approx(6e-3)
    assert tenth.all_reduce[1].bandwidth == pytest.approx(10e6)
    assert tenth.exchange[2].bandwidth == pytest.approx(8e6)
    assert tenth.compute_slowdown == pytest.approx(1.02), "a tenth of the bytes per second, a tenth of the disturbance"


def test_no_link_makes_the_ranks_themselves_faster():
    rates = rates_of(probed(endpoint_bandwidth=2 * GIGABIT), bandwidth=40 * GIGABIT)
    assert rates.all_reduce[1].bandwidth == pytest.approx(200e6)
    slower = rates_of(probed(endpoint_bandwidth=GIGABIT / 2), bandwidth=GIGABIT / 4)
    assert slower.all_reduce[1].bandwidth == pytest.approx(50e6), "it was the ranks that gave 100 MB/s, not the link"


def test_what_crosses_the_link_depends_on_how_many_hosts_there_are():
    cluster = ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT, num_ranks=2)
    measured = probed(
        inner=Curve.line(latency=2e-4, bandwidth=1e9), outer=Curve.line(latency=3e-3, bandwidth=90e6)
    ).measured
    rates = rates_of(cluster.model_copy(update={"measured": measured}), num_hosts=2)
    # of 8 ranks 2·6/7 crossed, of 4 ranks 2·2/3 do
    assert rates.exchange[1].bandwidth == pytest.approx(80e6 * (12 / 7) / (4 / 3))
    assert rates.inner == measured.inner
    assert rates.outer is not None
    assert rates.outer.latency == pytest.approx(1e-3)
    one = rates_of(cluster.model_copy(update={"measured": measured}), num_hosts=1)
    assert one.all_reduce == {1: measured.inner}
    assert one.connections == 1


def test_computing_is_scaled_from_where_the_profile_was_measured():
    device = Device(
        flops_per_s=50e9,
        memory_bandwidth=10e9,
        flops_per_s_by_busy={4: 25e9},
        memory_bandwidth_by_busy={4: 2.5e9},
    )
    hosts = tuple(Host(name=f"h{i}", link="1Gbit/s", device=device) for i in range(4))
    cluster = ClusterSpec(hosts=(*hosts, Host(name="unknown", link="1Gbit/s")))
    four = rates_of(cluster, device=PROFILED, num_hosts=4)
    assert four.hosts[0].compute_scale == pytest.approx((100 / 25 + 10 / 2.5) / 2)
    assert (four.flops_per_s, four.memory_bandwidth) == (25e9, 2.5e9)
    assert rates_of(cluster, device=PROFILED, num_hosts=1).hosts[0].compute_scale == pytest.approx((2 + 1) / 2)
    assert rates_of(cluster, num_hosts=4).hosts[0].compute_scale == 1.0
    assert rates_of(cluster, device=PROFILED).hosts[4].compute_scale == 1.0
    described = ClusterSpec.uniform(num_hosts=2, bandwidth=GIGABIT)
    alike = rates_of(described, device=PROFILED)
    assert (alike.flops_per_s, alike.memory_bandwidth) == (100e9, 10e9), "as where the profile was measured"


def test_between_two_counts_of_busy_ranks_seconds_lie_on_a_line():
    device = Device(flops_per_s=60e9, flops_per_s_by_busy={2: 60e9, 4: 30e9})
    assert [device.flops_per_s_of(n) for n in (1, 2, 3, 4, 9)] == [60e9, 60e9, pytest.approx(40e9), 30e9, 30e9]
    assert device.memory_bandwidth_of(2) is None


@pytest.mark.parametrize("num_hosts", [0, 5])
def test_hosts_that_are_not_there_are_refused(num_hosts):
    with pytest.raises(ClusterError, match=f"{num_hosts} hosts would be: this cluster has 4"):
        rates_of(ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT), num_hosts=num_hosts)


def test_levels_from_near_to_far():
    one_each = levels(ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT))
    assert [(level.name, level.size) for level in one_each] == [("network", 4)]
    two = levels(ClusterSpec.uniform(num_hosts=4, bandwidth=GIGABIT, num_ranks=2))
    assert [(level.name, level.size) for level in two] == [("host", 2), ("network", 4)]
    assert two[0].bandwidth > two[1].bandwidth == pytest.approx(0.95 * GIGABIT)


def test_the_bottleneck_has_a_name_and_figures():
    cluster = ClusterSpec.uniform(num_hosts=3, bandwidth=GIGABIT).with_link("host1", Link(up=GIGABIT, down=GIGABIT / 2))
    found = bottleneck(cluster)
    assert (found.link.host, found.direction, found.link.share) == ("host1", "down", 0.5)
    assert found.link.stands_out
    assert found.sentence() == "the slowest link is the one to host1: 500Mbit/s, the others 1Gbit/s"
    hosts = [Host(name=n, link="1Gbit/s", device=Device(flops_per_s=f)) for n, f in (("a", 50e9), ("b", 100e9))]
    even = bottleneck(ClusterSpec(hosts=tuple(hosts)))
    assert not even.link.stands_out
    assert even.sentence().endswith("the slowest device is that of a: 50GFLOP/s, the others 100GFLOP/s")


def with_pairs(cluster, **rates):
    """Measured pairs, all at 1 Gbit/s but those given as `host0_host1=rate`."""
    names = [host.name for host in cluster.hosts]
    pairs = [
        PairRate(sender=a, receiver=b, latency=1e-4, bandwidth=rates.get(f"{a}_{b}", GIGABIT))
        for a in names
        for b in names
        if a != b
    ]
    return cluster.model_copy(update={"measured": probed(pairs=tuple(pairs)).measured})


def test_links_below_their_siblings_are_named_with_figures():
    alike = ClusterSpec.uniform(num_hosts=3, bandwidth=GIGABIT)
    assert slow_links(alike) == []
    slightly = alike.with_link("host1", Link(up=0.75 * GIGABIT, down=GIGABIT))
    assert slow_links(slightly) == []
    slow = alike.with_link("host1", Link(up=0.5 * GIGABIT, down=GIGABIT))
    assert slow_links(slow) == ["the link of host1 is slow: 500Mbit/s up, the others 1Gbit/s"]


def test_a_pair_below_what_both_move_with_others_is_named():
    cluster = with_pairs(ClusterSpec.uniform(num_hosts=3, bandwidth=GIGABIT), host0_host2=GIGABIT / 10)
    assert slow_links(cluster) == ["host0 to host2 is slow: 100Mbit/s, while both move 1Gbit/s with others"]


def test_of_two_hosts_the_slower_way_is_named():
    link = Link(up=GIGABIT / 10, down=GIGABIT), Link(up=GIGABIT, down=GIGABIT / 10)
    hosts = tuple(Host(name=f"host{i}", link=link[i]) for i in range(2))
    cluster = with_pairs(ClusterSpec(hosts=hosts), host0_host1=GIGABIT / 10)
    assert slow_links(cluster) == ["host0 to host1 is slow: 100Mbit/s, 1Gbit/s the other way"]
