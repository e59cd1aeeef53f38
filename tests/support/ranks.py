"""Runs a function in several ranks on loopback and hands back what each returned.

The ranks come from a forkserver that has torch loaded, so the first call in a session takes seconds and each further
one a fraction of one. They import the function by its module's path: functions live at the top level of a test module.
The forkserver keeps the environment and the current folder of the first call.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = (
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "pytest"),
    *("poseidon", "poseidon.comm", "poseidon.runtime.attach", "poseidon.runtime.join"),
)
"""Modules that the forkserver imports once for all ranks; one that cannot be imported is passed over.

`torch.optim` imports `torch._dynamo` when the first optimizer is made: 1.7 of the 1.9 seconds that two ranks took.
"""
GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one has failed, to say what they saw."""

forkserver = multiprocessing.get_context("forkserver")
_preloaded = list(PRELOAD)
forkserver.set_forkserver_preload(_preloaded)


def preload(*modules: str) -> None:
    """Has the forkserver import these too, once for all ranks: for the top level of a test module, before any rank."""
    _preloaded.extend(modules)
    forkserver.set_forkserver_preload(_preloaded)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 50.0,
    init: bool = True,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    """Runs `function(rank, world_size, *args)` in `world_size` processes, each with one torch thread.

    Args:
        world_size: How many ranks.
        function: Importable by its module's path, as its arguments and results are picklable.
        args: Handed to every rank.
        timeout: Seconds until all ranks are killed; below pytest's own 60, so that this error is the one seen.
        init: Whether the default group (gloo) is made before the function and destroyed after it. Without, only the
            variables are set with which `init_process_group` or `poseidon.init` finds a store that is already there.
        expect_dead: Ranks that die on the way; their result is None.

    Returns:
        The results by rank.

    Raises:
        Exception: The first exception that a rank raised, of its own class, with notes that name the rank, show its
            traceback and tell what became of the other ranks.
        TimeoutError: Ranks were late; the notes show where each stood.
        ChildProcessError: A rank died, or one of `expect_dead` did not.
    """
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # The store listens before any rank starts, on loopback only, so no port is guessed.
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        ranks = [_Rank(rank, Path(folder) / f"stack{rank}") for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start(environment_of(rank.rank, world_size, port), timeout, init, payload)
            _collect(ranks, time.monotonic() + timeout, expect_dead)
            _raise_failure(ranks, timeout, expect_dead)
        finally:
            for rank in ranks:
                rank.stop()
            del store
    return [rank.result for rank in ranks]


class _Rank:
    """One rank as the parent sees it: its process, and what came back through its pipe."""

    def __init__(self, rank: int, stack_file: Path) -> None:
        self.rank = rank
        self.stack_file = stack_file
        self.reader, self.writer = forkserver.Pipe(duplex=False)
        self.process: Any = None
        self.ended_at: float | None = None
        self.answered = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.trace = ""

    def start(self, environment: dict[str, str], timeout: float, init: bool, payload: bytes) -> None:
        self.process = forkserver.Process(
            target=_run_rank, args=(self.writer, environment, self.stack_file, timeout, init, payload)
        )
        self.process.start()
        self.writer.close()

    def receive(self) -> None:
        try:
            self.result, self.error, self.trace = pickle.loads(self.reader.recv_bytes())
            self.answered = True
        except EOFError:
            self.process.join()
        self.ended_at = time.monotonic()

    @property
    def died(self) -> bool:
        return self.ended_at is not None and not self.answered

    def describe(self) -> str:
        if self.error:
            return f"rank {self.rank} raised:\n{self.trace}"
        if self.answered:
            return f"rank {self.rank} returned {self.result!r:.200}"
        if self.ended_at is None:
            return f"rank {self.rank} was still running:\n{self._stack()}"
        code = self.process.exitcode
        return f"rank {self.rank} died: " + (signal.Signals(-code).name if code < 0 else f"exit code {code}")

    def _stack(self) -> str:
        if not self.stack_file.exists():
            return "(not yet started)"
        os.kill(self.process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        while not self.stack_file.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.stack_file.read_text()

    def stop(self) -> None:
        """Ends the process if it has not ended, and waits for it."""
        self.reader.close()
        self.writer.close()
        if self.process is None or self.process.pid is None:
            return
        if self.answered:
            self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _collect(ranks: list[_Rank], deadline: float, expect_dead: Collection[int]) -> None:
    """Waits for every rank, but not much longer once one has failed."""
    while waiting := {rank.reader: rank for rank in ranks if rank.ended_at is None}:
        for reader in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting[reader]  # type: ignore[index]
            rank.receive()
            if rank.error or (rank.died and rank.rank not in expect_dead):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() >= deadline:
            return


def _raise_failure(ranks: list[_Rank], timeout: float, expect_dead: Collection[int]) -> None:
    late = [rank.rank for rank in ranks if rank.ended_at is None]
    survivors = [rank.rank for rank in ranks if rank.rank in expect_dead and rank.answered]
    failed = [rank for rank in ranks if rank.error or (rank.died and rank.rank not in expect_dead)]
    error: BaseException
    if failed:
        first = min(failed, key=lambda rank: rank.ended_at or 0.0)
        ranks = [first, *(rank for rank in ranks if rank is not first)]
        error = first.error or ChildProcessError(f"rank {first.rank} of {len(ranks)} died before it returned")
    elif late:
        error = TimeoutError(f"late after {timeout:g} s: {_names(late)} of {len(ranks)}")
    elif survivors:
        error = ChildProcessError(f"expected to die, but did not: {_names(survivors)} of {len(ranks)}")
    else:
        return
    for rank in ranks:
        error.add_note(rank.describe())
    raise error


def _names(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _run_rank(
    writer: Connection, environment: dict[str, str], stack_file: Path, timeout: float, init: bool, payload: bytes
) -> None:
    """What runs in the rank's own process."""
    unready = stack_file.with_suffix(".unready")
    with unready.open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)
        unready.rename(stack_file)
        os.environ.update(environment)
        torch.set_num_threads(1)
        try:
            answer = _answer(int(environment["RANK"]), int(environment["WORLD_SIZE"]), timeout, init, payload)
        except BaseException as error:  # noqa: BLE001  # pytest's own outcomes are no Exceptions; the parent raises it
            answer = _pickle_error(error)
        writer.send_bytes(answer)
        writer.close()
        faulthandler.unregister(signal.SIGUSR2)


def _answer(rank: int, world_size: int, timeout: float, init: bool, payload: bytes) -> bytes:
    function, args = pickle.loads(payload)
    if init:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    result = function(rank, world_size, *args)
    if init and dist.is_initialized():
        dist.destroy_process_group()
    return pickle.dumps((result, None, ""))


def _pickle_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps((None, error, trace))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001  # an exception class may forbid it in any way it likes
        answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer
