"""The columns: from a profile to a plan that has the scheme wherever a layer can use it, or None where none can."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from poseidon.comm import AllReduce, BoundLayer, CommScheme, ShardedServer, SparseRows, SufficientFactor
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.structure import owned_parameters
from poseidon.runtime.deferral import check_deferred

HOSTS = ((0, 1), (2, 3))
"""Which ranks share a host under `two_level`."""
SMALL_BUCKETS = {"first_bytes": 64, "bucket_bytes": 600}
"""So that a small model has several."""

Maker = Callable[[ModelProfile, int, nn.Module, torch.optim.Optimizer], Plan | None]


def _only(scheme: CommScheme) -> Maker:
    def make(profile: ModelProfile, world_size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan | None:
        del model, optimizer
        chosen = {layer.name: _first(layer, scheme) for layer in profile.trainable}
        return uniform_plan(profile, world_size, chosen) if scheme in chosen.values() else None

    return make


def _first(layer: LayerSpec, *schemes: CommScheme) -> CommScheme:
    """The first of these that can carry the layer, else what a plain run has."""
    if layer.is_sparse:
        return SparseRows()
    return next((scheme for scheme in schemes if scheme.refuse(layer) is None), AllReduce(**SMALL_BUCKETS))


def _two_level(
    profile: ModelProfile, world_size: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Plan | None:
    """Factors where there are some, all-reduce elsewhere, both the ranks of a host first."""
    del model, optimizer
    if world_size < 4:
        return None
    schemes = (SufficientFactor(levels=2), AllReduce(levels=2, **SMALL_BUCKETS))
    return uniform_plan(profile, world_size, {layer.name: _first(layer, *schemes) for layer in profile.trainable})


def _mix(profile: ModelProfile, world_size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan | None:
    """Each layer its most particular scheme, every second of those that have none on the server."""
    del model, optimizer
    chosen = _particular(profile)
    plain = [name for name, scheme in chosen.items() if scheme.kind == "all_reduce"]
    chosen |= {name: ShardedServer() for name in plain[::2]}
    return uniform_plan(profile, world_size, chosen) if len({s.kind for s in chosen.values()}) > 1 else None


def _particular(profile: ModelProfile) -> dict[str, CommScheme]:
    """Rows where they are touched, factors for every second layer that has some, all-reduce elsewhere."""
    chosen = {layer.name: _first(layer, SparseRows()) for layer in profile.trainable}
    products = [layer.name for layer in profile.trainable if layer.structure is GradientStructure.OUTER_PRODUCT]
    return chosen | {name: SufficientFactor() for name in products[::2]}


def _deferred(profile: ModelProfile, world_size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    """Every layer that can be is deferred, under its most particular scheme."""
    plan = uniform_plan(profile, world_size, _particular(profile))
    refusals = {name: _refusal(plan, name, model, optimizer) for name in plan.arrival}
    deferred = tuple(name for name, refusal in refusals.items() if refusal is None)
    if not deferred:
        raise next(refusal for refusal in refusals.values() if refusal is not None)
    return Plan.model_validate({**dict(plan), "deferred": deferred})


def _refusal(plan: Plan, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> InfeasibleError | None:
    layer = BoundLayer(
        spec=plan.layers[name],
        module=model.get_submodule(name),
        parameters=owned_parameters(model)[name],
        optimizer=optimizer,
        deferred=True,
    )
    try:
        check_deferred(plan.schemes[name], [layer], model)
    except InfeasibleError as error:
        return error
    return None


AUTO = "auto"
"""The column of plans that are found while training."""
SCHEMES: Mapping[str, Maker] = {
    "all_reduce": _only(AllReduce(**SMALL_BUCKETS)),
    "sufficient_factor": _only(SufficientFactor()),
    "sparse_rows": _only(SparseRows()),
    "sharded_server": _only(ShardedServer()),
    "mix": _mix,
    "deferred": _deferred,
    "two_level": _two_level,
}
