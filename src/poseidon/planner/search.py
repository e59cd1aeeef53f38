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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from poseidon.cluster.rates import Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm import CommScheme, Message
from poseidon.plan import Choice, Plan, PredictedStep
from poseidon.planner.bound import curve_of, lower_bound
from poseidon.planner.buckets import best_buckets
from poseidon.planner.memory import Memory, check_memory, memory_of
from poseidon.planner.rules import best_scheme
from poseidon.planner.space import Space, label, make_space
from poseidon.profile.graph import LayerSpec, ModelProfile
from poseidon.simulator import Simulation, simulate
from poseidon.simulator.build import planned_exchanges
from poseidon.simulator.rates import rates_for
from poseidon.timeline import Activity

LAYER_STEPS = 30_000
"""Layers times steps that one search may simulate: some seconds of one processor."""
MOST_STEPS = 6_000
"""As many steps are simulated at most, however small the model."""
STEPS_OF_A_PLAN = 5
"""As many are simulated at most to judge one plan."""
FEWEST_STEPS = 60
SHARE_FOR_RUNNERS_UP = 0.3
"""Of the steps that may be simulated, how many are kept for what each layer's next best scheme would have given."""
GAPS = ((0, 2), (1, 2), (0, 3))
"""Sets of layers that are deferred with gaps between them: the first one, and every so many after it."""
SMALL = 16
"""Layers up to which each move is tried with the same buckets and with new ones."""
MOVES_AWAY = 3
"""How many moves away from the best plan the search begins anew."""
PATIENCE = 8
"""How often in a row it does so in vain."""
NEAR = 0.002
"""Share above the lower bound from which on nothing more is worth looking for."""
PRICE_OF_DEFERRAL = 0.01
"""Share of a step that deferred transfers have to gain: while they are under way a gradient is not final yet."""
PRICE_OF_WIRE = 0.03
"""Seconds that a second on the wire counts even where it is hidden: what is hidden by a hair is in the way tomorrow."""
LEAST_GAIN = 1e-6
"""Share of a step by which a plan has to be faster than a plainer one."""


def search_plan(
    profile: ModelProfile,
    cluster: ClusterSpec | Rates,
    *,
    allow: str = "exact",
    num_hosts: int | None = None,
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
        arrival: Layers in the order in which their gradients become ready; the reverse of forward if it is not known.
        sparse: Layers whose gradients autograd makes sparse, where the profile does not say so; only `sparse_rows`
            carries these.
        overrides: What is not up for choice: `layers.NAME.scheme`, `layers.NAME.FIELD`, `connections`, `wait_free`,
            `deferred`, `order`, `buckets`.
        memory_num_bytes: What a rank may use; the smallest device of a cluster if left out.
        effort: How much is simulated, as a multiple of what takes some seconds; less where many plans are compared.

    Returns:
        A plan for all ranks, with `predicted` and `choices`.

    Raises:
        ConfigError: An override names what is not there.
        InfeasibleError: No plan fits into the memory of a rank; by how much it is missed.

    Example:
        >>> plan = poseidon.search_plan(profile, poseidon.ClusterSpec.load("lab.toml"))
        >>> plan.save("plan.json")
    """
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


def find_plan(space: Space, judge: "Judge") -> Plan:
    """The best of all plans where they are few, else of those that a search comes by."""
    if space.rates.world_size == 1:  # nothing crosses a network
        return space.plain
    best = every_plan(space, judge) if STEPS_OF_A_PLAN * space.num_plans < judge.most else neighbours(space, judge)
    return best if judge.step_seconds(best) <= judge.step_seconds(space.plain) else space.plain


def memory_limit(cluster: ClusterSpec, num_hosts: int | None = None) -> int | None:
    """Bytes of the smallest device among the hosts that take part; None where nobody said."""
    devices = [host.device for host in cluster.hosts[:num_hosts] if host.device]
    return min((device.memory_num_bytes for device in devices if device.memory_num_bytes), default=None)


class Judge:
    """Predicts the step of one plan after the other, each plan once, and counts them.

    Args:
        profile: The model.
        rates: The group of ranks.
        memory_num_bytes: What a rank may use; None where nobody said.
        effort: A multiple of what may be simulated.
    """

    def __init__(
        self, profile: ModelProfile, rates: Rates, memory_num_bytes: int | None = None, *, effort: float = 1.0
    ) -> None:
        self._profile = profile
        self._rates = rates
        self._limit = memory_num_bytes
        self._known: dict[Hashable, tuple[float, float]] = {}
        self._costs: dict[Hashable, float] = {}
        kinds = len({host.model_copy(update={"name": ""}) for host in rates.hosts})
        size = kinds * max(1, len(profile.layers))
        self.most = max(FEWEST_STEPS, round(effort * min(MOST_STEPS, LAYER_STEPS / size)))
        """How many steps may be simulated."""
        self.num_steps = 0
        self.reserve = 0
        """How many of them are kept for later."""

    def __call__(self, plan: Plan) -> float:
        """Seconds of a step, with a price on deferral and on the wire; what plans are compared by.

        Infinite where the plan does not fit into memory, or no more may be simulated.
        """
        return self._look_up(plan)[0]

    def step_seconds(self, plan: Plan) -> float:
        """Seconds of a step; infinite as above."""
        return self._look_up(plan)[1]

    def _look_up(self, plan: Plan) -> tuple[float, float]:
        key = (tuple(plan.schemes.values()), plan.buckets, plan.order, plan.deferred, plan.connections)
        if key not in self._known:
            if self.is_spent:
                return math.inf, math.inf
            self._known[key] = self._predict(plan)
        return self._known[key]

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be simulated now."""
        return self.num_steps >= self.most - self.reserve

    def best(self, plans: Iterable[Plan]) -> Plan:
        """The fastest; an earlier one unless a later one gains something."""
        first, *others = plans
        return min_by_gain(first, others, self)

    def _predict(self, plan: Plan) -> tuple[float, float]:
        if memory_of(plan, self._rates).refuse(self._limit):
            return math.inf, math.inf
        num_steps = 3 if plan.deferred else 2  # else nothing of a step reaches beyond the next one's beginning
        simulation = simulate(self._profile, plan, self._rates, num_steps=num_steps)
        self.num_steps += simulation.num_steps
        seconds = simulation.step_seconds
        return priced(seconds, plan, self._wire_seconds(plan)), seconds

    def _wire_seconds(self, plan: Plan) -> float:
        total = 0.0
        for name, layer in plan.layers.items():
            key = (name, plan.schemes[name])
            if key not in self._costs:
                self._costs[key] = plan.schemes[name].cost(layer, self._rates).wire_seconds
            total += self._costs[key]
        return total


def priced(seconds: float, plan: Plan, wire_seconds: float) -> float:
    """What a predicted step counts in comparisons."""
    return seconds * (1.0 + PRICE_OF_DEFERRAL if plan.deferred else 1.0) + PRICE_OF_WIRE * wire_seconds


def min_by_gain(first: Plan, others: Iterable[Plan], judge: Callable[[Plan], float]) -> Plan:
    """The fastest of some plans; a later one has to gain more than `LEAST_GAIN` to be taken."""
    best, seconds = first, judge(first)
    for plan in others:
        if (found := judge(plan)) < seconds * (1.0 - LEAST_GAIN) or (math.isinf(seconds) and found < seconds):
            best, seconds = plan, found
    return best


# Few plans


def every_plan(space: Space, judge: Judge) -> Plan:
    """The best of all plans of a small space, plain all-reduce in buckets by size among them."""
    return min_by_gain(space.plain, space.plans(), judge)


# Many plans


Move = Callable[[Plan], Iterator[Plan]]
"""From a plan to some of its neighbours."""


def neighbours(space: Space, judge: Judge) -> Plan:
    """The best that is found from a few whole plans on, the promising ones first, as far as the judge's count goes.

    Then from plans near the best, a few moves away from it at random (of a fixed seed), until that has been of no use
    for a while or the bound is near.
    """
    whole = [space.plain, *(one for plan in _whole_plans(space) for one in (plan, *_rebucketed(plan, space)))]
    judge.reserve = round(SHARE_FOR_RUNNERS_UP * judge.most)
    moves = list(_moves(space))
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


def _moves(space: Space) -> Iterator[Move]:
    """What is tried with a plan, one after the other, each with the best so far."""
    for connections in space.connections:
        yield partial(_connect, space, connections)
    for names in _sorts(space):
        for scheme in space.candidates[names[0]]:
            yield partial(_change, space, names, scheme)
    for deferred in _few_deferrals(space):
        yield partial(_defer, space, deferred)
    if space.is_free("buckets"):
        yield partial(_rebucketed, space=space)
        yield lambda plan: iter([] if plan.deferred else [space.with_choice(plan, buckets=())])
        yield partial(_halve, space)
    for name in _by_weight(space):
        for scheme in space.candidates[name]:
            yield partial(_change, space, [name], scheme)
    if space.is_free("buckets"):
        for name in space.arrival:
            yield partial(_toggle_cut, space, name)
    for name in space.deferrable:
        yield partial(_toggle_deferral, space, name)


def _whole_plans(space: Space) -> Iterator[Plan]:
    """Plain all-reduce, the rule, and each scheme wherever it can be used."""
    yield space.plain
    by_rule = {name: _cheapest(name, space) for name in space.candidates}
    yield space.plan(by_rule)
    for scheme in dict.fromkeys(scheme for options in space.candidates.values() for scheme in options):
        yield space.plan({n: scheme if scheme in options else options[0] for n, options in space.candidates.items()})


def _cheapest(name: str, space: Space) -> Any:
    layer = next(layer for layer in space.profile.trainable if layer.name == name)
    return min(space.candidates[name], key=lambda scheme: scheme.cost(layer, space.rates).seconds)


def _rebucketed(plan: Plan, space: Space) -> Iterator[Plan]:
    """The plan with its buckets cut by dynamic programming, where it has any and they are up for choice."""
    names = [name for name in plan.arrival if plan.schemes[name].kind == "all_reduce"]
    if not names or not space.is_free("buckets"):
        yield plan
        return
    rates = space.rates.with_connections(plan.connections)
    ready = arrival_seconds(plan, rates)
    layers = plan.layers
    late = set(plan.deferred)
    messages = {name: plan.schemes[name].cost(layers[name], rates).messages for name in names}
    groups = best_buckets(
        [ready[name] for name in names],
        [messages[name][0].num_bytes for name in names],
        lambda num_bytes: message_seconds(messages[names[0]], num_bytes, rates),
        [(plan.schemes[name], _types(layers[name]), name in late) for name in names],
    )
    yield space.with_choice(plan, buckets=tuple(tuple(names[i] for i in group) for group in groups))


def _types(layer: LayerSpec) -> tuple[str, ...]:
    return tuple(sorted({tensor.dtype for tensor in layer.parameters}))


def message_seconds(messages: Sequence[Message], num_bytes: float, rates: Rates) -> float:
    """Of a bucket whose first message has so many bytes; what follows grows with it."""
    first = messages[0].num_bytes
    scale = num_bytes / first if first else 1.0
    return sum(curve_of(message, rates).at(message.num_bytes * scale) for message in messages)


def arrival_seconds(plan: Plan, rates: Rates) -> dict[str, float]:
    """When each layer's gradient is ready to be sent, from the beginning of backward on the slowest host."""
    scale = max(host.compute_scale for host in rates.hosts)
    now = 0.0
    ready: dict[str, float] = {}
    for layer in reversed(plan.profile.layers):
        now += layer.backward_seconds * scale
        if layer.parameters:
            cost = plan.schemes[layer.name].cost(layer, rates)
            now += cost.backward_seconds + cost.prepare_seconds
            ready[layer.name] = now
    return ready


# Moves


def _connect(space: Space, connections: int, plan: Plan) -> Iterator[Plan]:
    if connections != plan.connections:
        yield space.with_choice(plan, connections=connections)


def _change(space: Space, names: Sequence[str], scheme: CommScheme, plan: Plan) -> Iterator[Plan]:
    """Some layers on another scheme, with the buckets cut anew; one layer without that, except in a small model."""
    if any(plan.schemes[name] != scheme for name in names):
        changed = space.with_scheme(plan, names, scheme)
        if len(names) == 1:
            yield changed
        if len(names) > 1 or _is_small(space):
            yield from _rebucketed(changed, space)


def _defer(space: Space, deferred: Sequence[str], plan: Plan) -> Iterator[Plan]:
    if tuple(deferred) != plan.deferred:
        yield from _rebucketed(space.with_deferred(plan, deferred), space)


def _halve(space: Space, plan: Plan) -> Iterator[Plan]:
    """Every bucket in two, and every two in one."""
    halves = [half for b in plan.buckets for half in (b[: len(b) // 2], b[len(b) // 2 :]) if half]
    yield space.with_choice(plan, buckets=tuple(halves))
    pairs: list[tuple[str, ...]] = []
    for index, bucket in enumerate(plan.buckets):
        if index % 2 and _alike(pairs[-1] + bucket, plan):
            pairs[-1] += bucket
        else:
            pairs.append(bucket)
    yield space.with_choice(plan, buckets=tuple(pairs))


def _toggle_cut(space: Space, name: str, plan: Plan) -> Iterator[Plan]:
    """Joins a layer's bucket with the next one where the layer ends it, else cuts the bucket behind the layer."""
    index = next((i for i, bucket in enumerate(plan.buckets) if name in bucket), None)
    if index is None:
        return
    bucket, before, after = plan.buckets[index], plan.buckets[:index], plan.buckets[index + 1 :]
    if bucket[-1] != name:
        place = bucket.index(name) + 1
        yield space.with_choice(plan, buckets=(*before, bucket[:place], bucket[place:], *after))
    elif after and _alike(bucket + after[0], plan):
        yield space.with_choice(plan, buckets=(*before, bucket + after[0], *after[1:]))


def _toggle_deferral(space: Space, name: str, plan: Plan) -> Iterator[Plan]:
    deferred = [n for n in space.candidates if (n in plan.deferred) != (n == name)]
    changed = space.with_deferred(plan, deferred)
    if changed.buckets:
        yield changed
    if not changed.buckets or _is_small(space):
        yield from _rebucketed(changed, space)


def _is_small(space: Space) -> bool:
    return len(space.candidates) <= SMALL


def _sorts(space: Space) -> list[list[str]]:
    """Layers that are equal and have a choice, where there are several of a sort."""
    sorts: dict[Hashable, list[str]] = {}
    for layer in space.profile.trainable:
        shapes = tuple(tensor.shape for tensor in layer.parameters)
        key = (space.candidates[layer.name], layer.kind, layer.structure, layer.rows, shapes)
        sorts.setdefault(key, []).append(layer.name)
    return [names for names in sorts.values() if len(names) > 1 and len(space.candidates[names[0]]) > 1]


def _by_weight(space: Space) -> list[str]:
    """Layers that have a choice, by how far their schemes are apart."""
    spread: dict[str, float] = {}
    for layer in space.profile.trainable:
        costs = [scheme.cost(layer, space.rates).seconds for scheme in space.candidates[layer.name]]
        if len(costs) > 1:
            spread[layer.name] = max(costs) - min(costs)
    return sorted(spread, key=lambda name: -spread[name])


def _few_deferrals(space: Space) -> list[tuple[str, ...]]:
    """No layer, the first and the last part of the forward pass, every so many of all, of the first and the last half.

    Where the link is the limit, what is deferred and what is not should share backward between them, so that the link
    is never idle: hence the sets with gaps.
    """
    names = space.deferrable
    count = len(names)
    parts = [
        part for cut in (1, count // 8, count // 4, count // 2) for part in (names[: cut or 1], names[-cut or -1 :])
    ]
    parts += [part[first::every] for part in (names, names[: count // 2], names[count // 2 :]) for first, every in GAPS]
    return list(dict.fromkeys([(), *parts, names])) if names else []


def _alike(names: Sequence[str], plan: Plan) -> bool:
    return len({(plan.schemes[name], name in plan.deferred) for name in names}) == 1


# What is told about the choice


def explain_choices(plan: Plan, space: Space, judge: Judge) -> Plan:
    """The plan with what was predicted for it, and for each layer what its schemes cost and what came second."""
    profile, rates = space.profile, space.rates
    runners_up = _runners_up(plan, space, judge) if rates.world_size > 1 else {}
    simulation = simulate(profile, plan, rates)
    hidden, exposed = _by_layer(simulation, plan, rates)
    choices = {}
    for layer in profile.trainable:
        options = space.candidates[layer.name]
        second, seconds = runners_up.get(layer.name, ("", 0.0))
        choices[layer.name] = Choice(
            seconds_by_scheme={label(scheme): scheme.cost(layer, rates).seconds for scheme in options},
            reason=best_scheme(layer, rates)[1].reason,
            hidden_seconds=hidden.get(layer.name, 0.0),
            exposed_seconds=exposed.get(layer.name, 0.0),
            runner_up=second,
            runner_up_step_seconds=seconds,
        )
    memory = memory_of(plan, rates)
    return plan.model_copy(
        update={"choices": choices, "predicted": predicted_step(simulation, plan, rates, memory, lower_bound(space))}
    )


def predicted_step(
    simulation: Simulation, plan: Plan, rates: Rates, memory: Memory, lower_bound_seconds: float = 0.0
) -> PredictedStep:
    """What is expected of a step, from its simulation."""
    seconds = simulation.step_seconds
    return PredictedStep(
        step_seconds=seconds,
        parts=simulation.parts,
        samples_per_s=plan.world_size * plan.profile.batch_size / seconds if seconds else 0.0,
        lower_bound_seconds=lower_bound_seconds,
        peak_num_bytes=memory.total,
        source=f"simulated from a profile ({plan.profile.source or 'of unknown origin'}) on {rates.num_hosts} host(s)",
    )


def _runners_up(plan: Plan, space: Space, judge: Judge) -> dict[str, tuple[str, float]]:
    """By layer its next best scheme and the step with it, as far as the judge's count goes; by cost beyond that."""
    found: dict[str, tuple[str, float]] = {}
    layers = plan.layers
    for name in _by_weight(space):
        others = [scheme for scheme in space.candidates[name] if scheme != plan.schemes[name]]
        changed = {scheme: space.with_scheme(plan, [name], scheme) for scheme in others}
        second = min(others, key=lambda s: (judge(changed[s]), s.cost(layers[name], space.rates).seconds))
        seconds = judge.step_seconds(changed[second])
        found[name] = (label(second), seconds if math.isfinite(seconds) else 0.0)
    return found


def _by_layer(simulation: Simulation, plan: Plan, rates: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """Hidden and exposed seconds of each layer's transfers; those of a bucket are shared out by size."""
    took: dict[str, float] = {}
    stood: dict[str, float] = {}
    for interval in simulation.step.intervals:
        if interval.activity is Activity.TRANSFER:
            took[interval.name] = took.get(interval.name, 0.0) + interval.seconds
        elif interval.activity is Activity.EXPOSED:
            stood[interval.name] = stood.get(interval.name, 0.0) + interval.seconds
    hidden: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for exchange in planned_exchanges(plan.profile, plan, rates.with_connections(plan.connections)):
        labels = {name for name in (*took, *stood) if name == exchange.name or name.startswith(f"{exchange.name} (")}
        transfer = sum(took.get(name, 0.0) for name in labels)
        standing = sum(stood.get(name, 0.0) for name in labels)
        total = sum(layer.num_bytes for layer in exchange.layers) or 1
        for layer in exchange.layers:
            share = layer.num_bytes / total
            hidden[layer.name] = share * max(0.0, transfer - standing)
            exposed[layer.name] = share * standing
    return hidden, exposed
