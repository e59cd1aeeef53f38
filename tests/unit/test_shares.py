"""What shares by speed are predicted to give: the split, the simulated steps and the words for them."""

import pytest

from poseidon.cluster.rates import HostRates
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.explain import explain
from poseidon.planner.search import search_plan
from poseidon.planner.shares import describe_shares, propose_shares, shares_by_speed, with_shares
from poseidon.simulator import simulate
from support.models_as_data import dense, model, rates

MB = 10**6
NET = model([dense("a", 4, forward=1.0, backward=2.2)], batch=32)
"""A tenth of a second for each sample."""
SLOW_AND_FAST = rates(
    4,
    hosts=[
        HostRates(name="fast0"),
        HostRates(name="fast1"),
        HostRates(name="slow0", compute_scale=4.0),
        HostRates(name="slow1", compute_scale=4.0),
    ],
)


def test_a_quarter_of_the_speed_gets_a_quarter_of_the_samples():
    assert shares_by_speed([0, 0, 0, 0], [1, 1, 4, 4], 100) == [40, 40, 10, 10]


def test_a_fixed_time_counts_like_samples():
    assert shares_by_speed([6.0, 0.0], [1.0, 1.0], 10) == [2, 8]


def test_a_rank_that_is_slow_whatever_it_gets_has_one_sample():
    assert shares_by_speed([100.0, 0.0], [1.0, 1.0], 10) == [1, 9]


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(InfeasibleError, match="3 samples among 4 ranks"):
        shares_by_speed([0.0] * 4, [1.0] * 4, 3)


def test_a_simulated_rank_computes_for_its_samples_and_updates_all_the_same():
    profile = NET.model_copy(update={"optimizer_seconds": 0.5})
    plan = with_shares(uniform_plan(profile, 2), [48, 16])
    assert plan.loads == (1.5, 0.5)
    simulation = simulate(profile, plan, rates(2))
    assert simulation.step_seconds == pytest.approx(3.2 * 1.5 + 0.5)
    fast = next(line for line in simulation.timelines if line.steps[-1].rank == 1)
    assert fast.steps[-1].exposed_seconds == pytest.approx(3.2)


def test_the_proposal_is_simulated_against_equal_shares():
    """Equal: 12.8 s on a slow host. By speed: a fast host has 52 samples of 0.1 s, a slow one 12 of 0.4 s."""
    found = propose_shares(NET, uniform_plan(NET, 4), SLOW_AND_FAST)
    assert found is not None
    assert sum(found.samples) == 128
    assert found.samples == (52, 52, 12, 12)
    assert found.equal_step_seconds == pytest.approx(12.8)
    assert found.step_seconds == pytest.approx(5.2)
    assert found.gain == pytest.approx(12.8 / 5.2)


def test_hosts_that_compute_alike_are_proposed_nothing():
    assert propose_shares(NET, uniform_plan(NET, 4), rates(4)) is None


def test_what_hardly_pays_is_not_proposed():
    """The link takes a hundred times as long as computing."""
    profile = model([dense("a", 100 * MB, forward=0.01, backward=0.01)])
    plan = uniform_plan(profile, 2)
    hosts = [HostRates(name="fast"), HostRates(name="slow", compute_scale=2.0)]
    assert propose_shares(profile, plan, rates(2, bandwidth=1e8, hosts=hosts)) is None


def test_the_plan_says_what_shares_would_give():
    plan = uniform_plan(NET, 4)
    (sentence,) = [text for text in explain(NET, plan, SLOW_AND_FAST) if "differ in speed" in text]
    assert "with equal shares a step takes 12.8s" in sentence
    assert "of 128 samples fast0 52, fast1 52, slow0 12, slow1 12, it takes 5.2s: 2.46 times as fast" in sentence


def test_ranks_of_a_host_are_told_together():
    two_hosts = rates(4, hosts=[HostRates(name="a", num_ranks=2), HostRates(name="b", num_ranks=2)])
    assert describe_shares([5, 4, 2, 1], two_hosts) == "a 9, b 3"


def test_a_plan_keeps_its_shares_in_a_file(tmp_path):
    plan = with_shares(uniform_plan(NET, 4), [51, 51, 13, 13])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").portions == (51.0, 51.0, 13.0, 13.0)


@pytest.mark.parametrize("portions", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("inf"))])
def test_portions_that_do_not_fit_the_ranks_are_refused(portions):
    with pytest.raises(ValueError, match="portions"):
        Plan.model_validate({**dict(uniform_plan(NET, 2)), "portions": portions})


def test_a_plan_is_searched_for_the_shares_that_are_fixed():
    profile = model([dense("a", 10 * MB, forward=0.1, backward=0.2)], optimizer=0.01)
    hosts = rates(2, hosts=[HostRates(name="fast"), HostRates(name="slow", compute_scale=3.0)])
    plan = search_plan(profile, hosts, overrides={"portions": (48.0, 16.0)})
    assert plan.portions == (48.0, 16.0)
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(0.3 * 1.5 + 0.03 + 0.1, rel=0.1)
    assert plan.predicted.lower_bound_seconds <= plan.predicted.step_seconds
