"""The fastest plan for a model on a group of ranks, with the simulator as the judge.

Where there are few plans, every one of them is simulated. Where there are many, the search begins at the best of a few
whole plans (Poseidon's rule, plain all-reduce, every layer that can on one other scheme), cuts the buckets by dynamic
programming, and then goes on from neighbour to neighbour: one sort of layers or one layer on another scheme, another
cut of the buckets, other layers deferred, more connections. It ends when no neighbour is faster, or when as many plans
have been simulated as it may; the count decides, never the clock, so that the same question has the same answer.

Plain all-reduce is always among what is judged: the plan that comes out is never predicted slower. Between others the
predicted step decides, and with little weight what a prediction knows little of: seconds on the wire, even hidden ones,
and gradients that are not final when backward has ended.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from poseidon.cluster.rates import Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm import CommScheme
from poseidon.plan import Plan
from poseidon.planner.bound import lower_bound
from poseidon.planner.choices import explain_choices
from poseidon.planner.judge import STEPS_OF_A_PLAN, Judge, min_by_gain
from poseidon.planner.memory import check_memory, memory_of
from poseidon.planner.moves import Move, all_moves, rebucketed
from poseidon.planner.space import Space, make_space
from poseidon.profile.graph import ModelProfile
from poseidon.simulator.rates import rates_for

SHARE_FOR_RUNNERS_UP = 0.3
"""Of the steps that may be simulated, how many are kept for what each layer's next best scheme would have given."""
MOVES_AWAY = 3
"""How many moves away from the best plan the search begins anew."""
PATIENCE = 8
"""How often in a row it does so in vain."""
NEAR = 0.002
"""Share above the lower bound from which on nothing more is worth looking for."""


def search_plan(
    profile: ModelProfile,
    cluster: ClusterSpec | Rates,
    *,
    allow: str = "exact",
    num_hosts: int | None = None,
    accumulate: int | None = None,
    arrival: Sequence[str] = (),
    sparse: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    memory_num_bytes: int | None = None,
    effort: float = 1.0,
) -> Plan:
    """The plan with the shortest predicted step, and what was predicted.

    Args:
        profile: The model, with rows and seconds.
        cluster: The hosts, described or probed; or what a group of ranks computes and moves.
        allow: How far the mathematics may bend: `exact`, `rounded`, `compressed` or `relaxed`.
        num_hosts: The first so many hosts of the cluster; all if left out. Rates are those of one group already.
        accumulate: Backward passes to one exchange, each over the profile's batch; what the profile says if left out.
        arrival: Layers in the order in which their gradients become ready; the reverse of forward if it is not known.
        sparse: Layers whose gradients autograd makes sparse, where the profile does not say so; only `sparse_rows`
            carries these.
        overrides: What is not up for choice: `layers.NAME.scheme`, `layers.NAME.FIELD`, `connections`, `wait_free`,
            `deferred`, `order`, `buckets`, `portions`.
        memory_num_bytes: What a rank may use; the smallest device of a cluster if left out.
        effort: How much is simulated, as a multiple of what takes some seconds; less where many plans are compared.

    Returns:
        A plan for all ranks, with `predicted` and `choices`.

    Raises:
        ConfigError: An override names what is not there.
        ProfileError: Fewer than one pass is asked for.
        InfeasibleError: No plan fits into the memory of a rank; by how much it is missed.

    Example:
        >>> plan = poseidon.search_plan(profile, poseidon.ClusterSpec.load("lab.toml"))
        >>> plan.save("plan.json")
    """
    if accumulate is not None:
        profile = profile.accumulated(accumulate)
    rates, limit = _rates_and_limit(cluster, profile, num_hosts)
    limit = memory_num_bytes or limit
    space = make_space(profile, rates, allow=allow, arrival=arrival, sparse=sparse, overrides=overrides)
    judge = Judge(profile, rates, limit, effort=effort)
    best = find_plan(space, judge)
    if math.isinf(judge(best)):
        check_memory(min((memory_of(plan, rates) for plan in _whole_plans(space)), key=lambda m: m.total), limit)
    return Plan.model_validate(dict(explain_choices(best, space, judge)))


def _rates_and_limit(
    cluster: ClusterSpec | Rates, profile: ModelProfile, num_hosts: int | None
) -> tuple[Rates, int | None]:
    if isinstance(cluster, Rates):
        return cluster, None
    return rates_for(profile, cluster, num_hosts=num_hosts), memory_limit(cluster, num_hosts)


def find_plan(space: Space, judge: Judge) -> Plan:
    """The best of all plans where they are few, else of those that a search comes by."""
    if space.rates.world_size == 1:  # nothing crosses a network
        return space.plain
    best = every_plan(space, judge) if STEPS_OF_A_PLAN * space.num_plans < judge.most else neighbours(space, judge)
    return best if judge.step_seconds(best) <= judge.step_seconds(space.plain) else space.plain


def memory_limit(cluster: ClusterSpec, num_hosts: int | None = None) -> int | None:
    """Bytes of the smallest device among the hosts that take part; None where nobody said."""
    devices = [host.device for host in cluster.hosts[:num_hosts] if host.device]
    return min((device.memory_num_bytes for device in devices if device.memory_num_bytes), default=None)


def every_plan(space: Space, judge: Judge) -> Plan:
    """The best of all plans of a small space, plain all-reduce in buckets by size among them."""
    return min_by_gain(space.plain, space.plans(), judge)


def neighbours(space: Space, judge: Judge) -> Plan:
    """The best that is found from a few whole plans on, the promising ones first, as far as the judge's count goes.

    Then from plans near the best, a few moves away from it at random (of a fixed seed), until that has been of no use
    for a while or the bound is near.
    """
    whole = [space.plain, *(one for plan in _whole_plans(space) for one in (plan, *rebucketed(plan, space)))]
    judge.reserve = round(SHARE_FOR_RUNNERS_UP * judge.most)
    moves = list(all_moves(space))
    best = judge.best(whole)
    for start in sorted(whole, key=judge):
        best = min_by_gain(best, [_descend(start, moves, judge)], judge)
    generator, in_vain = Random(0), 0
    near_the_bound = lower_bound(space) * (1.0 + NEAR)
    while in_vain < PATIENCE and not judge.is_spent and judge(best) > near_the_bound:
        start = best
        for move in generator.sample(moves, min(MOVES_AWAY, len(moves))):
            start = next(move(start), start)
        found = min_by_gain(best, [_descend(start, moves, judge)], judge)
        best, in_vain = found, in_vain + 1 if found is best else 0
    judge.reserve = 0
    return best


def _descend(start: Plan, moves: Sequence[Move], judge: Judge) -> Plan:
    """To a plan that no move makes faster."""
    best, before = start, None
    while before is not best:
        before = best
        for move in moves:
            if judge.is_spent:
                return best
            best = min_by_gain(best, move(best), judge)
    return best


def _whole_plans(space: Space) -> Iterator[Plan]:
    """Plain all-reduce, the rule, and each scheme wherever it can be used."""
    yield space.plain
    by_rule = {name: _cheapest(name, space) for name in space.candidates}
    yield space.plan(by_rule)
    for scheme in dict.fromkeys(scheme for options in space.candidates.values() for scheme in options):
        yield space.plan({n: scheme if scheme in options else options[0] for n, options in space.candidates.items()})


def _cheapest(name: str, space: Space) -> CommScheme:
    layer = next(layer for layer in space.profile.trainable if layer.name == name)
    return min(space.candidates[name], key=lambda scheme: scheme.cost(layer, space.rates).seconds)
