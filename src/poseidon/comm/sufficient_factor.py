"""Sufficient factors: the two thin matrices whose product is the gradient of a fully connected layer.

The weight gradient of `nn.Linear` is `output_gradient.T @ input`, a sum of one outer product per row. Every rank sends
its rows of both factors to every other and builds the gradient of the union of all batches from all of them, once; no
rank ever computes a gradient of its own batch. The input factor leaves in the forward pass.

Source: Xie et al., "Lighter-communication distributed machine learning via sufficient factor broadcasting", UAI 2016;
Zhang et al., "Poseidon", ATC 2017, section 3.2. Beyond the papers: factors travel in two parts, the rows of all calls
of a layer count, and the cost face charges the rebuild.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from poseidon.cluster.rates import Rates
from poseidon.comm.capture import ReplacedForward, accumulates
from poseidon.comm.group import Group
from poseidon.comm.paired_rows import Call, PairedRowsExchange
from poseidon.comm.scheme import (
    BoundLayer,
    CommScheme,
    Cost,
    Exactness,
    Exchange,
    Message,
    StepState,
    Wire,
    check_levels,
    wire_num_bytes,
)
from poseidon.errors import CommError
from poseidon.profile.graph import GradientStructure, LayerSpec


class SufficientFactor(CommScheme):
    """Both factors of every rank to every rank, point to point."""

    kind: Literal["sufficient_factor"] = "sufficient_factor"
    levels: Literal[1, 2] = 1
    """2 sends factors to one rank of each other host, which passes them on to its host."""
    wire: Wire = ""
    """The format in which factors cross the network, if narrower than autograd made them."""

    @property
    def exactness(self) -> Exactness:
        """Rounded if factors are narrower on the wire; each is rounded once, and summed in the gradient's format."""
        return "rounded" if self.wire else "exact"

    def refuse(self, layer: LayerSpec) -> str | None:
        """Only gradients that are sums of outer products have factors."""
        if layer.structure is GradientStructure.OUTER_PRODUCT:
            return None
        return layer.reason or f"its gradient is {layer.structure.value}, not a sum of outer products"

    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """K(M+N) numbers to each of P-1 peers; in two levels, it or another rank of the peer's host."""
        out_features, in_features = layer.matrix
        itemsize = wire_num_bytes(self.wire, layer.factor_num_bytes)
        return layer.rows * (out_features + in_features) * itemsize * (world_size - 1)

    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """The wire, and a rebuild of 2·P·K·M·N operations that also writes the whole gradient, on every rank.

        The input factor leaves in the forward pass, the output factor in the backward pass; no local gradient is made.

        Source: the wire is table 1 of the ATC'17 paper with P1 = P2; the rebuild is not in it.
        """
        out_features, in_features = layer.matrix
        flops = 2 * rates.world_size * layer.rows * out_features * in_features
        messages = [
            message
            for when, width in (("forward", in_features), ("backward", out_features))
            for message in self._messages(when, layer.rows * width, layer, rates)  # type: ignore[arg-type]
        ]
        return Cost(
            messages=tuple(message for message, _ in messages),
            wire_seconds=sum(seconds for _, seconds in messages) if rates.world_size > 1 else 0.0,
            finish_seconds=flops / rates.flops_per_s + layer.parameters[0].num_bytes / rates.memory_bandwidth,
        )

    def _messages(
        self, when: Literal["forward", "backward"], count: int, layer: LayerSpec, rates: Rates
    ) -> list[tuple[Message, float]]:
        """How one factor travels, and the seconds of each message on an idle network; flat if no more was measured."""
        num_bytes = count * wire_num_bytes(self.wire, layer.factor_num_bytes)
        if self.levels == 1 or rates.inner is None or rates.outer is None:
            sent, curve = num_bytes * (rates.world_size - 1), rates.exchange[rates.connections]
            message = Message(when=when, pattern="exchange", num_bytes=sent)
            return [(message, sent / curve.bandwidth + curve.latency)]
        ranks, hosts = rates.ranks_per_host, rates.num_hosts
        across, inside = num_bytes * ranks * (hosts - 1), num_bytes * (ranks - 1) * hosts
        return [
            (
                Message(when=when, pattern="outer", num_bytes=across),
                across / rates.outer.bandwidth + rates.outer.latency,
            ),
            (
                Message(when=when, pattern="inner", num_bytes=inside),
                inside / rates.inner.bandwidth + rates.inner.latency,
            ),
        ]

    def check(self, layers: Sequence[BoundLayer], group: Group) -> None:
        """Two levels need hosts with several ranks."""
        check_levels(self.levels, self.kind, group)

    def bind(self, layers: Sequence[BoundLayer], group: Group, step: StepState) -> list[Exchange]:
        """One exchange per layer."""
        return [FactorExchange(layer, group, step, levels=self.levels, wire=self.wire) for layer in layers]


class FactorMath(Protocol):
    """What a fully connected layer computes; replaced where the computing is slept instead."""

    def output(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(K, in)` to `(K, out)`."""

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`(K, out)` to `(K, in)`."""

    def rebuild(
        self, outputs: torch.Tensor, inputs: torch.Tensor, into: torch.Tensor | None, add: bool
    ) -> torch.Tensor:
        """`(K, out)` and `(K, in)` of all ranks to the weight gradient `(out, in)`, written or added into `into`."""


class LinearMath:
    """`nn.Linear` as torch computes it."""

    def output(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `F.linear`."""
        return F.linear(rows, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As autograd computes it for `F.linear`."""
        return gradient @ weight

    def rebuild(
        self, outputs: torch.Tensor, inputs: torch.Tensor, into: torch.Tensor | None, add: bool
    ) -> torch.Tensor:
        """One matrix product over the rows of all ranks."""
        if into is None:
            return torch.mm(outputs.t(), inputs)
        if add:
            return into.addmm_(outputs.t(), inputs)
        return torch.mm(outputs.t(), inputs, out=into)


class _Linear(torch.autograd.Function):
    """`F.linear` on rows whose backward hands the output gradient on instead of computing a weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        math: FactorMath,
        exchange: "FactorExchange",
        call: Call,
        *anchors: nn.Parameter,
    ) -> torch.Tensor:
        ctx.num_anchors = len(anchors)  # they make the output require a gradient
        ctx.math, ctx.exchange, ctx.call = math, exchange, call
        ctx.save_for_backward(weight)
        return math.output(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        anchors = [node for node, _ in ctx.next_functions[-ctx.num_anchors :]]
        gradients = ctx.exchange.passed(ctx.call, gradient, anchors)
        input_gradient = ctx.math.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        others = len(ctx.needs_input_grad) - 1 - ctx.num_anchors
        return (input_gradient, *[None] * others, *gradients)


class FactorExchange(PairedRowsExchange):
    """Sufficient factors of one fully connected layer."""

    def __init__(self, layer: BoundLayer, group: Group, step: StepState, *, levels: int = 1, wire: Wire = "") -> None:
        weight = layer.module.weight
        assert isinstance(weight, nn.Parameter)
        out_features, in_features = layer.spec.matrix
        super().__init__(
            layer.name,
            list(layer.parameters.values()),
            widths=(in_features, out_features),
            dtypes=(weight.dtype, weight.dtype),
            capacity=layer.spec.rows,
            device=weight.device,
            group=group,
            step=step,
            levels=levels,
            wire=wire,
        )
        bias = getattr(layer.module, "bias", None)
        self._module = layer.module
        self._weight = weight
        self._bias = bias if isinstance(bias, nn.Parameter) else None
        self._anchors = list(layer.parameters.values())
        self._math: FactorMath = getattr(layer.module, "factor_math", LinearMath())
        self._buffer: torch.Tensor | None = None
        self._trained: frozenset[nn.Parameter] = frozenset()
        """Those that were not frozen when backward ended; the loop may freeze them before the gradient is rebuilt."""
        self.handles.append(ReplacedForward(layer.module, self._forward, self))

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self._anchors):
            return self._math.output(x, self._weight, self._bias)
        self.check_hooks()
        weight = self._weight.detach()
        bias = None if self._bias is None else self._bias.detach()
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type) and x.is_floating_point():
            dtype = torch.get_autocast_dtype(device_type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device_type, enabled=False):
            call = self.called(rows.detach())
            output: torch.Tensor = _Linear.apply(rows, weight, bias, self._math, self, call, *self._anchors)
        return output if x.dim() == 2 else output.reshape(*x.shape[:-1], output.shape[-1])

    def passed(
        self, call: Call, gradient: torch.Tensor, anchors: Sequence[Node | None]
    ) -> Sequence[torch.Tensor | None]:
        """Told by autograd, with the nodes that would accumulate the gradients of this layer's parameters.

        Returns:
            What they are to accumulate: nothing, unless the layer is on another scheme by now, or on none.
        """
        try:
            wanted = any(accumulates(node) for node in anchors if node is not None)
        except CommError as error:
            raise CommError(
                f"rank {self.group.rank}: {error} of {self.name}, which sufficient_factor never computes on one rank; "
                "use backward(), or choose all_reduce for this layer"
            ) from error
        if wanted and not self._is_detached:
            self.returned(call, gradient)
        elif wanted and (successor := self.successor(self._module)) is not None:
            successor.inherited(call, gradient)
        elif wanted:
            return [self._own_gradient(parameter, call.first, gradient) for parameter in self._anchors]
        return [None] * len(self._anchors)

    def _own_gradient(
        self, parameter: nn.Parameter, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> torch.Tensor | None:
        """Of this rank alone."""
        if not parameter.requires_grad:
            return None
        gradient = outputs.sum(0) if parameter is self._bias else self._math.rebuild(outputs, inputs, None, False)
        return gradient.to(parameter.dtype)

    def zeros(self) -> torch.Tensor:
        """Where the gradient will be rebuilt, for a weight; a bias comes first where the weight is frozen."""
        if self.parameters[0] is not self._weight:
            return torch.zeros_like(self.parameters[0])
        self._buffer = torch.zeros_like(self._weight) if self._buffer is None else self._buffer.zero_()
        return self._buffer

    def flush(self) -> None:
        """Also notes what is trained in this step."""
        self._trained = frozenset(parameter for parameter in self._anchors if parameter.requires_grad)
        super().flush()

    def combine(self, firsts: list[torch.Tensor], seconds: list[torch.Tensor]) -> None:
        """The mean over ranks of the weight's and the bias's gradient, each computed once."""
        with self.step.working("rebuild", self.name):
            dtype = self._weight.dtype
            outputs = self.weighted(seconds, dtype)
            if self._weight in self._trained:
                inputs = torch.cat([rows.to(dtype) for rows in firsts])
                self._rebuild_weight(outputs, inputs)
            if self._bias is not None and self._bias in self._trained:
                total = outputs.sum(0)
                self._bias.grad = total if self._bias.grad is None else self._bias.grad.add_(total)

    def _rebuild_weight(self, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
        if self._weight.grad is not None:
            self._math.rebuild(outputs, inputs, self._weight.grad, True)
            return
        self._buffer = self._math.rebuild(outputs, inputs, self._buffer, False)
        self._weight.grad = self._buffer
