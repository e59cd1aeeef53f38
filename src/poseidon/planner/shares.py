"""How many samples of each global batch each rank should take, so that the slowest is done as early as can be.

A step of a rank takes a fixed time and a time for each sample. What is the same on all ranks, such as the time that
communication is exposed, makes every split equally longer and changes nothing about which one is best.
"""

import heapq
from collections.abc import Sequence

from poseidon.artifact import Value
from poseidon.cluster.rates import Rates
from poseidon.comm.scheme import local_gradient_seconds
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.simulator import simulate

WORTH_WHILE = 0.03
"""Share of a step that other shares have to save to be proposed: no prediction is better than that."""


class Shares(Value):
    """Samples by rank, and what they are predicted to gain."""

    samples: tuple[int, ...]
    """Of one global batch, by rank."""
    equal_step_seconds: float
    """Predicted where every rank takes as many."""
    step_seconds: float
    """Predicted with these."""

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.equal_step_seconds / self.step_seconds


def shares_by_speed(fixed_seconds: Sequence[float], seconds_per_sample: Sequence[float], count: int) -> list[int]:
    """Splits a global batch so that the slowest rank needs the least time; every rank has one sample at least.

    Sample by sample to the rank that would be done first with one more, among equals to the lowest. That is the best
    split: sorted by time, the ends of all samples that the ranks could take are the same list whatever the split, a
    split of `count` samples lasts until the latest of those that it takes, and this one takes the `count` earliest.

    Args:
        fixed_seconds: By rank, of a step whatever its samples.
        seconds_per_sample: By rank.
        count: Samples of the global batch.

    Returns:
        Samples by rank; their sum is `count`.

    Raises:
        InfeasibleError: There are fewer samples than ranks.

    Example:
        >>> shares_by_speed([0.0, 0.0], [0.001, 0.004], 100)
        [80, 20]
    """
    world_size = len(seconds_per_sample)
    if count < world_size:
        raise InfeasibleError(f"cannot share {count} samples among {world_size} ranks: use a larger batch")
    samples = [1] * world_size

    def end_with_one_more(rank: int) -> tuple[float, int]:
        return fixed_seconds[rank] + seconds_per_sample[rank] * (samples[rank] + 1), rank

    waiting = [end_with_one_more(rank) for rank in range(world_size)]
    heapq.heapify(waiting)
    for _ in range(count - world_size):
        rank = waiting[0][1]
        samples[rank] += 1
        heapq.heapreplace(waiting, end_with_one_more(rank))
    return samples


def propose_shares(profile: ModelProfile, plan: Plan, rates: Rates) -> Shares | None:
    """The split of a global batch that suits the hosts' speeds, where it is predicted to be worth while.

    Args:
        profile: The model; every rank takes its batch where shares are equal.
        plan: Under which steps are predicted.
        rates: The hosts.

    Returns:
        The split; None where hosts compute alike, or a step would hardly be shorter.
    """
    scales = [host.compute_scale for host in rates.hosts for _ in range(host.num_ranks)]
    if len(set(scales)) == 1 or not profile.batch_size or not profile.seconds:
        return None
    passes = sum(_seconds_of_passes(profile, rates))
    samples = shares_by_speed(
        [scale * profile.optimizer_seconds for scale in scales],
        [scale * passes / profile.batch_size for scale in scales],
        rates.world_size * profile.batch_size,
    )
    equal = simulate(profile, plan.model_copy(update={"portions": ()}), rates).step_seconds
    shared = simulate(profile, with_shares(plan, samples), rates).step_seconds
    found = Shares(samples=tuple(samples), equal_step_seconds=equal, step_seconds=shared)
    return found if shared < equal * (1.0 - WORTH_WHILE) else None


def with_shares(plan: Plan, samples: Sequence[int]) -> Plan:
    """The same plan with other shares."""
    return plan.model_copy(update={"portions": tuple(map(float, samples))})


def describe_shares(samples: Sequence[int], rates: Rates) -> str:
    """Samples by host, as in `host0 51, host1 51, host2 13, host3 13`; of all its ranks together."""
    parts, rank = [], 0
    for host in rates.hosts:
        parts.append(f"{host.name} {sum(samples[rank : rank + host.num_ranks])}")
        rank += host.num_ranks
    return ", ".join(parts)


def _seconds_of_passes(profile: ModelProfile, rates: Rates) -> Sequence[float]:
    """Forward, backward and the gradient of the weight, layer by layer, where the profile was measured."""
    slowest = max(host.compute_scale for host in rates.hosts)
    return [
        layer.forward_seconds
        + layer.backward_seconds
        + local_gradient_seconds(layer, rates) / (slowest if layer.weight_gradient_seconds else 1.0)
        for layer in profile.layers
    ]
