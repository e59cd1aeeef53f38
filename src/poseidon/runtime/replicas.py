"""Models and plans that are alike on every rank, and replicas that start equal."""

import json
from collections.abc import Container, Iterator
from itertools import zip_longest

import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan


def describe_model(model: nn.Module, ignored: Container[str] = ()) -> list[list[str]]:
    """Name, shape, dtype and whether it is trained of every parameter and buffer, in order."""
    rows = [[name, _form(p), str(p.dtype), str(p.requires_grad)] for name, p in model.named_parameters()]
    rows += [[name, _form(b), str(b.dtype), "buffer"] for name, b in model.named_buffers()]
    return [row for row in rows if row[0] not in ignored]


def _form(tensor: torch.Tensor) -> str:
    """The shape, and where it is not the usual one the layout in memory: gradients are summed as they lie there."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_contiguous() else f"{shape} with strides {tensor.stride()}"


def check_same_model(model: nn.Module, group: Group, ignored: Container[str] = ()) -> None:
    """Compares the models of all ranks before anything depends on their being alike.

    Args:
        model: The root module.
        group: The ranks.
        ignored: Names of what stays each rank's own.

    Raises:
        InfeasibleError: They differ; the first difference is named.
    """
    for rank, index, here, there in _differences(describe_model(model, ignored), group, "comparing the models"):
        raise InfeasibleError(
            f"the models differ between ranks, so they cannot train together: number {index} is "
            f"{_in_words(here)} on rank 0 and {_in_words(there)} on rank {rank}; "
            "build the same model on every rank"
        )


def check_same_plan(plan: Plan, group: Group) -> None:
    """Compares what the ranks are about to do.

    Raises:
        InfeasibleError: Their plans differ; the first difference is named.
    """
    mine = [
        ["wait_free", str(plan.wait_free)],
        ["connections", str(plan.connections)],
        ["the order of arrival", ", ".join(plan.arrival)],
        ["the order of transfers", ", ".join(plan.order)],
        ["what is in buckets", "; ".join(", ".join(bucket) for bucket in plan.buckets)],
        ["what is deferred", ", ".join(plan.deferred)],
        ["each rank's portion of the samples", ", ".join(map(str, plan.portions))],
        *([f"the scheme of layer {name!r}", scheme.model_dump_json()] for name, scheme in plan.schemes.items()),
        *([f"rows of layer {layer.name!r}", str(layer.rows)] for layer in plan.profile.trainable),
    ]
    for rank, _, here, there in _differences(mine, group, "comparing the plans"):
        what, value = here or there or ["", ""]
        raise InfeasibleError(
            f"the plans differ between ranks: {what} is {value} on rank 0 and {(there or ['', 'missing'])[1]} on rank "
            f"{rank}; give every rank the same plan"
        )


def _differences(
    mine: list[list[str]], group: Group, what: str
) -> Iterator[tuple[int, int, list[str] | None, list[str] | None]]:
    """Where a rank's rows differ from rank 0's: that rank, the row's number, rank 0's row and that rank's."""
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), what)]
    for rank, other in enumerate(everyone):
        for index, (here, there) in enumerate(zip_longest(everyone[0], other)):
            if here != there:
                yield rank, index, here, there


def _in_words(row: list[str] | None) -> str:
    if row is None:
        return "missing"
    name, shape, dtype, role = row
    kind = {"buffer": "buffer", "True": "parameter", "False": "frozen parameter"}[role]
    return f"{kind} {name!r} {shape} {dtype}"


def broadcast_model(model: nn.Module, group: Group, ignored: Container[str] = ()) -> None:
    """Gives every rank rank 0's parameters and buffers, in place, but for what is ignored."""
    for name, tensor in model.named_parameters():
        if name not in ignored:
            broadcast_tensor(tensor, group)
    broadcast_buffers(model, group, ignored)


def broadcast_buffers(model: nn.Module, group: Group, ignored: Container[str] = ()) -> None:
    """Gives every rank rank 0's buffers, such as running statistics, by name, but for what is ignored."""
    for name, tensor in model.named_buffers():
        if name not in ignored:
            broadcast_tensor(tensor, group)


def broadcast_tensor(tensor: torch.Tensor, group: Group) -> None:
    """Gives every rank rank 0's value, in place; a tensor whose elements share memory is left alone."""
    data = tensor.detach()
    if data.numel() == 0 or any(
        stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True)
    ):
        return
    if data.is_contiguous():
        group.broadcast(data, "making the replicas equal")
    else:
        copy = data.contiguous()
        group.broadcast(copy, "making the replicas equal")
        data.copy_(copy)
