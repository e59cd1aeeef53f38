"""From the first step to a settled plan, and to another when that no longer holds: watch, measure, choose, compare.

The first steps run as plain all-reduce while the gradients' structure, rows and order and the layers' seconds are
watched. Then the links are measured for a second, rank 0 chooses, and every rank adopts the same plan. It is not
believed, but compared: plan and plain all-reduce take turns for a few steps, and the slower one is dropped. From then
on a monitor holds it to its word. If steps depart from what they took for long, links are measured again, rank 0
chooses again, and the new plan has to win against the present one. All of it is said, and every step of it is as exact
as any other.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.comm import AllReduce, SparseRows
from poseidon.comm.probe import measure_rates
from poseidon.comm.sufficient_factor import LinearMath
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.graph import GradientStructure, ModelProfile
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import Run
from poseidon.runtime.balance import Balance
from poseidon.runtime.departure import LASTING_RATIO, Departure
from poseidon.runtime.monitor import Monitor
from poseidon.runtime.observation import Observation, Observed
from poseidon.runtime.surroundings import find_hosts
from poseidon.runtime.trial import Trial, Verdict
from poseidon.units import format_bandwidth, format_flops_per_s, format_seconds

log = logging.getLogger(__name__)

Chooser = Callable[[ModelProfile, Rates, Sequence[str], Sequence[str]], Plan]
"""From profile, rates, order of arrival and the layers with sparse gradients to a plan."""

PROBED_ELEMENTS = 2**22
"""A gradient of at most this many elements is rebuilt to measure the rate: a fraction of a second on any processor."""


class Adoption:
    """Leads one run from observation to a settled plan, and through whatever happens to it.

    Args:
        run: Just attached, as plain all-reduce.
        watch: Installed before that.
        choose: Called on rank 0.
        balance: Decides on the samples of each rank once the plan has settled; None leaves them as they are.
    """

    def __init__(self, run: Run, watch: StepWatch, choose: Chooser, balance: Balance | None = None) -> None:
        self._run = run
        self._choose = choose
        self._balance = balance
        self._sparse = sparse_layers(run)
        self._observation = Observation(run, watch)
        self._observed: Observed | None = None
        self._monitor: Monitor | None = None
        run.settled = False
        run.label = "observation"
        run.on_exchanged = self._observe
        run.on_retrained = self._start_anew
        run.on_resumed = self._resume

    def _start_anew(self) -> None:
        """The model trains other layers now: what was seen, tried out or expected so far holds no longer."""
        run = self._run
        run.on_detach()
        self._sparse = sparse_layers(run)
        self._observed = self._monitor = None
        plain = _plain(run.plan, self._sparse).model_copy(update={"wait_free": False})

        def watch() -> None:
            self._observation = Observation(run, StepWatch(run.model, run.ignored))

        run.adopt(plain, "observation", meanwhile=watch)
        run.settled = False
        run.on_exchanged = self._observe

    def _resume(self, plan: Plan) -> None:
        """The run goes on from where one had settled on a plan: nothing is observed or tried out again."""
        self._run.on_detach()
        self._monitor = None
        self._observed = Observed(plan.profile, _scales(self._run))
        self._settle(plan)

    def _observe(self) -> None:
        if not self._observation.is_over():
            return
        self._observed = self._observation.gather()
        plan = self._make_plan()
        plain = _plain(plan, self._sparse)
        text = f"the plan: {_promise(plan)}"
        if _goes_like(plan, plain):
            self._run.note("adopted", text)
            self._settle(plan)
        else:
            self._run.note("planned", text)
            self._compare(plan, plain, ("the plan", "plain all-reduce"), label="trial_plain")

    def _make_plan(self) -> Plan:
        """Measures the links, says so, and has rank 0 choose."""
        run, observed = self._run, self._observed
        assert observed is not None
        rates = measure_rates(run.group, _rebuild_of(observed.profile, run))
        run.rates = _with_hosts(rates, find_hosts(run.group), observed.compute_scales)
        run.note("measured", f"measured {_in_words(run.rates)}")
        chosen = self._chosen(observed.profile, run.rates).to_json() if run.group.rank == 0 else ""
        plan = Plan.parse(run.group.broadcast_text(chosen), source="rank 0's plan")
        run.recorder.restart()
        return plan

    def _chosen(self, profile: ModelProfile, rates: Rates) -> Plan:
        """What rank 0 chooses; plain all-reduce where that cannot be put to work on this model and optimizer."""
        run = self._run
        plan = self._choose(profile, rates, self._arrival(profile), self._sparse)
        try:
            run.check_plan(plan)
        except InfeasibleError as error:
            log.warning("the plan that was found is not used: %s", error)
            return _plain(plan, self._sparse)
        return plan

    def _arrival(self, profile: ModelProfile) -> list[str]:
        """As seen in the last exchange; what did not arrive, in the reverse order of forward."""
        names = [layer.name for layer in reversed(profile.trainable)]
        return list(dict.fromkeys([*(name for name in self._run.last_arrivals if name in set(names)), *names]))

    def _compare(self, plan: Plan, other: Plan, names: tuple[str, str], *, label: str) -> None:
        """Has both take turns, called `names` in what is said, and settles on the faster one."""

        def end(verdict: Verdict) -> None:
            first = self._monitor is None
            kind = "kept" if verdict.stays else "dropped"
            self._run.note(kind, verdict.in_words(*names), loud=first and not verdict.stays)
            self._settle(plan if verdict.stays else other)

        Trial(self._run, plan, other, label=label, on_end=end)

    def _settle(self, plan: Plan) -> None:
        self._run.adopt(plan, "plan")
        self._run.recorder.restart()
        self._run.settled = True
        if self._monitor is None:
            self._monitor = Monitor(self._run, self._replan, self._balance, self._replan_grown)
        else:
            self._monitor.restart()

    def _replan(self, departure: Departure) -> None:
        assert self._observed is not None
        profile, scales = self._observed
        growth = [ratio if _has_changed(ratio) else 1.0 for ratio in departure.compute_growth()]
        self._observed = Observed(profile, [scale * more for scale, more in zip(scales, growth, strict=True)])
        self._look_for_another()

    def _replan_grown(self) -> None:
        """The loop makes other passes, or larger ones: an estimate from what was observed."""
        assert self._observed is not None
        profile = self._observed.profile.accumulated(max(1, self._run.num_passes))
        rows, layers = self._run.rows_by_layer, {layer.name: layer for layer in profile.trainable}
        ratio = median([count / layers[name].rows for name, count in rows.items() if layers[name].rows] or [1.0])
        if _has_changed(ratio):
            profile = profile.scaled_to_batch(max(1, round(ratio * profile.batch_size)))
        self._observed = self._observed._replace(profile=profile)
        self._look_for_another()

    def _look_for_another(self) -> None:
        """The plan for what is known now; it has to win against the present one."""
        present = self._run.plan.model_copy(update={"predicted": None})
        plan = self._make_plan()
        if _goes_like(plan, present):
            self._run.note("kept", f"no other plan is better now: {_promise(plan)}")
            self._settle(plan)
        else:
            self._run.note("planned", f"another plan: {_promise(plan)}")
            self._compare(plan, present, ("the new plan", "the one so far"), label="trial_present")


def sparse_layers(run: Run) -> list[str]:
    """Layers whose gradients autograd makes sparse."""
    return [name for name in run.plan.schemes if getattr(run.model.get_submodule(name), "sparse", False)]


def observation_schemes(profile: ModelProfile, sparse: Sequence[str]) -> dict[str, AllReduce | SparseRows]:
    """All-reduce for every layer, except where the gradient is sparse."""
    return {layer.name: SparseRows() if layer.name in sparse else AllReduce() for layer in profile.trainable}


def _plain(plan: Plan, sparse: Sequence[str]) -> Plan:
    """The same layers, arrival and connections without anything that was chosen."""
    return uniform_plan(
        plan.profile, plan.world_size, observation_schemes(plan.profile, sparse), arrival=plan.arrival
    ).model_copy(update={"connections": plan.connections})


def _goes_like(plan: Plan, other: Plan) -> bool:
    """Whether two plans do the same, whatever they predict and know."""
    unsaid: dict[str, object] = {"predicted": None, "choices": {}, "profile": plan.profile}
    return plan.model_copy(update=unsaid) == other.model_copy(update=unsaid)


def _promise(plan: Plan) -> str:
    if plan.predicted is None:
        return plan.summary()
    return f"{plan.summary()}; predicted {format_seconds(plan.predicted.step_seconds)} a step"


def _has_changed(ratio: float) -> bool:
    return not 1 / LASTING_RATIO <= ratio <= LASTING_RATIO


def _with_hosts(rates: Rates, hosts: Mapping[str, Sequence[int]], compute_scales: Sequence[float]) -> Rates:
    """The rates with the hosts' names, and how much slower than the profile each computes: as its slowest rank."""
    named = tuple(
        HostRates(name=name, num_ranks=len(ranks), compute_scale=max(compute_scales[rank] for rank in ranks))
        for name, ranks in hosts.items()
    )
    return Rates.model_validate({**dict(rates), "hosts": named})


def _scales(run: Run) -> list[float]:
    """By rank, how many times the profile's seconds it needs, as far as is known."""
    known = {host.name: host.compute_scale for host in run.rates.hosts} if run.rates else {}
    scales = {rank: known.get(name, 1.0) for name, ranks in find_hosts(run.group).items() for rank in ranks}
    return [scales[rank] for rank in range(run.group.world_size)]


def _rebuild_of(profile: ModelProfile, run: Run) -> Callable[[], int] | None:
    """A rebuild as the largest fully connected layer will have it, on a part of its outputs if it is very large."""
    layers = [layer for layer in profile.trainable if layer.structure is GradientStructure.OUTER_PRODUCT and layer.rows]
    if not layers:
        return None
    layer = max(layers, key=lambda one: one.num_bytes)
    module = run.model.get_submodule(layer.name)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    out_features, in_features = layer.matrix
    rows = layer.rows * run.group.world_size
    out_features = max(1, min(out_features, PROBED_ELEMENTS // in_features))
    outputs = torch.zeros(rows, out_features, dtype=weight.dtype, device=weight.device)
    inputs = torch.zeros(rows, in_features, dtype=weight.dtype, device=weight.device)
    math = getattr(module, "factor_math", LinearMath())
    into = math.rebuild(outputs, inputs, None, False)

    def rebuild() -> int:
        math.rebuild(outputs, inputs, into, False)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)
        return 2 * rows * out_features * in_features

    return rebuild


def _in_words(rates: Rates) -> str:
    parts = [
        f"all-reduce {format_bandwidth(rates.all_reduce_bandwidth)}",
        f"point to point {format_bandwidth(rates.exchange_bandwidth)}",
        f"latency {format_seconds(rates.latency)}",
    ]
    if rates.flops_per_s < UNLIMITED:
        parts.append(f"rebuild {format_flops_per_s(rates.flops_per_s)}")
    if rates.connections > 1:
        parts.append(f"{rates.connections} connections")
    return ", ".join(parts)
