"""How much each rank counts in the mean of one exchange."""


class Weighing:
    """How much each rank counts; complete once the counts of all ranks have come.

    Args:
        world_size: How many ranks there are.
        by_items: Whether ranks are weighted by what their losses are means over; else all ranks are weighted alike.
        scale: Where they are, `K / N` of the exchange before (see `poseidon.comm.counting`).
    """

    def __init__(self, world_size: int, *, by_items: bool = False, scale: float = 1.0) -> None:
        self.by_items = by_items
        self._scale = scale
        self.unit = 0.0
        """Items of the last backward pass that had any: what is in `p.grad` is scaled as a mean over these."""
        self.own = 0.0 if by_items else 1.0 / world_size
        """What this rank multiplies its gradient by before that leaves; 0 where it has nothing that counts."""
        self.correction = 1.0
        """What the sum over the ranks is multiplied by."""
        self.by_rank = (self.own,) * world_size
        """What each rank's gradient is multiplied by in all."""
        self.all_leave = False
        """Whether every rank has run out of samples."""

    def begin_pass(self, num_items: float) -> float:
        """A backward pass begins whose loss is a mean over so many items.

        Returns:
            What the gradients accumulated so far have to be multiplied by, so that this pass adds to them in its own
            unit.
        """
        before = self.unit
        self.unit = num_items or before
        if not self.by_items:
            return 1.0
        self.own = self._scale * self.unit
        return before / self.unit if before else 1.0

    def share_of(self, unit: float) -> float:
        """What a part that was made in another unit has to be multiplied by to be in that of the last pass."""
        return unit / self.unit if self.by_items and self.unit else 1.0

    def settle(self, units: list[float], scale: float) -> None:
        """The counts have come: each rank's unit, and the `K / N` that holds."""
        self.correction = scale / self._scale
        self.by_rank = tuple(unit * scale for unit in units)
