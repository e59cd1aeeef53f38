"""Files of parts between ranks: straight from one host's memory or disk into another's memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from poseidon.comm.group import Group
from poseidon.errors import CheckpointError
from poseidon.units import MIB

CHUNK = 64 * MIB
"""Bytes of one message."""
FILES_TAG = 3
"""Of the messages, on connections that nothing else uses meanwhile."""


def exchange_files(
    group: Group, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Sends files and receives others; whoever is named in `sends` names this rank in `receives`, in the same order.

    Args:
        group: The ranks.
        sends: The rank that gets a file, and its content.
        receives: The rank that a file comes from, and room for its content.

    Raises:
        CommError: A rank is gone.
    """
    out = [(peer, part) for peer, content in sends for part in content.split(CHUNK)]
    into = [(peer, part) for peer, room in receives for part in room.split(CHUNK)]
    group.exchange(out, into, tag=FILES_TAG, what="sending parts of a state").wait()


def room_for(size: int) -> torch.Tensor:
    """Memory for the content of a file of so many bytes."""
    return torch.empty(size, dtype=torch.uint8)


def content_of(path: Path) -> torch.Tensor:
    """The bytes of a file, read when they are used.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        size = path.stat().st_size
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot send {path}: {error}") from error
