"""Replicas that start equal, and the proof that they still are."""

import hashlib
import json

import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.errors import CommError, InfeasibleError


def describe_model(model: nn.Module) -> list[list[str]]:
    """Name, shape, dtype and whether it is trained of every parameter and buffer, in order."""
    rows = [[name, str(tuple(p.shape)), str(p.dtype), str(p.requires_grad)] for name, p in model.named_parameters()]
    return rows + [[name, str(tuple(b.shape)), str(b.dtype), "buffer"] for name, b in model.named_buffers()]


def check_same_model(model: nn.Module, group: Group) -> None:
    """Compares the models of all ranks before anything depends on their being alike.

    Raises:
        InfeasibleError: They differ; the first difference is named.
    """
    mine = describe_model(model)
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "comparing the models")]
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other == first:
            continue
        for index in range(max(len(first), len(other))):
            here = first[index] if index < len(first) else None
            there = other[index] if index < len(other) else None
            if here != there:
                raise InfeasibleError(
                    f"the models differ between ranks, so they cannot train together: number {index} is "
                    f"{_in_words(here)} on rank 0 and {_in_words(there)} on rank {rank}; "
                    "build the same model on every rank"
                )


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
