"""Engines on this machine: ranks on loopback, or ranks on emulated hosts.

Both need Linux. The thread that starts a launch has to live as long as the ranks do: the kernel ties them to it.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from poseidon.cluster.children import Keeper, spawn
from poseidon.cluster.emulated import INTERFACE, EmulatedCluster, why_unavailable
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.errors import ClusterError, LaunchError
from poseidon.launch.engine import Engine, OnLine, RankPlace
from poseidon.launch.ranks import RankProcess, Supervision

GRACE_S = 15.0
"""After the first failure the other ranks have this long to say which peer they lost."""

_LOOPBACK = "127.0.0.1"
_LAB_PORT = 29500
"""Free in every emulated host, since nothing else runs there."""
_STORE_SCRIPT = str(Path(__file__).with_name("_store_host.py"))
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's own switch: the launcher serves the rendezvous store, and rank 0 is a client like the others."""


class LoopbackEngine(Engine):
    """Every rank on 127.0.0.1; the launcher binds the port of the rendezvous and never lets go of it.

    As under torchrun, the store outlives the ranks' group: a rank makes its default group once, since a second one of
    the same name would find the addresses of the first.
    """

    def __init__(self, num_ranks: int, *, grace_s: float = GRACE_S) -> None:
        self._places = _places([num_ranks])
        self._grace_s = grace_s
        self._open = ExitStack()
        self._supervision: Supervision | None = None

    def start(self, command: Sequence[str], *, on_line: OnLine, env: Mapping[str, str] | None = None) -> None:
        """Starts the command as every rank; see `Engine.start`."""
        keeper = self._open.enter_context(Keeper())
        self._supervision = supervision = Supervision(on_line, grace_s=self._grace_s, keeper=keeper)
        self._open.callback(supervision.stop)
        with socket.create_server((_LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            store = [sys.executable, "-P", _STORE_SCRIPT, str(listener.fileno())]
            process = spawn(store, pass_fds=[listener.fileno()])
        supervision.add(RankProcess(label="store", what="the rendezvous store", process=process, serves=True))
        for place in self._places:
            variables = _environment(env, place, address=_LOOPBACK, port=port, interface="lo")
            process = spawn(command, env=variables | {_AGENT_STORE: "True"})
            supervision.add(RankProcess(label=f"rank{place.rank}", what=f"rank {place.rank}", process=process))

    def wait(self) -> None:
        """Waits until every rank has ended; see `Engine.wait`."""
        _started(self._supervision).wait()

    def stop(self) -> None:
        """Ends every rank that still runs; see `Engine.stop`."""
        self._open.close()


class LabEngine(Engine):
    """Every rank on its emulated host; rank 0 serves the rendezvous store inside its own.

    Entering it makes the hosts, which are then at hand as `cluster`; leaving it removes them.
    """

    def __init__(self, spec: ClusterSpec, *, changes: Sequence[LinkChange] = (), grace_s: float = GRACE_S) -> None:
        self.cluster = EmulatedCluster(spec)
        self._spec = spec
        self._changes = changes
        self._grace_s = grace_s
        self._open = ExitStack()
        self._supervision: Supervision | None = None
        for change in changes:
            spec.host(change.host)

    def start(self, command: Sequence[str], *, on_line: OnLine, env: Mapping[str, str] | None = None) -> None:
        """Starts the command as every rank; see `Engine.start`."""
        actions = [(change.after, partial(self.cluster.apply, change)) for change in self._changes]
        self._supervision = supervision = Supervision(on_line, grace_s=self._grace_s, actions=actions)
        self._open.callback(supervision.stop)
        address = self.cluster.address(self._spec.hosts[0].name)
        for place in _places([host.num_ranks for host in self._spec.hosts]):
            host = self._spec.hosts[place.node_rank]
            label = host.name if host.num_ranks == 1 else f"{host.name}:{place.local_rank}"
            variables = _environment(env, place, address=address, port=_LAB_PORT, interface=INTERFACE)
            process = self.cluster.start(command, host=host.name, env=variables)
            supervision.add(RankProcess(label=label, what=f"{label} (rank {place.rank})", process=process))

    def wait(self) -> None:
        """Waits until every rank has ended; see `Engine.wait`."""
        _started(self._supervision).wait()

    def stop(self) -> None:
        """Ends every rank that still runs and removes the hosts; see `Engine.stop`."""
        self._open.close()

    def __enter__(self) -> Self:
        """Makes the hosts."""
        self._open.enter_context(self.cluster)
        return self


def engine_for(
    *,
    num_ranks: int = 1,
    cluster: ClusterSpec | None = None,
    changes: Sequence[LinkChange] = (),
    grace_s: float = GRACE_S,
) -> tuple[Engine, str | None]:
    """The engine for what a user asked for, and a warning where it is not quite that.

    Args:
        num_ranks: Ranks on loopback, where no cluster is given.
        cluster: Hosts to emulate.
        changes: What happens to their links meanwhile.
        grace_s: Seconds between the first failure and the end of the other ranks.

    Returns:
        A `LabEngine` for a cluster. Where this process cannot emulate hosts, a `LoopbackEngine` with as many ranks, and
        a line for the user that says so.

    Raises:
        ClusterError: A host is to have a part of the processors, and this process cannot emulate hosts.
    """
    if cluster is None:
        return LoopbackEngine(num_ranks, grace_s=grace_s), None
    reason = why_unavailable()
    if reason is not None and any(host.cpu for host in cluster.hosts):
        raise ClusterError(f"cannot limit the processor time of hosts: {reason}")
    if reason is None:
        return LabEngine(cluster, changes=changes, grace_s=grace_s), None
    warning = (
        f"no emulated hosts here: {cluster.num_ranks} ranks run on loopback with unshaped links instead ({reason})"
    )
    return LoopbackEngine(cluster.num_ranks, grace_s=grace_s), warning


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


def _environment(
    env: Mapping[str, str] | None, place: RankPlace, *, address: str, port: int, interface: str
) -> dict[str, str]:
    """This process's variables, the caller's on top, the rank's on top of both; none for devices.

    All ranks share this machine's cores, whatever host they are on: each gets an equal number of threads, and at least
    one, unless somebody has set OMP_NUM_THREADS. More threads than cores would wait for each other.
    """
    inherited = {name: value for name, value in os.environ.items() if name != _AGENT_STORE}
    cores = len(os.sched_getaffinity(0))
    return {
        "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
        "OMP_NUM_THREADS": str(max(1, cores // place.world_size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch's own store prints stacks when a peer is gone; we say it in a line
        **inherited,
        **(env or {}),
        **place.variables(),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
    }


def _started(supervision: Supervision | None) -> Supervision:
    if supervision is None:
        raise LaunchError("cannot wait for ranks: none was started")
    return supervision
