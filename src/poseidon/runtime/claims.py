"""Which parameters are under a run: each can be under one only, as each run would exchange its gradient."""

from collections.abc import Container

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from poseidon.errors import InfeasibleError

_claimed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What messages call each parameter that is under a run."""


def check_unclaimed(model: nn.Module, ignored: Container[str] = ()) -> None:
    """Raises InfeasibleError if one of a model's parameters is under a run, as a part of this model or of another."""
    for name, parameter in model.named_parameters():
        if name not in ignored and (owner := _claimed.get(parameter)) is not None:
            raise InfeasibleError(
                f"cannot put {type(model).__name__} under a run: its parameter {name!r} is under one already, as "
                f"{owner}; each run would exchange its gradient. Distribute the outermost module once, or detach() the "
                "other run first"
            )


class Claim:
    """A model's parameters under one run, until `release` is called.

    Args:
        model: The root module.
        ignored: Names of parameters that the run leaves alone.
    """

    def __init__(self, model: nn.Module, ignored: Container[str] = ()) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if name not in ignored]
        self._parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        for name, parameter in named:
            _claimed[parameter] = f"{name!r} of {type(model).__name__}"

    def release(self) -> None:
        """The run is over."""
        for parameter in self._parameters:
            _claimed.pop(parameter, None)
        self._parameters.clear()
