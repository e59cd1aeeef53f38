"""Ranks that are forked from a process of their host which has torch imported already, so that they start at once."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from poseidon.cluster.children import Child, signal_group
from poseidon.errors import LaunchError

_SCRIPT = str(Path(__file__).with_name("_fork_server.py"))
_MESSAGE_BYTES = 1 << 16
_KILL_S = 10.0
_HARMLESS_OPTIONS = ("-u",)

StartServer = Callable[[Sequence[str], int], Child]
"""Starts a command that inherits a descriptor, on the host where the ranks are to be."""


def python_program(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """What a command has Python run, where it is a script or a module and the interpreter is this one.

    Returns:
        `script` or `module`, and its path or name with its arguments; None for any other command.
    """
    found = shutil.which(command[0])
    if found is None:
        return None
    here, path = Path(sys.executable).parent, Path(found).absolute()
    if path == here / "poseidon":
        return "script", [str(path), *command[1:]]
    if path.parent != here or path.resolve() != Path(sys.executable).resolve():
        return None
    rest = list(command[1:])
    while rest and rest[0] in _HARMLESS_OPTIONS:  # each line is written at once in any case
        rest = rest[1:]
    if len(rest) >= 2 and rest[0] == "-m":
        return "module", rest[1:]
    # a folder, an archive or a file of bytecode is left to Python itself
    is_script = bool(rest) and (rest[0].endswith(".py") or Path(rest[0]).absolute() == here / "poseidon")
    return ("script", rest) if is_script and not rest[0].startswith("-") else None


class ForkServer:
    """A process that forks Python programs on one host.

    Args:
        start: Starts the server's own command there, its output in a pipe.
    """

    def __init__(self, start: StartServer) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = start([sys.executable, _SCRIPT, str(theirs.fileno())], theirs.fileno())

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> "ForkedProcess":
        """Starts a program, its output in a pipe, in a process group of its own.

        Raises:
            LaunchError: The command is no program of this Python's, or the server is gone.
        """
        program = python_program(command)
        if program is None:
            raise LaunchError(f"cannot fork {command[0]!r}: it is no script or module of {sys.executable}")
        kind, words = program
        reader, writer = os.pipe()
        try:
            request = {"command": list(command), "kind": kind, "program": words, "env": dict(env)}
            answer = self._ask(request, [writer])
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return ForkedProcess(self, answer["pid"], os.fdopen(reader, "rb", buffering=0))

    def reap(self, pid: int) -> int:
        """The exit code of a process that has ended, as `subprocess` gives it; its number is free then."""
        return os.waitstatus_to_exitcode(self._ask({"reap": pid})["status"])

    def has_ended(self) -> bool:
        """Whether the server is gone, and all that it has forked with it."""
        try:
            self.process.wait(0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends the server, and with it what it has forked."""
        self._ours.close()
        signal_group(self.process, signal.SIGKILL)
        self.process.wait(_KILL_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
            answer = self._ours.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise LaunchError(f"cannot start a rank in the process that has torch imported: {error}") from error
        except BaseException:
            self._ours.close()  # the answer may still come, and would be taken for the one to the next request
            raise
        if not answer:
            raise LaunchError(f"the process that has torch imported has ended; its last lines: {self._last_words()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _last_words(self) -> str:
        if self.process.stdout is None:
            return ""
        os.set_blocking(self.process.stdout.fileno(), False)
        return (self.process.stdout.read() or b"").decode(errors="replace")[-2000:]


class ForkedProcess:
    """A process that a `ForkServer` has forked; what `subprocess.Popen` is for one's own children."""

    def __init__(self, server: ForkServer, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = stdout
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end and returns its exit code; minus the signal's number if one ended it.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            try:
                self.returncode = self._server.reap(self.pid)
            except LaunchError:
                self.returncode = -signal.SIGKILL  # as all that the server has forked, when it ended
            os.close(self._pidfd)
        return self.returncode
