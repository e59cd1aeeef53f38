"""Laws of what is kept where: one lost host costs no step, and parts of two states are never mixed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from poseidon.comm.group import Layout
from poseidon.runtime.holdings import Holding, Identity, deliveries, keepers, newest_complete, senders_to

COMMON = {"model", "optimizer", "job"}


@st.composite
def layouts(draw, min_hosts=2):
    counts = draw(st.lists(st.integers(1, 4), min_size=min_hosts, max_size=5))
    ranks = iter(draw(st.permutations(range(sum(counts)))))
    return Layout(tuple(tuple(sorted(next(ranks) for _ in range(count))) for count in counts))


def num_ranks(layout):
    return sum(map(len, layout.hosts))


def committed(layout, identity, reached=None):
    """What all hosts hold after a commit, or only those that it has reached."""
    everything = frozenset(COMMON | {f"own{rank}" for rank in range(num_ranks(layout))})
    held = []
    for host in range(len(layout.hosts)) if reached is None else reached:
        ranks = [*layout.hosts[host], *(other for rank in layout.hosts[host] for other in senders_to(layout, rank))]
        parts = frozenset(COMMON | {f"own{rank}" for rank in ranks})
        held.append(Holding(host=host, identity=identity, parts=parts, all_parts=everything))
    return held


def of(layout, step, **more):
    return Identity(**{"step": step, "tier": "memory", "attempt": 0, "world_size": num_ranks(layout), **more})


@given(layouts())
def test_every_rank_is_kept_on_its_host_and_on_another(layout):
    for rank in range(num_ranks(layout)):
        at = keepers(layout, rank)
        assert rank in layout.hosts[at[0]]
        assert len(at) == 2
        assert at[0] != at[1]


@given(layouts(), st.data())
def test_losing_any_one_host_loses_no_step(layout, data):
    lost = data.draw(st.integers(0, len(layout.hosts) - 1))
    held = [*committed(layout, of(layout, 10)), *committed(layout, of(layout, 20))]
    choice = newest_complete(one for one in held if one.host != lost)
    assert choice is not None
    assert choice.identity.step == 20
    assert all(lost not in hosts for hosts in choice.hosts.values())


@given(layouts(), st.data())
def test_a_commit_that_was_cut_short_leaves_the_one_before(layout, data):
    """Some hosts hold the newest already; it counts only if every part of it is somewhere."""
    reached = data.draw(st.sets(st.integers(0, len(layout.hosts) - 1)))
    held = [*committed(layout, of(layout, 10)), *committed(layout, of(layout, 20), reached)]
    choice = newest_complete(held)
    covered = all(set(keepers(layout, rank)) & reached for rank in range(num_ranks(layout)))
    assert choice is not None
    assert choice.identity.step == (20 if covered and reached else 10)


@given(layouts(), st.data())
def test_parts_of_two_attempts_are_never_mixed(layout, data):
    hosts = range(len(layout.hosts))
    first = data.draw(st.sets(st.sampled_from(hosts)))
    held = [
        *committed(layout, of(layout, 20, attempt=0), first),
        *committed(layout, of(layout, 20, attempt=1), set(hosts) - first),
    ]
    choice = newest_complete(held)
    if choice is not None:
        whole = [one for one in held if one.identity == choice.identity]
        assert frozenset().union(*(one.parts for one in whole)) == held[0].all_parts


@given(layouts(min_hosts=1), st.integers(1, 30), st.integers(1, 30))
def test_the_newest_step_counts_and_memory_where_equal(layout, in_memory, on_disk):
    held = [
        *committed(layout, of(layout, in_memory)),
        *committed(layout, of(layout, on_disk, tier="disk")),
    ]
    choice = newest_complete(held)
    assert choice is not None
    assert choice.identity.step == max(in_memory, on_disk)
    assert choice.identity.tier == ("memory" if in_memory >= on_disk else "disk")


@given(layouts(), st.data())
def test_deliveries_give_every_host_what_it_needs_from_one_that_has_it(layout, data):
    held = committed(layout, of(layout, 10))
    lost = data.draw(st.integers(0, len(layout.hosts) - 1))
    choice = newest_complete(one for one in held if one.host != lost)
    assert choice is not None
    everything = sorted(held[0].all_parts)
    needs = [data.draw(st.sets(st.sampled_from(everything))) for _ in layout.hosts]
    has = {one.host: set(one.parts) for one in held if one.host != lost}
    for delivery in deliveries(choice, needs):
        assert delivery.part in has[delivery.source]
        assert delivery.source != delivery.target
        has.setdefault(delivery.target, set()).add(delivery.part)
    assert all(need <= has.get(host, set()) for host, need in enumerate(needs))


@given(layouts())
def test_nothing_is_delivered_where_all_is_there(layout):
    held = committed(layout, of(layout, 10))
    choice = newest_complete(held)
    assert choice is not None
    assert not deliveries(choice, [one.parts for one in held])


def test_nothing_held_is_nothing_to_go_on_from():
    assert newest_complete([]) is None


def test_a_state_with_a_missing_part_is_not_chosen():
    layout = Layout(((0,), (1,)))
    held = committed(layout, of(layout, 10))
    broken = [replace(one, parts=one.parts - {"model"}) for one in held]
    assert newest_complete(broken) is None
