"""Replicas that start equal, and the proof that they still are."""

import hashlib
import json
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError
from poseidon.plan import Plan


def describe_model(model: nn.Module) -> list[list[str]]:
    """Name, shape, dtype and whether it is trained of every parameter and buffer, in order."""
    rows = [[name, _form(p), str(p.dtype), str(p.requires_grad)] for name, p in model.named_parameters()]
    return rows + [[name, _form(b), str(b.dtype), "buffer"] for name, b in model.named_buffers()]


def _form(tensor: torch.Tensor) -> str:
    """The shape, and where it is not the usual one the layout in memory: gradients are summed as they lie there."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_contiguous() else f"{shape} with strides {tensor.stride()}"


def check_same_model(model: nn.Module, group: Group) -> None:
    """Compares the models of all ranks before anything depends on their being alike.

    Raises:
        InfeasibleError: They differ; the first difference is named.
    """
    for rank, index, here, there in _differences(describe_model(model), group, "comparing the models"):
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


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Gives every rank rank 0's parameters and buffers, in place."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast_tensor(tensor, group)


def broadcast_buffers(model: nn.Module, group: Group) -> None:
    """Gives every rank rank 0's buffers, such as the running statistics of batch normalization."""
    for tensor in model.buffers():
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


def hash_parameters(model: nn.Module) -> dict[str, str]:
    """A digest of the bits of every parameter, by name."""
    return {name: _digest(p.detach()) for name, p in model.named_parameters()}


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def check_replicas(model: nn.Module, group: Group, step: int) -> None:
    """Compares every parameter bit by bit over the ranks, by digest.

    Raises:
        CommError: They differ; the first parameter and the ranks that differ from rank 0 are named.
    """
    everyone = [
        json.loads(text) for text in group.all_gather_text(json.dumps(hash_parameters(model)), "comparing replicas")
    ]
    for name, digest in everyone[0].items():
        odd = [rank for rank, other in enumerate(everyone) if other.get(name) != digest]
        if odd:
            raise CommError(
                f"the replicas have drifted apart after exchange {step}: parameter {name!r} on rank(s) "
                f"{', '.join(map(str, odd))} differs from rank 0's; did something besides the optimizer "
                "change it, or do the hosts compute differently (another processor or another number of threads)?"
            )
