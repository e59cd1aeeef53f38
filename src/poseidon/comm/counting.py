"""What the mean is over: the items that each rank counts, and how all ranks learn of them.

The loss of a backward pass is a mean over `n` items of this rank: samples, tokens, pixels. Over the ranks `r` and the
backward passes `k` since the last exchange, the gradient is to be

    (K / N) * sum of n_rk * g_rk,    N = all n together,    K = the most passes that any rank made.

With equal `n` that is the mean over ranks of what each has accumulated, as DDP has it. With a loop that divides its
losses by the number of passes it is the mean over all items, however they are spread over ranks and passes.

Nobody waits for the counts. They travel in one small message per step, between the transfers of the forward and those
of the backward pass. Until they have come, a rank scales what leaves by `K / N` of the exchange before, the same on all
ranks; where that turns out to have been another number, the sum is corrected on arrival.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import StepState, Transfer
from poseidon.comm.weighing import Weighing
from poseidon.errors import CommError

COUNTS_TAG = 1
"""Below those that exchanges use."""
FIRST_GUESS = 32.0
"""Items of a rank and pass before any were counted: only so that what leaves is neither huge nor tiny."""
_NUMBERS = 7
COUNTS_BYTES = 8 * _NUMBERS
"""That a rank sends to each other rank in each step."""


class Counting:
    """Counts what this rank's gradient is a mean over, and learns from all ranks what theirs are.

    Args:
        group: The ranks.
        step: Where this rank is in the step; gets a new `weighing` for each exchange.
        by_items: Whether ranks are weighted by what they count; else all ranks are weighted alike.
    """

    def __init__(self, group: Group, step: StepState, *, by_items: bool) -> None:
        self._group = group
        self._step = step
        self._by_items = by_items
        self._scale = 1.0 / (group.world_size * FIRST_GUESS)
        """`K / N` as it was in the last exchange."""
        self._own = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._from_peer = {peer: torch.zeros(_NUMBERS, dtype=torch.float64) for peer in group.peers}
        self._rows: list[list[float]] = []
        """The numbers of all ranks, by rank, once they have come."""
        self._told: float | None = None
        self._seen = 1.0
        self._said = not by_items
        self.leaving = False
        """Whether this rank has run out of samples."""
        self.is_asked: Callable[[], bool] = lambda: False
        """Whether this process was asked to end with the next state that is kept."""
        self.transfer = Transfer("counts", self._issue, self._arrive)
        self._begin()

    def _begin(self) -> None:
        self._total = 0.0
        self._passes = 0
        self._was_told = True
        self._sealed = False
        self._step.weighing = Weighing(self._group.world_size, by_items=self._by_items, scale=self._scale)

    @property
    def num_passes(self) -> int:
        """Backward passes on this rank since the last exchange."""
        return self._passes

    @property
    def most_passes(self) -> int:
        """Backward passes to the last exchange, of the rank that made most."""
        return int(max((row[3] for row in self._rows), default=0.0))

    def state_dict(self) -> dict[str, Any]:
        """What later exchanges depend on, between two of them; the same on every rank."""
        return {"scale": self._scale, "said": self._said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; nothing may have been counted since the last exchange."""
        self._scale, self._said = float(state["scale"]), bool(state["said"])
        self._begin()

    @property
    def asked(self) -> list[int]:
        """The ranks that said in the last exchange that they were asked to end."""
        return [rank for rank, row in enumerate(self._rows) if row[6]]

    # What the loop tells

    def tell(self, num_items: float) -> None:
        """The loss of the next backward pass is a mean over so many items."""
        self._told = num_items

    def see(self, num_items: int) -> None:
        """The model's input has so many rows: what counts where nobody tells."""
        self._seen = float(num_items)

    def begin_pass(self) -> float:
        """A backward pass begins; see `Weighing.begin_pass`."""
        num_items = self._seen if self._told is None else self._told
        self._was_told = self._was_told and self._told is not None
        self._told = None
        self._passes += 1
        self._total += num_items
        return self._step.weighing.begin_pass(num_items)

    def items_of_pass(self, *, under_way: bool) -> float:
        """What the loss of a backward pass is a mean over; 1 where all ranks are weighted alike.

        Args:
            under_way: Whether this pass has begun; else it is the next one, or one that leaves these parameters alone.
        """
        if not self._by_items:
            return 1.0
        if under_way:
            return self._step.weighing.unit
        return self._seen if self._told is None else self._told

    # The message

    def seal(self) -> None:
        """No further pass belongs to this exchange: the counts may leave."""
        if self._sealed:
            return
        self._sealed = True
        numbers = [self._step.index, self._step.weighing.unit, self._total, self._passes, self.leaving, self._was_told]
        numbers.append(self.is_asked())
        self._own.copy_(torch.tensor(numbers, dtype=torch.float64))
        if self._group.world_size == 1:
            self._settle()
        else:
            self.transfer.mark_ready()

    def _issue(self) -> Pending:
        sends = [(peer, self._own) for peer in self._group.peers]
        what = f"counts of step {self._step.index}"
        return self._group.exchange(sends, list(self._from_peer.items()), tag=COUNTS_TAG, what=what)

    def _arrive(self, pending: Pending) -> None:
        pending.wait()
        for rank, numbers in sorted(self._from_peer.items()):
            if numbers[0] != self._own[0]:
                raise CommError(
                    f"rank {self._group.rank}: rank {rank} is in exchange {int(numbers[0])}, this rank in "
                    f"{int(self._own[0])}; every rank must run backward equally often (one without data calls "
                    "empty_step() or drain())"
                )
        self._settle()

    def _settle(self) -> None:
        everyone = {**self._from_peer, self._group.rank: self._own}
        self._rows = [everyone[rank].tolist() for rank in range(self._group.world_size)]
        weighing = self._step.weighing
        weighing.all_leave = all(row[4] for row in self._rows)
        total = math.fsum(row[2] for row in self._rows)
        if self._by_items and total:
            self._scale = max(row[3] for row in self._rows) / total
            weighing.settle([row[1] for row in self._rows], self._scale)

    def end(self) -> str:
        """The exchange is over: counts anew.

        Returns:
            What is to be said, once: that ranks differ in what was counted without being told. Else nothing.
        """
        text = "" if self._said else self._difference()
        self._said = self._said or bool(text)
        self.transfer.reset()
        self._begin()
        return text

    def _difference(self) -> str:
        counted = [row for row in self._rows if row[3]]
        if len({row[2] for row in counted}) < 2 or all(row[5] for row in counted):
            return ""
        listed = ", ".join(f"{row[2]:g}" for row in counted[:8]) + (", ..." if len(counted) > 8 else "")
        return (
            f"batches differ between ranks ({listed} rows in the model's first input): the gradient is the mean over "
            'rows. run.weight(n) says what a loss is a mean over; mean="ranks" weights ranks alike'
        )
