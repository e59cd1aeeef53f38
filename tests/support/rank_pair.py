"""Two ranks that live on from one program to the next, and are replaced when one has broken them."""

import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from poseidon.comm import liveness
from poseidon.errors import PoseidonError
from poseidon.runtime import comm_thread, join
from support.programs import WORLD_SIZE, OutOfStepError, Player, Program, Reference, Seen, difference
from support.ranks import environment_of, forkserver

QUICK = {
    "BEAT_SECONDS": 0.05,
    "SILENT_SECONDS": 1.0,
    "PATIENCE_SECONDS": 2.0,
}
"""Of `liveness`, so that a program that cannot end is told from one that is slow within seconds."""
START_SECONDS = 40.0


@dataclass
class Outcome:
    """What became of a program on one rank."""

    seen: list[Seen] = field(default_factory=list)
    error: str = ""
    """The class of what it raised, `died` or `hung`; empty if it came to its end."""
    text: str = ""
    """The message, and where."""
    num_exchanges: int = 0
    """How many exchanges the rank has taken part in."""
    is_clear: bool = False
    """Whether the error is one of ours."""


def complaint(program: Program, outcomes: list[Outcome]) -> str:
    """What is wrong with what became of a program; empty if nothing is."""
    try:
        expected = Reference(program).play()
    except OutOfStepError as error:
        return _complaint_out_of_step(error, outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            return f"rank {rank}: {outcome.error}\n" + "\n".join(other.text for other in outcomes)
        if found := difference(outcome.seen, expected[rank]):
            return f"rank {rank}: {found}"
    ends = {outcome.seen[-1].values.tobytes() for outcome in outcomes}
    if len(ends) > 1:
        return "the ranks' parameters differ in their last bits"
    return ""


def _complaint_out_of_step(error: OutOfStepError, outcomes: list[Outcome]) -> str:
    if all(outcome.error and outcome.is_clear for outcome in outcomes):
        return ""
    ends = "\n".join(f"{outcome.error or 'no error'}: {outcome.text}" for outcome in outcomes)
    return f"out of step ({error}), but the ranks end with\n{ends}"


class RankPair:
    """Plays programs on two ranks.

    Args:
        deadline: Seconds that one program may take before it counts as hung.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._processes: list[_Process] = []
        self._store: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="pair-")
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(kill=False)
        self._folder.cleanup()

    def play(self, program: Program) -> list[Outcome]:
        """What became of it on each rank."""
        if not self._processes:
            self._start()
        for process in self._processes:
            process.send(program)
        outcomes = self._collect(time.monotonic() + self._deadline)
        if any(outcome.error for outcome in outcomes):
            self._end(kill=True)
        return outcomes

    def _start(self) -> None:
        self._number += 1
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        folder = Path(self._folder.name)
        self._processes = [
            _Process(environment_of(rank, WORLD_SIZE, port), folder / f"stack{self._number}-{rank}")
            for rank in range(WORLD_SIZE)
        ]
        for process in self._processes:
            process.wait_ready()

    def _collect(self, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        readers = {process.pipe: rank for rank, process in enumerate(self._processes)}
        while len(outcomes) < len(readers) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe, rank in readers.items() if rank not in outcomes], left):
                rank = readers[pipe]  # type: ignore[index]
                outcomes[rank] = self._processes[rank].receive()
        for rank, process in enumerate(self._processes):
            if rank not in outcomes:
                outcomes[rank] = Outcome(error="hung", text=process.stack())
        return [outcomes[rank] for rank in range(len(readers))]

    def _end(self, *, kill: bool) -> None:
        for process in self._processes:
            process.dismiss(kill=kill)
        for process in self._processes:
            process.wait()
        self._processes, self._store = [], None


class _Process:
    """One rank as its parent sees it."""

    def __init__(self, environment: dict[str, str], stack_file: Path) -> None:
        self.pipe, theirs = forkserver.Pipe()
        self._stack_file = stack_file
        self._process = forkserver.Process(target=_serve, args=(theirs, environment, stack_file))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        if not self.pipe.poll(START_SECONDS):
            raise TimeoutError(f"a rank did not start within {START_SECONDS:g} s:\n{self.stack()}")
        self.pipe.recv()

    def send(self, program: Program) -> None:
        with contextlib.suppress(OSError):  # what became of it is seen when its answer is waited for
            self.pipe.send(program)

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join(5.0)
            return Outcome(error="died", text=f"exit code {self._process.exitcode}")
        return outcome

    def stack(self) -> str:
        """Where it stands."""
        if not self._process.is_alive() or not self._stack_file.exists():
            return "(not running)"
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not self._stack_file.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._stack_file.read_text()

    def dismiss(self, *, kill: bool) -> None:
        """Tells it to end."""
        self.pipe.close()
        if kill:
            self._process.kill()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(pipe: Connection, environment: dict[str, str], stack_file: Path) -> None:
    """What runs in a rank's own process: program after program, until the pipe closes or one breaks the group."""
    for name, seconds in QUICK.items():
        setattr(liveness, name, seconds)
    comm_thread.LOOK_UP_SECONDS = 0.05
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    logging.getLogger("poseidon").addHandler(logging.NullHandler())  # thousands of programs have much to say
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        group = join.init(max_connections=1)
        pipe.send("ready")
        for program in _programs(pipe):
            before = group.num_exchanges
            try:
                outcome = Outcome(Player(group.rank, program, group).play(program.ops[group.rank]))
            except Exception as error:  # noqa: BLE001  # whatever it is, the parent judges it
                outcome = _told(error)
            outcome.num_exchanges = group.num_exchanges - before
            if outcome.error:
                join.shutdown(outcome.text.splitlines()[0])
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps(outcome))
            if outcome.error:
                os._exit(1)
    join.shutdown()


def _programs(pipe: Connection) -> Iterator[Program]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _told(error: Exception) -> Outcome:
    name = type(error).__name__
    where = "".join(traceback.format_exception(error))
    return Outcome(error=name, text=f"{name}: {error}\n{where}", is_clear=isinstance(error, PoseidonError))
