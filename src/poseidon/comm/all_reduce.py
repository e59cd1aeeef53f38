"""All-reduce: dense gradients, summed over the ranks in buckets.

In one level, over all ranks alike, or in two, the ranks of a host first. In the gradients' own format, or in a narrower
one: then each rank's share of the mean is rounded before it leaves, and so is every sum on the way, P roundings in all.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, split_into_buckets
from poseidon.comm.capture import LATE_ADDITION, Accumulated, Additions, on_gradient
from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import (
    BoundLayer,
    CommScheme,
    Cost,
    Exactness,
    Exchange,
    Message,
    StepState,
    Transfer,
    Wire,
    check_dense,
    check_levels,
    local_gradient_seconds,
    wire_dtype,
    wire_num_bytes,
)
from poseidon.comm.two_level import TwoLevelSum, inner_num_bytes, outer_num_bytes
from poseidon.errors import CommError
from poseidon.profile.graph import LayerSpec, TensorSpec
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
    levels: Literal[1, 2] = 1
    """2 sums over the ranks of each host first and then over the hosts."""
    wire: Wire = ""
    """The format in which gradients cross the network: `bfloat16` has the range of float32, `float16` more digits."""

    @property
    def exactness(self) -> Exactness:
        """Rounded if gradients are narrower on the wire."""
        return "rounded" if self.wire else "exact"

    def refuse(self, layer: LayerSpec) -> str | None:
        """Every dense gradient can be all-reduced."""
        del layer
        return None

    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """2(P-1)/P of the gradient: the floor without help from the network, and the same in two levels."""
        return 2 * self._num_bytes(layer) * (world_size - 1) // world_size

    def _num_bytes(self, layer: LayerSpec) -> int:
        """Of the gradient as it crosses the network."""
        return sum(math.prod(t.shape) * wire_num_bytes(self.wire, _itemsize(t)) for t in layer.parameters)

    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """The measured curve without its latency, which is the bucket's, shared by many layers; a copy into the bucket.

        The copy reads the gradient and reads and writes the bucket; another format costs a copy before and one after.
        """
        messages, wire_seconds = self._messages(layer, rates)
        casting = (layer.num_bytes + self._num_bytes(layer)) / rates.memory_bandwidth if self.wire else 0.0
        return Cost(
            messages=messages,
            wire_seconds=wire_seconds if rates.world_size > 1 else 0.0,
            backward_seconds=local_gradient_seconds(layer, rates),
            prepare_seconds=COPY_TRAFFIC * layer.num_bytes / rates.memory_bandwidth + casting,
            finish_seconds=casting,
        )

    def _messages(self, layer: LayerSpec, rates: Rates) -> tuple[tuple[Message, ...], float]:
        """What the layer sends, and the seconds that takes on an idle network; flat where only that was measured."""
        if self.levels == 1 or rates.inner is None or rates.outer is None:
            num_bytes = self.bytes_sent(layer, rates.world_size)
            seconds = num_bytes / rates.all_reduce[rates.connections].bandwidth
            return (Message(when="backward", pattern="all_reduce", num_bytes=num_bytes),), seconds
        inside = inner_num_bytes(self._num_bytes(layer), rates.ranks_per_host)
        across = outer_num_bytes(self._num_bytes(layer), rates.num_hosts)
        messages = (
            Message(when="backward", pattern="inner", num_bytes=inside),
            Message(when="backward", pattern="outer", num_bytes=across),
            Message(when="backward", pattern="inner", num_bytes=inside),
        )
        return messages, 2 * inside / rates.inner.bandwidth + across / rates.outer.bandwidth

    def check(self, layers: Sequence[BoundLayer], group: Group) -> None:
        """Gradients have to be dense; two levels need hosts with several ranks."""
        check_levels(self.levels, self.kind, group)
        for layer in layers:
            check_dense(layer, self.kind)

    def bind(self, layers: Sequence[BoundLayer], group: Group, step: StepState) -> list[Exchange]:
        """One exchange per bucket, the plan's or by size; dtypes and devices do not share one, nor what is deferred."""
        buckets = [bucket for entries in _alike(layers) for bucket in self._split(entries)]
        return [BucketExchange(bucket, group, step, levels=self.levels, wire=self.wire) for bucket in buckets]

    def _split(self, entries: Sequence["_Entry"]) -> list[list["_Entry"]]:
        if entries[0][0].bucket is not None:
            planned = dict.fromkeys(layer.bucket for layer, _, _ in entries)
            return [[entry for entry in entries if entry[0].bucket == bucket] for bucket in planned]
        sizes = [p.numel() * p.element_size() for _, _, p in entries]
        members = split_into_buckets(sizes, first_bytes=self.first_bytes, bucket_bytes=self.bucket_bytes)
        return [[entries[index] for index in indices] for indices in members]


_Entry = tuple[BoundLayer, str, nn.Parameter]
"""A parameter, its layer and its name there."""


def _alike(layers: Sequence[BoundLayer]) -> list[list[_Entry]]:
    """The parameters that may share a bucket."""
    alike: dict[tuple[torch.dtype, torch.device, bool], list[_Entry]] = {}
    for layer in layers:
        # Backward frees the last parameter of a module first or in no fixed order; they are close together anyway.
        for name, parameter in layer.parameters.items():
            alike.setdefault((parameter.dtype, parameter.device, layer.deferred), []).append((layer, name, parameter))
    return list(alike.values())


def _itemsize(tensor: TensorSpec) -> int:
    return tensor.num_bytes // max(1, math.prod(tensor.shape))


class BucketExchange(Exchange):
    """One bucket at work."""

    def __init__(
        self, entries: Sequence[_Entry], group: Group, step: StepState, *, levels: int = 1, wire: Wire = ""
    ) -> None:
        layers = tuple(dict.fromkeys(layer.name for layer, _, _ in entries))
        label = layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
        parameters = tuple(parameter for _, _, parameter in entries)
        super().__init__(name=label, layers=layers, parameters=parameters, group=group, step=step)
        self._names = [f"{layer.name}.{name}" for layer, name, _ in entries]
        self._layer_of = [layer.name for layer, _, _ in entries]
        self.bucket = Bucket(parameters)
        self._weighing = step.weighing
        self._additions = Additions(len(parameters))
        self._made = [0.0] * len(parameters)
        self._earlier: dict[int, torch.Tensor] | None = None
        """By a parameter's number, the mean of earlier exchanges, to which this one adds; None until the first pass."""
        self._noted: dict[int, Accumulated] = {}
        """The same parameters' gradients as the last pass has left them."""
        self._is_passing = False
        flat = self.bucket.flat
        dtype = wire_dtype(wire, flat.dtype)
        self._on_wire = flat if dtype == flat.dtype else torch.empty_like(flat, dtype=dtype)
        self._sum = TwoLevelSum(self._on_wire, group, f"all-reduce of {label}") if levels == 2 else None
        self._transfer = Transfer(
            label, self._issue, self._arrive, between=(self._cross, self._share) if self._sum else ()
        )
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

    def begin_backward(self) -> None:
        """A mean that lies in `p.grad` already is no part of this rank's gradient, and no items count for it."""
        if not self.step.weighing.by_items:
            return
        self._is_passing = True
        if self._earlier is not None:
            self._earlier = {i: gradient for i, gradient in self._earlier.items() if not self._noted[i].is_forgotten}
            return
        self._earlier = {}
        for index, (parameter, view) in enumerate(zip(self.bucket.parameters, self.bucket.views, strict=True)):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                self._earlier[index] = view.clone() if gradient is view else gradient
                parameter.grad = view.zero_()

    def end_unsynced(self) -> None:
        """Until the next pass only the loop touches the gradients."""
        self._is_passing = False
        views = self.bucket.views
        self._noted = {i: Accumulated(self.parameters[i], views[i].zero_) for i in self._earlier or ()}

    def _take(self, index: int) -> None:
        """Leaves this rank's share of the mean in the bucket, and the view in `p.grad` where there was a gradient."""
        parameter, view = self.bucket.parameters[index], self.bucket.views[index]
        gradient = parameter.grad
        self._weighing = self.step.weighing
        self._made[index] = float(gradient is not None)
        if gradient is not None and self._weighing.own:
            torch.mul(gradient, self._weighing.own, out=view)
        else:
            view.zero_()
        if gradient is not None:
            parameter.grad = view

    def flush(self) -> None:
        """What backward did not reach counts as zero here; other ranks may have reached it."""
        if not self._is_passing:
            self.begin_backward()
        if not self._transfer.ready.is_set():
            for index in sorted(self._additions.missing):
                self._take(index)
            self._transfer.mark_ready(self.bucket.flat.device)

    def _issue(self) -> Pending:
        self.bucket.facts.copy_(torch.tensor([*self._made, float(self.vote_for_new_order)]))
        if self._on_wire is not self.bucket.flat:
            self._on_wire.copy_(self.bucket.flat)
        if self._sum is not None:
            return self._sum.collect(self.tag)
        return self.group.all_reduce(self._on_wire, f"all-reduce of {self.name} in step {self.step.index}")

    def _cross(self, collected: Pending) -> Pending:
        assert self._sum is not None
        return self._sum.cross(collected)

    def _share(self, crossed: Pending) -> Pending:
        assert self._sum is not None
        return self._sum.share(crossed, self.tag + 1)

    def _arrive(self, pending: Pending) -> None:
        pending.wait()
        if self._on_wire is not self.bucket.flat:
            self.bucket.flat.copy_(self._on_wire)
        if self._weighing.correction != 1.0:
            self.bucket.gradients.mul_(self._weighing.correction)

    def finish(self) -> None:
        """A gradient that no rank made stays as it was, so that the optimizer skips it as it would on one rank."""
        *self.made, self.votes = self.bucket.facts.tolist()
        if 0.0 in self._made:
            for parameter, view, count in zip(self.bucket.parameters, self.bucket.views, self.made, strict=True):
                if count > 0 and parameter.grad is None:
                    parameter.grad = view
        self._add_earlier()

    def _add_earlier(self) -> None:
        for index, gradient in (self._earlier or {}).items():
            self.bucket.views[index].add_(gradient)
        self._earlier = None

    def wants_new_order(self) -> bool:
        """Whether some rank voted in this step."""
        return self.votes > 0

    def reset(self) -> None:
        """Waits for all gradients again."""
        super().reset()
        self._additions.reset()
        self._is_passing = False

    def detach(self) -> None:
        """Gradients get memory of their own again."""
        super().detach()
        self._add_earlier()
        for parameter, view in zip(self.bucket.parameters, self.bucket.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
