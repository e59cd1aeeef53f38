"""What no plan of a space can be faster than, from the computing and the bytes alone."""

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.comm import CommScheme, Message
from poseidon.comm.scheme import curve_of, local_gradient_seconds
from poseidon.planner.space import Space
from poseidon.profile.graph import LayerSpec


def lower_bound(space: Space) -> float:
    """Seconds that a step takes at least: of the slowest rank's computing and the busiest link the larger.

    Each layer by itself on the scheme that computes least, or that crosses the link in the least time; messages without
    latency, at the best rate of their curve; nothing waits for anything.
    """
    return max(_computing(space), _busiest_link(space))


def _computing(space: Space) -> float:
    profile, rates = space.profile, space.rates
    passes = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)
    scales = [host.compute_scale for host in rates.hosts for _ in range(host.num_ranks)]
    slowest = max(
        scale * (load * passes + profile.optimizer_seconds)
        for scale, load in zip(scales, space.plain.loads, strict=True)
    )
    by_scheme = sum(
        min(_computing_of(scheme, layer, rates, min(space.plain.loads)) for scheme in space.candidates[layer.name])
        for layer in profile.trainable
    )
    return profile.loader_seconds + slowest + by_scheme


def _computing_of(scheme: CommScheme, layer: LayerSpec, rates: Rates, load: float) -> float:
    """Without copies into buffers, which may go on beside a device; on a rank with the least samples."""
    cost = scheme.cost(layer, rates)
    gradient = cost.backward_seconds if rates.world_size > 1 else local_gradient_seconds(layer, rates)
    gradient *= load
    if not layer.weight_gradient_seconds:  # counted, not measured: the same on a host that computes faster
        gradient *= min(1.0, *(host.compute_scale for host in rates.hosts))
    return gradient + (cost.finish_seconds if rates.world_size > 1 else 0.0)


def _busiest_link(space: Space) -> float:
    if space.rates.world_size == 1:
        return 0.0
    by_connections = [space.rates.with_connections(number) for number in space.connections]
    return max(
        sum(
            min(
                sum(_least_seconds(m, host, capacity, rates) for m in scheme.cost(layer, rates).messages)
                for scheme in space.candidates[layer.name]
                for rates in by_connections
            )
            for layer in space.profile.trainable
        )
        for host in {host.model_copy(update={"name": ""}) for host in space.rates.hosts}
        for capacity in (_capacity(host.send_bandwidth, space.rates), _capacity(host.receive_bandwidth, space.rates))
    )


def _least_seconds(message: Message, host: HostRates, capacity: float, rates: Rates) -> float:
    """Of the link, for a message among others that share its latency."""
    if message.pattern == "inner":
        return 0.0
    crossing = message.num_bytes
    if message.pattern == "exchange":
        crossing *= host.num_ranks * (rates.world_size - host.num_ranks) / (rates.world_size - 1)
    return min(crossing / capacity, message.num_bytes * _least_slope(curve_of(message, rates)))


def _least_slope(curve: Curve) -> float:
    """Seconds per byte, latency included, at the size at which they are fewest."""
    points = zip(curve.num_bytes, curve.seconds, strict=True)
    return min(1.0 / curve.bandwidth, *(seconds / size for size, seconds in points if size))


def _capacity(bandwidth: float, rates: Rates) -> float:
    """Bytes per second of a side of a link; where nobody knows, the best that any transfer reaches."""
    if bandwidth < UNLIMITED:
        return bandwidth
    return max(curve.bandwidth for by in (rates.all_reduce, rates.exchange) for curve in by.values())
