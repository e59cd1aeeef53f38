"""The contract of every engine, and what it tells a rank.

An engine starts one command as every rank of a group, with the environment that torchrun sets, so that the command
needs to know nothing about where it runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

OnLine = Callable[[str, str], None]
"""Takes the label of a host or rank and one line of its output, without line end; called from one thread only."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank stands among the others."""

    rank: int
    local_rank: int
    """Its position among the ranks of its host."""
    node_rank: int
    """The position of its host."""
    num_nodes: int
    world_size: int
    local_world_size: int
    """Ranks on its host."""

    def variables(self) -> dict[str, str]:
        """What torchrun tells a process about its place, under the same names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
        }


class Engine(ABC):
    """Runs one command as every rank; a context manager that leaves no process behind.

    ```python
    with engine:
        engine.start(["python", "train.py"], on_line=lambda label, line: print(f"[{label}] {line}"))
        engine.wait()
    ```
    """

    @abstractmethod
    def start(self, command: Sequence[str], *, on_line: OnLine, env: Mapping[str, str] | None = None) -> None:
        """Starts the command as every rank and returns.

        Args:
            command: Program and arguments, the same for every rank.
            on_line: Gets every line of output while `wait` runs.
            env: Variables on top of this process's own, the same for every rank.

        Raises:
            LaunchError: The command cannot be started.
            ClusterError: The hosts cannot be made.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until every rank has ended, however long that takes.

        Once a rank fails, the others have a grace period to end by themselves, and are then ended.

        Raises:
            LaunchError: A rank failed: which one first, how, and its last lines.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends every rank that still runs: asks it first, kills it a few seconds later. Harmless when none runs."""

    def run(self, command: Sequence[str], *, on_line: OnLine, env: Mapping[str, str] | None = None) -> None:
        """Starts the command, waits for every rank and leaves nothing behind.

        Raises:
            LaunchError: A rank failed or could not be started.
            ClusterError: The hosts cannot be made.
        """
        with self:
            self.start(command, on_line=on_line, env=env)
            self.wait()

    def __enter__(self) -> Self:
        """Nothing is made before `start`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops what still runs."""
        self.stop()
