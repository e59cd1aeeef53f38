"""Small profiles and rates for what is pure: no tensors, no processes."""

from collections.abc import Sequence

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import HostRates, Rates
from poseidon.profile.graph import ComputeRates, GradientStructure, LayerSpec, ModelProfile, TensorSpec

DEVICE = ComputeRates(name="a processor", flops_per_s=1e11, memory_bandwidth=1e30)


def dense(name: str, num_bytes: int, *, forward: float = 0.0, backward: float = 0.0) -> LayerSpec:
    count = num_bytes // 4
    return LayerSpec(
        name=name,
        kind="Conv2d",
        parameters=(TensorSpec(name="weight", shape=(count,), num_bytes=4 * count),),
        forward_seconds=forward,
        backward_seconds=backward,
    )


def linear(
    name: str, outputs: int, inputs: int, *, rows: int, seconds: float = 0.0, gradient: float = 0.0
) -> LayerSpec:
    return LayerSpec(
        name=name,
        kind="Linear",
        parameters=(TensorSpec(name="weight", shape=(outputs, inputs), num_bytes=4 * outputs * inputs),),
        structure=GradientStructure.OUTER_PRODUCT,
        rows=rows,
        forward_seconds=seconds,
        backward_seconds=seconds,
        weight_gradient_seconds=gradient or seconds,
    )


def silent(name: str, seconds: float) -> LayerSpec:
    """A layer without parameters."""
    return LayerSpec(name=name, kind="ReLU", parameters=(), forward_seconds=seconds, backward_seconds=seconds)


def model(layers: Sequence[LayerSpec], *, optimizer: float = 0.0, loader: float = 0.0, batch: int = 32) -> ModelProfile:
    return ModelProfile(
        model="Net",
        batch_size=batch,
        layers=tuple(layers),
        device=DEVICE,
        optimizer_seconds=optimizer,
        loader_seconds=loader,
    )


def rates(
    world_size: int,
    *,
    bandwidth: float = 1e8,
    latency: float = 0.0,
    hosts: Sequence[HostRates] = (),
    **more: object,
) -> Rates:
    """Straight lines, equal for both patterns."""
    curve = Curve.line(latency=latency, bandwidth=bandwidth)
    return Rates.model_validate(
        {"world_size": world_size, "hosts": tuple(hosts), "all_reduce": {1: curve}, "exchange": {1: curve}, **more}
    )
