"""What is left of a request to the process that forks ranks when it is interrupted."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import pytest

from poseidon.cluster.children import spawn
from poseidon.errors import LaunchError
from poseidon.launch.forking import ForkedProcess, ForkServer


@pytest.fixture
def peer() -> Iterator[list[socket.socket]]:
    """The other end of a server's socket, once there is one."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def test_the_answer_to_an_interrupted_request_is_not_that_to_the_next(
    peer: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: Sequence[str], fd: int) -> subprocess.Popen[bytes]:
        peer.append(socket.socket(fileno=os.dup(fd)))
        return spawn(["true"])

    def interrupted(*_: object) -> int:
        peer[0].send(b'{"status": 0}')
        raise KeyboardInterrupt

    with closing(ForkServer(start)) as server:
        with monkeypatch.context() as during:
            during.setattr(socket, "send_fds", interrupted)
            with pytest.raises(KeyboardInterrupt):
                server.reap(1)
        with pytest.raises(LaunchError, match="cannot start a rank"):
            server.reap(1)


class Interrupted(ForkServer):
    """Its first answer never comes."""

    def __init__(self) -> None:
        self.asked = 0

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 1:
            raise KeyboardInterrupt
        return {"status": int(signal.SIGKILL)}


def test_a_process_can_be_waited_for_after_an_interrupted_wait() -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as child:
        process = ForkedProcess(Interrupted(), child.pid, cast(Any, child.stdout))
        with pytest.raises(KeyboardInterrupt):
            process.wait(20)
        assert process.wait(20) == -signal.SIGKILL
        assert process.wait(20) == -signal.SIGKILL
