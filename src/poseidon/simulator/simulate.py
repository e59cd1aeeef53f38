"""`simulate`: the predicted timeline of a few steps, and what a step costs once they follow one another.

Steps are counted as the runtime counts them: a step lasts from the end of one exchange of gradients to the end of the
next, so that the optimizer and the loader stand at its beginning.
"""

from functools import cached_property

from poseidon.breakdown import StepParts, find_last_starts, split_step
from poseidon.cluster.rates import Rates
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.simulator.build import Program, build
from poseidon.simulator.engine import run
from poseidon.simulator.ops import Op
from poseidon.timeline import Activity, Interval, Step, Timeline

NUM_STEPS = 3
"""The first has nothing before it; the last one counts."""


class Simulation:
    """What is predicted.

    Args:
        program: Operations that have been run.
        num_counted: How many steps count, the last ones.
    """

    def __init__(self, program: Program, num_counted: int = 1) -> None:
        self._program = program
        self._num_counted = num_counted

    @property
    def num_steps(self) -> int:
        """How many were simulated."""
        return len(self._program.steps)

    @property
    def step_seconds(self) -> float:
        """Mean of the steps that count, on the rank on which they are longest."""
        count = self._num_counted
        ends = [[0.0, *(step.last[k].end for step in self._program.steps)] for k in range(len(self._program.kinds))]
        return max((times[-1] - times[-1 - count]) / count for times in ends)

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """One for each kind of rank, of the first rank of the kind; ranks of a kind do the same."""
        return tuple(_timeline(self._program, k) for k in range(len(self._program.kinds)))

    @property
    def step(self) -> Step:
        """The last step of the slowest rank: of those that end last, the one that stands still least."""
        return self._slowest(-1)

    @property
    def parts(self) -> StepParts:
        """Where the time of a step goes, on the slowest rank: mean of the steps that count."""
        total = StepParts()
        for index in range(-self._num_counted, 0):
            starts = find_last_starts([timeline.steps[index] for timeline in self.timelines])
            total += split_step(self._slowest(index), starts)
        return StepParts.model_validate({name: value / self._num_counted for name, value in total})

    def _slowest(self, index: int) -> Step:
        steps = [timeline.steps[index] for timeline in self.timelines]
        return max(steps, key=lambda step: (step.seconds, -step.exposed_seconds))

    def summary(self) -> str:
        """One line."""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.parts.shares().items() if share >= 0.005)
        return f"{self.step_seconds:.4g} s a step: {shares}"


def simulate(profile: ModelProfile, plan: Plan, rates: Rates, *, num_steps: int = NUM_STEPS) -> Simulation:
    """Predicts steps of a model under a plan.

    Args:
        profile: With seconds.
        plan: For as many ranks as `rates` speaks of.
        rates: What the ranks compute and move.
        num_steps: How many steps follow one another; overlap with the next forward shows from two on. Two more where
            transfers are deferred, and then the last two count: what one step leaves to the next makes a short step
            follow a long one.

    Returns:
        The prediction. The same arguments give the same one, to the last bit.

    Raises:
        InfeasibleError: The plan is for another number of ranks, or for another model.
    """
    if plan.world_size != rates.world_size:
        raise InfeasibleError(
            f"cannot simulate a plan for {plan.world_size} ranks on {rates.world_size}: make a plan for these"
        )
    names = {layer.name for layer in profile.trainable}
    if odd := sorted(names ^ set(plan.schemes)):
        raise InfeasibleError(f"cannot simulate: the plan and the profile differ at layer {odd[0]!r}")
    program = build(profile, plan, rates, max(1, num_steps + (2 if plan.deferred else 0)))
    run(program.ops, program.machine)
    return Simulation(program, num_counted=min(2, len(program.steps)) if plan.deferred else 1)


def _timeline(program: Program, k: int) -> Timeline:
    bounds = [0.0, *(step.last[k].end for step in program.steps)]
    by_step: list[list[Interval]] = [[] for _ in program.steps]
    for interval in sorted(_intervals(program, k), key=lambda i: (i.start, i.end)):
        index = next((n for n, end in enumerate(bounds[1:]) if interval.start < end), None)
        if index is not None:
            by_step[index].append(interval)
    return Timeline(
        steps=tuple(
            Step(
                rank=program.kinds[k].rank,
                index=index,
                start=bounds[index],
                end=bounds[index + 1],
                intervals=tuple(intervals),
            )
            for index, intervals in enumerate(by_step)
        )
    )


def _intervals(program: Program, k: int) -> list[Interval]:
    found = []
    before = 0.0
    for op in program.training[k]:
        start = before if op.activity is Activity.EXPOSED else op.start
        if op.end > start:
            found.append(_interval(op, start))
        before = op.end
    for transfer in program.transfers:
        found.append(_interval(transfer, program.issues[k][transfer].end, round(transfer.num_bytes)))
    return found


def _interval(op: Op, start: float, num_bytes: int = 0) -> Interval:
    return Interval.model_construct(activity=op.activity, name=op.name, start=start, end=op.end, num_bytes=num_bytes)
