"""How many hosts: one plan for each number of hosts, link rate and batch, and what each is predicted to give."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poseidon.artifact import Value
from poseidon.cluster.rates import Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.plan import Plan
from poseidon.planner.search import memory_limit, search_plan
from poseidon.planner.what_if import bottleneck
from poseidon.profile.graph import ModelProfile
from poseidon.simulator.rates import rates_for
from poseidon.units import format_bandwidth

ENOUGH = 0.02
"""Share of the samples per second that more hosts have to add to be worth having."""


class Scaling(Value):
    """What one number of hosts over one link is predicted to give."""

    num_hosts: int
    link: float | None
    """Bytes per second of every link; None for the cluster's own."""
    plan: Plan
    rates: Rates
    speed_up: float
    """Samples per second over those of one host with the same batch per rank."""
    bottleneck: str
    """What a step waits for most: `link`, `latency`, `computing`, `rebuild` or `loader`."""

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.plan.profile.batch_size

    @property
    def step_seconds(self) -> float:
        """As predicted."""
        return self.plan.predicted.step_seconds if self.plan.predicted else 0.0

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.plan.predicted.samples_per_s if self.plan.predicted else 0.0

    @property
    def efficiency(self) -> float:
        """Speed-up per host."""
        return self.speed_up / self.num_hosts


def compare_hosts(
    profile: ModelProfile,
    cluster: ClusterSpec,
    *,
    hosts: Sequence[int] = (1, 2, 4, 8),
    links: Sequence[float | None] = (None,),
    allow: str = "exact",
    overrides: Mapping[str, Any] | None = None,
    effort: float = 1.0,
) -> tuple[Scaling, ...]:
    """A plan for each number of hosts over each link, one host for comparison among them.

    Args:
        profile: The model; every rank has its batch, however many there are.
        cluster: Hosts, described or probed; the first ones are used.
        hosts: How many.
        links: Bytes per second in both directions of every link; None for what the cluster has.
        allow: As in `search_plan`.
        overrides: As in `search_plan`.
        effort: As in `search_plan`, for each of them.

    Returns:
        Link by link, one host first.

    Raises:
        ClusterError: The cluster has not so many hosts.
        InfeasibleError: A plan does not fit into memory.
    """
    found = []
    for link in links:
        one = 0.0
        for count in sorted({1, *hosts}):
            rates = rates_for(profile, cluster, num_hosts=count, bandwidth=link)
            plan = search_plan(
                profile,
                rates,
                allow=allow,
                overrides=overrides,
                effort=effort,
                memory_num_bytes=memory_limit(cluster, count),
            )
            samples = plan.predicted.samples_per_s if plan.predicted else 0.0
            one = one or samples
            found.append(
                Scaling(
                    num_hosts=count,
                    link=link,
                    plan=plan,
                    rates=rates,
                    speed_up=samples / one if one else 1.0,
                    bottleneck=bottleneck(profile, plan, rates),
                )
            )
    return tuple(found)


def format_rate(samples_per_s: float) -> str:
    """Samples per second: whole where they are many, else four digits."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def recommend(scalings: Iterable[Scaling]) -> Scaling:
    """The fewest hosts to which more would add less than `ENOUGH`."""
    scalings = list(scalings)
    most = max(one.samples_per_s for one in scalings)
    return min((one for one in scalings if one.samples_per_s >= most * (1.0 - ENOUGH)), key=lambda one: one.num_hosts)


def recommendation(scalings: Sequence[Scaling]) -> str:
    """A sentence on the number of hosts for one link and one batch."""
    best = recommend(scalings)
    where = f"at {format_bandwidth(best.link)}, " if best.link else ""
    rate = f"{format_rate(best.samples_per_s)} samples/s"
    others = [one for one in scalings if one.num_hosts > 1]
    if best.num_hosts > 1:
        return (
            f"{where}{best.num_hosts} hosts with {best.batch_size} samples a rank are best: {rate}, "
            f"{best.speed_up:.2f} times one host"
        )
    if not others:
        return f"{where}one host with {best.batch_size} samples a rank: {rate}"
    rival = max(others, key=lambda one: one.samples_per_s)
    return (
        f"{where}stay on one host with {best.batch_size} samples a rank: {rate}; {rival.num_hosts} hosts would give "
        f"{rival.speed_up:.2f} times that; their bottleneck: {rival.bottleneck}"
    )
