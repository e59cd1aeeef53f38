"""Touched rows: an embedding's gradient is zero except in the rows that the batch looked up, so only these travel.

Every rank sums its lookups row by row first. The row numbers are known in the forward pass and leave then; their
gradients follow in the backward pass. The result is dense or sparse, as the module's own `sparse` flag says.

Source: Kim et al., "Parallax: sparsity-aware data parallel training of deep neural networks", EuroSys 2019, for the
idea that sparse variables want another way than dense ones.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from poseidon.cluster.rates import Rates
from poseidon.comm.capture import ReplacedForward, accumulates
from poseidon.comm.group import Group
from poseidon.comm.paired_rows import Call, PairedRowsExchange
from poseidon.comm.scheme import BoundLayer, CommScheme, Cost, Exchange, Message, StepState
from poseidon.errors import CommError
from poseidon.profile.graph import GradientStructure, LayerSpec

INDEX_BYTES = 8
"""A row number travels as int64."""
ADDITION_TRAFFIC = 5
"""Bytes read and written per byte of a row: joined with the others, scaled, and added to the gradient."""


class SparseRows(CommScheme):
    """The touched rows of every rank to every rank, point to point."""

    kind: Literal["sparse_rows"] = "sparse_rows"

    def refuse(self, layer: LayerSpec) -> str | None:
        """Only embeddings touch a few rows."""
        if layer.structure is GradientStructure.ROWS:
            return None
        return layer.reason or f"its gradient is {layer.structure.value}, not a set of touched rows"

    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """The touched rows and their numbers to each of P-1 peers."""
        num_bytes = layer.parameters[0].num_bytes // max(1, layer.matrix[0]) + INDEX_BYTES
        return layer.rows * num_bytes * (world_size - 1)

    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """The wire, and adding up the rows of all ranks: each is read, and added to what is there."""
        peers = rates.world_size - 1
        width = layer.parameters[0].num_bytes // max(1, layer.matrix[0])
        messages = (
            Message(when="forward", pattern="exchange", num_bytes=layer.rows * INDEX_BYTES * peers),
            Message(when="backward", pattern="exchange", num_bytes=layer.rows * width * peers),
        )
        curve = rates.exchange[rates.connections]
        return Cost(
            messages=messages,
            wire_seconds=sum(m.num_bytes / curve.bandwidth + curve.latency for m in messages) if peers else 0.0,
            finish_seconds=ADDITION_TRAFFIC * rates.world_size * layer.rows * width / rates.memory_bandwidth,
        )

    def bind(self, layers: Sequence[BoundLayer], group: Group, step: StepState) -> list[Exchange]:
        """One exchange per embedding."""
        return [SparseRowsExchange(layer, group, step) for layer in layers]


class _Weight(torch.autograd.Function):
    """An embedding's weight as lookups see it, whose sparse gradient comes to the exchange."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, exchange: "SparseRowsExchange", call: Call) -> torch.Tensor:
        ctx.exchange, ctx.call = exchange, call
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ((anchor, _),) = ctx.next_functions
        return ctx.exchange.passed(ctx.call, gradient, anchor), None, None


class SparseRowsExchange(PairedRowsExchange):
    """Touched rows of one embedding."""

    def __init__(self, layer: BoundLayer, group: Group, step: StepState) -> None:
        module = layer.module
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        self._module = module
        self._weight = module.weight
        super().__init__(
            layer.name,
            list(layer.parameters.values()),
            widths=(1, module.embedding_dim),
            dtypes=(torch.int64, module.weight.dtype),
            capacity=min(module.num_embeddings, layer.spec.rows + layer.spec.rows // 4),
            device=module.weight.device,
            group=group,
            step=step,
        )
        self._buffer: torch.Tensor | None = None
        self._touched = torch.empty(0, dtype=torch.int64, device=module.weight.device)
        forward = self._forward_bag if isinstance(module, nn.EmbeddingBag) else self._forward
        self.handles.append(ReplacedForward(module, forward, self))

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        module = self._module
        assert isinstance(module, nn.Embedding)
        return F.embedding(input, self._seen_weight(input), module.padding_idx, sparse=True)

    def _forward_bag(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        module = self._module
        assert isinstance(module, nn.EmbeddingBag)
        return F.embedding_bag(
            input,
            self._seen_weight(input),
            offsets,
            mode=module.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )

    def _seen_weight(self, indices: torch.Tensor) -> torch.Tensor:
        """The weight, or where a gradient is wanted a stand-in for it whose sparse gradient comes to us."""
        if not torch.is_grad_enabled() or not self._weight.requires_grad:
            return self._weight
        self.check_hooks()
        rows = torch.unique(indices.detach().to(torch.int64))
        seen: torch.Tensor = _Weight.apply(self._weight, self, self.called(rows.view(-1, 1)))
        return seen

    def passed(self, call: Call, gradient: torch.Tensor, anchor: Node) -> torch.Tensor | None:
        """Told by autograd, with the node that would accumulate the weight's gradient.

        Returns:
            What it is to accumulate: nothing, unless the layer is on another scheme by now, or on none.
        """
        try:
            wanted = accumulates(anchor)
        except CommError as error:
            raise CommError(
                f"rank {self.group.rank}: {error} of {self.name}, which sparse_rows never computes on one rank; "
                "use backward(), or choose all_reduce for this layer"
            ) from error
        if wanted and not self._is_detached:
            self.returned(call, self._by_row(call, gradient))
        elif wanted and (successor := self.successor(self._module)) is not None:
            successor.inherited(call, self._by_row(call, gradient))
        elif wanted:
            return gradient if self._module.sparse else gradient.to_dense()
        return None

    def zeros(self) -> torch.Tensor:
        """No rows, or where the rows will be added up."""
        if self._module.sparse:
            return torch.zeros_like(self._weight, layout=torch.sparse_coo)
        self._buffer = torch.zeros_like(self._weight, memory_format=torch.contiguous_format)
        self._touched = self._touched[:0]
        return self._buffer

    def _by_row(self, call: Call, gradient: torch.Tensor) -> torch.Tensor:
        """The sparse gradient summed into one row for each of the call's row numbers; untouched padding stays zero."""
        rows = call.first.view(-1)
        summed = torch.zeros(rows.shape[0], self._module.embedding_dim, dtype=gradient.dtype, device=rows.device)
        return summed.index_add_(0, torch.searchsorted(rows, gradient._indices()[0].contiguous()), gradient._values())

    def combine(self, firsts: list[torch.Tensor], seconds: list[torch.Tensor]) -> None:
        """The mean over ranks, added up in the order of ranks everywhere."""
        with self.step.working("rebuild", self.name):
            indices = torch.cat([rows.view(-1) for rows in firsts])
            values = self.weighted(seconds, self._weight.dtype)
            if self._module.sparse:
                self._add_sparse(indices, values)
            else:
                self._add_dense(indices, values)

    def _add_sparse(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        unique, place = torch.unique(indices, return_inverse=True)
        summed = torch.zeros(unique.shape[0], values.shape[1], dtype=values.dtype, device=values.device)
        summed.index_add_(0, place, values)
        gradient = torch.sparse_coo_tensor(
            unique.unsqueeze(0), summed, self._weight.shape, is_coalesced=True, check_invariants=False
        )
        self._weight.grad = gradient if self._weight.grad is None else self._weight.grad + gradient

    def _add_dense(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        if self._weight.grad is None:
            if self._buffer is None:
                self._buffer = torch.zeros_like(self._weight, memory_format=torch.contiguous_format)
            else:  # only what the last steps touched is not zero
                self._buffer.index_fill_(0, self._touched, 0.0)
            self._touched = indices
            self._weight.grad = self._buffer
        elif self._weight.grad is self._buffer:
            self._touched = torch.cat([self._touched, indices])
        self._weight.grad.index_add_(0, indices, values)
