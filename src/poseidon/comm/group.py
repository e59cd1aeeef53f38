"""The few calls of torch.distributed that Poseidon needs, with byte counts, deadlines and our errors.

Everything that crosses the network goes through a `Group`. Collectives are counted as their bandwidth-optimal
algorithm sends them; point-to-point messages as they are. torch's errors become ours here and nowhere else.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from poseidon.comm.liveness import Liveness
from poseidon.comm.mesh import BACKEND_NAMES, Mesh, abort_all
from poseidon.errors import CommError, CommTimeoutError, PeerLostError
from poseidon.units import GIB, MIB, format_bytes

EXCHANGE_SECONDS = 30 * 24 * 3600.0
"""Deadline of a single exchange: none, in effect. `Liveness` says who is lost, and the others are waited for."""
SPLIT_ABOVE_BYTES = MIB
"""A tensor below this size stays on one connection: splitting it would only add messages."""
MOST_TEXT_BYTES = 64 * MIB
"""Of one rank's text: a plan or a timeline has a few MiB."""
MOST_GATHERED_BYTES = 4 * GIB
"""Of the texts of all ranks together."""


@dataclass(frozen=True)
class Layout:
    """Which ranks share a host."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, in order."""

    @classmethod
    def of_names(cls, names: Sequence[str]) -> "Layout":
        """From what each rank calls its host."""
        hosts: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            hosts.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, hosts.values())))

    @property
    def num_lanes(self) -> int:
        """Ranks of the host that has the fewest: so many can speak for their hosts side by side."""
        return min(map(len, self.hosts))

    def lane(self, index: int) -> list[int]:
        """One rank of each host: those at the same place."""
        return [host[index] for host in self.hosts]

    def host_of(self, rank: int) -> tuple[int, ...]:
        """All ranks that share a host with this one, itself included."""
        return next(host for host in self.hosts if rank in host)

    def place(self, rank: int) -> int:
        """A rank's number among those of its host."""
        return self.host_of(rank).index(rank)

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several hosts and one of them has several ranks."""
        return len(self.hosts) > 1 and any(len(host) > 1 for host in self.hosts)

    def __str__(self) -> str:
        counts = [len(host) for host in self.hosts]
        ranks = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
        return f"{len(counts)} host{'s' * (len(counts) > 1)} with {ranks} rank{'s' * (ranks != '1')}"


def _new_group(ranks: Sequence[int] | None = None, mesh: Mesh | None = None) -> dist.ProcessGroup | None:
    """Further connections between some ranks, all if left out; called on all ranks together."""
    members = None if ranks is None else list(ranks)
    group: dist.ProcessGroup | None = dist.new_group(members, timeout=timedelta(seconds=EXCHANGE_SECONDS))
    if mesh is not None and isinstance(group, dist.ProcessGroup):  # what is none says that this rank is not in it
        mesh.seal(group)
    return group


def _longest_text(lengths: Sequence[int], what: str) -> int:
    """The greatest of the lengths that the ranks announce, before memory is taken for it; the same on every rank.

    Raises:
        CommError: A rank announces a text that nobody sends, or all of them together are more than a rank may hold.
    """
    most = min(MOST_TEXT_BYTES, MOST_GATHERED_BYTES // len(lengths))
    for rank, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise CommError(
                f"{what} failed: rank {rank} announces a text of {length} bytes, and {format_bytes(most)} are the most "
                f"that each of {len(lengths)} ranks may send; is it the same version of Poseidon?"
            )
    return max(lengths)


def host_identity() -> str:
    """The same for two processes only if what they send to each other stays on one machine.

    The boot and the network namespace: a container with a network of its own counts as a host. A launcher that numbers
    hosts may say that there are more.
    """
    return f"{os.environ.get('GROUP_RANK', os.environ.get('NODE_RANK', ''))} {machine_identity()}"


def machine_identity() -> str:
    """The same for all processes of one machine that share a network, however hosts are numbered."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


@dataclass
class Pending:
    """Transfers that were issued together and have not been waited for."""

    works: list[dist.Work]
    num_bytes: int
    """Payload that this rank sends."""
    what: str
    translate: Callable[[BaseException, str], CommError]
    keep: list[torch.Tensor] = field(default_factory=list)
    """Buffers that must outlive the transfer."""

    def wait(self) -> None:
        """Blocks until all of them have ended.

        Raises:
            PeerLostError: A rank is gone.
            CommTimeoutError: The deadline of the process group passed.
        """
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.translate(error, self.what) from error
        self.works.clear()
        self.keep.clear()


@dataclass
class Traffic:
    """What a group and its siblings have done together."""

    bytes_sent: int = 0
    num_exchanges: int = 0


class Group:
    """The ranks that train together, and the connections between them.

    One run works on a group at a time. Each further one works on a sibling: the same ranks over connections of their
    own, so that nothing depends on the order in which two runs send.

    Args:
        groups: torch process groups over the same ranks; each has connections of its own. Large tensors are split over
            the first `connections` of them.
        liveness: Who is still there; None where nobody watches (tests, one rank).
        hosts: The ranks of each host, every rank once; a host for each rank if left out.
        mesh: Who watches over the connections; None where nobody does.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        *,
        liveness: Liveness | None = None,
        hosts: Sequence[Sequence[int]] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self._groups = list(groups)
        self.connections = 1
        self.liveness = liveness
        self._mesh = mesh
        self.rank = self._groups[0].rank() if self._groups else 0
        self.world_size = self._groups[0].size() if self._groups else 1
        self.layout = Layout(tuple(map(tuple, hosts)) or tuple((rank,) for rank in range(self.world_size)))
        self._lanes: list[dist.ProcessGroup | None] = []
        self.root = self
        """The group whose sibling this is; itself where it is none's."""
        self._siblings: list[Group] = []
        self._side: Group | None = None
        self._has_run = False
        self._traffic = Traffic()
        self.takes_short_messages = not self._groups or self._groups[0].name() in BACKEND_NAMES
        """A receive may be posted with a larger buffer than the message: gloo yes, NCCL no."""

    @classmethod
    def of_default(
        cls,
        *,
        max_connections: int = 1,
        liveness: Liveness | None = None,
        hosts: Sequence[Sequence[int]] = (),
        mesh: Mesh | None = None,
    ) -> "Group":
        """A group over torch's default process group; further connections are made now.

        Args:
            max_connections: Connections to each peer.
            liveness: Who is still there.
            hosts: The ranks of each host; found out now if left out.
            mesh: Who watches over the connections.
        """
        if not dist.is_initialized():
            return cls([])
        groups = [dist.group.WORLD] + [_new_group(mesh=mesh) for _ in range(max_connections - 1)]
        group = cls([g for g in groups if g is not None], liveness=liveness, hosts=hosts, mesh=mesh)
        if not hosts:
            group.layout = Layout.of_names(group.all_gather_text(host_identity(), "finding out who shares a host"))
        return group

    def close(self) -> None:
        """Lets go of the process groups: while something holds them, their threads outlive the interpreter's end."""
        for sibling in self._siblings:
            sibling.close()
        self._siblings, self._side = [], None
        self._groups, self._lanes = [], []

    def abort(self) -> None:
        """Ends everything that is under way on this group, its lanes and siblings; from any thread, and for good.

        What waits for a transfer gets an error within milliseconds, here and on the other ranks, so that no thread
        hangs and the process can end in good order.
        """
        if self._mesh is None:
            if self._groups:
                abort_all()
            return
        groups = [group for group in (*self._groups, *self._lanes) if isinstance(group, dist.ProcessGroup)]
        self._mesh.abort(groups)
        for sibling in self._siblings:
            sibling.abort()

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent, over this group and its siblings together."""
        return self._traffic.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, num_bytes: int) -> None:
        self._traffic.bytes_sent = num_bytes

    @property
    def num_exchanges(self) -> int:
        """How many exchanges of gradients lie behind this rank, over all runs of this group and its siblings."""
        return self._traffic.num_exchanges

    @num_exchanges.setter
    def num_exchanges(self, count: int) -> None:
        self._traffic.num_exchanges = count

    def take_for_run(self) -> "Group":
        """The group that one more run is to work on: this one where it is free, else a new sibling of it.

        Called on all ranks together, as `return_from_run`.
        """
        group = self._sibling(self.max_connections) if self._has_run else self
        group._has_run = True
        return group

    def return_from_run(self, *, failed: bool = False) -> None:
        """The run has ended: this group is free again or, if it is a sibling, gone.

        Args:
            failed: Whether an exchange has; then connections stay open, as nothing can end what is under way on them.
        """
        self._has_run = False
        if self.root is not self and self._groups and not failed:
            self.barrier()
            groups = [group for group in (*self._groups, *self._lanes) if isinstance(group, dist.ProcessGroup)]
            self.root._siblings.remove(self)
            self.close()
            for group in groups:
                dist.destroy_process_group(group)

    def side(self) -> "Group":
        """A sibling for what the training thread sends while transfers are under way; one for all runs.

        Where it does not exist yet it is made, by all ranks together.
        """
        root = self.root
        if root._side is None:
            root._side = root._sibling(1)
        return root._side

    def background(self) -> "Group":
        """A new sibling for what one thread sends beside the training; made by all ranks together.

        Its waiting is not told to the others: the training is what they wait for. Ends with `return_from_run`.
        """
        sibling = self.root._sibling(1)
        sibling.liveness = None
        return sibling

    def _sibling(self, num_connections: int) -> "Group":
        made: list[dist.ProcessGroup] = []
        if self._groups:
            ranks = dist.get_process_group_ranks(self._groups[0])
            found = self._watched(lambda: [_new_group(ranks, self._mesh) for _ in range(num_connections)])
            made = [group for group in found if group is not None]
        sibling = Group(made, liveness=self.liveness, hosts=self.layout.hosts, mesh=self._mesh)
        sibling.root, sibling._traffic = self.root, self._traffic
        self.root._siblings.append(sibling)
        return sibling

    def join_lanes(self) -> None:
        """Makes the connections across hosts that `all_reduce_in_lane` uses; on all ranks together, once."""
        if not self._lanes:
            lanes = [self.layout.lane(index) for index in range(self.layout.num_lanes)]
            self._lanes = self._watched(lambda: [_new_group(lane, self._mesh) for lane in lanes])

    def _watched(self, make: Callable[[], list[dist.ProcessGroup | None]]) -> list[dist.ProcessGroup | None]:
        """Makes connections, which torch waits for without end; given up as soon as a rank is lost.

        Raises:
            PeerLostError: A rank was lost meanwhile.
        """
        liveness = self.root.liveness
        return make() if liveness is None else liveness.watch_over(make, "making further connections")

    def all_reduce_in_lane(self, tensor: torch.Tensor, what: str) -> Pending:
        """Starts to sum `tensor` over the ranks of this rank's lane, in place; nothing where it is in none."""
        lane = self.layout.place(self.rank)
        if lane >= self.layout.num_lanes or not tensor.numel():
            return self._pending([], 0, what)
        group = self._lanes[lane]
        assert group is not None
        works = [self._call(what, lambda: group.allreduce([tensor]))]
        num_hosts = len(self.layout.hosts)
        num_bytes = 2 * tensor.numel() * tensor.element_size() * (num_hosts - 1) // num_hosts
        return self._pending(works, num_bytes, what)

    @property
    def max_connections(self) -> int:
        """How many connections to each peer exist."""
        return max(1, len(self._groups))

    @property
    def peers(self) -> list[int]:
        """The other ranks, this rank's right neighbor first, so that not everybody sends to rank 0 at once."""
        return [(self.rank + offset) % self.world_size for offset in range(1, self.world_size)]

    def all_reduce(self, tensor: torch.Tensor, what: str = "all-reduce") -> Pending:
        """Starts to sum `tensor` (contiguous, any shape) over the ranks, in place."""
        if self.world_size == 1:
            return self._pending([], 0, what)
        works = [
            self._call(what, lambda g=group, p=part: g.allreduce([p]))  # type: ignore[misc]
            for group, part in zip(self._groups, self._split(tensor), strict=False)
        ]
        num_bytes = tensor.numel() * tensor.element_size()
        return self._pending(works, 2 * num_bytes * (self.world_size - 1) // self.world_size, what)

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        tag: int,
        what: str,
    ) -> Pending:
        """Starts point-to-point messages: (peer, contiguous tensor) each.

        Messages of one pair and tag keep their order. They stay on the first connection, which keeps it.
        """
        if self.world_size == 1:
            return self._pending([], 0, what)
        group = self._groups[0]
        works = [
            self._call(what, lambda p=peer, t=tensor: group.recv([t], p, tag))  # type: ignore[misc]
            for peer, tensor in receives
            if tensor.numel()
        ]
        works += [
            self._call(what, lambda p=peer, t=tensor: group.send([t], p, tag))  # type: ignore[misc]
            for peer, tensor in sends
            if tensor.numel()
        ]
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        return self._pending(works, num_bytes, what, [t for _, t in (*sends, *receives)])

    def broadcast(self, tensor: torch.Tensor, what: str = "broadcast") -> None:
        """Gives every rank the value that rank 0 has, in place."""
        if self.world_size > 1:
            work = self._call(what, lambda: self._groups[0].broadcast([tensor], dist.BroadcastOptions()))
            num_bytes = tensor.numel() * tensor.element_size() if self.rank == 0 else 0
            self._pending([work], num_bytes, what).wait()

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather_text("", "waiting for all ranks")

    def all_gather_text(self, text: str, what: str = "gathering facts") -> list[str]:
        """Every rank's text, by rank. JSON crosses the network this way; never a pickle."""
        if self.world_size == 1:
            return [text]
        with self.waiting(what):
            return self._gather_text(text, what)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Tells the others meanwhile that this rank waits for them outside any exchange."""
        return nullcontext() if self.liveness is None else self.liveness.waiting(self.num_exchanges, what)

    def _gather_text(self, text: str, what: str) -> list[str]:
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(text.encode())]), what)
        longest = max(1, _longest_text([int(length) for length in lengths], what))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data[:longest]
        parts = self.all_gather(padded, what)
        return [p[: int(n)].numpy().tobytes().decode() for p, n in zip(parts, lengths, strict=True)]

    def broadcast_text(self, text: str, what: str = "sending the plan") -> str:
        """Rank 0's text on every rank."""
        return self.all_gather_text(text if self.rank == 0 else "", what)[0]

    def all_gather(self, tensor: torch.Tensor, what: str = "all-gather") -> list[torch.Tensor]:
        """Every rank's tensor, by rank; all of one shape and type."""
        outputs = [torch.empty_like(tensor) for _ in range(self.world_size)]
        work = self._call(what, lambda: self._groups[0].allgather([outputs], [tensor]))
        self._pending([work], tensor.numel() * tensor.element_size() * (self.world_size - 1), what).wait()
        return outputs

    def _split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.connections == 1 or tensor.numel() * tensor.element_size() < SPLIT_ABOVE_BYTES:
            return [tensor]
        return tensor.view(-1).tensor_split(self.connections)

    def _pending(
        self, works: list[dist.Work], num_bytes: int, what: str, keep: list[torch.Tensor] | None = None
    ) -> Pending:
        self.bytes_sent += num_bytes
        return Pending(works, num_bytes, what, self._translate, keep or [])

    def _call(self, what: str, start: Callable[[], dist.Work]) -> dist.Work:
        try:
            return start()
        except RuntimeError as error:
            raise self._translate(error, what) from error

    def _translate(self, error: BaseException, what: str) -> CommError:
        """Torch's error as ours, naming who is gone if that can be found out."""
        if self.liveness is not None and (lost := self.liveness.name_lost(time.monotonic())):
            return PeerLostError(f"rank {self.rank}: {what} failed: {lost}")
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        if "imed out" in first_line or "imeout" in first_line:
            return CommTimeoutError(
                f"rank {self.rank}: {what} did not end before its deadline although every rank is alive: {first_line}"
            )
        return CommError(f"rank {self.rank}: {what} failed although every rank is alive: {first_line}")
