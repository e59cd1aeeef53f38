"""What a step would be if one thing were otherwise, by simulating it; and so, what a step waits for most.

The bottleneck is found by trial: of link, latency, computing, rebuild and loader it is the one that shortens the step
most when it is a tenth faster.
"""

from collections.abc import Callable

from poseidon.artifact import Value
from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.simulator import simulate

A_LITTLE = 1.1
"""How many times as fast a resource is made to see whether a step waits for it."""
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


def bottleneck(profile: ModelProfile, plan: Plan, rates: Rates) -> str:
    """What a step waits for most: `link`, `latency`, `computing`, `rebuild` or `loader`."""
    seconds = {
        name: simulate(*_arguments(plan, *change(profile, rates, A_LITTLE))).step_seconds
        for name, (_, change) in RESOURCES.items()
    }
    return min(seconds, key=lambda name: seconds[name])


def faster_resources(profile: ModelProfile, plan: Plan, rates: Rates) -> tuple[WhatIf, ...]:
    """What each resource at twice its speed would give."""
    now = simulate(profile, plan, rates).step_seconds
    return tuple(
        _what_if(name, text, (profile, plan, rates), change(profile, rates, 2.0), now)
        for name, (text, change) in RESOURCES.items()
    )


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
    seconds = simulate(*_arguments(plan, changed, other)).step_seconds
    samples = rates.world_size * changed.batch_size / seconds if seconds else 0.0
    samples_now = rates.world_size * profile.batch_size / now if now else 0.0
    gain = samples / samples_now if samples_now else 1.0
    return WhatIf(name=name, change=change, step_seconds=seconds, samples_per_s=samples, gain=gain)


def _arguments(plan: Plan, profile: ModelProfile, rates: Rates) -> tuple[ModelProfile, Plan, Rates]:
    return profile, plan if plan.profile is profile else plan.model_copy(update={"profile": profile}), rates


def faster_link(rates: Rates, factor: float) -> Rates:
    """All links that much faster, inside the hosts too; latency as it is."""
    return _with_curves(rates, lambda curve: curve.scaled(wire=1.0 / factor), lambda host: _faster(host, factor))


def lower_latency(rates: Rates, factor: float) -> Rates:
    """Messages of no length that much faster."""
    return _with_curves(rates, lambda curve: curve.scaled(latency=1.0 / factor), lambda host: host)


def faster_computing(rates: Rates, factor: float) -> Rates:
    """The model's layers and copies that much faster; the rebuild as it is."""
    hosts = [host.model_copy(update={"compute_scale": host.compute_scale / factor}) for host in rates.hosts]
    return rates.model_copy(update={"hosts": tuple(hosts), "memory_bandwidth": rates.memory_bandwidth * factor})


def faster_rebuild(rates: Rates, factor: float) -> Rates:
    """Gradients made from factors that much faster."""
    return rates.model_copy(update={"flops_per_s": rates.flops_per_s * factor})


def faster_loader(profile: ModelProfile, factor: float) -> ModelProfile:
    """Batches there that much sooner."""
    return profile.model_copy(update={"loader_seconds": profile.loader_seconds / factor})


RESOURCES: dict[str, tuple[str, Callable[[ModelProfile, Rates, float], tuple[ModelProfile, Rates]]]] = {
    "computing": (
        "processors twice as fast",
        lambda profile, rates, factor: (profile, faster_computing(rates, factor)),
    ),
    "link": ("twice the bandwidth", lambda profile, rates, factor: (profile, faster_link(rates, factor))),
    "latency": ("half the latency", lambda profile, rates, factor: (profile, lower_latency(rates, factor))),
    "rebuild": (
        "gradients rebuilt twice as fast",
        lambda profile, rates, factor: (profile, faster_rebuild(rates, factor)),
    ),
    "loader": ("a loader twice as fast", lambda profile, rates, factor: (faster_loader(profile, factor), rates)),
}
"""What a step may wait for, what twice its speed is called, and how it is made so many times as fast."""


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
