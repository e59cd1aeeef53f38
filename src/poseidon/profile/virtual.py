"""Virtual compute: a model that sleeps for what its profile says, with gradients and factors of the real sizes.

Comes in: a `ModelProfile`. Goes out: an `nn.Module` whose layers bear the names, parameters and gradient structures of
the profiled ones, in one chain. A layer sleeps in its forward and in its backward pass, a rebuild sleeps for its
operations; all else is what any model meets: hooks, buckets, copies, sockets. So more hosts than cores can be
shown without their computing for the same cores.

The device that is stood in for works through what it is given without waiting for the processor: a layer ends when it
would end there, and what the processor does meanwhile (copying a gradient into its bucket, waking up late) is not added
to it unless it takes longer.

Numbers are zeros. Gradients are views of one stretch of zeros that no memory stands behind until somebody writes there.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile, TensorSpec

LARGEST_NUMBER_BYTES = 8
"""Of a float64."""


class DeviceClock:
    """When the device that is stood in for would be done with what it was given."""

    def __init__(self) -> None:
        self._due = time.monotonic()

    def start(self) -> None:
        """The device gets something to do, having had nothing."""
        self._due = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleeps until the device is done with this too."""
        self._due += seconds
        if (left := self._due - time.monotonic()) > 0:
            time.sleep(left)


class Zeros:
    """Tensors of zeros that share one stretch of memory, which the system hands out only where it is written to.

    Autograd does not know that they share it: what is written into one may be saved for backward as another.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.zeros(num_bytes, dtype=np.uint8)

    def like(self, spec: TensorSpec) -> torch.Tensor:
        """A contiguous tensor."""
        return self.tensor(spec.shape, dtype_of(spec))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor."""
        return torch.from_numpy(self._bytes[: prod(shape) * dtype.itemsize]).view(dtype).view(shape)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a tensor that is described."""
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What one layer does in a step."""

    clock: DeviceClock
    forward_seconds: float
    backward_seconds: float
    output_shape: tuple[int, ...]
    zeros: Zeros


class _Layer(torch.autograd.Function):
    """A layer whose gradients, of the real shapes, come out of its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: _Work, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.work = work
        ctx.given = (x.shape, *(p.shape for p in parameters))
        ctx.dtypes = (x.dtype, *(p.dtype for p in parameters))
        work.clock.spend(work.forward_seconds)
        return _placeholder(work.output_shape, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del gradient
        work: _Work = ctx.work
        work.clock.spend(work.backward_seconds)
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
        mine, *rest = (
            work.zeros.tensor(tuple(shape), dtype) if needed else None
            for shape, dtype, needed in zip(ctx.given, ctx.dtypes, wanted, strict=True)
        )
        return (mine, None, *rest)


class _Resize(torch.autograd.Function):
    """Activations of another shape, in no time; calls `before` when backward comes by."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, before: Callable[[], None] | None
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.before = x.shape, x.dtype, before
        return _placeholder(shape, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del gradient
        if ctx.before is not None:
            ctx.before()
        return _placeholder(ctx.shape, ctx.dtype), None, None, None


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of any shape in the memory of one."""
    return torch.zeros((), dtype=dtype).expand(shape)


class VirtualMath:
    """A fully connected layer as `comm.sufficient_factor.FactorMath` wants it, slept instead of computed."""

    def __init__(self, clock: DeviceClock, layer: LayerSpec, flops_per_s: float, zeros: Zeros) -> None:
        self._clock = clock
        self._layer = layer
        self._flops_per_s = flops_per_s
        self._zeros = zeros

    def output(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(K, in)` to `(K, out)`."""
        del bias
        self._clock.spend(self._layer.forward_seconds)
        return _placeholder((rows.shape[0], weight.shape[0]), rows.dtype)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`(K, out)` to `(K, in)`."""
        self._clock.spend(self._layer.backward_seconds)
        return _placeholder((gradient.shape[0], weight.shape[1]), gradient.dtype)

    def rebuild(
        self, outputs: torch.Tensor, inputs: torch.Tensor, into: torch.Tensor | None, add: bool
    ) -> torch.Tensor:
        """`(P·K, out)` and `(P·K, in)` to the weight gradient: 2·P·K·M·N operations at the layer's own rate."""
        del add
        (rows, out_features), in_features = outputs.shape, inputs.shape[1]
        self._clock.start()  # it waited for the factors
        self._clock.spend(2 * rows * out_features * in_features / self._flops_per_s)
        return self._zeros.tensor((out_features, in_features), outputs.dtype) if into is None else into


class VirtualLayer(nn.Module):
    """A layer with a dense gradient: any activations in, a placeholder out."""

    def __init__(self, work: _Work) -> None:
        super().__init__()
        self._work = work

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Sleeps."""
        result: torch.Tensor = _Layer.apply(input, self._work, *self.parameters(recurse=False))
        return result


class VirtualLinear(VirtualLayer):
    """A fully connected layer, `(K, in)` to `(K, out)`.

    Its own forward is for when the dense gradient crosses the network: backward then takes as long as the gradient of
    the input and that of the weight. `factor_math` is for when factors do.
    """

    def __init__(self, work: _Work, factor_math: VirtualMath, weight_gradient_share: float) -> None:
        super().__init__(work)
        self.factor_math = factor_math
        self.weight_gradient_share = weight_gradient_share
        """Of what backward sleeps where the dense gradient crosses the network."""


class VirtualModel(nn.Module):
    """The layers of a profile in one chain; made by `virtual_model`.

    Args:
        profile: The layers, in forward order.
        flops_per_s: As in `virtual_model`.
        writable: As in `virtual_model`.
    """

    def __init__(self, profile: ModelProfile, *, flops_per_s: float | None, writable: bool) -> None:
        super().__init__()
        self._clock = DeviceClock()
        sizes = [tensor.num_bytes for layer in profile.layers for tensor in layer.parameters]
        activations = [
            layer.rows * max(layer.matrix) * LARGEST_NUMBER_BYTES
            for layer in profile.layers
            if layer.structure is GradientStructure.OUTER_PRODUCT
        ]
        self._zeros = Zeros(max(sizes + activations, default=0))
        self._memory = Zeros(max(sizes, default=0)) if writable else None
        self._links: list[Callable[[torch.Tensor], torch.Tensor]] = []
        # A parent first, so that a layer inside another finds it.
        links = {layer.name: self._add(layer, profile, flops_per_s) for layer in sorted(profile.layers, key=_depth)}
        self._links = [links[layer.name] for layer in profile.layers]

    def forward(self, batch: object) -> torch.Tensor:
        """Sleeps through the layers; the result is a scalar zero, whatever the batch."""
        del batch
        self._clock.start()
        x = torch.zeros(1, requires_grad=torch.is_grad_enabled())
        for link in self._links:
            x = link(x)
        result: torch.Tensor = _Resize.apply(x, (), torch.float32, self._clock.start)
        return result

    def _add(
        self, layer: LayerSpec, profile: ModelProfile, flops_per_s: float | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Puts the module of a layer in its place; returns what the chain calls."""
        if layer.structure is GradientStructure.OUTER_PRODUCT:
            return self._add_linear(layer, layer.rows or profile.batch_size or 1, flops_per_s)
        work = self._work(layer, layer.backward_seconds, (1,))
        if not layer.parameters:
            return lambda x: _Layer.apply(x, work)
        if layer.structure is GradientStructure.ROWS:
            return self._add_embedding(layer, work)
        if not layer.name:  # the model itself owns parameters
            self._own(layer, self)
            return lambda x: _Layer.apply(x, work, *self.parameters(recurse=False))
        return self._own(layer, VirtualLayer(work))

    def _add_linear(
        self, layer: LayerSpec, rows: int, flops_per_s: float | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        out_features, in_features = layer.matrix
        flops = 2 * rows * out_features * in_features
        rate = flops_per_s or (flops / layer.forward_seconds if layer.forward_seconds else float("inf"))
        weight = dtype_of(layer.parameters[0])
        dtype = torch.bfloat16 if layer.factor_num_bytes < weight.itemsize else weight
        math = VirtualMath(self._clock, layer, rate, self._zeros)
        weight_gradient_seconds = layer.weight_gradient_seconds or flops / rate
        backward_seconds = layer.backward_seconds + weight_gradient_seconds
        share = weight_gradient_seconds / backward_seconds if backward_seconds else 0.0
        work = self._work(layer, backward_seconds, (rows, out_features))
        module = self._own(layer, VirtualLinear(work, math, share))
        return lambda x: module(_Resize.apply(x, (rows, in_features), dtype, None))

    def _add_embedding(self, layer: LayerSpec, work: _Work) -> Callable[[torch.Tensor], torch.Tensor]:
        """A real one, which looks up as many different rows as the profile counted: that costs next to nothing."""
        (weight,) = layer.parameters
        num_rows, width = weight.shape
        module = self._own(layer, nn.Embedding(num_rows, width, _weight=self._parameter(weight).detach()))
        indices = torch.arange(max(1, min(layer.rows, num_rows)))
        return lambda x: _Layer.apply(x, work, module(indices))

    def _work(self, layer: LayerSpec, backward_seconds: float, output_shape: tuple[int, ...]) -> _Work:
        return _Work(
            clock=self._clock,
            forward_seconds=layer.forward_seconds,
            backward_seconds=backward_seconds,
            output_shape=output_shape,
            zeros=self._zeros,
        )

    def _own(self, layer: LayerSpec, module: nn.Module) -> nn.Module:
        """Gives a module its parameters, and its place in the tree unless it is the root."""
        for tensor in layer.parameters:
            if tensor.name not in module._parameters:
                module.register_parameter(tensor.name, self._parameter(tensor))
        if module is not self:
            *above, last = layer.name.split(".")
            parent: nn.Module = self
            for name in above:
                if name not in parent._modules:
                    parent.add_module(name, nn.Module())
                parent = parent.get_submodule(name)
            parent.add_module(last, module)
        return module

    def _parameter(self, tensor: TensorSpec) -> nn.Parameter:
        if self._memory is not None:
            return nn.Parameter(self._memory.like(tensor))
        return nn.Parameter(_placeholder(tensor.shape, dtype_of(tensor)))


def _depth(layer: LayerSpec) -> int:
    return layer.name.count(".") + 1 if layer.name else 0


def virtual_model(profile: ModelProfile, *, flops_per_s: float | None = None, writable: bool = False) -> VirtualModel:
    """A model that takes the time that a profile says and has gradients of the real sizes.

    Args:
        profile: With seconds; the rows of its fully connected layers are those of one rank's batch.
        flops_per_s: Rate at which a weight gradient is rebuilt from factors, and computed where the profile does not
            say how long that takes; each layer's own rate in its forward pass if left out.
        writable: Whether parameters have memory, which `sharded_server` needs. Layers share it, so it is as much as
            the largest parameter. Without it, the elements of a parameter share one number.

    Returns:
        The model. It takes any batch and gives a scalar zero, its own loss.
    """
    return VirtualModel(profile, flops_per_s=flops_per_s, writable=writable)


def virtual_loss(model: nn.Module, batch: object) -> torch.Tensor:
    """The loss of a virtual model: a scalar zero with a graph behind it, as a task's `loss`."""
    loss: torch.Tensor = model(batch)
    return loss


def virtual_counts(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """What evaluating a virtual model finds, as a task's `evaluate`: samples, none of them right, without loss."""
    model(batch)
    zero = torch.zeros(())
    return {"correct": zero, "loss_sum": zero, "samples": torch.full((), len(batch))}


def virtual_batch(profile: ModelProfile) -> torch.Tensor:
    """A batch for a virtual model, one number per sample: shape `(batch_size, 1)`."""
    return torch.zeros(max(1, profile.batch_size), 1)


class VirtualOptimizer(torch.optim.Optimizer):
    """An optimizer that sleeps instead of changing parameters.

    Args:
        params: As for any optimizer.
        seconds: Of one step.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, seconds: float = 0.0) -> None:
        super().__init__(params, {})
        self._seconds = seconds

    def step(self, closure: Any = None) -> Any:
        """Sleeps."""
        loss = None if closure is None else closure()
        time.sleep(self._seconds)
        return loss


def virtual_optimizer(params: Iterable[nn.Parameter], *, seconds: float = 0.0) -> torch.optim.Optimizer:
    """The optimizer for the parameters of a virtual model.

    One that sleeps, or where parameters have memory the SGD that `sharded_server` knows, with a learning rate of zero;
    that one really reads and writes this rank's stretch of the parameters.
    """
    params = list(params)
    if all(parameter.is_contiguous() for parameter in params):
        return torch.optim.SGD(params, lr=0.0)
    return VirtualOptimizer(params, seconds=seconds)
