"""Gradient accumulation: nothing is sent until it is asked for."""

import torch
from tests.equivalence.situation import Branches, Side, Situation, scaled
from torch import nn

PARTS = 3


class Accumulation(Situation):
    """Two micro-batches in `no_sync`, the third outside: no byte is sent for the first two."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        with side.no_sync():
            for part in range(PARTS - 1):
                self.micro_step(side, part)
        self.micro_step(side, PARTS - 1)
        side.note_gradients()
        side.optimizer.step()

    def micro_step(self, side: Side, part: int) -> None:
        side.backward(lambda batch: self.loss(side.model, batch) / PARTS, step=10 * side.index + part)


class ForwardInside(Accumulation):
    """Forwards in `no_sync`, their backwards outside of it: each is exchanged."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for part in range(2):
            with side.no_sync():
                losses = self.losses(side, part)
            for loss in losses:
                loss.backward()
        side.note_gradients()
        side.optimizer.step()

    def losses(self, side: Side, part: int) -> list[torch.Tensor]:
        return [scaled(self.loss(side.model, batch) / 2, share) for batch, share in side.work(10 * side.index + part)]


class BackwardInside(ForwardInside):
    """The forward before `no_sync`, its backward inside; then a whole micro-batch outside."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        losses = self.losses(side, 0)
        with side.no_sync(silent=False):  # what the forward made ready may be on its way
            for loss in losses:
                loss.backward()
        for loss in self.losses(side, 1):
            loss.backward()
        side.note_gradients()
        side.optimizer.step()


class SentWithoutBackward(Accumulation):
    """Every micro-batch in `no_sync`, then an exchange without a backward of its own."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        with side.no_sync():
            for part in range(PARTS):
                self.micro_step(side, part)
        side.no_samples()
        side.note_gradients()
        side.optimizer.step()


class AccumulationOverSteps(Accumulation):
    """`no_sync` over all of a step but its end, entered again before the optimizer runs."""

    def step(self, side: Side) -> None:
        with side.no_sync():
            self.micro_step(side, 0)
        self.micro_step(side, 1)
        side.note_gradients()
        with side.no_sync(silent=False):  # the server sends parameters
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=side.index != 1)


class Nested(Accumulation):
    """`no_sync` within `no_sync`."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        with side.no_sync():
            with side.no_sync():
                self.micro_step(side, 0)
            self.micro_step(side, 1)
        self.micro_step(side, 2)
        side.note_gradients()
        side.optimizer.step()


class AccumulatedBranches(Accumulation):
    """Micro-batches that use different layers."""

    def model(self) -> nn.Module:
        return Branches()

    def sample(self, models: dict[str, nn.Module]) -> None:
        for way in range(2):
            models[""](self.batch(0, 0), way).square().mean().backward()

    def micro_step(self, side: Side, part: int) -> None:
        side.backward(
            lambda batch: side.model(batch, (0, 1, None)[part]).square().mean() / PARTS, step=10 * side.index + part
        )
