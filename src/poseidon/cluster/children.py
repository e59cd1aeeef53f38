"""Child processes that do not outlive this one, however it ends.

Three ties, each for what the one before cannot reach: a child is killed by the kernel when the thread that started it
ends; a keeper process kills its group, or everything in its network namespace, once this process is gone; and whoever
started it ends it in good order.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Protocol, Self

from poseidon.errors import ClusterError

_HERE = Path(__file__).parent
_PLAIN_PYTHON = (sys.executable, "-I", "-S")
_KEEPER_DEADLINE_S = 30.0


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    output: int | IO[bytes] = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
    cgroup: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own that ends, at the latest, with the calling thread.

    Args:
        command: Program and arguments, looked up in PATH.
        env: The whole environment; None for this process's own.
        cwd: The folder to run in; None for the calling thread's.
        output: Where standard output and error go, one after the other as written.
        pass_fds: Descriptors that it inherits under the same numbers, beside the three standard ones.
        cgroup: Folder of the control group that it runs in; None for this process's own.
    """
    tied = [*_PLAIN_PYTHON, str(_HERE / "_tied.py"), str(os.getpid()), str(cgroup or ""), *command]
    return subprocess.Popen(
        tied,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the others in good order
    )


class Child(Protocol):
    """What can be done with a process that was started, by this process or for it."""

    pid: int
    returncode: int | None
    """Its exit code, minus the number of the signal that ended it; None while nobody has waited for it."""
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end and returns its exit code."""


def signal_group(process: Child, number: signal.Signals) -> None:
    """Sends a signal to a spawned process and what it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Keeper:
    """A process that ends what it was told about when it is closed or when this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_PLAIN_PYTHON, str(_HERE / "_keeper.py")], stdin=subprocess.PIPE, start_new_session=True
        )

    def keep(self, kind: Literal["group", "net", "cgroup", "folder"], which: int | Path) -> None:
        """Takes charge of a process group, the processes in a network namespace, a control group or another folder.

        Processes are killed, of the namespace with an inode; then folders are removed.
        """
        self._tell(f"+{kind} {which}")

    def forget(self, kind: Literal["group", "net"], which: int) -> None:
        """Takes it from its care again."""
        self._tell(f"-{kind} {which}")

    def close(self) -> None:
        """Kills what is left and waits until it is gone.

        Raises:
            ClusterError: A process cannot be killed.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_KEEPER_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait()
            raise ClusterError(
                "processes of an emulated host or rank cannot be killed: look for state D in ps"
            ) from error

    def _tell(self, line: str) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClusterError(f"the process that cleans up after this one is gone (it was told {line!r})") from error

    def __enter__(self) -> Self:
        """Ready since it was built."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()
