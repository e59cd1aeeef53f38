"""Which parameters are under a run: each can be under one only, as each run would exchange its gradient."""

from collections.abc import Container

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from poseidon.errors import InfeasibleError

_claimed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What messages call each parameter that is under a run."""


class Claim:
    """A model's parameters under one run, until `release` is called.

    Args:
        model: The root module.
        ignored: Names of parameters that the run leaves alone.

    Raises:
        InfeasibleError: One of them is under a run already, as a part of this model or of another.
    """

    def __init__(self, model: nn.Module, ignored: Container[str] = ()) -> None:
        kind = type(model).__name__
        self._parameters: list[torch.Tensor] = []
        named = [(name, parameter) for name, parameter in model.named_parameters() if name not in ignored]
        for name, parameter in named:
            if (owner := _claimed.get(parameter)) is not None:
                raise InfeasibleError(
                    f"cannot put {kind} under a run: its parameter {name!r} is under one already, as {owner}; each run "
                    "would exchange its gradient. Distribute the outermost module once, or detach() the other run first"
                )
        for name, parameter in named:
            _claimed[parameter] = f"{name!r} of {kind}"
            self._parameters.append(parameter)

    def release(self) -> None:
        """The run is over."""
        for parameter in self._parameters:
            _claimed.pop(parameter, None)
        self._parameters.clear()
