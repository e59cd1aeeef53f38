"""From the first step to a settled plan: watch, measure, choose, compare, aloud.

The first step runs as plain all-reduce while the gradients' structure, rows and order are watched. Then the links are
measured for a second, rank 0 chooses, and every rank adopts the same plan. It is not believed, but compared: plan and
plain all-reduce take turns for a few steps, and the slower one is dropped. Every step of this is as exact as any
other.
"""

import json
import logging
import statistics
from collections.abc import Callable, Sequence

import torch

from poseidon.cluster.rates import UNLIMITED, Rates
from poseidon.comm import AllReduce, SparseRows
from poseidon.comm.probe import measure_rates
from poseidon.comm.sufficient_factor import LinearMath
from poseidon.plan import Plan
from poseidon.profile.graph import GradientStructure, ModelProfile
from poseidon.profile.structure import StepWatch, merge
from poseidon.runtime.attach import Run
from poseidon.runtime.monitor import Monitor
from poseidon.units import format_bandwidth, format_flops_per_s, format_seconds

log = logging.getLogger(__name__)

Chooser = Callable[[ModelProfile, Rates, Sequence[str], Sequence[str]], Plan]
"""From profile, rates, order of arrival and the layers with sparse gradients to a plan."""

WARM_UP_STEPS = 1
"""Steps after a change of plan that do not count."""
COUNTED_STEPS = 2
"""Steps in a turn that count."""
MOST_ROUNDS = 3
CLEAR_RATIO = 1.3
"""A plan that is so much faster is kept after the first round; one that seems slower is dropped only after the last."""
TOLERANCE = 1.02
"""The plan stays unless plain all-reduce is faster by more than this: what is left is noise."""
PROBED_ELEMENTS = 2**22
"""A gradient of at most this many elements is rebuilt to measure the rate: a fraction of a second on any processor."""


class Adoption:
    """Leads one run from observation to a settled plan. Its `exchanged` is called after each exchange, on all ranks."""

    def __init__(self, run: Run, watch: StepWatch, choose: Chooser) -> None:
        self._run = run
        self._watch: StepWatch | None = watch
        self._choose = choose
        self._sparse = sparse_layers(run)
        self._plans: dict[str, Plan] = {}
        self._turn = "plan"
        self._left = 0
        self._seconds: dict[str, list[float]] = {"plan": [], "plain": []}
        self._round = 0
        run.settled = False
        run.label = "observation"
        run.on_exchanged = self.exchanged

    def exchanged(self) -> None:
        """Advances by one step."""
        if self._watch is not None:
            self._adopt_first(self._watch)
            self._watch = None
            return
        self._left -= 1
        if self._left < COUNTED_STEPS:
            self._seconds[self._turn].append(self._run.recorder.timeline.steps[-1].seconds)
        if self._left == 0:
            self._next_turn()

    def _adopt_first(self, watch: StepWatch) -> None:
        run = self._run
        profiles = run.group.all_gather_text(watch.profile().to_json(), "gathering what was observed")
        profile = merge([ModelProfile.parse(text, source="what a rank observed") for text in profiles])
        rates = measure_rates(run.group, _rebuild_of(profile, run))
        run.recorder.restart()
        seen = list(dict.fromkeys(run.last_arrivals))
        names = {layer.name for layer in profile.trainable}
        arrival = [n for n in seen if n in names] + [n.name for n in reversed(profile.trainable) if n.name not in seen]
        chosen = self._choose(profile, rates, arrival, self._sparse) if run.group.rank == 0 else None
        text = run.group.broadcast_text(chosen.to_json() if chosen else "")
        plan = Plan.parse(text, source="rank 0's plan")
        self._plans = {"plan": plan, "plain": _plain(plan, self._sparse)}
        self._say(f"measured {_in_words(rates)}")
        self._say(f"plan from exchange {run.num_exchanges} on: {plan.summary()}")
        if plan.schemes == self._plans["plain"].schemes:
            self._settle("plan")
        else:
            self._take_turn("plan")

    def _take_turn(self, turn: str) -> None:
        self._turn = turn
        self._left = WARM_UP_STEPS + COUNTED_STEPS
        self._run.adopt(self._plans[turn], "trial" if turn == "plan" else "trial_plain")

    def _next_turn(self) -> None:
        if self._turn == "plan":
            self._take_turn("plain")
            return
        self._round += 1
        medians = self._slowest_medians()
        ratio = medians["plain"] / medians["plan"]
        if self._round < MOST_ROUNDS and ratio < CLEAR_RATIO:
            self._take_turn("plan")
            return
        times = f"{format_seconds(medians['plan'])} a step against {format_seconds(medians['plain'])}"
        if ratio * TOLERANCE >= 1:
            self._say(f"the plan stays: {times} with plain all-reduce, {ratio:.2f} times as fast")
            self._settle("plan")
        else:
            self._say(
                f"the plan is dropped for plain all-reduce, which is {1 / ratio:.2f} times as fast: {times}", loud=True
            )
            self._settle("plain")

    def _slowest_medians(self) -> dict[str, float]:
        everyone = [
            json.loads(text)
            for text in self._run.group.all_gather_text(
                json.dumps(self._seconds), "comparing the plan with plain all-reduce"
            )
        ]
        return {
            turn: statistics.median(max(times) for times in zip(*(one[turn] for one in everyone), strict=True))
            for turn in self._seconds
        }

    def _settle(self, turn: str) -> None:
        self._run.adopt(self._plans[turn], "plan")
        self._run.recorder.restart()
        self._run.settled = True
        Monitor(self._run)

    def _say(self, text: str, *, loud: bool = False) -> None:
        if self._run.group.rank == 0:
            log.log(logging.WARNING if loud else logging.INFO, "%s", text)


def sparse_layers(run: Run) -> list[str]:
    """Layers whose gradients autograd makes sparse."""
    return [name for name in run.plan.schemes if getattr(run.model.get_submodule(name), "sparse", False)]


def observation_schemes(profile: ModelProfile, sparse: Sequence[str]) -> dict[str, AllReduce | SparseRows]:
    """All-reduce for every layer, except where the gradient is sparse."""
    return {layer.name: SparseRows() if layer.name in sparse else AllReduce() for layer in profile.trainable}


def _plain(plan: Plan, sparse: Sequence[str]) -> Plan:
    return Plan.model_validate({**dict(plan), "schemes": observation_schemes(plan.profile, sparse)})


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
