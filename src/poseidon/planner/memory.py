"""What one rank needs in memory under a plan, and whether its device has it."""

from poseidon.artifact import Value
from poseidon.cluster.rates import Rates
from poseidon.comm import CommScheme
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan
from poseidon.profile.graph import LayerSpec
from poseidon.units import format_bytes


class Memory(Value):
    """Bytes of one rank, when most is held at once: at the end of the forward pass, with buffers in use."""

    parameters: int
    gradients: int
    """Under all-reduce they are views of their buckets, so that these count once."""
    optimizer_state: int
    activations: int
    buffers: int
    """What arrives from peers: factors, rows, shards; and the factors and rows of earlier passes, which wait here."""

    @property
    def total(self) -> int:
        """All together."""
        return self.parameters + self.gradients + self.optimizer_state + self.activations + self.buffers

    def refuse(self, limit: int | None) -> str | None:
        """What is missing on a device of so many bytes; None where it fits or nobody said how much there is."""
        if limit is None or self.total <= limit:
            return None
        parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in self if size)
        return (
            f"a rank needs {format_bytes(self.total)} ({parts}), its device has {format_bytes(limit)}: "
            f"{format_bytes(self.total - limit)} are missing"
        )


def memory_of(plan: Plan, rates: Rates) -> Memory:
    """What a rank needs under a plan; from the profile's sizes, frozen parameters not counted."""
    profile = plan.profile
    return Memory(
        parameters=profile.num_bytes,
        gradients=profile.num_bytes,
        optimizer_state=profile.optimizer_state_num_bytes,
        activations=sum(layer.activation_num_bytes for layer in profile.layers),
        buffers=sum(
            _buffers(plan.schemes[layer.name], layer, rates)
            + _waiting(plan.schemes[layer.name], layer, rates, profile.accumulate)
            for layer in profile.trainable
        ),
    )


def _buffers(scheme: CommScheme, layer: LayerSpec, rates: Rates) -> int:
    """What comes from peers is held until the gradient is made of it: as much as a rank sends, since all send alike.

    An all-reduce works in the gradients themselves, and in a copy of them where they are narrower on the wire.
    """
    if rates.world_size == 1:
        return 0
    if scheme.kind == "all_reduce":
        return scheme.bytes_sent(layer, 2) if scheme.exactness == "rounded" else 0
    return round(sum(message.num_bytes for message in scheme.cost(layer, rates).messages))


def _waiting(scheme: CommScheme, layer: LayerSpec, rates: Rates, accumulate: int) -> int:
    """Factors and rows of all passes but the last; what is dense is added up in the gradient."""
    if rates.world_size == 1 or scheme.kind not in ("sufficient_factor", "sparse_rows"):
        return 0
    return scheme.bytes_sent(layer, 2) * (accumulate - 1) // accumulate


def check_memory(memory: Memory, limit: int | None) -> None:
    """Raises InfeasibleError, with the figures, where the plan that needs least does not fit."""
    if refusal := memory.refuse(limit):
        raise InfeasibleError(f"no plan fits: {refusal}; use a smaller batch, or a device with more memory")
