"""What is told about a plan that was chosen: the predicted step, and by layer what came second and what is hidden."""

import math

from poseidon.cluster.rates import Rates
from poseidon.plan import Choice, Plan, PredictedStep
from poseidon.planner.bound import lower_bound
from poseidon.planner.judge import Judge
from poseidon.planner.memory import Memory, memory_of
from poseidon.planner.moves import by_weight
from poseidon.planner.rules import best_scheme
from poseidon.planner.space import Space, label
from poseidon.simulator import Simulation, simulate
from poseidon.simulator.build import planned_exchanges
from poseidon.timeline import Activity


def explain_choices(plan: Plan, space: Space, judge: Judge) -> Plan:
    """The plan with what was predicted for it, and for each layer what its schemes cost and what came second."""
    profile, rates = space.profile, space.rates
    runners_up = _runners_up(plan, space, judge) if rates.world_size > 1 else {}
    simulation = simulate(profile, plan, rates)
    hidden, exposed = _by_layer(simulation, plan, rates)
    choices = {}
    for layer in profile.trainable:
        options = space.candidates[layer.name]
        second, seconds = runners_up.get(layer.name, ("", 0.0))
        choices[layer.name] = Choice(
            seconds_by_scheme={label(scheme): scheme.cost(layer, rates).seconds for scheme in options},
            reason=best_scheme(layer, rates)[1].reason,
            hidden_seconds=hidden.get(layer.name, 0.0),
            exposed_seconds=exposed.get(layer.name, 0.0),
            runner_up=second,
            runner_up_step_seconds=seconds,
        )
    memory = memory_of(plan, rates)
    return plan.model_copy(
        update={"choices": choices, "predicted": predicted_step(simulation, plan, rates, memory, lower_bound(space))}
    )


def predicted_step(
    simulation: Simulation, plan: Plan, rates: Rates, memory: Memory, lower_bound_seconds: float = 0.0
) -> PredictedStep:
    """What is expected of a step, from its simulation."""
    seconds = simulation.step_seconds
    return PredictedStep(
        step_seconds=seconds,
        parts=simulation.parts,
        samples_per_s=plan.world_size * plan.profile.batch_size / seconds if seconds else 0.0,
        lower_bound_seconds=lower_bound_seconds,
        peak_num_bytes=memory.total,
        source=f"simulated from a profile ({plan.profile.source or 'of unknown origin'}) on {rates.num_hosts} host(s)",
    )


def _runners_up(plan: Plan, space: Space, judge: Judge) -> dict[str, tuple[str, float]]:
    """By layer its next best scheme and the step with it, as far as the judge's count goes; by cost beyond that."""
    found: dict[str, tuple[str, float]] = {}
    layers = plan.layers
    for name in by_weight(space):
        others = [scheme for scheme in space.candidates[name] if scheme != plan.schemes[name]]
        changed = {scheme: space.with_scheme(plan, [name], scheme) for scheme in others}
        second = min(others, key=lambda s: (judge(changed[s]), s.cost(layers[name], space.rates).seconds))
        seconds = judge.step_seconds(changed[second])
        found[name] = (label(second), seconds if math.isfinite(seconds) else 0.0)
    return found


def _by_layer(simulation: Simulation, plan: Plan, rates: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """Hidden and exposed seconds of each layer's transfers; those of a bucket are shared out by size."""
    took: dict[str, float] = {}
    stood: dict[str, float] = {}
    for interval in simulation.step.intervals:
        if interval.activity is Activity.TRANSFER:
            took[interval.name] = took.get(interval.name, 0.0) + interval.seconds
        elif interval.activity is Activity.EXPOSED:
            stood[interval.name] = stood.get(interval.name, 0.0) + interval.seconds
    hidden: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for exchange in planned_exchanges(plan.profile, plan, rates.with_connections(plan.connections)):
        labels = {name for name in (*took, *stood) if name == exchange.name or name.startswith(f"{exchange.name} (")}
        transfer = sum(took.get(name, 0.0) for name in labels)
        standing = sum(stood.get(name, 0.0) for name in labels)
        total = sum(layer.num_bytes for layer in exchange.layers) or 1
        for layer in exchange.layers:
            share = layer.num_bytes / total
            hidden[layer.name] = share * max(0.0, transfer - standing)
            exposed[layer.name] = share * standing
    return hidden, exposed
