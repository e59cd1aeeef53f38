"""A model as data: layers, their parameters, the structure of their gradients, their seconds. No tensors in here."""

from enum import StrEnum

from pydantic import Field

from poseidon.artifact import Artifact, Value


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


class LayerSpec(Value):
    """A module that owns parameters."""

    name: str
    """Its name in `model.named_modules()`; empty for the model itself."""
    kind: str
    """The module's class name."""
    parameters: tuple[TensorSpec, ...]
    """The trainable ones."""
    structure: GradientStructure = GradientStructure.DENSE
    reason: str = ""
    """Why the structure is dense where the kind of layer would allow more."""
    rows: int = 0
    """Rows of activations (outer product) or touched rows (rows) per rank and step; 0 where they were not seen."""
    factor_num_bytes: int = 4
    """Bytes of one number of a factor as autograd makes it: 2 under bf16 autocast."""
    flops: int = 0
    """Operations of one forward pass over a rank's batch, two for each multiply-add."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """Without what a scheme does itself: for an outer product, the gradient of the input only."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer's gradients."""
        return sum(tensor.num_bytes for tensor in self.parameters)

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, N) of the first parameter seen as a matrix: output features, input features; or rows, width."""
        shape = self.parameters[0].shape
        width = 1
        for size in shape[1:]:
            width *= size
        return shape[0], width


class ModelProfile(Artifact):
    """What one rank's step over one model is made of."""

    version: int = 1
    model: str
    batch_size: int = Field(ge=0)
    """Samples per rank and step."""
    layers: tuple[LayerSpec, ...]
    """In the order of the forward pass."""
    source: str = ""
    """Where the seconds come from: measured on which device, or scaled from which published figure."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Forward and backward seconds of all layers."""
        return sum(layer.forward_seconds + layer.backward_seconds for layer in self.layers)
