"""What makes a `GradScaler` come to the same decision on every rank, where each rank's optimizer has a part only."""

from math import inf

import torch
from torch import nn


class Alarm:
    """Tells whatever looks through the gradients of this rank's optimizer that some rank's were not finite.

    What this rank holds need not show it. So while the alarm is given, a parameter that belongs to nobody is among the
    optimizer's, with a gradient that is not finite; the numbers of the model are left as they are.

    Args:
        optimizer: Which one.
        device: Where its parameters are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._parameter = nn.Parameter(torch.zeros(2, device=device))
        self._is_given = False
        """Whether the parameter is among the optimizer's."""
        self._exchange = -1
        self._was_heard = False

    @property
    def parameter(self) -> nn.Parameter:
        """What is among the optimizer's while the alarm is given."""
        return self._parameter

    def begin(self, exchange: int) -> bool:
        """The gradients of an exchange come in, those of one layer after the other.

        Returns:
            Whether a `GradScaler` has heard the alarm since the exchange before, and so has left out the update.
        """
        if exchange != self._exchange:
            self._exchange = exchange
            self._was_heard = self._is_given and self._was_unscaled()
            if self._was_heard or self._was_zeroed():
                self.withdraw()
        return self._was_heard

    def _was_unscaled(self) -> bool:
        gradient = self._parameter.grad
        return gradient is not None and gradient[1].item() != 1.0

    def _was_zeroed(self) -> bool:
        gradient = self._parameter.grad
        return gradient is None or bool(torch.isfinite(gradient).all())

    def give(self) -> None:
        """Some rank's numbers are not finite."""
        self._parameter.grad = torch.tensor([inf, 1.0], device=self._parameter.device)
        if not self._is_given:
            self._optimizer.param_groups[-1]["params"].append(self._parameter)
            self._is_given = True

    def withdraw(self) -> None:
        """No longer; the optimizer keeps nothing of it."""
        if self._is_given:
            for group in self._optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not self._parameter]
            self._optimizer.state.pop(self._parameter, None)
            self._is_given = False
        self._parameter.grad = None


def is_finite(numbers: torch.Tensor) -> torch.Tensor:
    """Whether all are, in one pass over them: what is not finite is the least or the greatest, or is both."""
    if not numbers.numel():
        return torch.ones((), dtype=torch.bool, device=numbers.device)
    return torch.isfinite(torch.stack(torch.aminmax(numbers))).all()
