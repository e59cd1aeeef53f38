"""How a run takes the mean, treats buffers and checks itself: what `distribute` is asked for beside the plan."""

from dataclasses import dataclass
from typing import Literal

from poseidon.errors import ConfigError

Mean = Literal["samples", "ranks"]
BufferPolicy = Literal["on_request", "after_step"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What holds for a run whatever its plan.

    Raises:
        ConfigError: A field cannot be used.
    """

    mean: Mean = "ranks"
    """`samples` weights each rank by the items its loss is a mean over, `ranks` weights all ranks alike, as DDP does."""
    buffers: BufferPolicy = "on_request"
    """When rank 0's buffers are sent to all: in `run.sync_buffers()` only, or after each `optimizer.step()` too."""
    check_every: int = 0
    """After how many exchanges all ranks prove again that they hold the same model; 0 never does."""
    ignore: tuple[str, ...] = ()
    """Names of parameters and buffers that stay each rank's own: neither made equal at the start nor exchanged."""

    def __post_init__(self) -> None:
        """Refuses what is not known."""
        if self.mean not in ("samples", "ranks"):
            raise ConfigError(f"cannot take the mean over {self.mean!r}: use 'samples' or 'ranks'")
        if self.buffers not in ("on_request", "after_step"):
            raise ConfigError(f"cannot treat buffers as {self.buffers!r}: use 'on_request' or 'after_step'")
        if self.check_every < 0:
            raise ConfigError(f"cannot check every {self.check_every} exchanges: use 0 for never, or a positive number")
