"""`torch.compile`, of all or of a part, before and after the plan is put to work."""

from typing import Any, ClassVar

import torch
from tests.equivalence.situation import Net, Side, Situation
from torch import nn

BACKEND = "eager"
"""Dynamo sees and guards everything as with any other backend; only the code that it makes is not compiled further."""


class CompiledBefore(Situation):
    """`torch.compile(model)` before `distribute`."""

    refused: ClassVar = {"deferred": "a part of the model is compiled"}

    def model(self) -> nn.Module:
        torch.compiler.reset()
        return torch.compile(Net(), backend=BACKEND, dynamic=False)


class CompiledInPlace(CompiledBefore):
    """`model.compile()` before `distribute`."""

    def model(self) -> nn.Module:
        torch.compiler.reset()
        model = Net()
        model.compile(backend=BACKEND, dynamic=False)
        return model


class CompiledPart(CompiledBefore):
    """A layer is compiled before `distribute`."""

    def model(self) -> nn.Module:
        torch.compiler.reset()
        model = Net()
        model.first.compile(backend=BACKEND, dynamic=False)
        return model


class CompiledAfter(Situation):
    """`torch.compile(model)` after `distribute`."""

    def begin(self, side: Side) -> None:
        torch.compiler.reset()
        self.compiled = torch.compile(side.model, backend=BACKEND, dynamic=False)

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda batch: self.loss(self.compiled, batch))
        side.note_gradients()
        side.optimizer.step()


class CompiledPartAfter(Situation):
    """A layer is compiled after `distribute`."""

    def begin(self, side: Side) -> None:
        torch.compiler.reset()
        part: Any = side.model.first
        part.compile(backend=BACKEND, dynamic=False)
