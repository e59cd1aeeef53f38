"""The plan: which scheme carries each layer's gradient, in which order, and what that is expected to cost."""

import math
from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from poseidon.artifact import MOST_RANKS, Artifact, Value
from poseidon.breakdown import StepParts
from poseidon.comm import AllReduce, AnyScheme, CommScheme
from poseidon.errors import InfeasibleError
from poseidon.profile.graph import LayerSpec, ModelProfile


class Choice(Value):
    """Why a layer has the scheme that it has."""

    seconds_by_scheme: dict[str, float] = Field(default_factory=dict)
    """Predicted cost of each scheme that the layer could use, wire and computing, in seconds, the layer alone."""
    reason: str = ""
    """In words, where nothing was compared."""
    hidden_seconds: float = 0.0
    """Of the layer's transfers in the predicted step: what computing hides."""
    exposed_seconds: float = 0.0
    """Of the layer's transfers in the predicted step: what the training thread stands still for."""
    runner_up: str = ""
    """The next best scheme for this layer, all others as planned; empty where there is no other."""
    runner_up_step_seconds: float = 0.0
    """The predicted step with it."""


class PredictedStep(Value):
    """What the planner expects of a step under the plan."""

    step_seconds: float
    """Wall time of a step, loader and optimizer included."""
    parts: StepParts
    """Where the time of the slowest rank goes."""
    samples_per_s: float
    """Of all ranks together."""
    lower_bound_seconds: float = 0.0
    """No plan of the searched kind can be faster; 0 where no bound was computed."""
    peak_num_bytes: int = 0
    """Memory of one rank: parameters, gradients, optimizer state, activations and buffers."""
    source: str = ""
    """What it was computed from: profile and cluster, in words."""


class Plan(Artifact):
    """How the gradients of one model cross the network between `world_size` ranks."""

    version: int = 1
    world_size: int = Field(ge=1, le=MOST_RANKS)
    profile: ModelProfile
    """The model that the plan is for: its layers in forward order."""
    schemes: dict[str, AnyScheme]
    """One scheme per layer that has trainable parameters, by layer name."""
    arrival: tuple[str, ...]
    """The layers in the order in which their gradients become ready in backward."""
    order: tuple[str, ...] = ()
    """The layers in the order in which their last transfers are issued; empty for the order of arrival."""
    buckets: tuple[tuple[str, ...], ...] = ()
    """Which layers' gradients share an all-reduce, each bucket in order of arrival; empty for buckets by size. Layers
    on other schemes are in none."""
    deferred: tuple[str, ...] = ()
    """Layers whose transfers may end as late as the layer's next forward; their share of the update is applied then."""
    wait_free: bool = True
    """Transfers start while backward goes on; false sends everything after it, as a baseline."""
    connections: int = Field(default=1, ge=1)
    """Connections to each peer over which large tensors are split."""
    portions: tuple[float, ...] = ()
    """Of each global batch, how much each rank takes in relation to the others; empty for equal parts."""
    choices: dict[str, Choice] = Field(default_factory=dict)
    """What the planner knew about each layer."""
    predicted: PredictedStep | None = None
    """What the planner expects; None where nothing was predicted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {layer.name for layer in self.profile.trainable}
        given = {"schemes": set(self.schemes), "arrival": set(self.arrival)}
        if self.order:
            given["order"] = set(self.order)
        for what, some in given.items():
            if some != names:
                odd = sorted(some ^ names)[0]
                where = (
                    "the model has no such trainable layer"
                    if odd in some
                    else "a scheme and a place in the order are needed"
                )
                raise ValueError(f"{what} do not fit the profile at layer {odd!r}: {where}")
        for what, listed in (("arrival", self.arrival), ("order", self.order)):
            if listed and len(listed) != len(names):
                raise ValueError(f"{what} names a layer twice")
        for layer in self.profile.trainable:
            if refusal := self.schemes[layer.name].refuse(layer):
                raise ValueError(f"layer {layer.name!r} cannot use {self.schemes[layer.name].kind}: {refusal}")
        self._check_buckets()
        self._check_portions()
        for name in self.deferred:
            if name not in names:
                raise ValueError(f"deferred names layer {name!r}: the model has no such trainable layer")
        return self

    def _check_buckets(self) -> None:
        bucketed = [name for bucket in self.buckets for name in bucket]
        wanted = {name for name, scheme in self.schemes.items() if scheme.kind == "all_reduce"}
        if not self.buckets:
            return
        if odd := sorted(set(bucketed) ^ wanted):
            where = "it is not on all_reduce" if odd[0] in bucketed else "it is on all_reduce and in no bucket"
            raise ValueError(f"buckets do not fit the schemes at layer {odd[0]!r}: {where}")
        if len(bucketed) != len(set(bucketed)):
            raise ValueError("buckets name a layer twice")
        for bucket in self.buckets:
            for name in bucket[1:]:
                if self.schemes[name] != self.schemes[bucket[0]]:
                    raise ValueError(f"layers {bucket[0]!r} and {name!r} share a bucket, but not one scheme")
                if (name in self.deferred) != (bucket[0] in self.deferred):
                    raise ValueError(f"layers {bucket[0]!r} and {name!r} share a bucket, but only one is deferred")

    def _check_portions(self) -> None:
        if self.portions and len(self.portions) != self.world_size:
            raise ValueError(f"portions are {len(self.portions)}, ranks {self.world_size}: give one for each rank")
        if any(not 0 < portion < math.inf for portion in self.portions):
            raise ValueError(f"portions {self.portions} cannot be cut by: each is above zero")

    @property
    def loads(self) -> tuple[float, ...]:
        """By rank, how many times its equal part of the samples it takes."""
        total = sum(self.portions)
        return tuple(portion * self.world_size / total for portion in self.portions) or (1.0,) * self.world_size

    @property
    def layers(self) -> dict[str, LayerSpec]:
        """The profile's trainable layers by name, in forward order."""
        return {layer.name: layer for layer in self.profile.trainable}

    @property
    def bytes_sent(self) -> int:
        """Payload that one rank sends in one step."""
        return sum(self.schemes[layer.name].bytes_sent(layer, self.world_size) for layer in self.profile.trainable)

    @property
    def is_plain(self) -> bool:
        """Whether every layer uses all-reduce."""
        return all(scheme.kind == "all_reduce" for scheme in self.schemes.values())

    def with_arrival(self, arrival: Sequence[str]) -> Self:
        """The same schemes where gradients become ready in another order: buckets by size, issued as they come."""
        return self.model_validate({**dict(self), "arrival": tuple(arrival), "order": (), "buckets": ()})

    def summary(self) -> str:
        """One sentence: which layers go which way, and what that saves on the wire."""
        by_kind: dict[str, list[str]] = {}
        for layer in self.profile.trainable:
            by_kind.setdefault(self.schemes[layer.name].kind, []).append(layer.name or "(model)")
        parts = [
            f"{', '.join(names)} by {kind}"
            if len(names) <= 4 and kind != "all_reduce"
            else f"{len(names)} layers by {kind}"
            for kind, names in sorted(by_kind.items(), key=lambda item: item[0] == "all_reduce")
        ]
        plain = sum(AllReduce().bytes_sent(layer, self.world_size) for layer in self.profile.trainable)
        share = f"{self.bytes_sent / plain:.0%} of the bytes of plain all-reduce" if plain else "nothing to send"
        return f"{'; '.join(parts)}: {share}"


def uniform_plan(
    profile: ModelProfile,
    world_size: int,
    schemes: Mapping[str, CommScheme] | CommScheme | None = None,
    *,
    arrival: tuple[str, ...] = (),
    wait_free: bool = True,
) -> Plan:
    """A plan with one scheme wherever a layer can use it, and plain all-reduce elsewhere.

    Args:
        profile: The model.
        world_size: How many ranks.
        schemes: The scheme for all layers, or some layers' schemes by name; all-reduce where nothing is said.
        arrival: The order of arrival; the reverse of the forward order if it is not known.
        wait_free: As in `Plan`.

    Raises:
        InfeasibleError: A scheme was given for a layer by name that cannot use it.
    """
    chosen: dict[str, CommScheme] = {}
    for layer in profile.trainable:
        if isinstance(schemes, CommScheme):
            chosen[layer.name] = AllReduce() if schemes.refuse(layer) else schemes
        else:
            chosen[layer.name] = (schemes or {}).get(layer.name, AllReduce())
            if refusal := chosen[layer.name].refuse(layer):
                raise InfeasibleError(f"layer {layer.name!r} cannot use {chosen[layer.name].kind}: {refusal}")
    return Plan.model_validate(
        {
            "world_size": world_size,
            "profile": profile,
            "schemes": chosen,
            "arrival": arrival or tuple(layer.name for layer in reversed(profile.trainable)),
            "wait_free": wait_free,
        }
    )


def label(scheme: CommScheme) -> str:
    """What tables and choices call a scheme: its kind, and what makes it other than plain."""
    fields = type(scheme).model_fields
    odd = [f"{name}={value}" for name, value in scheme if value != fields[name].default]
    return f"{scheme.kind}({', '.join(odd)})" if odd else scheme.kind
