"""Laws of the search: as good as trying everything, never worse than plain, the paper's rule where that holds."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.cluster.curve import Curve
from poseidon.comm import AllReduce, SparseRows, SufficientFactor
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.judge import priced
from poseidon.planner.rules import choose_plan, paper_prefers_factors
from poseidon.planner.search import search_plan
from poseidon.profile.graph import GradientStructure
from poseidon.simulator import simulate
from support.models_as_data import dense, linear, model, rates

seconds = st.sampled_from([0.0, 0.001, 0.004, 0.02])


@st.composite
def layers(draw, name):
    kind = draw(st.sampled_from(["dense", "linear", "rows"]))
    if kind == "dense":
        return dense(name, draw(st.sampled_from([4_000, 400_000])), forward=draw(seconds), backward=draw(seconds))
    layer = linear(name, draw(st.sampled_from([10, 300])), 200, rows=draw(st.integers(1, 64)), seconds=draw(seconds))
    if kind == "rows":
        return layer.model_copy(update={"structure": GradientStructure.ROWS, "weight_gradient_seconds": 0.0})
    return layer


@st.composite
def profiles(draw, most):
    names = [f"layer{index}" for index in range(draw(st.integers(1, most)))]
    return model([draw(layers(name)) for name in names], optimizer=draw(seconds), loader=draw(seconds)).model_copy(
        update={"optimizer": draw(st.sampled_from(["SGD", "SGD", ""]))}
    )


@st.composite
def groups(draw):
    bandwidth = draw(st.sampled_from([1e6, 2e7, 1e9]))
    several = {
        n: Curve.line(latency=draw(st.sampled_from([0.0, 1e-4, 2e-3])), bandwidth=bandwidth * n**0.1) for n in (1, 2)
    }
    connections = draw(st.sampled_from([{1: several[1]}, several]))
    return rates(
        draw(st.integers(2, 8)), flops_per_s=1e10, all_reduce=connections, exchange=connections, memory_bandwidth=1e10
    )


def usable(layer):
    return [scheme for scheme in (AllReduce(), SufficientFactor(), SparseRows()) if scheme.refuse(layer) is None]


def cuts(names):
    """Every way to cut a row of names into neighbours."""
    if not names:
        return [()]
    return [(tuple(names[:count]), *rest) for count in range(1, len(names) + 1) for rest in cuts(names[count:])]


def everything(profile, group):
    """Every plan of the kind that is searched, spelled out on its own."""
    forward = [layer.name for layer in profile.trainable]
    backward = forward[::-1]
    for schemes in itertools.product(*map(usable, profile.trainable)):
        by_name = dict(zip(forward, schemes, strict=True))
        for grouping in cuts([name for name in backward if by_name[name].kind == "all_reduce"]):
            for late in itertools.chain.from_iterable(
                itertools.combinations(forward, count) for count in range(len(forward) + 1 if profile.optimizer else 1)
            ):
                halves = [[n for n in bucket if (n in late) is there] for bucket in grouping for there in (False, True)]
                place = [n for n in backward if n not in late] + [n for n in forward if n in late]
                for connections in group.all_reduce:
                    yield Plan(
                        world_size=group.world_size,
                        profile=profile,
                        schemes=by_name,
                        arrival=tuple(backward),
                        order=tuple(place) if late else (),
                        buckets=tuple(tuple(half) for half in halves if half),
                        deferred=tuple(late),
                        connections=connections,
                    )


@settings(max_examples=15)
@given(profile=profiles(most=3), group=groups())
def test_a_small_space_is_searched_to_the_end(profile, group):
    plan = search_plan(profile, group)
    counts = min(
        judged(profile, other, group)
        for other in [uniform_plan(profile, group.world_size), *everything(profile, group)]
    )
    plain = simulate(profile, uniform_plan(profile, group.world_size), group).step_seconds
    if judged(profile, plan, group) > counts * (1 + 1e-5):  # what counts least was slower than plain
        assert plan.predicted.step_seconds == plain
        assert counts > plain


def judged(profile, plan, group):
    wire = sum(plan.schemes[layer.name].cost(layer, group).wire_seconds for layer in profile.trainable)
    return priced(simulate(profile, plan, group).step_seconds, plan, wire)


@settings(max_examples=20)
@given(profile=profiles(most=7), group=groups())
def test_never_worse_than_plain_and_never_better_than_possible(profile, group):
    plan = search_plan(profile, group, effort=0.2)
    plain = uniform_plan(profile, group.world_size)
    predicted = plan.predicted
    assert predicted.step_seconds <= simulate(profile, plain, group).step_seconds * (1 + 1e-9)
    assert predicted.step_seconds == simulate(profile, plan, group).step_seconds
    assert predicted.lower_bound_seconds <= predicted.step_seconds * (1 + 1e-9)
    for name, choice in plan.choices.items():
        assert set(choice.seconds_by_scheme) == {scheme.kind for scheme in usable(plan.layers[name])}


@settings(max_examples=5)
@given(profile=profiles(most=6), group=groups())
def test_the_same_question_has_the_same_answer(profile, group):
    assert search_plan(profile, group) == search_plan(profile, group)


shapes = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 128))


@settings(max_examples=25)
@given(sizes=st.lists(shapes, min_size=1, max_size=4), ranks=st.integers(2, 40))
def test_the_papers_rule_is_what_remains_when_only_bytes_count(sizes, ranks):
    """Equal rates, no latency, a free rebuild, and nothing to hide a transfer behind."""
    names = [f"layer{index}" for index in range(len(sizes))]
    fully_connected = [linear(n, m, k, rows=rows) for n, (m, k, rows) in zip(names, sizes, strict=True)]
    profile = model([dense("conv", 4_000), *fully_connected])
    group = rates(ranks, bandwidth=1e8)
    plan = search_plan(profile, group)
    assert plan.schemes["conv"] == AllReduce()
    for name, (outputs, inputs, rows) in zip(names, sizes, strict=True):
        if ranks * rows * (outputs + inputs) == 2 * outputs * inputs:
            continue  # a tie
        paper = paper_prefers_factors(rows=rows, out_features=outputs, in_features=inputs, workers=ranks, servers=ranks)
        assert (plan.schemes[name].kind == "sufficient_factor") == paper
        assert plan.schemes[name] == choose_plan(profile, group).schemes[name]
