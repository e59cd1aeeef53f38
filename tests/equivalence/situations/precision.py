"""Narrower numbers: autocast, gradient scaling, parameters in bfloat16."""

from typing import Any, ClassVar

import torch
from tests.equivalence.situation import Net, Side, Situation
from torch import nn


class SinglePrecision(Situation):
    """Everything in float32."""

    dtype = torch.float32
    tolerance = 2e-5


class AutocastBfloat16(Situation):
    """Forward under autocast to bfloat16, parameters in float32."""

    dtype = torch.float32
    tolerance = 0.02
    autocast: ClassVar[torch.dtype] = torch.bfloat16

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", self.autocast):
            y = model(batch)
        return y.float().square().mean()


class AutocastAroundBackward(AutocastBfloat16):
    """Forward and backward under autocast."""

    def step(self, side: Side) -> None:
        with torch.autocast("cpu", self.autocast):
            side.optimizer.zero_grad()
            side.backward()
        side.note_gradients()
        side.optimizer.step()


class GradScaler(AutocastBfloat16):
    """Autocast to float16 with a GradScaler; one rank's gradients overflow in one step, which no rank may take."""

    autocast = torch.float16
    tolerance = 0.005
    num_steps = 5

    def batch(self, rank: int, step: int) -> Any:
        return super().batch(rank, step), torch.full((4, 1, 1), float("inf") if (rank, step) == (0, 2) else 1.0)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, factor = batch
        with torch.autocast("cpu", self.autocast):
            y = model(x)
        return (y.float() * factor).square().mean()

    def begin(self, side: Side) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda batch: self.scaler.scale(self.loss(side.model, batch)))
        self.scaler.step(side.optimizer)
        self.scaler.update()
        side.note_parameters()
        side.note("scale", {"scale": torch.tensor(self.scaler.get_scale())})


class GradScalerOnePart(GradScaler):
    """A GradScaler and a step in which one layer's gradient alone overflows, on one rank."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, factor = batch
        with torch.autocast("cpu", self.autocast):
            y = model(x)
        return y.float().square().mean() + (model.norm.bias[:1] * ((factor - 1.0) * 1e38)).sum()


class GradScalerUnscaled(GradScaler):
    """A GradScaler whose gradients are unscaled and looked at before the step."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda batch: self.scaler.scale(self.loss(side.model, batch)))
        self.scaler.unscale_(side.optimizer)
        if side.index != 2:
            side.note_gradients()
        self.scaler.step(side.optimizer)
        self.scaler.update()
        side.note_parameters()


class Bfloat16(Situation):
    """Parameters, gradients and data in bfloat16."""

    dtype = torch.bfloat16
    tolerance = 0.03


class NormInSinglePrecision(Situation):
    """A model in bfloat16 whose normalization stays in float32."""

    dtype = torch.bfloat16
    tolerance = 0.03

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm.float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(self.table(x)).float())
            return self.last(torch.tanh(x).bfloat16())

    def model(self) -> nn.Module:
        return self.Mixed()
