"""From a plan to its neighbours: what the search tries, one after the other, with the best plan so far."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

from poseidon.cluster.rates import Rates
from poseidon.comm import CommScheme, Message
from poseidon.comm.scheme import curve_of
from poseidon.plan import Plan
from poseidon.planner.buckets import best_buckets
from poseidon.planner.space import Space

GAPS = ((0, 2), (1, 2), (0, 3))
"""Sets of layers that are deferred with gaps between them: the first one, and every so many after it."""
SMALL = 16
"""Layers up to which each move is tried with the same buckets and with new ones."""

Move = Callable[[Plan], Iterator[Plan]]
"""From a plan to some of its neighbours."""


def all_moves(space: Space) -> Iterator[Move]:
    """What is tried with a plan, one after the other, each with the best so far."""
    for connections in space.connections:
        yield partial(_connect, space, connections)
    for names in _sorts(space):
        for scheme in space.candidates[names[0]]:
            yield partial(_change, space, names, scheme)
    for deferred in _few_deferrals(space):
        yield partial(_defer, space, deferred)
    if space.is_free("buckets"):
        yield partial(rebucketed, space=space)
        yield lambda plan: iter([] if plan.deferred else [space.with_choice(plan, buckets=())])
        yield partial(_halve, space)
    for name in by_weight(space):
        for scheme in space.candidates[name]:
            yield partial(_change, space, [name], scheme)
    if space.is_free("buckets"):
        for name in space.arrival:
            yield partial(_toggle_cut, space, name)
    for name in space.deferrable:
        yield partial(_toggle_deferral, space, name)


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
            yield from rebucketed(changed, space)


def _defer(space: Space, deferred: Sequence[str], plan: Plan) -> Iterator[Plan]:
    if tuple(deferred) != plan.deferred:
        yield from rebucketed(space.with_deferred(plan, deferred), space)


def _halve(space: Space, plan: Plan) -> Iterator[Plan]:
    """Every bucket in two, and every two in one."""
    halves = [half for b in plan.buckets for half in (b[: len(b) // 2], b[len(b) // 2 :]) if half]
    yield space.with_choice(plan, buckets=tuple(halves))
    pairs: list[tuple[str, ...]] = []
    for index, bucket in enumerate(plan.buckets):
        if index % 2 and _alike(space, pairs[-1] + bucket, plan):
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
    elif after and _alike(space, bucket + after[0], plan):
        yield space.with_choice(plan, buckets=(*before, bucket + after[0], *after[1:]))


def _toggle_deferral(space: Space, name: str, plan: Plan) -> Iterator[Plan]:
    deferred = [n for n in space.candidates if (n in plan.deferred) != (n == name)]
    changed = space.with_deferred(plan, deferred)
    if changed.buckets:
        yield changed
    if not changed.buckets or _is_small(space):
        yield from rebucketed(changed, space)


def _is_small(space: Space) -> bool:
    return len(space.candidates) <= SMALL


# Buckets


def rebucketed(plan: Plan, space: Space) -> Iterator[Plan]:
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
        [(plan.schemes[name], space.dtypes[name], name in late) for name in names],
    )
    yield space.with_choice(plan, buckets=tuple(tuple(names[i] for i in group) for group in groups))


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


# What is tried


def _sorts(space: Space) -> list[list[str]]:
    """Layers that are equal and have a choice, where there are several of a sort."""
    sorts: dict[Hashable, list[str]] = {}
    for layer in space.profile.trainable:
        shapes = tuple(tensor.shape for tensor in layer.parameters)
        key = (space.candidates[layer.name], layer.kind, layer.structure, layer.rows, shapes)
        sorts.setdefault(key, []).append(layer.name)
    return [names for names in sorts.values() if len(names) > 1 and len(space.candidates[names[0]]) > 1]


def by_weight(space: Space) -> list[str]:
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


def _alike(space: Space, names: Sequence[str], plan: Plan) -> bool:
    """Whether layers may share a bucket."""
    return len({(plan.schemes[name], space.dtypes[name], name in plan.deferred) for name in names}) == 1
