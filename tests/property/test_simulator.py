"""Laws of the simulator, for any model, plan and cluster."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from poseidon.breakdown import split_step
from poseidon.cluster.rates import HostRates
from poseidon.comm import AllReduce, ShardedServer, SufficientFactor
from poseidon.plan import Plan, uniform_plan
from poseidon.simulator import simulate
from poseidon.simulator.build import build
from poseidon.simulator.engine import run
from poseidon.simulator.ops import Op, TransferOp
from poseidon.timeline import Activity
from support.models_as_data import dense, linear, model, rates, silent

seconds = st.floats(0.0, 2.0).map(lambda s: round(s, 3))


@st.composite
def profiles(draw):
    layers = []
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["dense", "linear", "silent"]))
        name = f"layer{index}"
        if kind == "dense":
            layers.append(dense(name, 4 * draw(st.integers(1, 10**7)), forward=draw(seconds), backward=draw(seconds)))
        elif kind == "linear":
            size = draw(st.integers(1, 2000))
            layers.append(linear(name, size, 1000, rows=draw(st.integers(1, 64)), seconds=draw(seconds)))
        else:
            layers.append(silent(name, draw(seconds)))
    layers.append(dense("last", 400, forward=0.01, backward=0.01))
    return model(layers, optimizer=draw(seconds), loader=draw(seconds))


@st.composite
def clusters(draw):
    hosts = [
        HostRates(name=f"h{i}", compute_scale=draw(st.sampled_from([1.0, 1.0, 1.5, 3.0])))
        for i in range(draw(st.integers(1, 4)))
    ]
    return rates(
        len(hosts),
        bandwidth=draw(st.sampled_from([1e6, 1e8, 1e10])),
        latency=draw(st.sampled_from([0.0, 1e-3])),
        hosts=hosts,
        flops_per_s=1e9,
        compute_slowdown=draw(st.sampled_from([1.0, 1.3])),
        transfer_slowdown=draw(st.sampled_from([1.0, 1.2])),
    )


@st.composite
def cases(draw):
    profile, cluster = draw(profiles()), draw(clusters())
    scheme = draw(st.sampled_from([AllReduce(), AllReduce(first_bytes=1, bucket_bytes=1), SufficientFactor()]))
    if draw(st.booleans()) and isinstance(scheme, AllReduce):
        scheme = ShardedServer()
    plan = uniform_plan(profile, cluster.world_size, scheme, wait_free=draw(st.booleans()))
    if draw(st.booleans()) and not isinstance(scheme, ShardedServer):
        names = [layer.name for layer in profile.trainable]
        plan = Plan.model_validate({**dict(plan), "deferred": tuple(draw(st.sets(st.sampled_from(names))))})
    return profile, plan, cluster


@given(cases())
def test_a_step_is_never_shorter_than_its_critical_path_or_its_busiest_resource(case):
    profile, plan, cluster = case
    program = build(profile, plan, cluster, 2)
    end = run(program.ops, program.machine)
    path: dict[Op, float] = {}
    for op in program.ops:
        path[op] = op.seconds + max((path[before] for before in op.after), default=0.0)
    assert end >= max(path.values(), default=0.0) - 1e-9
    for processor in range(program.machine.num_processors):
        assert end >= sum(op.seconds for op in program.ops if op.processor == processor) - 1e-9
    for link in range(program.machine.num_links):
        busy = sum(
            op.seconds * share
            for op in program.ops
            if isinstance(op, TransferOp)
            for side, share in op.shares
            if side == link
        )
        assert end >= busy - 1e-6


@given(cases())
def test_no_processor_does_two_things_at_once_and_nothing_starts_too_early(case):
    profile, plan, cluster = case
    program = build(profile, plan, cluster, 2)
    run(program.ops, program.machine)
    for op in program.ops:
        assert op.end >= op.start >= max((before.end for before in op.after), default=0.0) - 1e-9
    for processor in range(program.machine.num_processors):
        spans = sorted((op.start, op.end) for op in program.ops if op.processor == processor and op.end > op.start)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-9


@given(cases())
def test_the_same_input_gives_the_same_timeline_and_its_parts_add_up(case):
    profile, plan, cluster = case
    first, second = simulate(profile, plan, cluster), simulate(profile, plan, cluster)
    assert first.timelines == second.timelines
    step = first.step
    parts = split_step(step, {})
    assert abs(parts.total - step.seconds) <= 1e-6 + 1e-6 * step.seconds
    assert parts.other <= 1e-6 + 0.01 * step.seconds


@given(cases())
def test_equal_ranks_are_folded_without_changing_anything(case):
    """A host that is slower by nothing that matters is simulated for itself, and the step stays what it was."""
    profile, plan, cluster = case
    hosts = [h.model_copy(update={"send_bandwidth": h.send_bandwidth * (1 + i)}) for i, h in enumerate(cluster.hosts)]
    unfolded = cluster.model_copy(update={"hosts": tuple(hosts)})
    one, many = simulate(profile, plan, cluster), simulate(profile, plan, unfolded)
    assert len(many.timelines) == len(hosts)
    assert abs(one.step_seconds - many.step_seconds) <= 1e-6 * max(1.0, one.step_seconds)


@given(cases(), st.floats(1.0, 10.0))
def test_faster_links_do_not_lengthen_a_step_of_one_transfer_at_a_time(case, factor):
    """More bandwidth never hurts holds for a fixed order; here for what is sent after backward, in order."""
    profile, plan, cluster = case
    if len(set(plan.schemes.values())) > 1:
        return
    plan = plan.model_copy(update={"wait_free": False, "deferred": ()})
    faster = cluster.model_copy(
        update={
            "all_reduce": {1: cluster.all_reduce[1].scaled(wire=1 / factor)},
            "exchange": {1: cluster.exchange[1].scaled(wire=1 / factor)},
        }
    )
    assert simulate(profile, plan, faster).step_seconds <= simulate(profile, plan, cluster).step_seconds + 1e-9


def test_a_whole_step_of_intervals_is_inside_its_step():
    profile = model([dense("a", 10**7, forward=0.1, backward=0.1), silent("b", 0.1)], optimizer=0.1, loader=0.1)
    simulation = simulate(profile, uniform_plan(profile, 2), rates(2))
    (timeline,) = simulation.timelines
    assert [step.index for step in timeline.steps] == [0, 1, 2]
    for step in timeline.steps[1:]:
        seen = {interval.activity for interval in step.intervals}
        assert seen >= {Activity.LOADER, Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER, Activity.TRANSFER}
        assert all(step.start - 1e-9 <= i.start and i.end <= step.end + 1e-9 for i in step.intervals)
