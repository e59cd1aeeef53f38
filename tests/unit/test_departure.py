"""When steps have departed from what was expected, and to whom that is due: numbers in, decisions out."""

from itertools import pairwise

import pytest

from poseidon.comm.link_probe import LinkSpeed
from poseidon.runtime.blame import blame_links, blame_ranks
from poseidon.runtime.departure import (
    CALM_READINGS,
    FASTER_READINGS,
    SLOWER_READINGS,
    Departure,
    DepartureWatch,
    Reading,
)
from poseidon.timeline import Activity, Interval, Step
from poseidon.units import parse_bandwidth

FAST, SLOW = parse_bandwidth("1Gbit/s"), parse_bandwidth("100Mbit/s")
HOSTS = {"host0": [0], "host1": [1], "host2": [2]}


def reading(step=0.3, *, exposed=0.1, computing=0.15, loader=0.0):
    return Reading(step=step, exposed=exposed, computing=computing, loader=loader)


def ranks(*readings):
    return list(readings or [reading()] * 3)


def watching(expected=None):
    watch = DepartureWatch()
    assert watch.note(expected or ranks()) is None
    return watch


def slow_link(step=0.8):
    return ranks(*[reading(step, exposed=step - 0.2)] * 3)


def feed(watch, readings, times):
    return [watch.note(readings) for _ in range(times)]


def test_steps_as_expected_are_no_departure():
    assert not any(feed(watching(), ranks(*[reading(0.36, exposed=0.16)] * 3), 50))


def test_slow_steps_are_a_departure_once_they_last():
    found = feed(watching(), slow_link(), SLOWER_READINGS)
    assert found[:-1] == [None] * (SLOWER_READINGS - 1)
    assert found[-1].slower
    assert (found[-1].seconds_before, found[-1].seconds_now) == (0.3, 0.8)


def test_a_slow_spell_that_passes_is_none():
    watch = watching()
    for _ in range(20):
        assert not any(feed(watch, slow_link(), SLOWER_READINGS - 1))
        assert watch.note(ranks()) is None


def test_one_rank_that_was_held_up_outside_of_the_step_is_none():
    assert not any(feed(watching(), ranks(reading(), reading(5.0), reading()), 20))


def test_fast_steps_are_a_departure_later():
    watch = watching(slow_link())
    found = feed(watch, ranks(), FASTER_READINGS)
    assert found[:-1] == [None] * (FASTER_READINGS - 1)
    assert not found[-1].slower
    assert FASTER_READINGS > SLOWER_READINGS


def test_what_follows_a_departure_is_the_new_expectation():
    watch = watching()
    assert feed(watch, slow_link(), SLOWER_READINGS)[-1]
    assert not any(feed(watch, slow_link(), 100))


def test_what_goes_up_and_down_is_chased_ever_more_seldom():
    watch = watching()
    noticed = [
        index
        for index in range(400)
        if watch.note(slow_link() if index // (2 * FASTER_READINGS) % 2 else ranks()) is not None
    ]
    gaps = [after - before for before, after in pairwise(noticed)]
    assert len(noticed) <= 6
    assert gaps[0] > CALM_READINGS
    assert gaps[-1] > 2 * gaps[0]


def test_a_rank_whose_own_time_grew_is_the_suspect():
    slow_host = reading(0.8, exposed=0.05, computing=0.7)
    others = reading(0.8, exposed=0.6)
    (departure,) = filter(None, feed(watching(), ranks(others, slow_host, others), SLOWER_READINGS))
    suspect = departure.suspect()
    assert suspect.ranks == (1,)
    assert suspect.part == "computing"
    assert (suspect.before, suspect.now) == (0.15, 0.7)
    assert departure.compute_growth() == pytest.approx([1.0, 0.7 / 0.15, 1.0])


def test_so_is_one_that_waits_for_its_samples():
    slow_loader = reading(0.8, exposed=0.05, loader=0.55)
    others = reading(0.8, exposed=0.6)
    suspect = Departure(before=tuple(ranks()), now=(others, others, slow_loader)).suspect()
    assert (suspect.ranks, suspect.part) == ((2,), "loader")


def test_and_all_of_them_where_all_compute_more_slowly():
    suspect = Departure(before=tuple(ranks()), now=tuple(ranks(*[reading(0.8, computing=0.65)] * 3))).suspect()
    assert sorted(suspect.ranks) == [0, 1, 2]
    assert blame_ranks(HOSTS, suspect) == "all ranks spend 650ms a step computing instead of 150ms"


def test_nobody_is_where_all_stand_still_for_the_network():
    assert Departure(before=tuple(ranks()), now=tuple(slow_link())).suspect() is None


def test_a_host_that_is_itself_again_is_found_by_its_own_time():
    before = (reading(0.8, exposed=0.6), reading(0.8, exposed=0.05, computing=0.7), reading(0.8, exposed=0.6))
    suspect = Departure(before=before, now=tuple(ranks())).suspect()
    assert suspect.ranks == (1,)
    assert blame_ranks(HOSTS, suspect) == "host1 (rank 1) spends 150ms a step computing instead of 700ms"


def test_a_reading_counts_no_second_twice():
    intervals = (
        Interval(activity=Activity.LOADER, start=0.0, end=0.5),
        Interval(activity=Activity.FORWARD, start=0.5, end=3.5),
        Interval(activity=Activity.EXPOSED, start=1.0, end=2.0),
        Interval(activity=Activity.OPTIMIZER, start=2.0, end=2.5),
        Interval(activity=Activity.EXPOSED, start=4.0, end=5.0),
        Interval(activity=Activity.TRANSFER, start=0.5, end=5.0),
    )
    found = Reading.of_step(Step(rank=0, index=0, start=0.0, end=6.0, intervals=intervals))
    assert found == Reading(step=6.0, exposed=2.0, computing=2.0, loader=0.5, passes=2.0)
    assert found.parts == {"computing": 2.0, "loader": 0.5, "other": 1.5}
    assert found.own == 4.0


def speeds(*links):
    return [LinkSpeed(*(link if isinstance(link, tuple) else (link, link))) for link in links]


def test_the_link_that_moves_less_is_named_with_host_and_rank():
    said = blame_links(HOSTS, speeds(FAST, FAST, FAST), speeds(FAST * 0.9, FAST, SLOW), slower=True)
    assert said == "the link of host2 (rank 2) moves 100Mbit/s instead of 1Gbit/s"


def test_and_the_direction_if_it_is_one_only():
    said = blame_links(HOSTS, speeds(FAST, FAST, FAST), speeds(FAST, (FAST, SLOW), FAST), slower=True)
    assert said == "the link of host1 (rank 1) receives 100Mbit/s instead of 1Gbit/s"


def test_a_link_that_moves_more_again_is_named_too():
    said = blame_links(HOSTS, speeds(SLOW, FAST, FAST), speeds(FAST, FAST, FAST), slower=False)
    assert said == "the link of host0 (rank 0) moves 1Gbit/s instead of 100Mbit/s"


def test_of_two_hosts_nobody_knows_which():
    hosts = {"left": [0, 1], "right": [2]}
    said = blame_links(hosts, speeds(FAST, FAST), speeds((SLOW, FAST), (FAST, SLOW)), slower=True)
    assert said == "the link between left and right moves 100Mbit/s instead of 1Gbit/s"


def test_several_links_are_named_up_to_a_number():
    hosts = {f"h{i}": [2 * i, 2 * i + 1] for i in range(5)}
    said = blame_links(hosts, speeds(*[FAST] * 5), speeds(*[SLOW] * 5), slower=True)
    assert said == (
        "the links of h0 (ranks 0, 1), h1 (ranks 2, 3), h2 (ranks 4, 5) and 2 more move 100Mbit/s instead of 1Gbit/s"
    )


def test_one_that_was_only_held_up_by_the_slow_one_is_not_named():
    said = blame_links(HOSTS, speeds(FAST, FAST, FAST), speeds(FAST / 2, FAST, SLOW), slower=True)
    assert said == "the link of host2 (rank 2) moves 100Mbit/s instead of 1Gbit/s"


def test_links_that_are_as_they_were_are_not_blamed():
    assert blame_links(HOSTS, speeds(FAST, FAST, FAST), speeds(FAST * 0.9, FAST * 1.1, FAST), slower=True) == ""
