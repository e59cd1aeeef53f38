"""Simulated steps against what can be worked out by hand."""

import pytest

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import HostRates
from poseidon.comm import AllReduce, ShardedServer, SufficientFactor
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.simulator import simulate
from poseidon.simulator.engine import run
from poseidon.simulator.ops import Machine, Op, TransferOp
from poseidon.timeline import Activity
from support.models_as_data import dense, linear, model, rates, silent

MB = 10**6


def test_one_rank_only_computes():
    profile = model([dense("a", MB, forward=1, backward=2), silent("b", 0.5)], optimizer=0.25, loader=0.125)
    simulation = simulate(profile, uniform_plan(profile, 1), rates(1))
    assert simulation.step_seconds == pytest.approx(4.375)
    assert simulation.parts.computing == pytest.approx(4.25)
    assert simulation.parts.loader == pytest.approx(0.125)


def test_a_transfer_hides_behind_the_layers_below():
    """The upper layer's 100 MB need 1.5 s over 100 MB/s between four ranks; the lower layer computes for 2 s."""
    profile = model([dense("low", 4 * MB, backward=2), dense("high", 100 * MB, backward=1)])
    simulation = simulate(profile, uniform_plan(profile, 4), rates(4))
    assert simulation.step_seconds == pytest.approx(3 + 0.06)
    assert simulation.parts.hidden == pytest.approx(1.5)
    assert simulation.parts.exposed == pytest.approx(0.06)


def test_without_overlap_the_parts_add_up():
    profile = model([dense("low", 4 * MB, backward=2), dense("high", 100 * MB, backward=1)])
    plan = uniform_plan(profile, 4, wait_free=False)
    assert simulate(profile, plan, rates(4)).step_seconds == pytest.approx(3 + 1.56)


def test_two_transfers_share_the_link():
    """Both are ready at once, each needs half a second in two rounds, which alternate on the connection."""
    profile = model([dense("low", 50 * MB, backward=0), dense("high", 50 * MB, backward=1)])
    plan = Plan.model_validate({**dict(uniform_plan(profile, 2)), "buckets": (("high",), ("low",))})
    simulation = simulate(profile, plan, rates(2))
    assert simulation.step_seconds == pytest.approx(1 + 1.0)
    transfers = [i for i in simulation.step.intervals if i.activity is Activity.TRANSFER]
    assert [t.seconds for t in transfers] == pytest.approx([0.75, 1.0])


def test_one_bucket_costs_one_latency():
    layers = [dense(f"l{i}", MB, backward=0.001) for i in range(10)]
    profile = model(layers)
    plain = uniform_plan(profile, 2)
    names = plain.arrival
    slow = rates(2, latency=0.5)
    one = Plan.model_validate({**dict(plain), "buckets": (names,)})
    assert simulate(profile, one, slow).step_seconds == pytest.approx(0.01 + 0.5 + 0.1)


def test_factors_spare_the_local_gradient_and_pay_for_the_rebuild():
    """Forward 1, backward 1 without the local gradient; both factors hide; the rebuild is 2·P·K·M·N operations."""
    profile = model([linear("fc", 100, 100, rows=10, seconds=1.0)])
    fast = rates(4, bandwidth=1e9, flops_per_s=2 * 4 * 10 * 100 * 100 / 0.5)
    simulation = simulate(profile, uniform_plan(profile, 4, SufficientFactor()), fast)
    assert simulation.step_seconds == pytest.approx(2.5, abs=1e-3)
    plain = simulate(profile, uniform_plan(profile, 4), fast)
    assert plain.step_seconds == pytest.approx(3.0, abs=1e-3)


def test_the_server_sends_again_after_the_update():
    """Half of the optimizer's work, because a rank owns half of the parameters."""
    profile = model([dense("a", 100 * MB, backward=1)], optimizer=0.5)
    simulation = simulate(profile, uniform_plan(profile, 2, ShardedServer()), rates(2))
    assert simulation.step_seconds == pytest.approx(1 + 0.5 + 0.25 + 0.5)


def test_a_deferred_transfer_ends_in_the_next_forward():
    """Of the top half second, the first round delays the small layer's second one; the rest hides behind forward."""
    profile = model([dense("low", 4, forward=1.5, backward=0), dense("high", 50 * MB, forward=0.5, backward=0.5)])
    plain = uniform_plan(profile, 2)
    plain = Plan.model_validate({**dict(plain), "buckets": (("high",), ("low",))})
    deferred = plain.model_copy(update={"deferred": ("high",), "order": ("low", "high")})
    assert simulate(profile, plain, rates(2)).step_seconds == pytest.approx(2.5 + 0.5, rel=1e-3)
    assert simulate(profile, deferred, rates(2)).step_seconds == pytest.approx(2.75, rel=1e-3)


def test_a_slow_host_is_waited_for():
    profile = model([dense("a", MB, backward=1)])
    hosts = [HostRates(name="fast"), HostRates(name="slow", compute_scale=3.0)]
    simulation = simulate(profile, uniform_plan(profile, 2), rates(2, hosts=hosts))
    assert simulation.step_seconds == pytest.approx(3.01)
    assert len(simulation.timelines) == 2
    assert simulation.step.rank == 1
    fast = simulation.timelines[0].steps[-1]
    assert fast.exposed_seconds == pytest.approx(2.01)


def test_computing_slows_while_the_link_is_busy():
    """Of the lower layer's 2 s, what runs beside the transfer of 1 s takes half as long again."""
    profile = model([dense("low", 4, backward=2), dense("high", 50 * MB, backward=1)])
    plan = Plan.model_validate({**dict(uniform_plan(profile, 2)), "buckets": (("high",), ("low",))})
    simulation = simulate(profile, plan, rates(2, bandwidth=0.5e8, compute_slowdown=1.5))
    assert simulation.step_seconds == pytest.approx(1 + 1 + (2 - 1 / 1.5), rel=1e-3)


def test_a_curve_counts_instead_of_a_line():
    profile = model([dense("a", 4 * MB)])
    curve = Curve(num_bytes=(0, 2 * MB, 4 * MB), seconds=(0.1, 0.3, 1.3))
    simulation = simulate(profile, uniform_plan(profile, 2), rates(2, all_reduce={1: curve}))
    assert simulation.step_seconds == pytest.approx(1.3)


def test_two_levels_follow_one_another():
    profile = model([dense("a", 4 * MB)])
    plan = uniform_plan(profile, 4)
    with pytest.raises(InfeasibleError, match="for 4 ranks on 2"):
        simulate(profile, plan, rates(2))


def test_a_plan_for_another_model_is_refused():
    profile, other = model([dense("a", MB)]), model([dense("b", MB)])
    with pytest.raises(InfeasibleError, match="differ at layer 'a'"):
        simulate(profile, uniform_plan(other, 2), rates(2))


def test_a_circle_is_named():
    first = Op("a", Activity.FORWARD, 1.0)
    second = Op("b", Activity.FORWARD, 1.0, [first])
    first.after = (second,)
    with pytest.raises(InfeasibleError, match="'a' waits for itself"):
        run([first, second], Machine(num_processors=0, num_links=0))


def test_a_channel_lets_two_through_at_a_time():
    transfers = [TransferOp(str(i), 0.0, latency_seconds=1.0, channel=0) for i in range(3)]
    assert run(transfers, Machine(num_processors=0, num_links=0, num_channels=1)) == pytest.approx(2.0)


def test_all_reduce_by_size_fills_buckets_as_the_runtime_does():
    layers = [dense(f"l{i}", 30 * 2**20, backward=0.01) for i in range(3)]
    profile = model(layers)
    plan = uniform_plan(profile, 2, AllReduce(first_bytes=2**20, bucket_bytes=50 * 2**20))
    step = simulate(profile, plan, rates(2)).step
    names = [i.name for i in step.intervals if i.activity is Activity.TRANSFER]
    assert names == ["l2", "l1..l0"]
