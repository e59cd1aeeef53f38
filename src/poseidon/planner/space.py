"""What the search chooses from: for each layer the schemes that it may use, and for the plan all else that varies.

Comes in: a profile, rates, how far the mathematics may bend, and what somebody has fixed. Goes out: a `Space`, which
makes plans: the starting points, and all plans where they are few.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, get_args

from pydantic import ValidationError

from poseidon.artifact import describe
from poseidon.cluster.rates import Rates
from poseidon.comm import SCHEMES, CommScheme, SparseRows
from poseidon.comm.sharded_server import ELEMENTWISE
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.plan import label as label
from poseidon.planner.rules import CANDIDATES
from poseidon.profile.graph import LayerSpec, ModelProfile

EXACTNESS = ("exact", "rounded", "compressed", "relaxed")
"""How far the mathematics may bend, from not at all; each allows those before it too."""
SEARCHED_WIRE = "bfloat16"
"""The precision on the wire that is tried where rounding is allowed: as short as float16, and nothing overflows."""
PLAN_FIELDS = ("connections", "wait_free", "deferred", "order", "buckets", "portions")
"""What of a plan can be fixed, beside its layers' schemes."""

Schemes = dict[str, CommScheme]
"""By layer."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans for one model on one group of ranks that the search may choose from."""

    profile: ModelProfile
    rates: Rates
    arrival: tuple[str, ...]
    candidates: Mapping[str, tuple[CommScheme, ...]]
    """By trainable layer, the plainest first; never none."""
    connections: tuple[int, ...]
    """The group's own choice first."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan that are not up for choice."""

    @cached_property
    def plain(self) -> Plan:
        """Plain all-reduce wherever it is allowed, in buckets by size."""
        return Plan.model_validate(
            {
                "world_size": self.rates.world_size,
                "profile": self.profile,
                "schemes": {name: options[0] for name, options in self.candidates.items()},
                "arrival": self.arrival,
                "connections": self.connections[0],
                **self.fixed,
            }
        )

    def plan(self, schemes: Mapping[str, CommScheme], **chosen: Any) -> Plan:
        """A plan of this space that issues transfers as gradients arrive, unless something else is chosen or fixed."""
        return self.plain.model_copy(update={"schemes": dict(schemes), **chosen, **self.fixed})

    def is_free(self, name: str) -> bool:
        """Whether a field of the plan is up for choice."""
        return name not in self.fixed

    def with_scheme(self, plan: Plan, names: Iterable[str], scheme: CommScheme) -> Plan:
        """Some layers on another scheme, all else as it is; a layer that comes into buckets gets one for itself."""
        names = set(names)
        schemes = {name: scheme if name in names else old for name, old in plan.schemes.items()}
        if not self.is_free("buckets") or not plan.buckets:
            return self.plan(schemes, **self._chosen(plan))
        kept = [tuple(name for name in bucket if name not in names) for bucket in plan.buckets]
        if scheme.kind == "all_reduce":
            kept += [(name,) for name in self.arrival if name in names]
        return self.plan(schemes, **{**self._chosen(plan), "buckets": self._by_arrival(kept)})

    def with_choice(self, plan: Plan, **chosen: Any) -> Plan:
        """The plan with other fields."""
        return self.plan(plan.schemes, **{**self._chosen(plan), **chosen})

    def with_deferred(self, plan: Plan, deferred: Sequence[str]) -> Plan:
        """Some layers end as late as their next forward: the others go first, then these, soonest needed first.

        A bucket of which only a part is deferred is cut in two.
        """
        late = {name for name in deferred if self.may_defer(name, plan.schemes[name])}
        order: tuple[str, ...] = ()
        if late:
            forward = [layer.name for layer in self.profile.trainable]
            order = (*(n for n in self.arrival if n not in late), *(n for n in forward if n in late))
        halves = [
            tuple(name for name in bucket if (name in late) is wanted)
            for bucket in plan.buckets
            for wanted in (False, True)
        ]
        return self.with_choice(
            plan, deferred=tuple(n for n in self.candidates if n in late), order=order, buckets=self._by_arrival(halves)
        )

    @cached_property
    def deferrable(self) -> tuple[str, ...]:
        """The layers of which it is up for choice whether they are deferred, in forward order.

        None where something is fixed that speaks against it, and where the optimizer cannot be run later for some
        parameters than for others, or is not known.
        """
        if not all(map(self.is_free, ("deferred", "order", "buckets"))) or self.fixed.get("wait_free") is False:
            return ()
        if self.profile.is_compiled or self.profile.optimizer not in {kind.__name__ for kind in ELEMENTWISE}:
            return ()
        return tuple(layer.name for layer in self.profile.trainable if not (layer.is_sparse or layer.is_shared))

    def may_defer(self, name: str, scheme: CommScheme) -> bool:
        """Whether a layer may be deferred on this scheme."""
        return name in self.deferrable and scheme.kind != "sharded_server"

    # All of them

    @property
    def num_plans(self) -> int:
        """How many plans `plans` makes, at most."""
        bucketed = sum(any(s.kind == "all_reduce" for s in options) for options in self.candidates.values())
        groupings = 1 << max(0, bucketed - 1) if self.is_free("buckets") else 1
        deferrals = 1 << len(self.deferrable)
        schemes = prod(len(options) for options in self.candidates.values())
        return schemes * len(self.connections) * groupings * deferrals

    def plans(self) -> Iterator[Plan]:
        """Every plan: schemes by layer, groupings of neighbours in arrival, connections, deferred layers."""
        names = list(self.candidates)
        deferrals = [
            late for count in range(len(self.deferrable) + 1) for late in itertools.combinations(self.deferrable, count)
        ]
        for schemes in itertools.product(*self.candidates.values()):
            chosen = dict(zip(names, schemes, strict=True))
            for connections, buckets in itertools.product(self.connections, self._groupings(chosen)):
                plan = self.plan(chosen, connections=connections, buckets=buckets)
                for deferred in deferrals:
                    yield self.with_deferred(plan, deferred) if deferred else plan

    def _groupings(self, schemes: Schemes) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Every way to cut the layers on all-reduce, in order of arrival, into buckets of one scheme each."""
        names = [name for name in self.arrival if schemes[name].kind == "all_reduce"]
        if not self.is_free("buckets") or not names:
            yield ()
            return
        for cuts in itertools.product((False, True), repeat=len(names) - 1):
            buckets = [[names[0]]]
            for name, cut in zip(names[1:], cuts, strict=True):
                if cut:
                    buckets.append([name])
                else:
                    buckets[-1].append(name)
            if all(len({(schemes[name], self.dtypes[name]) for name in bucket}) == 1 for bucket in buckets):
                yield tuple(map(tuple, buckets))

    # Parts

    @cached_property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """By layer, those of its gradients: gradients of several do not share a bucket."""
        return {
            layer.name: tuple(sorted({tensor.dtype for tensor in layer.parameters})) for layer in self.profile.trainable
        }

    def _chosen(self, plan: Plan) -> dict[str, Any]:
        return {name: getattr(plan, name) for name in PLAN_FIELDS}

    def _by_arrival(self, buckets: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        place = {name: index for index, name in enumerate(self.arrival)}
        return tuple(sorted((bucket for bucket in buckets if bucket), key=lambda bucket: place[bucket[-1]]))


def check_allowed(allow: str) -> None:
    """Raises ConfigError unless this is a level of exactness."""
    if allow not in EXACTNESS:
        raise ConfigError(f"cannot allow {allow!r}: choose one of {', '.join(EXACTNESS)}")


def make_space(
    profile: ModelProfile,
    rates: Rates,
    *,
    allow: str = "exact",
    arrival: Sequence[str] = (),
    sparse: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Space:
    """What may be chosen for a model on a group of ranks.

    Args:
        profile: The model.
        rates: What the ranks compute and move.
        allow: One of `EXACTNESS`.
        arrival: Layers in the order in which their gradients become ready; the reverse of forward if it is not known.
        sparse: Layers whose gradients autograd makes sparse, where the profile does not say so.
        overrides: What is not up for choice, by key: `layers.NAME.scheme`, `layers.NAME.` and a field of a scheme, or
            a field of the plan. Values as text or as such.

    Raises:
        ConfigError: A level, layer, field or value is not known; the message names those that are.
    """
    check_allowed(allow)
    wanted, fixed = _sort_overrides(profile, overrides or {})
    known = sorted(set(rates.all_reduce) & set(rates.exchange), key=lambda n: (n != rates.connections, n))
    connections = (fixed.pop("connections"),) if "connections" in fixed else tuple(known)
    if connections[0] not in known:
        raise ConfigError(
            f"cannot plan with {connections[0]} connections: {', '.join(map(str, sorted(known)))} were measured"
        )
    candidates = {
        layer.name: _candidates(
            layer, rates, allow, wanted.get(layer.name, {}), is_sparse=layer.is_sparse or layer.name in sparse
        )
        for layer in profile.trainable
    }
    if "buckets" in fixed:
        candidates = _in_buckets(candidates, {name for bucket in fixed["buckets"] for name in bucket})
    space = Space(
        profile=profile,
        rates=rates,
        arrival=tuple(arrival) or tuple(layer.name for layer in reversed(profile.trainable)),
        candidates=candidates,
        connections=connections,
        fixed=fixed,
    )
    try:
        space.plain  # noqa: B018 - fields that are fixed are checked when a plan is built
    except ValidationError as error:
        raise ConfigError(
            f"cannot make a plan with {', '.join(fixed) or 'these schemes'}: {describe(error)}"
        ) from error
    return space


# Candidates of a layer


def _candidates(
    layer: LayerSpec, rates: Rates, allow: str, wanted: Mapping[str, Any], *, is_sparse: bool
) -> tuple[CommScheme, ...]:
    """The schemes that the layer may use, plain ones first."""
    kinds = [type(scheme) for scheme in CANDIDATES]
    if is_sparse:
        kinds = [SparseRows]
    if (kind := wanted.get("scheme")) is not None:
        if kind not in SCHEMES:
            raise ConfigError(f"cannot use scheme {kind!r} for layer {layer.name!r}: there are {', '.join(SCHEMES)}")
        kinds = [SCHEMES[kind]]
    fields = {key: value for key, value in wanted.items() if key != "scheme"}
    having = [kind for kind in kinds if fields.keys() <= kind.model_fields.keys() - {"kind"}]
    if not having:
        there = sorted({name for kind in kinds for name in kind.model_fields} - {"kind"})
        unknown = next((key for key in fields if key not in there), next(iter(fields)))
        raise ConfigError(f"cannot set {unknown!r} of layer {layer.name!r}: there are {', '.join(['scheme', *there])}")
    options = [scheme for kind in having for scheme in _variants(kind, rates, allow, fields, layer)]
    refusals = [refusal for scheme in options if (refusal := scheme.refuse(layer))]
    usable = tuple(dict.fromkeys(scheme for scheme in options if scheme.refuse(layer) is None))
    if not usable:
        raise ConfigError(f"layer {layer.name!r} cannot use {having[0].model_fields['kind'].default}: {refusals[0]}")
    return usable


def _variants(
    kind: type[CommScheme], rates: Rates, allow: str, fields: Mapping[str, Any], layer: LayerSpec
) -> list[CommScheme]:
    """The schemes of one kind with the fields that were asked for, and all that may vary beside them."""
    vary: list[dict[str, Any]] = [{}]
    if "levels" in kind.model_fields and "levels" not in fields and rates.inner is not None and rates.outer is not None:
        vary = [{"levels": levels} for levels in get_args(kind.model_fields["levels"].annotation)]
    if "wire" in kind.model_fields and "wire" not in fields and EXACTNESS.index(allow) >= EXACTNESS.index("rounded"):
        vary = [{**one, **wire} for one in vary for wire in ({}, {"wire": SEARCHED_WIRE})]
    try:
        made = [kind.model_validate({**one, **fields}) for one in vary]
    except ValidationError as error:
        raise ConfigError(f"cannot set a field of layer {layer.name!r}: {describe(error)}") from error
    if fields:  # asked for by name: not a matter of what is allowed
        return made
    return [scheme for scheme in made if EXACTNESS.index(scheme.exactness) <= EXACTNESS.index(allow)]


def _in_buckets(
    candidates: Mapping[str, tuple[CommScheme, ...]], bucketed: set[str]
) -> dict[str, tuple[CommScheme, ...]]:
    """One all-reduce for what is in a bucket that is fixed, no all-reduce for what is in none."""
    found = {}
    for name, options in candidates.items():
        fitting = tuple(one for one in options if (one.kind == "all_reduce") == (name in bucketed))
        if not fitting:
            where = "it is in a bucket" if name in bucketed else "it is in no bucket"
            raise ConfigError(f"cannot use the buckets that were set for layer {name!r}: {where}, against its scheme")
        found[name] = fitting[:1] if name in bucketed else fitting
    return found


# Overrides


def _sort_overrides(
    profile: ModelProfile, overrides: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """By layer what is wanted of its scheme, and what is fixed of the plan."""
    names = {layer.name for layer in profile.trainable}
    wanted: dict[str, dict[str, Any]] = {}
    fixed: dict[str, Any] = {}
    for key, value in overrides.items():
        if key.startswith("layers."):
            name, _, field_name = key.removeprefix("layers.").rpartition(".")
            if name not in names:
                raise ConfigError(f"cannot set {key!r}: no trainable layer is named {name!r}; {_some(names)}")
            wanted.setdefault(name, {})[field_name] = value
        elif key in PLAN_FIELDS:
            fixed[key] = _field_value(key, value)
        else:
            raise ConfigError(
                f"cannot set {key!r}: there are layers.NAME.scheme, layers.NAME.FIELD, {', '.join(PLAN_FIELDS)}"
            )
    for name in (n for key in ("deferred", "order") for n in fixed.get(key, ())):
        if name not in names:
            raise ConfigError(f"cannot use layer {name!r} of what was set: no trainable layer is named so")
    return wanted, fixed


def _field_value(key: str, value: Any) -> Any:
    """A value of a plan's field from what was given, perhaps as text."""
    if not isinstance(value, str):
        return value
    if key in ("deferred", "order"):
        return tuple(name for name in value.split(",") if name)
    if key == "buckets":
        return tuple(tuple(bucket.split(",")) for bucket in value.split(";") if bucket)
    try:
        return json.loads(value)
    except ValueError as error:
        example = "true or false" if key == "wait_free" else "a number"
        raise ConfigError(f"cannot set {key} to {value!r}: write {example}") from error


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = sorted(names)
    more = f", … ({len(listed)} in all)" if len(listed) > most else ""
    return f"there are {', '.join(map(repr, listed[:most]))}{more}"
