"""All-reduce: dense gradients, summed over the ranks in buckets."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, split_into_buckets
from poseidon.comm.capture import LATE_ADDITION, Additions, on_gradient
from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import (
    BoundLayer,
    CommScheme,
    Cost,
    Exchange,
    Message,
    StepState,
    Transfer,
    check_dense,
    local_gradient_seconds,
)
from poseidon.errors import CommError
from poseidon.profile.graph import LayerSpec
from poseidon.units import Bytes

VOTE_AFTER = 3
"""Steps in a row with another order of arrival before a rank votes for new buckets."""


COPY_TRAFFIC = 3
"""Bytes read and written per byte that is scaled from one place to another: read, and written after a read."""


class AllReduce(CommScheme):
    """Plain all-reduce in buckets, first bucket small."""

    kind: Literal["all_reduce"] = "all_reduce"
    first_bytes: Bytes = FIRST_BUCKET_BYTES
    """Size at which the first bucket is closed: smaller lets the link start earlier, larger saves messages."""
    bucket_bytes: Bytes = BUCKET_BYTES
    """Size at which the other buckets are closed: smaller where little of the transfer is hidden."""

    def refuse(self, layer: LayerSpec) -> str | None:
        """Every dense gradient can be all-reduced."""
        del layer
        return None

    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """2(P-1)/P of the gradient: the floor of any all-reduce without help from the network."""
        return 2 * layer.num_bytes * (world_size - 1) // world_size

    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """The measured curve without its latency, which is the bucket's, shared by many layers; a copy into the bucket.

        The copy reads the gradient and reads and writes the bucket.
        """
        num_bytes = self.bytes_sent(layer, rates.world_size)
        curve = rates.all_reduce[rates.connections]
        return Cost(
            messages=(Message(when="backward", pattern="all_reduce", num_bytes=num_bytes),),
            wire_seconds=num_bytes / curve.bandwidth if rates.world_size > 1 else 0.0,
            backward_seconds=local_gradient_seconds(layer, rates),
            prepare_seconds=COPY_TRAFFIC * layer.num_bytes / rates.memory_bandwidth,
        )

    def check(self, layers: Sequence[BoundLayer]) -> None:
        """Gradients have to be dense."""
        for layer in layers:
            check_dense(layer, self.kind)

    def bind(self, layers: Sequence[BoundLayer], group: Group, step: StepState) -> list[Exchange]:
        """One exchange per bucket, the plan's or by size; dtypes and devices do not share a bucket."""
        exchanges: list[Exchange] = []
        for entries in _by_type(layers).values():
            sizes = [p.numel() * p.element_size() for _, _, p in entries]
            if layers[0].bucket is None:
                members = split_into_buckets(sizes, first_bytes=self.first_bytes, bucket_bytes=self.bucket_bytes)
            else:
                members = [[i for i, e in enumerate(entries) if e[0].bucket == b] for b in _planned_buckets(entries)]
            for indices in members:
                chosen = [entries[index] for index in indices]
                names = [(layer.name, name) for layer, name, _ in chosen]
                exchanges.append(BucketExchange(names, [p for _, _, p in chosen], group, step))
        return exchanges


_Entry = tuple[BoundLayer, str, nn.Parameter]
"""A parameter, its layer and its name there."""


def _by_type(layers: Sequence[BoundLayer]) -> dict[tuple[torch.dtype, torch.device], list[_Entry]]:
    by_type: dict[tuple[torch.dtype, torch.device], list[_Entry]] = {}
    for layer in layers:
        # Backward frees the last parameter of a module first or in no fixed order; they are close together anyway.
        for name, parameter in layer.parameters.items():
            by_type.setdefault((parameter.dtype, parameter.device), []).append((layer, name, parameter))
    return by_type


def _planned_buckets(entries: Sequence[_Entry]) -> list[int | None]:
    return list(dict.fromkeys(layer.bucket for layer, _, _ in entries))


class BucketExchange(Exchange):
    """One bucket at work."""

    def __init__(
        self, names: Sequence[tuple[str, str]], parameters: Sequence[nn.Parameter], group: Group, step: StepState
    ) -> None:
        layers = tuple(dict.fromkeys(layer for layer, _ in names))
        label = layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
        super().__init__(name=label, layers=layers, group=group, step=step)
        self._names = [f"{layer}.{name}" for layer, name in names]
        self._layer_of = [layer for layer, _ in names]
        self.bucket = Bucket(parameters)
        self._scale = 1.0 / group.world_size
        self._additions = Additions(len(parameters))
        self._made = [0.0] * len(parameters)
        self._transfer = Transfer(label, self._issue)
        self.transfers = (self._transfer,)
        self.votes = 0.0
        self.vote_for_new_order = False
        for index, parameter in enumerate(parameters):
            self.handles.append(on_gradient(parameter, lambda p, i=index: self._on_gradient(i, p)))  # type: ignore[misc]

    def _on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        self.step.on_backward()
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise CommError(
                f"rank {self.group.rank}: {self._names[index]} has a sparse gradient, which cannot be all-reduced; "
                "use the scheme sparse_rows for this layer, or build the embedding with sparse=False"
            )
        view = self.bucket.views[index]
        if not self.step.syncing:
            if gradient is not view:
                view.copy_(gradient)
                parameter.grad = view
            return
        self.step.arrived(self._layer_of[index])
        if self._additions.add(index):
            self._take(index)
            if not self._additions.missing:
                self._transfer.mark_ready(self.bucket.flat.device)
        elif index not in self._additions.missing:
            raise CommError(
                f"rank {self.group.rank}: autograd added to {self._names[index]} again after it had been complete, at "
                f"exchange {self.step.index}; {LATE_ADDITION}"
            )

    def _take(self, index: int) -> None:
        """Leaves this rank's share of the mean in the bucket, and the view in `p.grad` where there was a gradient."""
        parameter, view = self.bucket.parameters[index], self.bucket.views[index]
        gradient = parameter.grad
        self._made[index] = float(gradient is not None)
        if gradient is None:
            view.zero_()
        elif gradient is view:
            view.mul_(self._scale)
        else:
            torch.mul(gradient, self._scale, out=view)
            parameter.grad = view

    def flush(self) -> None:
        """What backward did not reach counts as zero here; other ranks may have reached it."""
        for index in sorted(self._additions.missing):
            self._take(index)
        if not self._transfer.ready.is_set():
            self._transfer.mark_ready(self.bucket.flat.device)

    def _issue(self) -> Pending:
        self.bucket.facts.copy_(torch.tensor([*self._made, float(self.vote_for_new_order)]))
        return self.group.all_reduce(self.bucket.flat, f"all-reduce of {self.name} in step {self.step.index}")

    def finish(self) -> None:
        """A gradient that no rank made stays as it was, so that the optimizer skips it as it would on one rank."""
        *made, self.votes = self.bucket.facts.tolist()
        if 0.0 in self._made:
            for parameter, view, count in zip(self.bucket.parameters, self.bucket.views, made, strict=True):
                if count > 0 and parameter.grad is None:
                    parameter.grad = view

    def wants_new_order(self) -> bool:
        """Whether some rank voted in this step."""
        return self.votes > 0

    def reset(self) -> None:
        """Waits for all gradients again."""
        super().reset()
        self._additions.reset()

    def detach(self) -> None:
        """Gradients get memory of their own again."""
        super().detach()
        for parameter, view in zip(self.bucket.parameters, self.bucket.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
