"""Scripts that are not equal to one process: what the harness has to notice. None of them is on the page."""

import torch
from tests.equivalence.situation import Side, Situation


class WrongMean(Situation):
    """Ranks compute another loss than the one process."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        factor = 1.0 if side.is_alone else 1.0 + 1e-8
        side.backward(lambda batch: self.loss(side.model, batch) * factor)
        side.note_gradients()
        side.optimizer.step()


class OneBitOff(Situation):
    """The last rank changes a parameter by a rounding error."""

    @torch.no_grad()
    def end(self, side: Side) -> None:
        if side.rank == side.world_size - 1:
            side.model.first.weight.mul_(1.0 + 1e-15)


class RaisesOnOneRank(Situation):
    """One rank ends with an exception while the others wait for it."""

    def step(self, side: Side) -> None:
        if side.index == 1 and side.rank == 1:
            raise RuntimeError("this rank has had enough")
        super().step(side)


class NotComparedOnRanks(Situation):
    """A gradient that only the one process has."""

    def step(self, side: Side) -> None:
        super().step(side)
        if side.is_alone:
            side.records[-1][1]["last.weight"] = None
