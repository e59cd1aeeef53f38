"""Measure, plan and attach in one call."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.search import search_plan
from poseidon.planner.shares import shares_by_speed
from poseidon.planner.space import check_allowed
from poseidon.profile.graph import ModelProfile
from poseidon.profile.structure import StepWatch, profile_structure
from poseidon.runtime.adoption import Adoption, observation_schemes
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.balance import Balance
from poseidon.runtime.ignored import ignored_names
from poseidon.runtime.join import group_of_process
from poseidon.runtime.monitor import Monitor
from poseidon.runtime.optimizers import Optimizers
from poseidon.runtime.options import BufferPolicy, Mean, RunOptions, Shares

__all__ = ["distribute"]


def distribute(
    model: nn.Module,
    optimizer: Optimizers = None,
    plan: Plan | str | Path = "auto",
    *,
    allow: str = "exact",
    mean: Mean = "samples",
    buffers: BufferPolicy = "on_request",
    check_every: int = 0,
    shares: Shares = "equal",
    ignore: Sequence[str] = (),
    group: Group | None = None,
) -> Run:
    """Trains a model on all ranks together, in place; the training loop stays as it is.

    Replicas start equal. When `backward()` returns, `p.grad` is the mean over the samples of all ranks.

    Args:
        model: Built alike on every rank.
        optimizer: Any `torch.optim` optimizer over the model's parameters, or several in a list; a plan that uses
            `sharded_server` needs them.
        plan: `"auto"` watches the first steps, measures the links and searches for the fastest plan; `"all_reduce"` is
            plain all-reduce; a `Plan` or the path of one is used as it is.
        allow: How far the mathematics may bend under `"auto"`: `"exact"`, `"rounded"`, `"compressed"`, `"relaxed"`.
        mean: `"samples"` weights each rank by its samples, or by what `run.weight(n)` says: unequal batches give then
            what one process would compute on all of them; `"ranks"` weights ranks alike, as DDP does. Where batches are
            equal both are the same.
        buffers: `"on_request"` sends rank 0's buffers to all in `run.sync_buffers()` only, `"after_step"` after each
            `optimizer.step()` too.
        check_every: After how many exchanges all ranks prove again that they hold the same model and hyperparameters; 0
            never does.
        shares: `"equal"` leaves each rank its equal part of what `run.shard` deals, or its part by the plan; `"speed"`
            adapts the parts slowly to how fast each rank computes, and keeps the global batch.
        ignore: Names of parameters, buffers and modules that stay each rank's own: neither made equal at the start nor
            exchanged nor compared.
        group: The ranks; those that `poseidon.init()` has joined if left out.

    Returns:
        The run: `no_sync`, `weight`, `join`, `explain`, `check_replicas`, `timeline`, `detach`.

    Raises:
        ConfigError: The plan's file cannot be used, or an argument is not known.
        InfeasibleError: The models differ between ranks, or the plan does not fit them.

    Example:
        >>> poseidon.init()
        >>> run = poseidon.distribute(model, optimizer)
    """
    check_allowed(allow)
    options = RunOptions(mean=mean, buffers=buffers, check_every=check_every, shares=shares, ignore=tuple(ignore))
    group = group or group_of_process()
    if isinstance(plan, Plan):
        return _monitored(attach(model, optimizer, plan, group, options))
    ignored = ignored_names(model, options.ignore)
    profile = profile_structure(model, ignored=ignored)
    sparse = [layer.name for layer in profile.trainable if getattr(model.get_submodule(layer.name), "sparse", False)]
    plain = uniform_plan(profile, group.world_size, observation_schemes(profile, sparse))
    if plan == "all_reduce":
        return _monitored(attach(model, optimizer, plain, group, options))
    if plan != "auto":
        return _monitored(attach(model, optimizer, _load(plan), group, options))
    if group.world_size == 1:
        return attach(model, optimizer, plain, group, options)
    watch = StepWatch(model, ignored)
    run = attach(model, optimizer, plain.model_copy(update={"wait_free": False}), group, options)

    def choose(profile: ModelProfile, rates: Rates, arrival: Sequence[str], sparse: Sequence[str]) -> Plan:
        portions = {"portions": run.plan.portions} if run.plan.portions else {}
        return search_plan(profile, rates, arrival=arrival, sparse=sparse, allow=allow, overrides=portions)

    Adoption(run, watch, choose, _balance_of(run))
    return run


def _monitored(run: Run) -> Run:
    if run.group.world_size > 1:
        run.on_retrained = Monitor(run, balance=_balance_of(run)).restart
    return run


def _balance_of(run: Run) -> Balance | None:
    return Balance(shares_by_speed) if run.options.shares == "speed" else None


def _load(path: str | Path) -> Plan:
    if not Path(path).exists():
        raise ConfigError(f'cannot find the plan {str(path)!r}: give "auto", "all_reduce" or the path of a plan file')
    return Plan.load(path)
