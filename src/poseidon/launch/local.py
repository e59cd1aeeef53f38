"""Engines on this machine: ranks on loopback, or ranks on emulated hosts.

Both need Linux. The thread that starts a launch has to live as long as the ranks do: the kernel ties them to it.
"""

import logging
import os
import signal
import socket
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from poseidon.cluster.children import Child, Keeper, signal_group, spawn
from poseidon.cluster.emulated import INTERFACE, EmulatedCluster, why_unavailable
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.errors import ClusterError, LaunchError
from poseidon.launch.attempts import Attempts, Ending
from poseidon.launch.engine import Engine, OnLine, RankPlace
from poseidon.launch.forking import ForkServer, python_program
from poseidon.launch.job import Job
from poseidon.launch.ranks import RankProcess, Supervision, TimedAction

log = logging.getLogger(__name__)

GRACE_S = 15.0
"""After the first failure the other ranks have this long to say which peer they lost."""
SETTLE_S = 4.0
"""Before ranks are started again, hosts that cannot be reached have this long to come back."""

_LOOPBACK = "127.0.0.1"
_LAB_PORT = 29500
"""Free in every emulated host, since nothing else runs there."""
_COORDINATOR_SCRIPT = str(Path(__file__).with_name("_store_host.py"))
_TORCH_STORE_SCRIPT = str(Path(__file__).with_name("_torch_store.py"))
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's own switch: the launcher serves the rendezvous store, and rank 0 is a client like the others."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one rank of an attempt runs."""

    place: RankPlace
    unit: str
    """What leaves with it if it leaves."""
    host: str
    label: str
    what: str
    """What errors call it."""


class LocalEngine(Engine):
    """Ranks on this machine, all of them started again after a failure as often as wanted.

    Args:
        units: Names of what leaves and comes back as a whole.
        restarts: Failures after which ranks are started again.
        min_units: With fewer the job does not go on; None for half of those that it had before.
        grace_s: Seconds between the first failure and the end of the other ranks.
    """

    def __init__(self, units: Sequence[str], *, restarts: int, min_units: int | None, grace_s: float) -> None:
        self._attempts = Attempts(hosts=units, restarts=restarts, min_hosts=min_units)
        self._grace_s = grace_s
        self._open = ExitStack()
        self._supervision: Supervision | None = None
        self._fork_servers: dict[str, ForkServer] = {}
        """By host; none where ranks are not started again, or are no Python programs."""
        self._slots: list[Slot] = []
        """Of the present attempt, by rank."""

    def start(self, command: Sequence[str], *, on_line: OnLine, env: Mapping[str, str] | None = None) -> None:
        """Starts the command as every rank; see `Engine.start`."""
        self._command, self._env = list(command), dict(env or {})
        self._job = Job()
        self._open.callback(self._job.close)
        self._keeper = self._open.enter_context(Keeper())
        self._keeper.keep("folder", self._job.folder)
        self._open.callback(self._close_fork_servers)
        self._supervision = supervision = Supervision(
            on_line,
            grace_s=self._grace_s,
            restarts=self._attempts.restarts > 0,
            actions=self._actions(),
            keeper=self._keeper,
        )
        self._open.callback(supervision.stop)
        self._coordinator = self._serve(supervision)
        self._start_attempt(supervision)

    def wait(self) -> None:
        """Waits until every rank has ended; see `Engine.wait`."""
        if self._supervision is None:
            raise LaunchError("cannot wait for ranks: none was started")
        while (failed := self._supervision.wait()) is not None:
            ending = self._ending(failed)
            try:
                self._attempts.take_in(ending)
                line = self._attempts.next(ending, self._supervision.meanwhile(self._reachable))
            except LaunchError as error:
                reason = f"\n{error}" if self._attempts.restarts else ""
                raise LaunchError(failed.failure() + reason) from None
            log.warning("%s", line)
            self._start_attempt(self._supervision)

    def stop(self) -> None:
        """Ends every rank that still runs; see `Engine.stop`."""
        self._open.close()

    # What differs between engines

    @abstractmethod
    def _listen(self) -> socket.socket:
        """A socket for the coordinator, where every rank that is not cut off reaches it."""

    @abstractmethod
    def _start_server(self, command: Sequence[str], env: Mapping[str, str], fd: int) -> Child:
        """Starts a process that serves on an inherited socket, where that socket is."""

    @abstractmethod
    def _start_on(self, host: str, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int] = ()) -> Child:
        """Starts a process on a host."""

    @abstractmethod
    def _slots_of(self, units: Sequence[str]) -> list[Slot]:
        """The ranks of an attempt with these units, by rank."""

    @abstractmethod
    def _network(self, supervision: Supervision) -> dict[str, str]:
        """What torch is told about the rendezvous of the attempt that is about to begin."""

    @abstractmethod
    def _reachable(self) -> Collection[str]:
        """The units that the coordinator reaches."""

    def _actions(self) -> Sequence[TimedAction]:
        return ()

    # Attempts

    def _serve(self, supervision: Supervision) -> str:
        """Starts the coordinator, again and again if need be, on a socket that stays open; returns its address."""
        listener = self._open.enter_context(self._listen())
        fd = listener.fileno()
        command = [sys.executable, "-P", _COORDINATOR_SCRIPT, str(fd), "--log", str(self._job.coordinator_log)]
        start = partial(self._start_server, command, {**os.environ, **self._job.variables_of_coordinator()}, fd)
        what = "the coordinator"
        supervision.add(RankProcess(label="coordinator", what=what, process=start(), serves=True, again=start))
        host, port = listener.getsockname()[:2]
        return f"{host}:{port}"

    def _start_attempt(self, supervision: Supervision) -> None:
        self._slots = self._slots_of(self._attempts.present)
        network = self._network(supervision)
        environments = [self._environment(slot, network) for slot in self._slots]
        if self._attempts.restarts and python_program(self._command) is not None:
            self._start_fork_servers(environments)
        processes = []
        for slot, env in zip(self._slots, environments, strict=True):
            server = self._fork_servers.get(slot.host)
            start = partial(self._start_on, slot.host) if server is None else server.start
            process = start(self._command, env)
            supervision.add(RankProcess(label=slot.label, what=slot.what, process=process))
            processes.append(process.pid)
        self._job.write_ranks([(slot.label, pid) for slot, pid in zip(self._slots, processes, strict=True)])

    def _start_fork_servers(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts those that are missing, all at once; each has the variables of one of its ranks from the beginning."""
        for slot, env in zip(self._slots, environments, strict=True):
            server = self._fork_servers.get(slot.host)
            if server is not None and server.has_ended():
                server.close()
            elif server is not None:
                continue
            self._fork_servers[slot.host] = started = ForkServer(partial(self._start_with, slot.host, env))
            self._keeper.keep("group", started.process.pid)

    def _start_with(self, host: str, env: Mapping[str, str], command: Sequence[str], fd: int) -> Child:
        return self._start_on(host, command, env, [fd])

    def _close_fork_servers(self) -> None:
        for server in self._fork_servers.values():
            server.close()
        self._fork_servers.clear()

    def _ending(self, failed: RankProcess) -> Ending:
        ranks = [rank for rank in self._job.take_leaving() if rank < len(self._slots)]
        return Ending(
            what=failed.what,
            code=failed.code,
            last_line=failed.tail[-1] if failed.tail else "",
            step=self._job.furthest_step(),
            leaving=frozenset(self._slots[rank].unit for rank in ranks),
        )

    def _environment(self, slot: Slot, network: Mapping[str, str]) -> dict[str, str]:
        """This process's variables, the caller's on top, the rank's on top of both; none for devices.

        All ranks share this machine's cores, whatever host they are on: each gets an equal number of threads, and at
        least one, unless somebody has set OMP_NUM_THREADS. More threads than cores would wait for each other.
        """
        inherited = {name: value for name, value in os.environ.items() if name != _AGENT_STORE}
        cores = len(os.sched_getaffinity(0))
        job = self._job.variables(
            slot.host,
            attempt=self._attempts.number,
            restarts=self._attempts.restarts,
            coordinator=self._coordinator,
        )
        return {
            "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
            "OMP_NUM_THREADS": str(max(1, cores // slot.place.world_size)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch's own store prints stacks when a peer is gone; we say it in a line
            **inherited,
            **self._env,
            **slot.place.variables(),
            **network,
            **job,
        }


class LoopbackEngine(LocalEngine):
    """Every rank on 127.0.0.1; the launcher binds the port of the rendezvous and never lets go of it.

    As under torchrun, the store outlives the ranks' group: a rank makes its default group once, since a second one of
    the same name would find the addresses of the first. Ranks that are started again find an empty store.
    """

    def __init__(self, num_ranks: int, *, grace_s: float = GRACE_S, restarts: int = 0) -> None:
        units = [f"rank{rank}" for rank in range(num_ranks)]
        super().__init__(units, restarts=restarts, min_units=1, grace_s=grace_s)
        self._torch_store: RankProcess | None = None
        self._port = 0

    def _listen(self) -> socket.socket:
        return socket.create_server((_LOOPBACK, 0))

    def _start_server(self, command: Sequence[str], env: Mapping[str, str], fd: int) -> Child:
        return spawn(command, env=env, pass_fds=[fd])

    def _start_on(self, host: str, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int] = ()) -> Child:
        return spawn(command, env=env, pass_fds=fds)

    def _slots_of(self, units: Sequence[str]) -> list[Slot]:
        return [
            Slot(place=place, unit=unit, host="host0", label=f"rank{place.rank}", what=f"rank {place.rank}")
            for unit, place in zip(units, _places([len(units)]), strict=True)
        ]

    def _network(self, supervision: Supervision) -> dict[str, str]:
        if self._torch_store is None:
            self._torch_store = self._serve_torch(supervision)
        else:
            signal_group(self._torch_store.process, signal.SIGHUP)
        return {
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "lo",
            _AGENT_STORE: "True",
        }

    def _serve_torch(self, supervision: Supervision) -> RankProcess:
        with self._listen() as listener:
            self._port = listener.getsockname()[1]
            command = [sys.executable, "-P", _TORCH_STORE_SCRIPT, str(listener.fileno())]
            with _blocked(signal.SIGHUP):  # the child inherits that: a signal waits until the store can take it
                process = spawn(command, pass_fds=[listener.fileno()])
        store = RankProcess(label="store", what="the rendezvous store", process=process, serves=True, is_silent=True)
        supervision.add(store)
        return store

    def _reachable(self) -> Collection[str]:
        return self._attempts.hosts


class LabEngine(LocalEngine):
    """Every rank on its emulated host; the coordinator is at their switch, and rank 0 serves torch's store.

    Entering it makes the hosts, which are then at hand as `cluster`; leaving it removes them.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        changes: Sequence[LinkChange] = (),
        grace_s: float = GRACE_S,
        restarts: int = 0,
        min_hosts: int | None = None,
    ) -> None:
        names = [host.name for host in spec.hosts]
        super().__init__(names, restarts=restarts, min_units=min_hosts, grace_s=grace_s)
        self.cluster = EmulatedCluster(spec)
        self._spec = spec
        self._changes = changes
        for change in changes:
            spec.host(change.host)

    def __enter__(self) -> Self:
        """Makes the hosts."""
        self._open.enter_context(self.cluster)
        return self

    def _actions(self) -> Sequence[TimedAction]:
        return [(change.after, partial(self.cluster.apply, change)) for change in self._changes]

    def _listen(self) -> socket.socket:
        return self.cluster.listen()

    def _start_server(self, command: Sequence[str], env: Mapping[str, str], fd: int) -> Child:
        return self.cluster.start_on_switch(command, env=env, pass_fds=[fd])

    def _start_on(self, host: str, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int] = ()) -> Child:
        return self.cluster.start(command, host=host, env=env, pass_fds=fds)

    def _slots_of(self, units: Sequence[str]) -> list[Slot]:
        hosts = [self._spec.host(name) for name in units]
        slots = []
        for place in _places([host.num_ranks for host in hosts]):
            host = hosts[place.node_rank]
            label = host.name if host.num_ranks == 1 else f"{host.name}:{place.local_rank}"
            what = f"{label} (rank {place.rank})"
            slots.append(Slot(place=place, unit=host.name, host=host.name, label=label, what=what))
        return slots

    def _network(self, supervision: Supervision) -> dict[str, str]:
        address = self.cluster.address(self._slots[0].host)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(_LAB_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}

    def _reachable(self) -> Collection[str]:
        return self.cluster.reachable(SETTLE_S)


def engine_for(
    *,
    num_ranks: int = 1,
    cluster: ClusterSpec | None = None,
    changes: Sequence[LinkChange] = (),
    grace_s: float = GRACE_S,
    restarts: int = 0,
    min_hosts: int | None = None,
) -> tuple[Engine, str | None]:
    """The engine for what a user asked for, and a warning where it is not quite that.

    Args:
        num_ranks: Ranks on loopback, where no cluster is given.
        cluster: Hosts to emulate.
        changes: What happens to their links meanwhile.
        grace_s: Seconds between the first failure and the end of the other ranks.
        restarts: Failures after which all ranks are started again.
        min_hosts: With fewer emulated hosts the job does not go on; None for half of those that it had before.

    Returns:
        A `LabEngine` for a cluster. Where this process cannot emulate hosts, a `LoopbackEngine` with as many ranks, and
        a line for the user that says so.

    Raises:
        ClusterError: A host is to have a part of the processors, and this process cannot emulate hosts.
    """
    if cluster is None:
        return LoopbackEngine(num_ranks, grace_s=grace_s, restarts=restarts), None
    reason = why_unavailable()
    if reason is not None and any(host.cpu for host in cluster.hosts):
        raise ClusterError(f"cannot limit the processor time of hosts: {reason}")
    if reason is None:
        lab = LabEngine(cluster, changes=changes, grace_s=grace_s, restarts=restarts, min_hosts=min_hosts)
        return lab, None
    warning = (
        f"no emulated hosts here: {cluster.num_ranks} ranks run on loopback with unshaped links instead ({reason})"
    )
    return LoopbackEngine(cluster.num_ranks, grace_s=grace_s, restarts=restarts), warning


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _places(ranks_by_node: Sequence[int]) -> list[RankPlace]:
    nodes = [(node, local) for node, count in enumerate(ranks_by_node) for local in range(count)]
    return [
        RankPlace(
            rank=rank,
            local_rank=local,
            node_rank=node,
            num_nodes=len(ranks_by_node),
            world_size=len(nodes),
            local_world_size=ranks_by_node[node],
        )
        for rank, (node, local) in enumerate(nodes)
    ]
