"""How a run takes the mean, treats buffers and checks itself: what `distribute` is asked for beside the plan."""

from dataclasses import dataclass
from typing import Literal

from poseidon.errors import ConfigError

Mean = Literal["samples", "ranks"]
BufferPolicy = Literal["on_request", "after_step"]
Shares = Literal["equal", "speed"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What holds for a run whatever its plan.

    Raises:
        ConfigError: A field cannot be used.
    """

    mean: Mean = "ranks"
    """`samples` weights each rank by the items its loss is a mean over, `ranks` weights ranks alike, as DDP does."""
    buffers: BufferPolicy = "on_request"
    """When rank 0's buffers are sent to all: in `run.sync_buffers()` only, or after each `optimizer.step()` too."""
    check_every: int = 0
    """After how many exchanges all ranks prove again that they hold the same model; 0 never does."""
    shares: Shares = "equal"
    """Samples of each rank: `equal` shares, or those of the plan where it has such; `speed` adapts them slowly to how
    fast each rank computes."""
    ignore: tuple[str, ...] = ()
    """Names of parameters, buffers and modules that stay each rank's own: neither made equal at the start nor exchanged
    nor compared."""

    def __post_init__(self) -> None:
        """Refuses what is not known."""
        if self.mean not in ("samples", "ranks"):
            raise ConfigError(f"cannot take the mean over {self.mean!r}: use 'samples' or 'ranks'")
        if self.buffers not in ("on_request", "after_step"):
            raise ConfigError(f"cannot treat buffers as {self.buffers!r}: use 'on_request' or 'after_step'")
        if self.shares not in ("equal", "speed"):
            raise ConfigError(f"cannot deal samples by {self.shares!r}: use 'equal' or 'speed'")
        if self.shares == "speed" and self.mean != "samples":
            raise ConfigError("cannot deal samples by speed and weight ranks alike: use mean='samples'")
        if self.check_every < 0:
            raise ConfigError(f"cannot check every {self.check_every} exchanges: use 0 for never, or a positive number")
