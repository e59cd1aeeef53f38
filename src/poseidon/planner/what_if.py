"""What a step would be if one thing were otherwise, by simulating it; and so, what a step waits for most.

The bottleneck is found by trial: of link, latency, computing, rebuild and loader it is the one whose doubling in speed
shortens the step most.
"""

from collections.abc import Callable

from poseidon.artifact import Value
from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.simulator import simulate

LEAST_GAIN = 0.02
"""Share of the samples per second below which a change is not worth a word."""


class WhatIf(Value):
    """One change and what it would give, the plan left as it is."""

    name: str
    """What is changed."""
    change: str
    """How, in words."""
    step_seconds: float
    samples_per_s: float
    gain: float
    """Samples per second over those without the change."""

    @property
    def pays(self) -> bool:
        """Whether it gives enough to speak of."""
        return self.gain > 1.0 + LEAST_GAIN


def bottleneck(profile: ModelProfile, plan: Plan, rates: Rates) -> tuple[str, tuple[WhatIf, ...]]:
    """What a step waits for most, and what each resource at twice its speed would give.

    Returns:
        `link`, `latency`, `computing`, `rebuild` or `loader`, and all of them that play a part, most helpful first.
    """
    now = simulate(profile, plan, rates).step_seconds
    found = [
        _what_if(name, change, (profile, plan, rates), changed(profile, rates), now)
        for name, (change, changed) in RESOURCES.items()
    ]
    ordered = tuple(sorted(found, key=lambda one: -one.gain))
    return ordered[0].name, ordered


def larger_batch(profile: ModelProfile, plan: Plan, rates: Rates) -> WhatIf:
    """Twice as many samples per rank and step."""
    now = simulate(profile, plan, rates).step_seconds
    changed = profile.scaled_to_batch(2 * profile.batch_size)
    return _what_if("batch", f"{changed.batch_size} samples a rank", (profile, plan, rates), (changed, rates), now)


def _what_if(
    name: str,
    change: str,
    before: tuple[ModelProfile, Plan, Rates],
    after: tuple[ModelProfile, Rates],
    now: float,
) -> WhatIf:
    profile, plan, rates = before
    changed, other = after
    seconds = simulate(changed, _for_profile(plan, changed), other).step_seconds
    samples = rates.world_size * changed.batch_size / seconds if seconds else 0.0
    samples_now = rates.world_size * profile.batch_size / now if now else 0.0
    gain = samples / samples_now if samples_now else 1.0
    return WhatIf(name=name, change=change, step_seconds=seconds, samples_per_s=samples, gain=gain)


def _for_profile(plan: Plan, profile: ModelProfile) -> Plan:
    return plan if plan.profile is profile else plan.model_copy(update={"profile": profile})


def faster_link(rates: Rates, factor: float = 2.0) -> Rates:
    """All links that much faster, inside the hosts too; latency as it is."""
    return _with_curves(rates, lambda curve: curve.scaled(wire=1.0 / factor), lambda host: _faster(host, factor))


def lower_latency(rates: Rates, factor: float = 2.0) -> Rates:
    """Messages of no length that much faster."""
    return _with_curves(rates, lambda curve: curve.scaled(latency=1.0 / factor), lambda host: host)


def faster_computing(rates: Rates, factor: float = 2.0) -> Rates:
    """The model's layers and copies that much faster; the rebuild as it is."""
    hosts = [host.model_copy(update={"compute_scale": host.compute_scale / factor}) for host in rates.hosts]
    return rates.model_copy(update={"hosts": tuple(hosts), "memory_bandwidth": rates.memory_bandwidth * factor})


def faster_rebuild(rates: Rates, factor: float = 2.0) -> Rates:
    """Gradients made from factors that much faster."""
    return rates.model_copy(update={"flops_per_s": rates.flops_per_s * factor})


RESOURCES: dict[str, tuple[str, Callable[[ModelProfile, Rates], tuple[ModelProfile, Rates]]]] = {
    "link": ("twice the bandwidth", lambda profile, rates: (profile, faster_link(rates))),
    "latency": ("half the latency", lambda profile, rates: (profile, lower_latency(rates))),
    "computing": ("processors twice as fast", lambda profile, rates: (profile, faster_computing(rates))),
    "rebuild": ("gradients rebuilt twice as fast", lambda profile, rates: (profile, faster_rebuild(rates))),
    "loader": (
        "a loader twice as fast",
        lambda profile, rates: (profile.model_copy(update={"loader_seconds": profile.loader_seconds / 2}), rates),
    ),
}
"""What a step may wait for, and how it is made twice as fast."""


def _faster(host: HostRates, factor: float) -> HostRates:
    rates = {"send_bandwidth": host.send_bandwidth, "receive_bandwidth": host.receive_bandwidth}
    return host.model_copy(update={key: min(UNLIMITED, rate * factor) for key, rate in rates.items()})


def _with_curves(rates: Rates, curve: Callable[[Curve], Curve], host: Callable[[HostRates], HostRates]) -> Rates:
    return rates.model_copy(
        update={
            "all_reduce": {number: curve(one) for number, one in rates.all_reduce.items()},
            "exchange": {number: curve(one) for number, one in rates.exchange.items()},
            "inner": rates.inner and curve(rates.inner),
            "outer": rates.outer and curve(rates.outer),
            "hosts": tuple(host(one) for one in rates.hosts),
        }
    )
