"""A plan for a model that trains other parameters than the plan knows: what was chosen stays, the rest is plain.

A layer whose parameters are the same goes on as planned. One that is new, or has other parameters now, goes by plain
all-reduce, or by rows where its gradient is sparse. It takes its place beside the layer before it in module order, in
the order of the forward pass and, seen from behind, in the order of arrival.
"""

from collections.abc import Container, Mapping, Sequence

from poseidon.comm import AllReduce, CommScheme, SparseRows
from poseidon.comm.bucket import split_into_buckets
from poseidon.plan import Choice, Plan
from poseidon.profile.graph import LayerSpec, ModelProfile


def extend(plan: Plan, now: ModelProfile, changed: Container[str]) -> Plan:
    """The plan with the layers that the model trains now.

    Args:
        plan: For the layers that it trained so far.
        now: The layers that it trains now, in module order.
        changed: Names of layers that may be called as before, but have other parameters.
    """
    found = {layer.name: layer for layer in now.layers}
    kept = {name for name in plan.layers if name in found and name not in changed}
    new = [name for name in found if name not in kept]
    before = dict(zip(found, [None, *found], strict=False))
    specs = {**found, **{layer.name: layer for layer in plan.profile.layers if layer.name not in new}}
    gone = set(plan.layers) - kept
    forward = _inserted([layer.name for layer in plan.profile.layers if layer.name not in gone], new, before)
    arrival = _inserted([name for name in reversed(plan.arrival) if name in kept], new, before)[::-1]
    order = _inserted([name for name in reversed(plan.order) if name in kept], new, before)[::-1] if plan.order else []
    schemes = {**{name: plan.schemes[name] for name in kept}, **{name: _plain_scheme(found[name]) for name in new}}
    choices = {name: choice for name, choice in plan.choices.items() if name in kept}
    if choices:
        choices |= {name: Choice(reason="it came to be trained after the plan was made") for name in new}
    return Plan.model_validate(
        {
            **dict(plan),
            "profile": plan.profile.model_copy(update={"layers": tuple(specs[name] for name in forward)}),
            "schemes": {name: schemes[name] for name in forward if name in schemes},
            "arrival": tuple(arrival),
            "order": tuple(order),
            "buckets": _buckets(plan, kept, [specs[name] for name in arrival if name in new]),
            "deferred": tuple(name for name in plan.deferred if name in kept),
            "choices": choices,
            "predicted": None,
        }
    )


def _inserted(names: Sequence[str], new: Sequence[str], before: Mapping[str, str | None]) -> list[str]:
    """The names in order, and each new one behind the nearest before it in module order that is there."""
    result = list(names)
    for name in new:
        previous = before[name]
        while previous is not None and previous not in result:
            previous = before[previous]
        result.insert(0 if previous is None else result.index(previous) + 1, name)
    return result


def _plain_scheme(layer: LayerSpec) -> CommScheme:
    return SparseRows() if layer.is_sparse else AllReduce()


def _buckets(plan: Plan, kept: Container[str], new: Sequence[LayerSpec]) -> tuple[tuple[str, ...], ...]:
    """The plan's buckets as far as they are left, and new ones by size."""
    if not plan.buckets:
        return ()
    left = [tuple(name for name in bucket if name in kept) for bucket in plan.buckets]
    reduced = [layer for layer in new if not layer.is_sparse]
    added = split_into_buckets([layer.num_bytes for layer in reduced])
    left += [tuple(reduced[index].name for index in members) for members in added]
    return tuple(bucket for bucket in left if bucket)
