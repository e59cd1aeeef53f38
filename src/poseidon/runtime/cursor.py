"""Where a training is: what one that goes on needs beside model, optimizer and random numbers."""

from collections.abc import Mapping
from typing import Any

from poseidon.artifact import Value
from poseidon.errors import CheckpointError

_FIELDS = (
    *("epoch", "num_seen", "num_steps", "num_trained", "seconds", "scores"),
    *("global_batch_size", "samples_per_pass", "world_size", "resumptions"),
)


class Cursor:
    """How far a training has come, and by how many samples at a time it goes on.

    Args:
        num_samples: Length of the data set.
        seed: Of the order of its samples.
        global_batch_size: Samples of all ranks per step. What was begun goes on with its own, whatever the ranks.
        samples_per_pass: The most samples that a rank takes in one backward pass.
        world_size: Ranks that train.
    """

    def __init__(
        self, *, num_samples: int, seed: int, global_batch_size: int, samples_per_pass: int, world_size: int
    ) -> None:
        self.epoch = 0
        self.num_seen = 0
        """Samples of the present epoch, over all ranks."""
        self.num_steps = 0
        self.num_trained = 0
        """Samples of all combined steps, over all ranks and epochs."""
        self.seconds = 0.0
        """Of all combined steps."""
        self.scores: dict[str, float] = {}
        """Of the last evaluation."""
        self.resumptions: list[dict[str, Any]] = []
        """Each time that it went on, as `Resumption` has it."""
        self.global_batch_size = global_batch_size
        self.samples_per_pass = samples_per_pass
        self.world_size = world_size
        self._data = {"num_samples": num_samples, "seed": seed}

    def begin_epoch(self, epoch: int) -> None:
        """Nothing of the epoch has been seen."""
        self.epoch, self.num_seen = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """All of it, the same on every rank."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "data": dict(self._data)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what another has saved, also of another number of ranks.

        Raises:
            CheckpointError: It was training on other data, or in another order.
        """
        for name, here in self._data.items():
            if state["data"][name] != here:
                raise CheckpointError(
                    f"cannot go on with the training: {name} was {state['data'][name]} when it was saved and is {here} "
                    "here; go on with the same task and seed"
                )
        for name in _FIELDS:
            setattr(self, name, state[name])


class Fit(Value):
    """How one step's samples are taken by so many ranks."""

    global_batch_size: int
    """Samples of all ranks."""
    local_batch_size: int
    """Samples of the rank that has most."""
    num_passes: int
    """Backward passes of that rank."""

    @classmethod
    def of(cls, cursor: Cursor, world_size: int) -> "Fit":
        """The global batch stays; a rank that gets more samples than it can take at once takes them in several."""
        local = -(-cursor.global_batch_size // world_size)
        return cls(
            global_batch_size=cursor.global_batch_size,
            local_batch_size=local,
            num_passes=-(-local // cursor.samples_per_pass),
        )

    def __str__(self) -> str:
        passes = f" in {self.num_passes} passes" if self.num_passes > 1 else ""
        return f"{self.local_batch_size} a rank{passes}"
