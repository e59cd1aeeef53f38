"""What a run trains, and whether the model is still the one that it knows.

A parameter may come to be trained while the run goes on: it was frozen, or it was not there. Nothing would exchange its
gradient, and replicas would drift apart. So before each forward pass the model is looked through, for a fraction of a
millisecond. Only where there is something new do the ranks talk: all of them have to see the same change before the
same exchange. Freezing is no change, since a GAN freezes and unfreezes in every step: what is frozen counts as zero.
"""

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from poseidon.comm.group import Group, Pending
from poseidon.errors import CommError
from poseidon.profile.structure import owned_parameters
from poseidon.runtime.replicas import broadcast_tensor

CHANGE_TAG = 7
"""Below those that exchanges use."""
_NAMED = 4
"""So many parameters are named in a message."""


@dataclass(frozen=True)
class Change:
    """What has changed in what the model trains."""

    added: tuple[str, ...]
    """Names of parameters that are trained and were not."""
    gone: tuple[str, ...]
    """Names of parameters that were trained and are not in the model any more."""
    forms: tuple[str, ...]
    """Of each that was added: shape, type, and whether every rank has rank 0's value already."""

    def __str__(self) -> str:
        added = f"{_listed(self.added)} newly trained" if self.added else ""
        gone = f"{_listed(self.gone)} gone from the model" if self.gone else ""
        return ", ".join(filter(None, (added, gone)))


class Inventory:
    """The parameters of one model as a run knows them.

    Args:
        model: The root module; every rank has rank 0's values.
        ignored: Names of what stays each rank's own.
    """

    def __init__(self, model: nn.Module, ignored: Container[str] = ()) -> None:
        self._model = model
        self._ignored = ignored
        self._trained: dict[int, nn.Parameter] = {}
        self._note_equal()
        self.take()

    @property
    def trained(self) -> Container[int]:
        """`id`s of the parameters that the run trains, those included that are frozen at present."""
        return self._trained

    @property
    def changed_layers(self) -> Container[str]:
        """Names of the layers whose parameters are not those that the run trains."""
        now = _ids_by_layer(self.layers)
        return {name for name, ids in now.items() if ids != self._layers.get(name)}

    @property
    def layers(self) -> dict[str, dict[str, nn.Parameter]]:
        """The parameters that the run is to train, by layer, as they are in the model."""
        return owned_parameters(self._model, trained=self._trained, ignored=self._ignored)

    def take(self) -> None:
        """From here on, what the model trains now is what the run trains."""
        layers = self.layers
        self._layers = _ids_by_layer(layers)
        self._names = {_joined(layer, name): p for layer, owned in layers.items() for name, p in owned.items()}
        self._trained = {id(parameter): parameter for parameter in self._names.values()}
        self._forms = [(p.dtype, p.device) for p in self._names.values()]
        self._snapshot()

    def _snapshot(self) -> None:
        """What tells quickly that nothing has changed."""
        self._modules = list(self._model.modules())
        self._parameter_ids, self._module_ids = self._ids()
        self._resting = [
            p for name, p in self._model.named_parameters() if id(p) not in self._trained and name not in self._ignored
        ]
        """Those that are frozen and were never trained."""

    def _ids(self) -> tuple[list[int], list[int]]:
        parameters = [id(p) for module in self._modules for p in module._parameters.values()]
        return parameters, [id(child) for module in self._modules for child in module._modules.values()]

    # What has changed

    def has_other_parameters(self) -> bool:
        """Whether parameters or modules have been added, taken away or replaced."""
        return self._ids() != (self._parameter_ids, self._module_ids)

    def look(self) -> Change | None:
        """What has changed in what is trained; None if nothing has.

        Raises:
            CommError: A parameter has another type or is on another device.
        """
        if [(p.dtype, p.device) for p in self._names.values()] != self._forms:
            self._refuse_conversion()
        if not self.has_other_parameters() and not any(p.requires_grad for p in self._resting):
            return None
        if any(not isinstance(p, nn.Parameter | None) for m in self._modules for p in m._parameters.values()):
            return None  # `torch.func.functional_call` has put other tensors in the place of parameters for one call
        change = self._compare()
        if change is None:
            self._snapshot()
        return change

    def _refuse_conversion(self) -> None:
        for (name, parameter), form in zip(self._names.items(), self._forms, strict=True):
            if (parameter.dtype, parameter.device) != form:
                before, now = (" on ".join(map(str, one)) for one in (form, (parameter.dtype, parameter.device)))
                raise CommError(
                    f"parameter {name!r} is {now} now and was {before} when the run began: its gradients have buffers "
                    "of that kind; call run.detach() before converting or moving the model, and distribute it again"
                )

    def _compare(self) -> Change | None:
        now = {_joined(layer, name): p for layer, owned in self.layers.items() for name, p in owned.items()}
        added = tuple(name for name, p in now.items() if self._names.get(name) is not p)
        gone = tuple(name for name, p in self._names.items() if now.get(name) is not p)
        if not added and not gone:
            return None
        return Change(added, gone, tuple(self._form(now[name]) for name in added))

    def _form(self, parameter: nn.Parameter) -> str:
        origin = "as rank 0 had it" if id(parameter) in self._equal else "new"
        return f"{tuple(parameter.shape)} {parameter.dtype} {origin}"

    # What all ranks do about it together

    def make_equal(self, group: Group) -> None:
        """Gives every rank rank 0's value of each parameter and buffer that it has not had yet."""
        new: list[tuple[str, torch.Tensor]]
        new = [(name, p) for name, p in self._model.named_parameters() if id(p) not in self._equal]
        new += [(name, b) for name, b in self._model.named_buffers() if name not in self._buffers]
        for name, tensor in new:
            if name not in self._ignored:
                broadcast_tensor(tensor, group)
        self._note_equal()

    def _note_equal(self) -> None:
        """Every rank has had rank 0's values; a buffer may since be another tensor, of the same name."""
        self._equal = {id(parameter): parameter for parameter in self._model.parameters()}
        self._buffers = {name for name, _ in self._model.named_buffers()}


def agree(
    change: Change, group: Group, num_exchanges: int, *, is_open: bool, wait: Callable[[Pending, str], None]
) -> bool:
    """Makes sure that every rank has come upon the same change before the same exchange.

    Args:
        change: What this rank has come upon.
        group: The ranks.
        num_exchanges: How many exchanges lie behind this rank.
        is_open: Whether something of the next exchange has begun, or has accumulated.
        wait: Blocks until a transfer has ended, or fails once it cannot end.

    Returns:
        Whether that is so on some rank.

    Raises:
        CommError: Another rank has not come upon it, or upon another change.
    """
    if group.world_size == 1:
        return False
    mine = torch.tensor([num_exchanges, int(is_open), *_digest(change)], dtype=torch.int64)
    theirs = {peer: torch.zeros_like(mine) for peer in group.peers}
    what = f"agreeing on what the model trains: {change} on rank {group.rank}"
    with group.waiting(what):
        pending = group.exchange([(p, mine) for p in group.peers], list(theirs.items()), tag=CHANGE_TAG, what=what)
        try:
            wait(pending, what)
        except CommError as error:
            raise CommError(
                f"rank {group.rank}: {change} before exchange {num_exchanges}, but another rank did not follow: every "
                f"rank has to change what is trained before the same forward pass ({error})"
            ) from error
    if all(torch.equal(mine[[0, 2, 3]], other[[0, 2, 3]]) for other in theirs.values()):
        return bool(is_open or any(other[1] for other in theirs.values()))
    raise CommError(_difference(change, group, num_exchanges))


def _difference(change: Change, group: Group, num_exchanges: int) -> str:
    mine = [num_exchanges, str(change), *change.forms]
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "comparing what is trained")]
    rank = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
    here, there = (f"{one[1]} before exchange {one[0]}" for one in (everyone[0], everyone[rank]))
    if here == there:
        here, there = next(
            (f"{here} as {one}", f"{there} as {other}")
            for one, other in zip(everyone[0][2:], everyone[rank][2:], strict=True)
            if one != other
        )
    return (
        f"rank {group.rank}: what the model trains has changed differently on the ranks: {here} on rank 0, {there} on "
        f"rank {rank}; make the same change on every rank before the same forward pass"
    )


def _digest(change: Change) -> list[int]:
    """Two numbers that tell changes apart."""
    text = json.dumps([change.added, change.gone, change.forms])
    bits = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return [int.from_bytes(bits[at : at + 8], "little", signed=True) for at in (0, 8)]


def _ids_by_layer(layers: Mapping[str, Mapping[str, nn.Parameter]]) -> dict[str, dict[str, int]]:
    return {layer: {name: id(p) for name, p in owned.items()} for layer, owned in layers.items()}


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_NAMED]))
    return listed if len(names) <= _NAMED else f"{listed} and {len(names) - _NAMED} more"
