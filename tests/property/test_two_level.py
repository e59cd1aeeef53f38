"""Laws of two levels: every message reaches every rank once and crosses to each host once, in an order all agree on."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poseidon.comm.group import Group, Layout
from poseidon.comm.two_level import Routes

host_names = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


def routes_of(layout: Layout, levels: int) -> list[Routes]:
    """Those of every rank."""
    groups = []
    for rank in range(sum(map(len, layout.hosts))):
        group = Group([])
        group.layout, group.rank, group.world_size = layout, rank, sum(map(len, layout.hosts))
        groups.append(group)
    return [Routes(group, levels) for group in groups]


@given(host_names)
def test_a_layout_has_every_rank_once(names):
    layout = Layout.of_names(names)
    assert sorted(rank for host in layout.hosts for rank in host) == list(range(len(names)))
    assert all(names[rank] == names[host[0]] for host in layout.hosts for rank in host)
    assert len(layout.hosts) == len(set(names))
    assert all(layout.host_of(rank)[layout.place(rank)] == rank for rank in range(len(names)))
    lanes = [rank for index in range(layout.num_lanes) for rank in layout.lane(index)]
    assert len(lanes) == len(set(lanes)) == layout.num_lanes * len(layout.hosts)


@given(host_names, st.sampled_from([1, 2]))
def test_every_message_reaches_every_other_rank_once(names, levels):
    layout = Layout.of_names(names)
    routes = routes_of(layout, levels)
    received = Counter()
    for rank, mine in enumerate(routes):
        for source in mine.receives_from:
            assert rank in routes[source].sends_to
            received[source, rank] += 1
        for source, by in mine.forwarded:
            assert (source, rank) in routes[by].forwards
            received[source, rank] += 1
    ranks = range(len(names))
    assert received == {(source, rank): 1 for source in ranks for rank in ranks if source != rank}
    assert sum(len(mine.sends_to) for mine in routes) == sum(len(mine.receives_from) for mine in routes)
    assert sum(len(mine.forwards) for mine in routes) == sum(len(mine.forwarded) for mine in routes)


@given(host_names)
def test_in_two_levels_a_message_crosses_to_each_host_once(names):
    layout = Layout.of_names(names)
    for rank, mine in enumerate(routes_of(layout, 2)):
        away = [names[to] for to in mine.sends_to if names[to] != names[rank]]
        assert sorted(away) == sorted(set(names) - {names[rank]})
        assert all(names[to] == names[rank] for _, to in mine.forwards)


@given(host_names)
def test_two_ranks_of_a_host_pass_on_in_one_order(names):
    """Messages between two ranks keep their order, so both have to name them in the same one."""
    routes = routes_of(Layout.of_names(names), 2)
    for by, mine in enumerate(routes):
        for to, theirs in enumerate(routes):
            sent = [source for source, receiver in mine.forwards if receiver == to]
            assert sent == [source for source, sender in theirs.forwarded if sender == by]
