"""What stays each rank's own: parameters and buffers that no rank makes equal, exchanges or compares.

They are named in `RunOptions.ignore` or, as for PyTorch's DDP, in `model._ddp_params_and_buffers_to_ignore`.
"""

from collections.abc import Iterable
from difflib import get_close_matches

import torch
from torch import nn

from poseidon.errors import ConfigError

DDP_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"


def ignored_names(model: nn.Module, names: Iterable[str] = ()) -> frozenset[str]:
    """The names of all tensors of a model that stay each rank's own.

    Args:
        model: The root module. What it names for DDP is ignored as well.
        names: Of parameters, of buffers, or of modules, of which all that is in them counts; any name of a tensor that
            several modules share.

    Returns:
        All names of each such tensor.

    Raises:
        ConfigError: There is nothing of such a name; the nearest name is told.
    """
    tensors = _named_tensors(model)
    meant = {name for name in getattr(model, DDP_ATTRIBUTE, ()) if name in dict(tensors)}
    for asked in names:
        found = {name for name, _ in tensors if name == asked or name.startswith(f"{asked}.")}
        if not found:
            raise ConfigError(f"cannot ignore {asked!r}: {_nearest(asked, model)}")
        meant |= found
    same = {id(tensor) for name, tensor in tensors if name in meant}
    return frozenset(name for name, tensor in tensors if id(tensor) in same)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and then buffers by name, one that several modules share once for each of its names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _nearest(asked: str, model: nn.Module) -> str:
    known = [*dict(_named_tensors(model)), *dict(model.named_modules())]
    close = get_close_matches(asked, filter(None, known), n=1)
    what = "the model has no parameter, buffer or module with tensors of this name"
    return f"{what}; did you mean {close[0]!r}?" if close else what
