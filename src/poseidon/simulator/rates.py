"""What a cluster's ranks have at hand for one model: the cluster's rates, with the model's own where these count."""

from poseidon.cluster.rates import UNLIMITED, Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.cluster.topology import rates_of
from poseidon.profile.graph import GradientStructure, ModelProfile


def rates_for(
    profile: ModelProfile, cluster: ClusterSpec, *, num_hosts: int | None = None, bandwidth: float | None = None
) -> Rates:
    """The rates of the first hosts of a cluster when they train this model.

    A profile that was measured is carried over to the cluster's devices. One with published or chosen seconds holds
    wherever it runs: its device is none that the cluster's figures speak of. It rebuilds gradients as fast as it
    computes its fully connected layers, and neither memory nor the network slows it down.

    Args:
        profile: The model.
        cluster: Described or probed.
        num_hosts: How many hosts take part; all if None.
        bandwidth: Bytes per second of every link, instead of what they have.

    Raises:
        ClusterError: The cluster has not so many hosts.
    """
    rates = rates_of(cluster, device=profile.device, num_hosts=num_hosts, bandwidth=bandwidth)
    if profile.device is not None:
        return rates
    return rates.model_copy(
        update={
            "flops_per_s": _rebuild_rate(profile),
            "memory_bandwidth": UNLIMITED,
            "compute_slowdown": 1.0,
            "transfer_slowdown": 1.0,
        }
    )


def _rebuild_rate(profile: ModelProfile) -> float:
    layers = [layer for layer in profile.layers if layer.structure is GradientStructure.OUTER_PRODUCT and layer.flops]
    seconds = sum(layer.forward_seconds for layer in layers)
    return sum(layer.flops for layer in layers) / seconds if seconds else UNLIMITED
