"""A model as data: layers, their parameters, the structure of their gradients, their seconds. No tensors in here."""

from enum import StrEnum
from typing import Self

from pydantic import Field

from poseidon.artifact import Artifact, Value
from poseidon.errors import ProfileError


class GradientStructure(StrEnum):
    """What a layer's weight gradient is made of, and so which ways across the network are open to it."""

    DENSE = "dense"
    """Any tensor."""
    OUTER_PRODUCT = "outer_product"
    """A sum of `rows` outer products of an output gradient and an input: fully connected layers."""
    ROWS = "rows"
    """Zero except in the rows that the batch touched: embeddings."""


class TensorSpec(Value):
    """One parameter."""

    name: str
    """Name within its layer, such as `weight`."""
    shape: tuple[int, ...]
    dtype: str = "float32"
    num_bytes: int = Field(ge=0)
    """Bytes of the parameter, and of its gradient."""


OUTSIDE = "outside"
"""The kind of a layer that is no module: what is computed between modules, and the loss."""


class LayerSpec(Value):
    """A module that owns parameters, a leaf module without any, or what is computed outside of these."""

    name: str
    """Its name in `model.named_modules()`; empty for the model itself. Outside of modules: `before <layer>`, or `loss`
    for what follows the last layer."""
    kind: str
    """The module's class name, or `OUTSIDE`."""
    parameters: tuple[TensorSpec, ...]
    """The trainable ones; none where nothing crosses the network."""
    structure: GradientStructure = GradientStructure.DENSE
    reason: str = ""
    """Why the structure is dense where the kind of layer would allow more."""
    is_sparse: bool = False
    """Autograd makes its gradient a sparse tensor, which only touched rows carry."""
    is_shared: bool = False
    """Another module uses one of its parameters too."""
    rows: int = 0
    """Rows of activations (outer product) or touched rows (rows) per rank and step; 0 where they were not seen."""
    factor_num_bytes: int = 4
    """Bytes of one number of a factor as autograd makes it: 2 under bf16 autocast."""
    flops: int = 0
    """Operations of one forward pass over a rank's batch, two for each multiply-add."""
    activation_num_bytes: int = Field(default=0, ge=0)
    """Bytes of what its calls give out in one forward pass, which backward may need again."""
    calls: int = Field(default=1, ge=0)
    """Forward calls in one step."""
    forward_seconds: float = 0.0
    """Median over the timed passes, all calls together."""
    backward_seconds: float = 0.0
    """Median, without what a scheme may do itself: for an outer product, the gradient of the input only."""
    weight_gradient_seconds: float = 0.0
    """Of an outer product: the local weight gradient, which backward computes unless factors travel."""
    forward_spread_seconds: float = 0.0
    """Between the values below and above which one in ten passes lies."""
    backward_spread_seconds: float = 0.0
    """The same for backward, weight gradient included."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer's gradients."""
        return sum(tensor.num_bytes for tensor in self.parameters)

    @property
    def seconds(self) -> float:
        """Forward and backward, local weight gradient included."""
        return self.forward_seconds + self.backward_seconds + self.weight_gradient_seconds

    def scaled(self, ratio: float, memory_bandwidth: float, num_passes: int = 1) -> Self:
        """With batches `ratio` times as large, `num_passes` of them; see `ModelProfile.scaled_to_batch`."""
        rows = max(1, round(self.rows * ratio)) if self.rows else 0
        if self.structure is GradientStructure.ROWS:
            rows = min(rows, num_passes * self.matrix[0])
        traffic = num_passes * self.num_bytes / memory_bandwidth
        is_lookup = self.structure is GradientStructure.ROWS  # it reads what the batch asks for, but writes all
        return self.model_copy(
            update={
                "rows": rows,
                "flops": round(self.flops * ratio),
                "activation_num_bytes": round(self.activation_num_bytes * ratio),
                "forward_seconds": _grown(self.forward_seconds, ratio, 0.0 if is_lookup else traffic),
                "backward_seconds": _grown(self.backward_seconds, ratio, traffic),
                "weight_gradient_seconds": _grown(self.weight_gradient_seconds, ratio, traffic),
                "forward_spread_seconds": self.forward_spread_seconds * ratio,
                "backward_spread_seconds": self.backward_spread_seconds * ratio,
            }
        )

    def repeated(self, ratio: float) -> Self:
        """With `ratio` times as many passes; see `ModelProfile.accumulated`."""
        seconds = ("forward_seconds", "backward_seconds", "weight_gradient_seconds")
        counts = ("rows", "flops", "calls")
        return self.model_copy(
            update={name: getattr(self, name) * ratio for name in seconds}
            | {name: round(getattr(self, name) * ratio) for name in counts}
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, N) of the first parameter seen as a matrix: output features, input features; or rows, width."""
        shape = self.parameters[0].shape
        width = 1
        for size in shape[1:]:
            width *= size
        return shape[0], width


def _grown(seconds: float, ratio: float, fixed: float) -> float:
    """Seconds of a batch `ratio` times as large, where `fixed` of them do not depend on the batch."""
    fixed = min(fixed, seconds)
    return fixed + (seconds - fixed) * ratio


class ComputeRates(Value):
    """How fast the device is on which a profile was measured; seconds measured there are carried elsewhere by these."""

    name: str
    """The processor or the GPU."""
    threads: int = Field(default=1, ge=1)
    flops_per_s: float = Field(gt=0)
    """On large matrix products, float32, with nothing else running beside it."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes per second read and written when large tensors are copied."""


class ModelProfile(Artifact):
    """What one rank's step over one model is made of."""

    version: int = 1
    model: str
    batch_size: int = Field(ge=0)
    """Samples per rank and step."""
    accumulate: int = Field(default=1, ge=1)
    """Backward passes whose sum is exchanged once, at the end of the last. A step is all of them together, and so are
    its samples, rows, operations and seconds; activations are those of one."""
    layers: tuple[LayerSpec, ...]
    """In the order of the forward pass."""
    source: str = ""
    """Where the seconds come from: measured on which device, or scaled from which published figure."""
    device: ComputeRates | None = None
    """What the seconds were measured on; None where they are published or asked for, and hold anywhere."""
    is_compiled: bool = False
    """A part of the model is compiled: what happens in there, nobody sees."""
    step_seconds: float = 0.0
    """Forward and backward pass as measured from outside, median; the layers' seconds add up to nearly that."""
    optimizer: str = ""
    """Class name of the optimizer whose seconds these are."""
    optimizer_seconds: float = 0.0
    """Median of `optimizer.step()` and `zero_grad()`."""
    optimizer_state_num_bytes: int = 0
    """What the optimizer keeps beside the parameters."""
    loader_seconds: float = 0.0
    """How long the training loop waits for a batch, median, after the first epoch."""
    first_epoch_loader_seconds: float = 0.0
    """The same in the first epoch, when nothing is cached."""
    notes: tuple[str, ...] = ()
    """What a reader should know: compiled blocks, layers that were not reached."""

    @property
    def trainable(self) -> tuple[LayerSpec, ...]:
        """The layers whose gradients cross the network."""
        return tuple(layer for layer in self.layers if layer.parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Forward and backward seconds of all layers, local weight gradients included."""
        return sum(layer.seconds for layer in self.layers)

    def scaled_to_batch(self, batch_size: int) -> Self:
        """An estimate for another batch: what depends on the batch grows with it, the rest stays.

        Rows, operations and activations grow in proportion; an embedding has no more rows than its table. Of a layer's
        seconds, those stay in which weights are read and gradients written, at the device's memory bandwidth where it
        is known. What each call costs whatever it computes is taken to grow too, so a much smaller batch is
        underestimated, and so is one that no longer fits into the caches.

        Args:
            batch_size: Samples per rank and step.

        Raises:
            ProfileError: The profile does not say which batch it is for, or the new one has no samples.
        """
        if batch_size < 1 or self.batch_size < 1:
            raise ProfileError(
                f"cannot scale the profile of {self.model} from {self.batch_size} to {batch_size} samples: "
                "both need to be 1 or more"
            )
        ratio = batch_size / self.batch_size
        bandwidth = self.device.memory_bandwidth if self.device is not None else float("inf")
        layers = tuple(layer.scaled(ratio, bandwidth, self.accumulate) for layer in self.layers)
        seconds = sum(layer.seconds for layer in layers)
        return self.model_copy(
            update={
                "batch_size": batch_size,
                "layers": layers,
                "step_seconds": self.step_seconds * seconds / self.seconds if self.seconds else 0.0,
                "loader_seconds": self.loader_seconds * ratio,
                "first_epoch_loader_seconds": self.first_epoch_loader_seconds * ratio,
                "source": self.source and f"{self.source}; estimated from {self.batch_size} to {batch_size} samples",
            }
        )

    def accumulated(self, num_passes: int) -> Self:
        """The same batches, so many of them to one exchange: what a pass takes and sends comes so many times.

        Args:
            num_passes: Forward and backward passes in a step, whatever they were before.

        Raises:
            ProfileError: There has to be one at least.
        """
        if num_passes < 1:
            raise ProfileError(f"cannot accumulate {num_passes} passes of {self.model}: use 1 or more")
        if num_passes == self.accumulate:
            return self
        ratio = num_passes / self.accumulate
        return self.model_copy(
            update={
                "accumulate": num_passes,
                "batch_size": round(self.batch_size * ratio),
                "layers": tuple(layer.repeated(ratio) for layer in self.layers),
                "step_seconds": self.step_seconds * ratio,
                "loader_seconds": self.loader_seconds * ratio,
                "first_epoch_loader_seconds": self.first_epoch_loader_seconds * ratio,
            }
        )
