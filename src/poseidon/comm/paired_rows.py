"""Two sets of rows that belong together and become known one after the other: the transfer under two schemes.

A sufficient factor is a pair: the layer's input is known in the forward pass, the gradient of its output in the
backward pass. A touched row is a pair: the index is known in the forward pass, its gradient in the backward pass. So
one exchange has two transfers, and the first leaves while the forward pass goes on.

Row counts differ between ranks and steps and travel with the rows, in a header of `HEADER_BYTES` before each part. The
second header has the last word. Where the step was not as expected (a forward that no backward followed, a call more
than last time, more rows than the buffers hold) it says so, and before the second transfer is complete both parts are
sent once more, as they should have been: every rank reads the same headers and so every rank knows.
"""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from poseidon.comm.capture import LATE_ADDITION, Accumulated, graph_is_kept, inside_backward
from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import Exchange, StepState, Transfer, Wire, wire_dtype
from poseidon.comm.two_level import Routes
from poseidon.errors import CommError, InfeasibleError
from poseidon.profile.hook import has_gradient_hooks

HEADER_BYTES = 64
_HEADER_NUMBERS = HEADER_BYTES // 8

REPAIR_TAG = 2
FORWARD_TAG = 3
"""Added to an exchange's own: of what is sent once more, and of what is passed on, its first and its second part."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)


class Call:
    """One forward call of the layer: the rows of its first part and, once backward came by, of its second."""

    def __init__(self, serial: int, first: torch.Tensor) -> None:
        self.serial = serial
        self.first = first
        self.second: torch.Tensor | None = None
        self.spent = False
        """Whether no further backward pass can come by."""

    @property
    def rows(self) -> int:
        """Rows in either part."""
        return self.first.shape[0]


@dataclass(frozen=True)
class Header:
    """What precedes each part on the wire."""

    step: int
    rows: int
    dtype: torch.dtype
    resent_rows: int = 0
    """Rows of both parts that follow instead; above zero, what came before does not count."""
    resent_dtype: torch.dtype = torch.float32
    """Of the first part; the second's is `dtype`."""
    reached: bool = False
    """Whether backward came by the layer, if only with no rows."""

    def write(self, buffer: torch.Tensor) -> None:
        """Puts it in front of a byte buffer."""
        numbers = [self.step, self.rows, _DTYPES.index(self.dtype), self.resent_rows, _DTYPES.index(self.resent_dtype)]
        numbers += [int(self.reached)]
        numbers += [0] * (_HEADER_NUMBERS - len(numbers))
        buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(numbers))

    @classmethod
    def read(cls, buffer: torch.Tensor) -> "Header":
        """Reads it from the front of a byte buffer."""
        numbers = buffer[:HEADER_BYTES].view(torch.int64).tolist()
        return cls(numbers[0], numbers[1], _DTYPES[numbers[2]], numbers[3], _DTYPES[numbers[4]], bool(numbers[5]))


class Part:
    """The buffers of one of the two parts: what this rank sends, and what each peer sends."""

    def __init__(
        self, width: int, itemsize: int, capacity: int, group: Group, routes: Routes, device: torch.device
    ) -> None:
        self.width = width
        self._itemsize = itemsize
        self._group = group
        self._routes = routes
        self._device = device
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Makes room for so many rows from each rank."""
        self.capacity = max(1, capacity)
        size = HEADER_BYTES + self.capacity * self.width * self._itemsize
        self.own = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self.from_peer = {p: torch.zeros(size, dtype=torch.uint8, device=self._device) for p in self._group.peers}
        self.used = HEADER_BYTES

    def fill(self, header: Header, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies rows behind the header; returns where each landed."""
        landed = []
        offset = HEADER_BYTES
        for tensor in rows:
            size = tensor.numel() * tensor.element_size()
            place = self.own[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            landed.append(place)
            offset += size
        header.write(self.own)
        self.used = offset
        return landed

    def issue(self, tag: int, what: str) -> Pending:
        """Starts to send this rank's part and to receive what comes straight."""
        message = self.own[: self.used] if self._group.takes_short_messages else self.own
        sends = [(peer, message) for peer in self._routes.sends_to]
        receives = [(peer, self.from_peer[peer]) for peer in self._routes.receives_from]
        return self._group.exchange(sends, receives, tag=tag, what=what)

    def forward(self, tag: int, what: str) -> Pending:
        """Starts to pass on what has come from other hosts, and to receive what others pass on."""
        sends = [(to, self._message_of(source)) for source, to in self._routes.forwards]
        receives = [(by, self.from_peer[source]) for source, by in self._routes.forwarded]
        return self._group.exchange(sends, receives, tag=tag, what=what)

    def _message_of(self, rank: int) -> torch.Tensor:
        """As it came, without the rest of the buffer where that may be left away."""
        buffer = self.from_peer[rank]
        if not self._group.takes_short_messages:
            return buffer
        header = Header.read(buffer)
        return buffer[: HEADER_BYTES + header.rows * self.width * header.dtype.itemsize]

    def received(self, rank: int) -> tuple[Header, torch.Tensor]:
        """Header and rows of one rank, this one included."""
        buffer = self.own if rank == self._group.rank else self.from_peer[rank]
        header = Header.read(buffer)
        size = header.rows * self.width * header.dtype.itemsize
        return header, buffer[HEADER_BYTES : HEADER_BYTES + size].view(header.dtype).view(header.rows, self.width)


class PairedRowsExchange(Exchange):
    """Gathers both parts of every rank and hands them to `combine`.

    Args:
        name: The layer.
        parameters: Its trainable parameters.
        widths: Numbers per row in the first and in the second part.
        dtypes: The widest dtype that each part can come in; the buffers are sized for it.
        capacity: Rows per rank that the buffers hold at first; the same on every rank.
        device: Where the layer lives.
        group: The ranks.
        step: Where this rank is in the step.
        levels: 2 sends parts once to each other host, where they are passed on.
        wire: The format in which floating-point rows cross the network.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        *,
        widths: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        capacity: int,
        device: torch.device,
        group: Group,
        step: StepState,
        levels: int = 1,
        wire: Wire = "",
    ) -> None:
        super().__init__(name=name, layers=(name,), parameters=tuple(parameters), group=group, step=step)
        self._device = device
        self._wire = wire
        dtypes = (wire_dtype(wire, dtypes[0]), wire_dtype(wire, dtypes[1]))
        routes = Routes(group, levels)
        self._parts = tuple(
            Part(width, dtype.itemsize, capacity, group, routes, device)
            for width, dtype in zip(widths, dtypes, strict=True)
        )
        self._default_dtypes = dtypes
        self._first, self._second = (
            Transfer(
                f"{name} ({which} factor)",
                lambda i=index: self._issue(i),  # type: ignore[misc]
                Pending.wait if index == 0 else self._complete,
                between=() if levels == 1 else (lambda pending, i=index: self._forward_on(pending, i),),  # type: ignore[misc]
            )
            for index, which in enumerate(("first", "second"))
        )
        self.transfers = (self._first, self._second)
        self.early = (self._first,)
        self._serial = 0
        self._calls: list[weakref.ref[Call]] = []
        """Calls that backward may come by; the autograd graph keeps them alive, not this list."""
        self._serial_before = 0
        """Of the last call before the present step."""
        self._expected_calls = 1
        self._learned = False
        """Whether `_expected_calls` has been observed. Before, only the end of backward completes the step."""
        self._sent: list[weakref.ref[Call]] = []
        self._sent_serials: list[int] = []
        self._sent_rows: list[int] = []
        self._arrived: list[Call] = []
        self._stash: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        """Pairs from backward passes inside `no_sync`, and the items that each pass was a mean over."""
        self._accumulated: Accumulated | None = None
        """Stands for the stash in `p.grad`."""
        self._stash_sent = 0
        self._resent: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self._repaired: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._weighing = step.weighing
        self._index = 0
        """Of the exchange whose parts are under way."""
        self._grow_to = 0
        self._is_detached = False

    @abstractmethod
    def combine(self, firsts: list[torch.Tensor], seconds: list[torch.Tensor]) -> None:
        """Leaves the mean gradient in `p.grad`; the rows of each rank, by rank.

        Called if backward came by the layer on any rank; even then there may be no rows at all.
        """

    @abstractmethod
    def zeros(self) -> torch.Tensor:
        """A gradient of zeros for the first parameter."""

    # What the training thread tells

    def check_hooks(self) -> None:
        """Raises InfeasibleError where somebody waits for a gradient that no rank computes alone."""
        if any(has_gradient_hooks(parameter) for parameter in self.parameters):
            raise InfeasibleError(
                f"layer {self.name!r} has got gradient hooks, which would not be called: its gradient is never "
                "computed on one rank alone; register them before distribute(), or choose all_reduce for this layer"
            )

    def called(self, first: torch.Tensor) -> Call:
        """Notes a forward call whose output needs a gradient; `first` has shape `(rows, width)`."""
        if self._first.ready.is_set() and inside_backward():
            # Activation checkpointing runs the layer once more, for what lies inside or behind. Where it is reentrant,
            # backward comes by this call, else by the first one, whose part has left.
            return Call(-1, first)
        self._serial += 1
        call = Call(self._serial, first)
        self._calls.append(weakref.ref(call))
        if self.step.syncing and not self._first.ready.is_set():
            new = [c for c in self._open_calls() if c.serial > self._serial_before]
            if len(new) == self._expected_calls:
                self._send_first(new)
        return call

    def _open_calls(self) -> list[Call]:
        calls = [call for call in (ref() for ref in self._calls) if call is not None and not call.spent]
        self._calls = [weakref.ref(call) for call in calls]
        return calls

    def returned(self, call: Call, second: torch.Tensor) -> None:
        """Notes that backward came by a call; `second` has shape `(rows, width)`."""
        self.step.on_backward()
        call.second, call.spent = second, not graph_is_kept()
        if not self.step.syncing:
            if not self._stash:
                self._accumulated = Accumulated(self.parameters[0], self.zeros)
            first = call.first.clone() if call.serial in self._sent_serials else call.first
            self._stash.append((first, second, self.step.weighing.unit))
            return
        if self._second.ready.is_set():
            raise CommError(
                f"rank {self.group.rank}: backward came by {self.name} again after its factors had left, at exchange "
                f"{self.step.index}; {LATE_ADDITION}"
            )
        if call.serial in self._sent_serials and not call.spent:
            call.first = call.first.clone()  # its place in the send buffer will not last until the next backward
        self._arrived.append(call)
        if self._is_complete():
            self._send_second()

    def begin_backward(self) -> None:
        """What was accumulated and then zeroed is not sent."""
        if self._accumulated is not None and self._accumulated.is_forgotten:
            self._stash.clear()
            self._accumulated = None

    def successor(self, module: nn.Module) -> Self | None:
        """Once this exchange is detached: the one of its kind that has taken its place at the layer, if there is one.

        Backward may still come by calls of before: the plan can change between two forward passes and their backwards.
        """
        owner = getattr(module.__dict__.get("forward"), "owner", None)
        return owner if self._is_detached and type(owner) is type(self) else None

    def inherited(self, call: Call, second: torch.Tensor) -> None:
        """Notes that backward came by a call of the exchange that had this place before."""
        self._serial += 1
        self.returned(Call(self._serial, call.first), second)

    def _is_complete(self) -> bool:
        arrived = {call.serial for call in self._arrived}
        if not self._learned or not self._first.ready.is_set() or arrived != set(self._sent_serials):
            return False
        # A call from before this step may be open: this backward may come by it as well.
        return all(call.serial in arrived for call in self._open_calls())

    def flush(self) -> None:
        """What did not come as expected is sent as it is, or marked to be sent once more."""
        self.begin_backward()
        if not self._first.ready.is_set():
            self._send_first(self._arrived)
        if not self._second.ready.is_set():
            self._send_second()
        self._serial_before = self._serial

    def _send_first(self, calls: list[Call]) -> None:
        calls = sorted(calls, key=lambda c: c.serial)
        rows = [first for first, _, _ in self._stash] + [c.first for c in calls]
        if sum(r.shape[0] for r in rows) > self._parts[0].capacity:
            calls, rows = [], []  # no room: both parts follow once more
            self._stash_sent = 0
        else:
            self._stash_sent = len(self._stash)
        rows = self._as_sent(rows)
        dtype = rows[0].dtype if rows else self._default_dtypes[0]
        landed = self._parts[0].fill(Header(self.step.index, sum(r.shape[0] for r in rows), dtype), rows)
        for call, place in zip(calls, landed[self._stash_sent :], strict=True):
            if call.second is None and place.dtype == call.first.dtype:
                call.first = place  # the copy in the send buffer serves from here on
        self._sent = [weakref.ref(c) for c in calls]
        self._sent_serials = [c.serial for c in calls]
        self._sent_rows = [c.rows for c in calls]
        self._first.mark_ready(self._device)

    def _send_second(self) -> None:
        arrived = {c.serial: c for c in self._arrived}
        as_sent = set(arrived) <= set(self._sent_serials) and self._stash_sent == len(self._stash)
        if as_sent or not (arrived or self._stash):
            self._send_second_as_announced(arrived)
        else:
            calls = sorted(self._arrived, key=lambda c: c.serial)
            firsts = self._as_sent([first for first, _, _ in self._stash] + [c.first for c in calls])
            seconds = self._as_sent(self._stashed_seconds() + [c.second for c in calls if c.second is not None])
            self._resent = (firsts, seconds)
            count = sum(f.shape[0] for f in firsts)
            header = Header(self.step.index, 0, seconds[0].dtype, count, firsts[0].dtype, reached=True)
            self._parts[1].fill(header, [])
        if arrived or self._stash:
            self.step.arrived(self.name)
        self._index = self.step.index
        self._weighing = self.step.weighing
        self._second.mark_ready(self._device)

    def _send_second_as_announced(self, arrived: dict[int, Call]) -> None:
        seconds = self._stashed_seconds()
        dtype = next((c.second.dtype for c in arrived.values() if c.second is not None), self._default_dtypes[1])
        for serial, rows in zip(self._sent_serials, self._sent_rows, strict=True):
            call = arrived.get(serial)
            if call is not None and call.second is not None:
                seconds.append(call.second)
            else:  # the forward was not followed by a backward: what was announced counts for nothing
                seconds.append(torch.zeros(rows, self._parts[1].width, dtype=dtype, device=self._device))
        reached = bool(arrived or self._stash)
        seconds = self._as_sent(seconds) if reached else []
        count = sum(s.shape[0] for s in seconds)
        dtype = seconds[0].dtype if seconds else dtype
        self._parts[1].fill(Header(self.step.index, count, dtype, reached=reached), seconds)

    def _stashed_seconds(self) -> list[torch.Tensor]:
        """In the unit of the last pass."""
        shares = [self.step.weighing.share_of(unit) for _, _, unit in self._stash]
        return [s if share == 1.0 else s * share for (_, s, _), share in zip(self._stash, shares, strict=True)]

    def _as_sent(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All in one dtype: the widest, or that of the wire."""
        return [tensor.to(wire_dtype(self._wire, tensor.dtype)) for tensor in _alike(rows)]

    # What the communication threads do

    def _issue(self, index: int) -> Pending:
        return self._parts[index].issue(self.tag + index, f"factors of {self.name} in step {self.step.index}")

    def _forward_on(self, received: Pending, index: int) -> Pending:
        received.wait()
        what = f"factors of {self.name} within the host in step {self.step.index}"
        return self._parts[index].forward(self.tag + FORWARD_TAG + index, what)

    def _complete(self, received: Pending) -> None:
        """Waits for the second part and, where any rank's header says that its parts follow, for these."""
        received.wait()
        if late := self._late_ranks():
            pending = self._repair(late)
            self._second.num_bytes += pending.num_bytes
            pending.wait()

    def _late_ranks(self) -> dict[int, Header]:
        headers = {rank: self._parts[1].received(rank)[0] for rank in range(self.group.world_size)}
        for rank, header in headers.items():
            if header.step != self._index:
                raise CommError(
                    f"rank {self.group.rank}: rank {rank} sent factors of {self.name} for exchange {header.step} in "
                    f"exchange {self._index}; every rank must run backward equally often (one without data calls "
                    "empty_step())"
                )
        return {rank: header for rank, header in headers.items() if header.resent_rows}

    def _repair(self, late: dict[int, Header]) -> Pending:
        """Starts to exchange both parts once more for the ranks that were late, straight to all others."""
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for rank, header in late.items():
            if rank == self.group.rank:
                assert self._resent is not None
                first, second = (torch.cat(rows) for rows in self._resent)
                sends = [
                    (peer, part) for peer in self.group.peers for part in (first.contiguous(), second.contiguous())
                ]
            else:
                shape, device = header.resent_rows, self._device
                first = torch.empty(shape, self._parts[0].width, dtype=header.resent_dtype, device=device)
                second = torch.empty(shape, self._parts[1].width, dtype=header.dtype, device=device)
                receives += [(rank, first), (rank, second)]
            self._repaired[rank] = (first, second)
        what = f"late factors of {self.name} in step {self._index}"
        most = max(header.resent_rows for header in late.values())
        self._grow_to = max(self._parts[0].capacity, most)
        return self.group.exchange(sends, receives, tag=self.tag + REPAIR_TAG, what=what)

    # On the training thread again

    def finish(self) -> None:
        """Hands all ranks' rows to `combine`."""
        firsts, seconds = [], []
        reached = 0
        for rank in range(self.group.world_size):
            header, second = self._parts[1].received(rank)
            first = self._parts[0].received(rank)[1][: second.shape[0]]
            if rank in self._repaired:
                first, second = self._repaired[rank]
            reached += header.reached
            firsts.append(first)
            seconds.append(second)
        self.num_rows = max(part.shape[0] for part in seconds)
        self.made = [float(reached)] * len(self.parameters)
        if reached:
            self.combine(firsts, seconds)

    def weighted(self, rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The rows of all ranks in one tensor of their own, each multiplied by what its rank counts."""
        by_rank = self._weighing.by_rank
        if len(set(by_rank)) == 1:
            return torch.cat([part.to(dtype) for part in rows]).mul_(by_rank[0])
        return torch.cat(
            [
                part.to(dtype) * weight if weight else torch.zeros_like(part, dtype=dtype)
                for part, weight in zip(rows, by_rank, strict=True)
            ]
        )

    def reweigh(self, factor: float) -> None:
        """What has accumulated is in the stash, in units of its own."""

    def reset(self) -> None:
        """Learns how many calls a step has, and forgets this one."""
        super().reset()
        if self._arrived:
            self._expected_calls = len(self._arrived)
            self._learned = True
        done = {c.serial for c in self._arrived}
        for ref in self._sent:
            call = ref()
            if call is not None and call.serial not in done:
                call.first = call.first.clone()  # its place in the send buffer is about to be used again
        self._sent, self._sent_serials, self._sent_rows = [], [], []
        for call in self._arrived:
            call.second = None  # the graph may live on and would keep it
        self._arrived, self._stash, self._stash_sent, self._accumulated = [], [], 0, None
        self._resent, self._repaired = None, {}
        if self._grow_to:
            for part in self._parts:
                part.grow(self._grow_to)
            self._grow_to = 0

    def detach(self) -> None:
        """Calls of before may still be come by."""
        super().detach()
        self._is_detached = True

    def end_unsynced(self) -> None:
        """At the end of a backward pass inside `no_sync`: its calls are in the stash."""
        self._serial_before = self._serial


def _alike(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All in one dtype, the widest; they differ only if autocast was on for some calls and off for others."""
    if len({tensor.dtype for tensor in rows}) < 2:
        return list(rows)
    widest = rows[0].dtype
    for tensor in rows:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in rows]
