"""A rank's side of the coordinator: a store as torch's process groups take it, over proved and signed connections.

A request that gets no answer is asked again over a new connection: nothing is done twice, because the server knows the
asker's name and the request's number. How long that goes on depends on what is seen. A machine that refuses
connections, or takes them and says nothing, is reachable: its coordinator may be about to be started again. One that
does not answer at all is cut off, or this one is.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from poseidon.comm.dialing import dial
from poseidon.comm.frames import FrameError, FrameReader, FrameWriter, Message, Op
from poseidon.comm.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    HANDSHAKE_SECONDS,
    ClientHandshake,
    HandshakeError,
)
from poseidon.comm.secret import Secret
from poseidon.comm.sockets import keep_from_children
from poseidon.comm.store_server import keep_alive
from poseidon.comm.store_table import NAME_BYTES
from poseidon.units import MILLISECONDS, format_seconds

CONNECT_SECONDS = 1.0
"""One attempt to connect; the kernel tries twice meanwhile."""
ANSWER_SECONDS = 2.0
"""A coordinator that lives answers sooner; then a new connection is tried, which finds out more."""
RETRY_SECONDS = 0.1
WAIT_SECONDS = 1.0
"""A long wait is asked for in pieces of this length, so that a coordinator that is gone is noticed."""
_RECEIVE_BYTES = 65536
UNPROVED_SECONDS = 3.0
"""A proof is tried again for so long: a coordinator under a flood of strangers drops one that is none."""
STARTING_SECONDS = 120.0
"""A launcher that holds the socket already starts its coordinator within this time."""


class Trouble(Enum):
    """Why a coordinator gave no answer."""

    REFUSED = "refused"
    """Its machine is there, but nobody listens: the process has ended."""
    SILENT = "silent"
    """Connections are taken, and nothing is said."""
    CUT_OFF = "cut off"
    """Nothing comes back at all."""
    UNPROVED = "unproved"
    """It has another secret, or is no coordinator of ours."""
    CLOSED = "closed"
    """This end was closed."""


class StoreLostError(DistStoreError):
    """The coordinator cannot be asked; `trouble` is what was seen last."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        super().__init__(message)
        self.trouble = trouble


class _NoAnswerError(Exception):
    """One attempt that failed."""

    def __init__(self, trouble: Trouble, why: str) -> None:
        super().__init__(why)
        self.trouble = trouble
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Patience:
    """For how many seconds a request is asked again, by what is seen."""

    first: float = 1800.0
    """Until the first connection: the coordinator may start later than this rank."""
    refused: float = 30.0
    """A launcher starts its coordinator again."""
    silent: float = 30.0
    cut_off: float = 7.0
    """TCP takes six seconds to come back to a link that was down for three."""

    def seconds(self, trouble: Trouble, *, is_first: bool) -> float:
        """How long this trouble is borne.

        Args:
            trouble: What was seen last.
            is_first: Whether there has been no connection yet.
        """
        match trouble:
            case Trouble.REFUSED:
                return self.first if is_first else self.refused
            case Trouble.CUT_OFF:
                return self.first if is_first else self.cut_off
            case Trouble.SILENT:
                return min(self.first, STARTING_SECONDS) if is_first else self.silent
            case Trouble.UNPROVED:
                return UNPROVED_SECONDS
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """Where it is, and how to talk to it."""

    address: str
    port: int
    secret: Secret
    patience: Patience = Patience()

    def __str__(self) -> str:
        shown = f"[{self.address}]" if ":" in self.address else self.address
        return f"{shown}:{self.port}"


class _Session:
    """One connection that both ends have proved."""

    def __init__(self, coordinator: Coordinator) -> None:
        try:
            self.socket = dial(coordinator.address, coordinator.port, seconds=CONNECT_SECONDS)
        except ConnectionRefusedError as error:
            raise _NoAnswerError(Trouble.REFUSED, "nobody listens there") from error
        except OSError as error:
            raise _NoAnswerError(Trouble.CUT_OFF, f"cannot connect: {error.strerror or error}") from error
        keep_from_children(self.socket)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(self.socket)
            handshake = ClientHandshake(coordinator.secret)
            self._deadline = time.monotonic() + HANDSHAKE_SECONDS
            self._send(handshake.prove(self._receive_exactly(GREETING_BYTES, "greeted nobody")))
            keys = handshake.check(self._receive_answer())
        except HandshakeError as error:
            self.close()
            raise _NoAnswerError(Trouble.UNPROVED, str(error)) from error
        except _NoAnswerError:
            self.close()
            raise
        self._writer, self._reader = FrameWriter(keys.to_server), FrameReader(keys.to_client)

    def ask(self, request: Message, seconds: float) -> Message:
        """The answer to a request."""
        self._deadline = time.monotonic() + seconds
        self._send(self._writer.write(request))
        while True:
            try:
                for answer in self._reader.feed(self._receive(_RECEIVE_BYTES, "said nothing")):
                    if answer.number == request.number:
                        return answer
            except FrameError as error:
                raise _NoAnswerError(Trouble.UNPROVED, str(error)) from error

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self._set_timeout()
            self.socket.sendall(data)
        except TimeoutError as error:
            raise _NoAnswerError(Trouble.SILENT, "it takes nothing in") from error
        except OSError as error:
            raise _NoAnswerError(Trouble.REFUSED, f"the connection ended: {error.strerror or error}") from error

    def _receive(self, most: int, what: str) -> bytes:
        try:
            self._set_timeout()
            data = self.socket.recv(most)
        except TimeoutError as error:
            raise _NoAnswerError(Trouble.SILENT, f"it took the connection and {what}") from error
        except OSError as error:
            raise _NoAnswerError(Trouble.REFUSED, f"the connection ended: {error.strerror or error}") from error
        if not data:
            raise _NoAnswerError(Trouble.REFUSED, "it ended the connection")
        return data

    def _receive_exactly(self, size: int, what: str) -> bytes:
        data = b""
        while len(data) < size:
            data += self._receive(size - len(data), what)
        return data

    def _receive_answer(self) -> bytes:
        try:
            return self._receive_exactly(ANSWER_BYTES, "took no notice of the proof")
        except _NoAnswerError as error:
            if error.trouble is Trouble.SILENT:
                raise
            why = "it dropped this rank, as one that does not know the job's secret is"
            raise _NoAnswerError(Trouble.UNPROVED, why) from error

    def _set_timeout(self) -> None:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self.socket.settimeout(left)


class _Line:
    """Asks one request after the other, over session after session; for one thread at a time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._name = secrets.token_bytes(NAME_BYTES)
        self._number = 0
        self._session: _Session | None = None
        self._silent: _Session | None = None
        """One that gave no answer. It stays open until there is another, so that this rank does not count as gone."""
        self._greetings = [Message(Op.HELLO, values=(self._name,))]
        """What a new session begins with."""
        self._was_connected = False
        self.is_closed = False

    def register(self, key: str, epitaph: bytes) -> None:
        """Has the server set a key if this process ends without goodbye."""
        request = Message(Op.REGISTER, keys=(key,), values=(epitaph,))
        self._greetings.append(request)
        self.ask(request)

    def ask(
        self,
        request: Message,
        seconds: float = ANSWER_SECONDS,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Message:
        """The answer to a request, which is asked again where none comes.

        Args:
            request: Its number is given here.
            seconds: How long an answer may take.
            on_trouble: Told what went wrong, each time.
        """
        self._number += 1
        request = Message(request.op, self._number, request.amount, request.keys, request.values)
        since = time.monotonic()
        unproved_since: float | None = None
        while not self.is_closed:
            try:
                return self._ready().ask(request, seconds)
            except _NoAnswerError as error:
                self._give_up_session(error.trouble)
                now = time.monotonic()
                is_unproved = error.trouble is Trouble.UNPROVED
                unproved_since = (unproved_since or now) if is_unproved else None
                limit = self._coordinator.patience.seconds(error.trouble, is_first=not self._was_connected)
                if now - (unproved_since or since) >= limit:
                    raise StoreLostError(
                        f"no answer from the coordinator at {self._coordinator} for {format_seconds(now - since)}: "
                        f"{error.why}",
                        error.trouble,
                    ) from None
                if on_trouble is not None:
                    on_trouble(error.why)
                time.sleep(1.0 if is_unproved else RETRY_SECONDS)
        raise StoreLostError(f"the connection to the coordinator at {self._coordinator} was closed", Trouble.CLOSED)

    def close(self, *, goodbye: bool) -> None:
        """Ends the session, with a goodbye or without; one that waits for an answer in another thread fails."""
        self.is_closed = True
        for session in (self._session, self._silent):
            if session is not None:
                if goodbye:
                    with suppress(_NoAnswerError, FrameError):
                        session.ask(Message(Op.GOODBYE, self._number + 1), ANSWER_SECONDS)
                session.close()

    def _ready(self) -> _Session:
        if self._session is None:
            session = _Session(self._coordinator)
            try:
                for greeting in self._greetings:
                    session.ask(greeting, ANSWER_SECONDS)
            except _NoAnswerError:
                session.close()
                raise
            self._session, self._was_connected = session, True
            if self._silent is not None:
                self._silent.close()
                self._silent = None
        return self._session

    def _give_up_session(self, trouble: Trouble) -> None:
        session, self._session = self._session, None
        if session is not None and trouble is Trouble.SILENT and self._silent is None:
            self._silent = session
        elif session is not None:
            session.close()


class RemoteStore(Store):
    """A store that a coordinator serves, usable by many threads at once.

    It can be the store of `init_process_group` and of a `PrefixStore`. Whoever hands it to torch has to keep it: torch
    holds its C++ half only.

    Args:
        coordinator: Where it is.
        prefix: Put before each key.
        on_trouble: Told why there is no answer yet, each time one was tried for.
    """

    def __init__(
        self, coordinator: Coordinator, *, prefix: str = "", on_trouble: Callable[[str], None] | None = None
    ) -> None:
        super().__init__()
        self.coordinator = coordinator
        self.prefix = prefix
        self._on_trouble = on_trouble
        self._guard = threading.Lock()
        self._idle: list[_Line] = []
        self._all: list[_Line] = []
        self._registered: _Line | None = None
        self._timeout = timedelta(seconds=300)

    def connect(self) -> None:
        """Returns once the coordinator has answered.

        Raises:
            StoreLostError: It did not, for as long as the coordinator's `Patience` says.
        """
        self._ask(Message(Op.CHECK))

    def register(self, key: str, epitaph: str) -> None:
        """Has a key set as soon as this process ends without `close`: its connection ends with it.

        Args:
            key: Without prefix.
            epitaph: The value.

        Raises:
            StoreLostError: As `connect`.
        """
        with self._guard:
            line = self._registered = _Line(self.coordinator)
            self._all.append(line)
        line.register(self.prefix + key, epitaph.encode())
        with self._guard:
            self._idle.append(line)

    def beat(self, key: str, value: str, folders: Sequence[str]) -> dict[str, bytes]:
        """Sets a key, in the coordinator's memory only, and reads all keys in some folders.

        Args:
            key: Without prefix.
            value: Of the key.
            folders: Without prefix, each with its slash.

        Returns:
            Keys without prefix, and their values.
        """
        keys = (self.prefix + key, *(self.prefix + folder for folder in folders))
        answer = self._ask(Message(Op.BEAT, keys=keys, values=(value.encode(),)))
        return {key[len(self.prefix) :]: value for key, value in zip(answer.keys, answer.values, strict=True)}

    def close(self) -> None:
        """Says goodbye and ends every connection; who waits in another thread fails."""
        with self._guard:
            lines, self._all, self._idle = self._all, [], []
        for line in lines:
            line.close(goodbye=line is self._registered)

    def clone(self) -> "RemoteStore":
        """The same store over connections of its own."""
        return RemoteStore(self.coordinator, prefix=self.prefix, on_trouble=self._on_trouble)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._ask(Message(Op.SET, keys=(self.prefix + key,), values=(_as_bytes(value),)))

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is there."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a key that holds a number, once, whatever becomes of the connection; the sum."""
        return self._ask(Message(Op.ADD, amount=amount, keys=(self.prefix + key,))).amount

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are there."""
        return bool(self._ask(Message(Op.CHECK, keys=self._full(keys))).amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all of the keys are there."""
        self._await(Op.WAIT, keys, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key that holds what is expected, or is absent where nothing is; what it holds then."""
        values = (_as_bytes(expected), _as_bytes(desired))
        return self._ask(Message(Op.COMPARE_SET, keys=(self.prefix + key,), values=values)).values[0]

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether it was there."""
        return bool(self._ask(Message(Op.DELETE, keys=(self.prefix + key,))).amount)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask(Message(Op.COUNT, keys=(self.prefix,))).amount

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys; waits until all are there."""
        return list(self._await(Op.READ, keys, None).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets several keys at once."""
        self._ask(Message(Op.SET, keys=self._full(keys), values=tuple(map(_as_bytes, values))))

    def has_extended_api(self) -> bool:
        """No: there are no queues and no append."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait where nothing else is said."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait where nothing else is said."""
        return self._timeout

    def _full(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.prefix + key for key in keys)

    def _await(self, op: Op, keys: Sequence[str], timeout: timedelta | None) -> Message:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            piece = min(max(deadline - time.monotonic(), 0.0), WAIT_SECONDS)
            request = Message(op, amount=round(piece * MILLISECONDS), keys=self._full(keys))
            answer = self._ask(request, piece + ANSWER_SECONDS)
            if answer.op is Op.DONE:
                return answer
            if time.monotonic() >= deadline:
                missing = [key for key in keys if not self.check([key])]
                raise DistStoreError(
                    f"waited {format_seconds(seconds)} in the store at {self.coordinator} for {', '.join(missing[:3])}"
                    f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} in vain"
                )

    def _ask(self, request: Message, seconds: float = ANSWER_SECONDS) -> Message:
        with self._guard:
            line = self._idle.pop() if self._idle else _Line(self.coordinator)
            if line not in self._all:
                self._all.append(line)
        try:
            answer = line.ask(request, seconds, self._on_trouble)
        finally:
            with self._guard:
                if line in self._all:
                    self._idle.append(line)
        if answer.op is Op.REFUSED:
            why = answer.values[0].decode(errors="replace") if answer.values else "without a reason"
            raise DistStoreError(f"the coordinator at {self.coordinator} refused a request: {why}")
        return answer


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
