"""What stays each rank's own: parameters and buffers that no rank makes equal, exchanges or compares.

They are named in `RunOptions.ignore` or, as for PyTorch's DDP, in `model._ddp_params_and_buffers_to_ignore`. DDP marks
such tensors with an attribute; so do we, and whoever asks a model what it trains finds the mark.
"""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import torch
from torch import nn

from poseidon.errors import ConfigError
from poseidon.profile.structure import IGNORED_MARK, is_ignored

DDP_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"


class Ignored:
    """The tensors of one model that stay each rank's own; marks them until `remove` is called.

    Args:
        model: The root module.
        names: Of parameters, of buffers, or of modules, of which all that is in them counts; any name of a tensor that
            several modules share. What the model names for DDP is ignored as well.

    Raises:
        ConfigError: There is nothing of such a name; the nearest name is told.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] = ()) -> None:
        self._names = _resolve(model, names)
        self._marked: list[torch.Tensor] = []
        for name, tensor in named_tensors(model):
            if name in self._names and not is_ignored(tensor):
                setattr(tensor, IGNORED_MARK, True)
                self._marked.append(tensor)

    def __contains__(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is ignored."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def remove(self) -> None:
        """Takes the marks away."""
        for tensor in self._marked:
            delattr(tensor, IGNORED_MARK)
        self._marked.clear()


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and then buffers by name, one that several modules share once for each of its names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _resolve(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """The names of all tensors that are meant, those included that another module calls otherwise."""
    tensors = named_tensors(model)
    meant = {name for name in getattr(model, DDP_ATTRIBUTE, ()) if name in dict(tensors)}
    for asked in names:
        found = {name for name, _ in tensors if name == asked or name.startswith(f"{asked}.")}
        if not found:
            raise ConfigError(f"cannot ignore {asked!r}: {_nearest(asked, model)}")
        meant |= found
    same = {id(tensor) for name, tensor in tensors if name in meant}
    return frozenset(name for name, tensor in tensors if id(tensor) in same)


def _nearest(asked: str, model: nn.Module) -> str:
    known = [*dict(named_tensors(model)), *dict(model.named_modules())]
    close = get_close_matches(asked, filter(None, known), n=1)
    what = "the model has no parameter, buffer or module with tensors of this name"
    return f"{what}; did you mean {close[0]!r}?" if close else what
