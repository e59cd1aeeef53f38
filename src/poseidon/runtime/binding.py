"""A plan put to work on the layers of a model: checked, bound, and the fixed order of its transfers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.comm.scheme import TAGS_PER_EXCHANGE, BoundLayer, CommScheme, Exchange, StepState, Transfer
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan
from poseidon.runtime.deferral import check_deferred
from poseidon.runtime.optimizers import check_no_closure, optimizer_of

Owned = Mapping[str, dict[str, nn.Parameter]]
"""What is trained, by layer."""


def check_plan(
    plan: Plan, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group, owned: Owned
) -> None:
    """Raises InfeasibleError with the first difference between a plan and what it is to be put to work on."""
    if plan.world_size != group.world_size:
        raise InfeasibleError(
            f"the plan is for {plan.world_size} ranks, but {group.world_size} are here; make a new plan"
        )
    for name in sorted(set(owned) ^ set(plan.schemes)):
        where = "the model has no such layer" if name in plan.schemes else "the plan does not mention it"
        raise InfeasibleError(f"the plan does not fit the model at layer {name!r}: {where}; make a new plan")
    for name, layer in plan.layers.items():
        here = {key: tuple(p.shape) for key, p in owned[name].items()}
        there = {tensor.name: tensor.shape for tensor in layer.parameters}
        if here != there:
            raise InfeasibleError(
                f"the plan does not fit the model at layer {name!r}: planned for {there}, found {here}; make a new plan"
            )
    if group.world_size > 1:
        _check_real(owned)
        for scheme, layers in _by_scheme(plan, model, owned, optimizers).items():
            scheme.check(layers, group)
            check_deferred(scheme, layers, model)
        check_no_closure(optimizers)
        if plan.deferred and len(optimizers) > 1:
            raise InfeasibleError(
                f"cannot defer {plan.deferred[0]!r} where several optimizers update the model; take it out of "
                "plan.deferred"
            )


def _check_real(owned: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
    for layer, parameters in owned.items():
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise InfeasibleError(
                    f"parameter {'.'.join(filter(None, (layer, name)))!r} is {parameter.dtype}, and complex gradients "
                    "cannot be exchanged: keep its real and imaginary parts, as torch.view_as_real gives them, as a "
                    "parameter and take torch.view_as_complex of that in forward, or freeze it"
                )


def bind(
    plan: Plan,
    model: nn.Module,
    owned: Owned,
    optimizers: Sequence[torch.optim.Optimizer],
    group: Group,
    state: StepState,
) -> list[Exchange]:
    """Puts each scheme to work on its layers; equal schemes with equal parameters share one call, and so buckets."""
    together = _by_scheme(plan, model, owned, optimizers)
    exchanges = [e for scheme, layers in together.items() for e in scheme.bind(layers, group, state)]
    for number, exchange in enumerate(exchanges):
        exchange.tag = (number + 1) * TAGS_PER_EXCHANGE
    return exchanges


def _by_scheme(
    plan: Plan, model: nn.Module, owned: Owned, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[CommScheme, list[BoundLayer]]:
    specs = plan.layers
    bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket}
    together: dict[CommScheme, list[BoundLayer]] = {}
    for name in plan.arrival:
        layer = BoundLayer(
            spec=specs[name],
            module=model.get_submodule(name),
            parameters=owned[name],
            optimizer=optimizer_of(owned[name].values(), optimizers),
            bucket=bucket_of.get(name),
            deferred=name in plan.deferred,
        )
        together.setdefault(plan.schemes[name], []).append(layer)
    return together


@dataclass(frozen=True)
class Schedule:
    """The fixed order of one step's transfers, the same on every rank."""

    head: list[Transfer]
    """What forward makes ready, in its order, and the counts."""
    tail: list[Transfer]
    """What backward makes ready, in the plan's order."""

    @property
    def all(self) -> list[Transfer]:
        """Both."""
        return [*self.head, *self.tail]


def schedule(plan: Plan, exchanges: Sequence[Exchange], counts: Transfer) -> Schedule:
    """The fixed order in which a step's transfers are issued."""
    forward = {layer.name: index for index, layer in enumerate(plan.profile.trainable)}
    place = {name: index for index, name in enumerate(plan.order or plan.arrival)}
    early = sorted((e for e in exchanges if e.early), key=lambda e: min(forward[name] for name in e.layers))
    late = sorted(exchanges, key=lambda e: max(place[name] for name in e.layers))
    return Schedule(
        head=[*(t for e in early for t in e.early), counts],
        tail=[t for e in late for t in e.transfers if t not in e.early],
    )
