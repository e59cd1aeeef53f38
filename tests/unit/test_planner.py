"""The planner on cases whose answer is known: limits, overrides, hosts, levels, precision, and what it says."""

import io
import json

import pytest
from rich.console import Console

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import HostRates, Rates
from poseidon.cluster.spec import ClusterSpec, Device, Host, Link
from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor
from poseidon.errors import ConfigError, InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.bound import lower_bound
from poseidon.planner.explain import explain, layer_table, scaling_table, what_ifs
from poseidon.planner.hosts import compare_hosts, recommend, recommendation
from poseidon.planner.judge import Judge
from poseidon.planner.memory import memory_of
from poseidon.planner.search import every_plan, neighbours, search_plan
from poseidon.planner.space import label, make_space
from poseidon.planner.what_if import bottleneck, faster_resources
from poseidon.profile.graph import GradientStructure
from poseidon.simulator import simulate
from support.models_as_data import dense, linear, model, rates

CONV = dense("conv", 4_000_000, forward=0.02, backward=0.04)
FC = linear("fc", 1000, 1000, rows=32, seconds=0.005)
NET = model([CONV, FC], optimizer=0.01).model_copy(update={"optimizer": "SGD"})
FOUR = rates(4, bandwidth=1e8, latency=1e-4, flops_per_s=1e11)


def on(cluster_rates, **given):
    return search_plan(NET, cluster_rates, **given)


# Choice


def test_a_plan_holds_what_was_predicted_and_compared():
    plan = on(FOUR)
    assert plan.schemes["fc"] == SufficientFactor()
    assert plan.predicted.step_seconds == simulate(NET, plan, FOUR).step_seconds
    assert plan.predicted.samples_per_s == pytest.approx(4 * 32 / plan.predicted.step_seconds)
    assert plan.predicted.parts.total == pytest.approx(plan.predicted.step_seconds)
    assert plan.choices["fc"].runner_up == "all_reduce"
    assert plan.choices["fc"].runner_up_step_seconds > plan.predicted.step_seconds
    assert plan.choices["conv"].runner_up == ""
    assert Plan.parse(json.dumps(plan.model_dump(mode="json"))) == plan


def test_hidden_and_exposed_seconds_of_the_layers_add_up_to_those_of_the_step():
    slow = rates(4, bandwidth=1e7, latency=1e-3, flops_per_s=1e11)
    plan = on(slow, overrides={"deferred": ()})
    step = simulate(NET, plan, slow).step
    assert sum(c.exposed_seconds for c in plan.choices.values()) == pytest.approx(step.exposed_seconds)
    assert step.exposed_seconds > 0


def test_one_rank_computes_and_nothing_else():
    plan = on(rates(1))
    assert plan.predicted.step_seconds == pytest.approx(NET.seconds + NET.optimizer_seconds)
    assert plan.predicted.lower_bound_seconds == pytest.approx(plan.predicted.step_seconds)
    assert plan.predicted.parts.computing == pytest.approx(plan.predicted.step_seconds)


def test_connections_are_part_of_the_choice():
    by = {1: Curve.line(latency=1e-4, bandwidth=1e7), 4: Curve.line(latency=1e-4, bandwidth=3e7)}
    assert on(rates(4, all_reduce=by, exchange=by)).connections == 4
    assert on(rates(4, all_reduce=by, exchange=by), overrides={"connections": "1"}).connections == 1


def test_transfers_are_deferred_only_where_it_pays():
    quick = on(rates(4, bandwidth=1e11))
    slow = on(rates(4, bandwidth=1e8, flops_per_s=1e11))
    assert quick.deferred == ()
    assert slow.deferred
    never = on(rates(4, bandwidth=1e8, flops_per_s=1e11), overrides={"deferred": ()})
    assert slow.predicted.step_seconds < never.predicted.step_seconds * 0.97


@pytest.mark.parametrize("change", [{"optimizer": "LBFGS"}, {"optimizer": ""}, {"is_compiled": True}])
def test_what_cannot_run_later_is_not_deferred(change):
    plan = search_plan(NET.model_copy(update=change), rates(4, bandwidth=5e7, flops_per_s=1e11))
    assert plan.deferred == ()


def test_sparse_gradients_go_by_rows_whatever_that_costs():
    table = linear("table", 100, 10, rows=90).model_copy(
        update={"structure": GradientStructure.ROWS, "is_sparse": True}
    )
    profile = model([table, CONV]).model_copy(update={"optimizer": "SGD"})
    plan = search_plan(profile, FOUR)
    assert plan.schemes["table"] == SparseRows()
    assert "table" not in plan.deferred
    assert set(plan.choices["table"].seconds_by_scheme) == {"sparse_rows"}


def two_level(inside: float) -> Rates:
    """Two hosts of two ranks; a flat ring crosses the slow link as often as one between the hosts."""
    return rates(
        4,
        bandwidth=1e7,
        latency=1e-3,
        hosts=[HostRates(name=f"h{i}", num_ranks=2) for i in range(2)],
        inner=Curve.line(latency=1e-5, bandwidth=inside),
        outer=Curve.line(latency=1e-4, bandwidth=1e7),
    )


def test_two_levels_only_where_the_model_says_so():
    assert {s.levels for s in on(two_level(1e10)).schemes.values()} == {2}
    assert {s.levels for s in on(two_level(1e4)).schemes.values()} == {1}
    flat = two_level(1e10).model_copy(update={"inner": None, "outer": None})
    assert {s.levels for s in on(flat).schemes.values()} == {1}


def test_precision_bends_only_as_far_as_allowed():
    slow = rates(4, bandwidth=1e6)
    assert {scheme.exactness for scheme in on(slow).schemes.values()} == {"exact"}
    rounded = on(slow, allow="rounded")
    assert {scheme.exactness for scheme in rounded.schemes.values()} == {"rounded"}
    assert rounded.predicted.step_seconds < on(slow).predicted.step_seconds
    with pytest.raises(ConfigError, match="exact, rounded, compressed, relaxed"):
        on(slow, allow="sloppy")


def test_the_search_among_many_is_as_good_as_trying_all_here():
    space = make_space(NET, FOUR)
    judge = Judge(NET, FOUR)
    assert judge(neighbours(space, judge)) == pytest.approx(judge(every_plan(space, judge)))
    assert lower_bound(space) <= judge(every_plan(space, judge))


def test_less_on_the_wire_is_no_reason_to_be_slower_than_plain():
    # All is hidden, and to build the gradient from factors takes 0.1 ms more than to compute it.
    profile = model([dense("conv", 400, forward=0.02, backward=0.04), FC])
    group = rates(4, bandwidth=1e9, flops_per_s=2 * 4 * 32 * 1000 * 1000 / 0.0051)
    factors = simulate(profile, uniform_plan(profile, 4, SufficientFactor()), group).step_seconds
    plain = simulate(profile, uniform_plan(profile, 4), group).step_seconds
    assert plain < factors < plain * 1.01
    plan = search_plan(profile, group)
    assert plan.predicted.step_seconds <= plain
    assert plan.is_plain


def test_the_bound_of_the_link_worked_by_hand():
    hosts = [HostRates(name=f"h{i}", send_bandwidth=2e6, receive_bandwidth=4e6) for i in range(4)]
    group = rates(4, bandwidth=1e6, hosts=hosts)
    fixed = make_space(NET, group, overrides={"layers.fc.scheme": "sufficient_factor"})
    factors = 3 * 32 * 2000 * 4  # from each rank, all of it over the link of its host
    assert lower_bound(fixed) == pytest.approx((6_000_000 + factors) / 2e6)
    shared = [HostRates(name=f"h{i}", num_ranks=2, send_bandwidth=4e6, receive_bandwidth=4e6) for i in range(2)]
    fixed = make_space(NET, rates(4, bandwidth=1e6, hosts=shared), overrides={"layers.fc.scheme": "sufficient_factor"})
    crossing = factors * 2 * 2 / 3  # two ranks a host send two thirds of it to the other host
    assert lower_bound(fixed) == pytest.approx((6_000_000 + crossing) / 4e6)


def test_a_hundred_layers_on_32_hosts_come_near_the_bound():
    layers = [linear(f"l{i}", 1024, 1024, rows=(256, 16, 1024, 32)[i % 4], seconds=1e-3) for i in range(100)]
    profile = model(layers, optimizer=0.1).model_copy(update={"optimizer": "SGD"})
    group = rates(32, bandwidth=1.25e9, latency=1e-4, flops_per_s=1e13)
    plan = search_plan(profile, group, effort=0.5)
    assert plan.predicted.step_seconds < 1.05 * plan.predicted.lower_bound_seconds
    assert plan.predicted.step_seconds < 0.7 * simulate(profile, uniform_plan(profile, 32), group).step_seconds


# Memory


def test_a_plan_that_does_not_fit_is_not_chosen():
    factors_need = memory_of(uniform_plan(NET, 4, SufficientFactor()), FOUR).total
    plain_needs = memory_of(uniform_plan(NET, 4), FOUR).total
    assert plain_needs < factors_need
    assert on(FOUR, memory_num_bytes=factors_need).schemes["fc"] == SufficientFactor()
    tight = on(FOUR, memory_num_bytes=factors_need - 1)
    assert tight.schemes["fc"] == AllReduce()
    assert tight.predicted.peak_num_bytes == plain_needs


def test_where_nothing_fits_the_error_says_by_how_much():
    device = Device(flops_per_s=1e12, memory_num_bytes=1_000_000)
    link = Link.symmetric("1Gbit/s")
    cluster = ClusterSpec(hosts=tuple(Host(name=f"h{i}", link=link, device=device) for i in range(2)))
    with pytest.raises(
        InfeasibleError, match=r"needs 15.26MiB \(parameters .*\), its device has 976.6KiB: 14.31MiB are"
    ):
        search_plan(NET, cluster)


# Overrides


def test_any_field_can_be_set():
    plan = on(
        FOUR,
        overrides={
            "layers.fc.scheme": "sharded_server",
            "layers.fc.piece_bytes": "1MiB",
            "layers.conv.bucket_bytes": 2**20,
            "wait_free": "false",
            "connections": 1,
        },
    )
    assert plan.schemes == {"conv": AllReduce(bucket_bytes=2**20), "fc": ShardedServer(piece_bytes=2**20)}
    assert not plan.wait_free
    assert on(FOUR, overrides={"deferred": "conv"}).deferred == ("conv",)
    fixed = on(FOUR, overrides={"layers.fc.scheme": "all_reduce", "buckets": "fc;conv", "order": "conv,fc"})
    assert fixed.buckets == (("fc",), ("conv",))
    assert fixed.order == ("conv", "fc")
    assert on(FOUR, overrides={"buckets": "fc,conv"}).is_plain
    assert on(FOUR, overrides={"buckets": "conv"}).schemes["fc"] == SufficientFactor()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers.fc6.scheme": "all_reduce"}, "no trainable layer is named 'fc6'; there are 'conv', 'fc'"),
        ({"layers.fc.scheme": "ring"}, "there are all_reduce, sufficient_factor, sparse_rows, sharded_server"),
        (
            {"layers.conv.scheme": "sufficient_factor"},
            "layer 'conv' cannot use sufficient_factor: its gradient is dense",
        ),
        ({"layers.fc.speed": "2"}, "cannot set 'speed' of layer 'fc': there are scheme, bucket_bytes"),
        ({"layers.fc.levels": "3"}, "cannot set a field of layer 'fc': key 'levels'"),
        ({"speed": "2"}, "there are layers.NAME.scheme, layers.NAME.FIELD, connections, wait_free"),
        ({"wait_free": "maybe"}, "cannot set wait_free to 'maybe': write true or false"),
        ({"connections": "3"}, "cannot plan with 3 connections: 1 were measured"),
        ({"deferred": "fc6"}, "no trainable layer is named so"),
        ({"buckets": "fc"}, "cannot use the buckets that were set for layer 'conv': it is in no bucket"),
        ({"order": "fc"}, "order do not fit the profile at layer 'conv'"),
    ],
)
def test_what_is_not_there_cannot_be_set(overrides, message):
    with pytest.raises(ConfigError) as error:
        on(FOUR, overrides=overrides)
    assert message in str(error.value)


# Hosts


def cluster(link: str = "1Gbit/s", num_hosts: int = 4) -> ClusterSpec:
    return ClusterSpec.uniform(num_hosts=num_hosts, bandwidth=link)


def test_more_hosts_are_recommended_where_they_help_and_one_where_they_do_not():
    slow, fast = 12.5e5, 1.25e9
    scalings = compare_hosts(NET, cluster(), hosts=(2, 4), links=(slow, fast))
    assert [(one.link, one.num_hosts) for one in scalings] == [(r, n) for r in (slow, fast) for n in (1, 2, 4)]
    assert [one.speed_up for one in scalings if one.num_hosts == 1] == [1.0, 1.0]
    over_slow, over_fast = scalings[:3], scalings[3:]
    assert recommend(over_slow).num_hosts == 1
    assert "stay on one host" in recommendation(over_slow)
    assert "their bottleneck: link" in recommendation(over_slow)
    assert recommend(over_fast).num_hosts == 4
    assert "4 hosts with 32 samples a rank are best" in recommendation(over_fast)
    assert over_fast[-1].speed_up == pytest.approx(over_fast[-1].samples_per_s / over_fast[0].samples_per_s)
    assert over_fast[-1].efficiency == pytest.approx(over_fast[-1].speed_up / 4)


def test_more_hosts_than_there_are_cannot_be_compared():
    with pytest.raises(Exception, match="this cluster has 4"):
        compare_hosts(NET, cluster(), hosts=(8,))


# Words


@pytest.mark.parametrize(
    ("profile", "group", "name"),
    [
        (NET, rates(4, bandwidth=1e6), "link"),
        (NET, rates(4, bandwidth=1e12, latency=0.5), "latency"),
        (NET, rates(4, bandwidth=1e12), "computing"),
        (model([FC.model_copy(update={"is_sparse": False})]), rates(4, bandwidth=1e12, flops_per_s=1e8), "rebuild"),
        (NET.model_copy(update={"loader_seconds": 3.0}), rates(4, bandwidth=1e12), "loader"),
    ],
)
def test_the_bottleneck_is_named(profile, group, name):
    plan = uniform_plan(profile, 4, SufficientFactor())
    assert bottleneck(profile, plan, group) == name
    gains = {one.name: one.gain for one in faster_resources(profile, plan, group)}
    assert max(gains, key=gains.get) == name
    assert gains[name] > 1.2
    assert any(name in sentence for sentence in explain(profile, plan, group))


def test_what_would_help_is_simulated():
    slow = rates(4, bandwidth=1e6)
    plan = on(slow)
    by_name = {one.name: one for one in what_ifs(NET, plan, slow)}
    assert by_name["link"].step_seconds == simulate(NET, plan, rates(4, bandwidth=2e6)).step_seconds
    assert by_name["loader"].gain == pytest.approx(1.0)
    assert by_name["batch"].gain > 1.2
    assert not by_name["loader"].pays


def test_labels_say_what_is_not_plain():
    assert label(AllReduce()) == "all_reduce"
    assert label(SufficientFactor(levels=2)) == "sufficient_factor(levels=2)"


def test_the_tables_keep_to_80_columns():
    names = [f"model.encoder.layers.{i}.out" for i in range(30)]
    profile = model([linear(name, 1024, 1024, rows=64, seconds=0.012345) for name in names])
    scalings = compare_hosts(profile, cluster("123Mbit/s"), hosts=(4,), effort=0.1)
    console = Console(width=200, file=io.StringIO())
    console.print(layer_table(scalings[-1].plan))
    console.print(scaling_table(scalings))
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.startswith("m.e.layers.7.out  factors") for line in lines)
    assert any(line.startswith("10 others") for line in lines)
