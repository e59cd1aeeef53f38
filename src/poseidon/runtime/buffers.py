"""When buffers become rank 0's on every rank: on request, or after each step.

Never in a forward pass and never between a forward and its backward, where autograd may have saved one. Buffers are
looked up by name whenever they are sent, so that a module may give itself a new tensor.
"""

import json
from collections.abc import Container, Mapping

import torch
from torch import nn

from poseidon.comm.capture import ModuleHook
from poseidon.comm.group import Group
from poseidon.errors import InfeasibleError


class Buffers:
    """The buffers of one run.

    Args:
        model: The root module, whose buffers are equal on all ranks now.
        group: The ranks.
        after_step: Whether they are to be sent after each step, which may be before transfers have ended.
        ignored: Names of those that stay each rank's own.
    """

    def __init__(
        self, model: nn.Module, group: Group, *, after_step: bool = False, ignored: Container[str] = ()
    ) -> None:
        self._model = model
        self._group = group
        self._ignored = ignored
        self._side = group.side() if after_step and group.world_size > 1 else None
        self._agreed = self._layout()
        self._are_equal = True
        """Whether nothing has happened since they were made equal that makes them differ."""
        self._hook = model.register_forward_pre_hook(ModuleHook(self._note_forward))

    def remove(self) -> None:
        """Takes out what was put into the model."""
        self._hook.remove()

    @property
    def equal(self) -> list[str]:
        """The names of those that have to be equal on all ranks at present: all, or none since the last forward."""
        return list(self._named()) if self._are_equal else []

    @property
    def are_equal(self) -> bool:
        """Whether nothing has happened since they were made equal that makes them differ."""
        return self._are_equal

    def note_equal(self, equal: bool) -> None:
        """They have been given values: the same ones on every rank, or each rank its own."""
        self._are_equal = equal

    def sync(self) -> None:
        """Gives every rank rank 0's buffers; on all ranks together, while no transfer is under way.

        Raises:
            InfeasibleError: A rank has other buffers than rank 0.
        """
        layout = self._layout()
        everyone = [json.loads(text) for text in self._group.all_gather_text(json.dumps(layout), "comparing buffers")]
        for rank, other in enumerate(everyone):
            if name := _first_difference(everyone[0], other):
                raise InfeasibleError(
                    f"cannot send rank 0's buffers: {name!r} is {_form(everyone[0], name)} on rank 0 and "
                    f"{_form(other, name)} on rank {rank}; build it alike on every rank, or name it in ignore"
                )
        self._agreed = layout
        self._send(self._group)

    def after_step(self) -> None:
        """Sends rank 0's buffers where that is the policy; on all ranks together.

        Raises:
            InfeasibleError: A buffer is not what all ranks agreed on.
        """
        if self._side is None:
            return
        layout = self._layout()
        if name := _first_difference(self._agreed, layout):
            raise InfeasibleError(
                f"rank {self._group.rank}: cannot send the buffers after this step: {name!r} was "
                f"{_form(self._agreed, name)} when all ranks last compared them and is {_form(layout, name)} now; call "
                'run.sync_buffers() after such a change, use buffers="on_request", or name it in ignore'
            )
        with self._group.waiting("the sending of buffers after a step"):
            self._send(self._side)

    def _note_forward(self, *_: object) -> None:
        self._are_equal = self._are_equal and not self._model.training

    def _named(self) -> dict[str, torch.Tensor]:
        """In the order of names, which is the same on every rank whatever happened to its modules."""
        return {name: buffer for name, buffer in sorted(self._model.named_buffers()) if name not in self._ignored}

    def _layout(self) -> dict[str, str]:
        return {name: f"{tuple(buffer.shape)} {buffer.dtype}" for name, buffer in self._named().items()}

    def _send(self, group: Group) -> None:
        """One message for each dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self._named().values():
            if has_own_memory(buffer):
                alike.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        for buffers in alike.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            group.broadcast(flat.view(torch.uint8), "sending buffers")
            if group.rank != 0:
                for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(values.view(buffer.shape))
        self._are_equal = True


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and none of them shares its memory with another."""
    stretched = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and not stretched


def _first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    names = dict.fromkeys([*here, *there])
    return next((name for name in names if here.get(name) != there.get(name)), None)


def _form(layout: Mapping[str, str], name: str) -> str:
    return layout.get(name, "missing")
