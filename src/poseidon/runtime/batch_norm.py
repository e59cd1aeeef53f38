"""Batch normalization over the batches of all ranks, equal to one process on their union, on CPU and GPU alike.

Forward, each rank sends count, mean and sum of squared deviations of every channel; from those of all ranks each
computes mean and variance of the union, in double precision and in the order of ranks, so that running statistics are
the same to the bit everywhere.

Backward, let rank r's loss count with weight w_r in the mean over ranks, g be the gradient of its own loss with respect
to this layer's output, and x^ the normalized input. The gradient of the weighted loss with respect to an input of rank
r is then (with M values per channel in the union)

    weight / sigma * (w_r * g  -  sum over ranks s of w_s * (sum g + x^ * sum g * x^) / M).

What lies before this layer will be multiplied by w_r when ranks are averaged, so the layer returns this divided by w_r.
Only ratios of weights matter: a rank sends its sums multiplied by its number of items, and divides by it what comes
back. The gradients of weight and bias are those of this rank's own loss.

Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015, section 3; the combination of means and squared
deviations is from T. Chan et al., "Algorithms for computing the sample variance", The American Statistician 1983.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from poseidon.comm.capture import ReplacedForward
from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.runtime.rounds import Parts, Seat, take_seat

Hold = Callable[[torch.Tensor], Parts]
"""Gives the others a part and returns the parts of all."""


class SyncedBatchNorms:
    """The layers of one run whose statistics are those of all ranks.

    Args:
        model: The root module.
        group: The ranks.
        items: What the loss of the backward pass under way on this rank is a mean over; 1 where all ranks count alike.
        standing_still: Notes what the training thread waits in, by its name.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        items: Callable[[], float],
        standing_still: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._group = group
        self._items = items
        self._standing_still = standing_still
        self._seat: Seat | None = take_seat(group) if group.world_size > 1 else None
        self._layers: dict[str, BatchNormLayer] = {}

    def sync(self, kind: type[_BatchNorm] = _BatchNorm) -> list[str]:
        """From now on layers of this kind see the batches of all ranks; called on all ranks together.

        Returns:
            The names of those that did not before.

        Raises:
            InfeasibleError: The ranks do not have the same such layers.
        """
        found = {n: m for n, m in self._model.named_modules() if isinstance(m, kind) and n not in self._layers}
        named = [[name, type(module).__name__, module.num_features] for name, module in found.items()]
        texts = self._group.all_gather_text(json.dumps(named), "synchronizing batch normalization")
        for rank, text in enumerate(texts):
            if json.loads(text) != json.loads(texts[0]):
                raise InfeasibleError(
                    f"batch normalization differs between ranks: rank 0 has {texts[0]}, rank {rank} has {text}; "
                    "build the same model on every rank"
                )
        for name, module in found.items():
            self._layers[name] = self._put_in(name, module)
        return list(found)

    def _put_in(self, name: str, module: _BatchNorm) -> "BatchNormLayer":
        layer = BatchNormLayer(name, module, self._items)
        if self._seat is not None:
            width = 2 * module.num_features
            forward = self._seat.add(f"the forward pass of {name!r}", 1 + width, layer.hear)
            backward = self._seat.add(f"the backward pass of {name!r}", width, lambda _: None)
            layer.hold_forward = self._noted(f"statistics of {name}", forward)
            layer.hold_backward = self._noted(f"gradients of the statistics of {name}", backward)
        return layer

    def _noted(self, name: str, hold: Hold) -> Hold:
        def noted(part: torch.Tensor) -> Parts:
            with self._standing_still(name):
                return hold(part)

        return noted

    @property
    def buffers(self) -> list[str]:
        """The names of the buffers that are the same on every rank at any time."""
        return [f"{name}.{key}" if name else key for name, layer in self._layers.items() for key in layer.buffers]

    def end_step(self) -> None:
        """This rank's backward passes of the step are over; waits for nobody."""
        if self._seat is not None:
            self._seat.end_step()

    def listen(self) -> None:
        """Answers ranks that still compute until all have come to the end of the step."""
        if self._seat is not None and self._seat.is_heard:
            with self._standing_still("statistics of other ranks"):
                self._seat.listen()

    def next_step(self) -> None:
        """The step is over on this rank."""
        if self._seat is not None:
            self._seat.next_step()

    def remove(self) -> None:
        """Gives the layers their own forward back; on all ranks together."""
        for layer in self._layers.values():
            layer.remove()
        self._layers.clear()
        if self._seat is not None:
            self._seat.leave()
            self._seat = None


@dataclass(frozen=True)
class Statistics:
    """Of one batch, perhaps of all ranks, by channel."""

    count: float
    """Values per channel."""
    mean: torch.Tensor
    """Shape `(channels,)`, double precision."""
    squares: torch.Tensor
    """Sums of squared deviations from the mean, of the same shape and precision."""

    @classmethod
    def of(cls, x: torch.Tensor) -> "Statistics":
        """Of a batch of shape `(batch, channels, ...)`."""
        count = x.numel() // x.shape[1] if x.shape[1] else 0
        if not count:
            return cls(0.0, torch.zeros(x.shape[1]).double(), torch.zeros(x.shape[1]).double())
        variance, mean = torch.var_mean(x.to(_precision(x)), _all_but_channels(x), correction=0)
        return cls(count, mean.to("cpu", torch.double), variance.to("cpu", torch.double) * count)

    @classmethod
    def union(cls, parts: Parts) -> "Statistics":
        """Of the batches of all ranks, from each rank's `as_part`."""
        batches = [cls.from_part(parts[rank]) for rank in sorted(parts)]
        count = sum(batch.count for batch in batches)
        mean = sum(batch.mean * batch.count for batch in batches) / max(count, 1.0)
        squares = sum(batch.squares + batch.count * (batch.mean - mean) ** 2 for batch in batches)
        return cls(count, torch.as_tensor(mean), torch.as_tensor(squares))

    def as_part(self) -> torch.Tensor:
        """As it is sent: `(1 + 2 * channels,)`."""
        return torch.cat([torch.tensor([self.count], dtype=torch.double), self.mean, self.squares])

    @classmethod
    def from_part(cls, part: torch.Tensor) -> "Statistics":
        """As it was received."""
        mean, squares = part[1:].chunk(2)
        return cls(float(part[0]), mean, squares)


class BatchNormLayer:
    """One module whose forward is ours until `remove` is called.

    Args:
        name: Of the module.
        module: One of torch's, `nn.SyncBatchNorm` included.
        items: See `SyncedBatchNorms`.
    """

    def __init__(self, name: str, module: _BatchNorm, items: Callable[[], float]) -> None:
        self._name = name
        self._module = module
        self._items = items
        self.hold_forward: Hold = lambda part: {0: part}
        self.hold_backward: Hold = lambda part: {0: part}
        self._replaced = ReplacedForward(module, self._forward)

    @property
    def buffers(self) -> list[str]:
        """The module's own."""
        return [name for name, _ in self._module.named_buffers(recurse=False)]

    def remove(self) -> None:
        """Gives the module its own forward back."""
        self._replaced.remove()

    def hear(self, parts: Parts) -> None:
        """The others went forward without this rank: its running statistics follow theirs."""
        with torch.no_grad():
            self._track(Statistics.union(parts))

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not module.training:
            output: torch.Tensor = type(module).forward(module, input)
            return output
        module._check_input_dim(input)
        if input.shape[1] != module.num_features:
            raise InfeasibleError(
                f"cannot normalize {tuple(input.shape)} by {self._name!r} over all ranks: the layer was built for "
                f"{module.num_features} channels, and the input has {input.shape[1]}; build it with num_features = "
                f"{input.shape[1]}"
            )
        with torch.no_grad():
            union = Statistics.union(self.hold_forward(Statistics.of(input).as_part()))
            if union.count == 1:
                raise ValueError(f"{self._name!r}: expected more than 1 value per channel over all ranks in training")
            self._track(union)
        normalized: torch.Tensor = _Normalize.apply(input, module.weight, module.bias, module.eps, union, self)
        return normalized

    def _track(self, union: Statistics) -> None:
        """Running statistics, as torch keeps them."""
        module = self._module
        if module.running_mean is None or module.running_var is None or not union.count:
            return
        factor = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            factor = 1.0 / float(module.num_batches_tracked) if factor is None else factor
        for running, now in (
            (module.running_mean, union.mean),
            (module.running_var, union.squares / max(union.count - 1.0, 1.0)),
        ):
            running.copy_(running.double() * (1.0 - (factor or 0.0)) + now.to(running.device) * (factor or 0.0))

    def sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of gradients, weighted by what each rank counts, in the unit of this rank; in double precision."""
        items = self._items()
        parts = self.hold_backward(sums.to("cpu", torch.double) * items)
        total = torch.stack([parts[rank] for rank in sorted(parts)]).sum(0)
        if items or not total.any():
            return total / (items or 1.0)
        raise CommError(
            f"the loss of this rank counts nothing, but its input to {self._name!r} has a part in the statistics that "
            "all ranks normalize by, and so in their losses: that gradient cannot be weighted by 0; leave such a batch "
            "out with empty_step(), or do not synchronize this layer"
        )


class _Normalize(torch.autograd.Function):
    """Normalizes by the statistics of all ranks; see the module's docstring for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        union: Statistics,
        layer: BatchNormLayer,
    ) -> torch.Tensor:
        precision = _precision(x)
        variance = union.squares / max(union.count, 1.0)
        mean = union.mean.to(x.device, precision)
        ctx.count, ctx.layer = union.count, layer
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps).to(x.device, precision))
        scale, shift = (None if p is None else p.to(precision) for p in (weight, bias))
        return F.batch_norm(x, mean, variance.to(x.device, precision), scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        deviation = x.to(mean.dtype) - mean.view(shape)
        gradient = gradient.to(mean.dtype)
        dims = _all_but_channels(x)
        sums = torch.stack([gradient.sum(dims), (gradient * deviation).sum(dims) * inverse])
        wanted = ctx.needs_input_grad
        input_gradient = None
        if wanted[0]:
            plain, along = (ctx.layer.sum_over_ranks(sums.view(-1)) / max(ctx.count, 1.0)).to(sums).chunk(2)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            input_gradient = deviation.mul_((-scale * inverse * along).view(shape))
            input_gradient.addcmul_(gradient, scale.view(shape)).sub_((scale * plain).view(shape))
            input_gradient = input_gradient.to(x.dtype)
        return (
            input_gradient,
            sums[1].to(weight.dtype) if wanted[1] else None,
            sums[0].to(weight.dtype) if wanted[2] else None,
            *[None] * 3,
        )


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _precision(x: torch.Tensor) -> torch.dtype:
    """What a batch is summed in."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
