"""Judges plans by simulating them, each once, and counts what that costs."""

import math
from collections.abc import Callable, Hashable, Iterable

from poseidon.cluster.rates import Rates
from poseidon.plan import Plan
from poseidon.planner.memory import memory_of
from poseidon.profile.graph import ModelProfile
from poseidon.simulator import simulate

LAYER_STEPS = 30_000
"""Layers times steps that one search may simulate: some seconds of one processor."""
MOST_STEPS = 6_000
"""As many steps are simulated at most, however small the model."""
FEWEST_STEPS = 60
"""As few, however large."""
STEPS_OF_A_PLAN = 5
"""As many are simulated at most to judge one plan."""
PRICE_OF_DEFERRAL = 0.03
"""Share of a step that deferred transfers have to gain: while they are under way a gradient is not final yet, every
torch call of the training thread is looked at, and a prediction is not better than that."""
PRICE_OF_WIRE = 0.03
"""Seconds that a second on the wire counts even where it is hidden: what is hidden by a hair is in the way tomorrow."""
LEAST_GAIN = 1e-6
"""Share of a step by which a plan has to be faster than a plainer one."""


class Judge:
    """Predicts the step of one plan after the other, each plan once, and counts them.

    Args:
        profile: The model.
        rates: The group of ranks.
        memory_num_bytes: What a rank may use; None where nobody said.
        effort: A multiple of what may be simulated.
    """

    def __init__(
        self, profile: ModelProfile, rates: Rates, memory_num_bytes: int | None = None, *, effort: float = 1.0
    ) -> None:
        self._profile = profile
        self._rates = rates
        self._limit = memory_num_bytes
        self._known: dict[Hashable, tuple[float, float]] = {}
        self._costs: dict[Hashable, float] = {}
        kinds = len({host.model_copy(update={"name": ""}) for host in rates.hosts})
        size = kinds * max(1, len(profile.layers))
        self.most = max(FEWEST_STEPS, round(effort * min(MOST_STEPS, LAYER_STEPS / size)))
        """How many steps may be simulated."""
        self.num_steps = 0
        self.reserve = 0
        """How many of them are kept for later."""

    def __call__(self, plan: Plan) -> float:
        """Seconds of a step, with a price on deferral and on the wire; what plans are compared by.

        Infinite where the plan does not fit into memory, or no more may be simulated.
        """
        return self._look_up(plan)[0]

    def step_seconds(self, plan: Plan) -> float:
        """Seconds of a step; infinite as above."""
        return self._look_up(plan)[1]

    def _look_up(self, plan: Plan) -> tuple[float, float]:
        key = (tuple(plan.schemes.values()), plan.buckets, plan.order, plan.deferred, plan.connections)
        if key not in self._known:
            if self.is_spent:
                return math.inf, math.inf
            self._known[key] = self._predict(plan)
        return self._known[key]

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be simulated now."""
        return self.num_steps >= self.most - self.reserve

    def best(self, plans: Iterable[Plan]) -> Plan:
        """The fastest; an earlier one unless a later one gains something."""
        first, *others = plans
        return min_by_gain(first, others, self)

    def _predict(self, plan: Plan) -> tuple[float, float]:
        if memory_of(plan, self._rates).refuse(self._limit):
            return math.inf, math.inf
        num_steps = 3 if plan.deferred else 2  # else nothing of a step reaches beyond the next one's beginning
        simulation = simulate(self._profile, plan, self._rates, num_steps=num_steps)
        self.num_steps += simulation.num_steps
        seconds = simulation.step_seconds
        return priced(seconds, plan, self._wire_seconds(plan)), seconds

    def _wire_seconds(self, plan: Plan) -> float:
        total = 0.0
        for name, layer in plan.layers.items():
            key = (name, plan.schemes[name])
            if key not in self._costs:
                self._costs[key] = plan.schemes[name].cost(layer, self._rates).wire_seconds
            total += self._costs[key]
        return total


def priced(seconds: float, plan: Plan, wire_seconds: float) -> float:
    """What a predicted step counts in comparisons."""
    return seconds * (1.0 + PRICE_OF_DEFERRAL if plan.deferred else 1.0) + PRICE_OF_WIRE * wire_seconds


def min_by_gain(first: Plan, others: Iterable[Plan], judge: Callable[[Plan], float]) -> Plan:
    """The fastest of some plans; a later one has to gain more than `LEAST_GAIN` to be taken."""
    best, seconds = first, judge(first)
    for plan in others:
        if (found := judge(plan)) < seconds * (1.0 - LEAST_GAIN) or (math.isinf(seconds) and found < seconds):
            best, seconds = plan, found
    return best
