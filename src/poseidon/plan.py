"""The plan: which scheme carries each layer's gradient, in which order, and what that is expected to cost."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from poseidon.artifact import Artifact, Value
from poseidon.comm import AllReduce, AnyScheme, CommScheme
from poseidon.errors import InfeasibleError
from poseidon.profile.graph import LayerSpec, ModelProfile


class Choice(Value):
    """Why a layer has the scheme that it has."""

    seconds_by_scheme: dict[str, float] = Field(default_factory=dict)
    """Predicted cost of each scheme that the layer could use, wire and computing, in seconds."""
    reason: str = ""
    """In words, where nothing was compared."""


class Plan(Artifact):
    """How the gradients of one model cross the network between `world_size` ranks."""

    version: int = 1
    world_size: int = Field(ge=1)
    profile: ModelProfile
    """The model that the plan is for: its layers in forward order."""
    schemes: dict[str, AnyScheme]
    """One scheme per layer that has trainable parameters, by layer name."""
    arrival: tuple[str, ...]
    """The layers in the order in which their gradients become ready in backward."""
    wait_free: bool = True
    """Transfers start while backward goes on; false sends everything after it, as a baseline."""
    connections: int = Field(default=1, ge=1)
    """Connections to each peer over which large tensors are split."""
    choices: dict[str, Choice] = Field(default_factory=dict)
    """What the planner knew about each layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {layer.name for layer in self.profile.layers}
        for what, given in (("schemes", set(self.schemes)), ("arrival", set(self.arrival))):
            if given != names:
                odd = sorted(given ^ names)[0]
                where = (
                    "the model has no such layer" if odd in given else "a scheme and a place in the order are needed"
                )
                raise ValueError(f"{what} do not fit the profile at layer {odd!r}: {where}")
        if len(self.arrival) != len(names):
            raise ValueError("arrival names a layer twice")
        for layer in self.profile.layers:
            if refusal := self.schemes[layer.name].refuse(layer):
                raise ValueError(f"layer {layer.name!r} cannot use {self.schemes[layer.name].kind}: {refusal}")
        return self

    @property
    def layers(self) -> dict[str, LayerSpec]:
        """The profile's layers by name."""
        return {layer.name: layer for layer in self.profile.layers}

    @property
    def bytes_sent(self) -> int:
        """Payload that one rank sends in one step."""
        return sum(self.schemes[layer.name].bytes_sent(layer, self.world_size) for layer in self.profile.layers)

    @property
    def is_plain(self) -> bool:
        """Whether every layer uses all-reduce."""
        return all(scheme.kind == "all_reduce" for scheme in self.schemes.values())

    def summary(self) -> str:
        """One sentence: which layers go which way, and what that saves on the wire."""
        by_kind: dict[str, list[str]] = {}
        for layer in self.profile.layers:
            by_kind.setdefault(self.schemes[layer.name].kind, []).append(layer.name or "(model)")
        parts = [
            f"{', '.join(names)} by {kind}"
            if len(names) <= 4 and kind != "all_reduce"
            else f"{len(names)} layers by {kind}"
            for kind, names in sorted(by_kind.items(), key=lambda item: item[0] == "all_reduce")
        ]
        plain = sum(AllReduce().bytes_sent(layer, self.world_size) for layer in self.profile.layers)
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
    for layer in profile.layers:
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
            "arrival": arrival or tuple(layer.name for layer in reversed(profile.layers)),
            "wait_free": wait_free,
        }
    )
