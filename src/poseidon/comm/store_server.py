"""The coordinator of a job: the store where its ranks meet, and which knows at once when a rank's process has ended.

It holds what torch's own store holds, and serves only who has proved the job's secret (`handshake`); strangers are
dropped and logged. One thread serves all connections. A wait of a rank costs an entry in a table here, not a thread.
Everything is bounded: connections that have proved nothing, bytes of a request, of a connection and of the whole table.

A rank registers on one of its connections. If that one ends without goodbye, the process behind it has ended, and the
key that the rank has named is set, which the other ranks read within a beat.

With a log the table outlives the process: `launch/_store_host.py` serves with one, and may be killed and started again.
"""

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from poseidon.comm.frames import FrameError, FrameReader, FrameWriter, Message, Op
from poseidon.comm.handshake import HANDSHAKE_SECONDS, PROOF_BYTES, HandshakeError, ServerHandshake
from poseidon.comm.secret import Secret
from poseidon.comm.sockets import keep_from_children
from poseidon.comm.store_table import NAME_BYTES, NOBODY, Table, TableLog
from poseidon.comm.strangers import StrangerLog
from poseidon.units import MILLISECONDS

_log = logging.getLogger(__name__)

MAX_UNPROVEN = 64
"""Connections that have proved nothing, at a time; one more, and the oldest is dropped."""
MAX_PROVEN = 8192
"""Connections of the job."""
GONE_AFTER_SECONDS = 0.3
"""So long may a rank's connection be away before its process counts as ended: it may come back over another one."""
_ACTIVE_SECONDS = 3.0
"""A rank that has asked for something so recently is alive."""
_RECEIVE_BYTES = 65536
_PAUSE_SECONDS = 0.02
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A connection to a host that has vanished ends after two minutes, and does not stay for ever."""


class _Connection:
    """One client, from its first byte on."""

    def __init__(self, sock: socket.socket, address: str, secret: Secret) -> None:
        self.socket = sock
        self.address = address
        self.handshake = ServerHandshake(secret)
        self.drop_at = time.monotonic() + HANDSHAKE_SECONDS
        self.proof = b""
        self.reader: FrameReader | None = None
        """None until it has proved the secret, as the writer."""
        self.writer: FrameWriter | None = None
        self.unsent = bytearray(self.handshake.greeting)
        self.name = NOBODY
        self.registered = ""
        """The key to set if it ends without goodbye."""
        self.epitaph = b""
        self.waiting: Message | None = None
        """The request that waits for keys."""
        self.wait_until = 0.0


class StoreServer:
    """Serves a store from a thread of its own until it is closed.

    Args:
        listener: Bound and listening; the server closes it.
        secret: Of the job.
        log: File that the table goes on from and is written to.

    Raises:
        ConfigError: The log cannot be used.
    """

    def __init__(self, listener: socket.socket, secret: Secret, log: Path | None = None) -> None:
        self._listener = listener
        keep_from_children(listener)
        self._secret = secret
        self.address, self.port = listener.getsockname()[:2]
        self._strangers = StrangerLog(_log, f"the coordinator at {self.address}:{self.port}")
        self._table = Table(TableLog(log) if log is not None else None)
        self._connections: dict[socket.socket, _Connection] = {}
        self._unproven: dict[socket.socket, _Connection] = {}
        """Of these connections, those that have proved nothing, the oldest first."""
        self._waiting: set[_Connection] = set()
        """Those whose request waits for keys."""
        self._waits: dict[str, list[_Connection]] = {}
        """The same by the first key that is missing."""
        self._departures: dict[str, tuple[float, bytes]] = {}
        """Keys to set unless their rank comes back, with the moment and the value."""
        self._guard = threading.Lock()
        self._active: dict[str, float] = {}
        """When each registered rank has asked last; under the guard."""
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="poseidon-coordinator", daemon=True)
        self._thread.start()

    @property
    def num_strangers(self) -> int:
        """How many connections were dropped because they did not prove the secret or broke the protocol."""
        return self._strangers.count

    def join(self) -> None:
        """Waits until it has ended."""
        self._thread.join()

    def await_goodbyes(self, seconds: float) -> None:
        """Returns when each registered rank has said goodbye, is gone or is silent; after some seconds in any case."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._guard:
                latest = max(self._active.values(), default=0.0)
            if latest < time.monotonic() - _ACTIVE_SECONDS:
                return
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Ends every connection and the thread."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._seconds_to_next()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                        self._turn_to(self._connections[key.fileobj], events)
                self._do_what_is_due()
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            self._listener.close()
            self._selector.close()
            self._table.close()

    def _seconds_to_next(self) -> float:
        moments = [moment for moment, _ in self._departures.values()]
        moments += [connection.drop_at for connection in self._unproven.values()]
        moments += [connection.wait_until for connection in self._waiting]
        return max(0.0, min(moments, default=time.monotonic() + HANDSHAKE_SECONDS) - time.monotonic())

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for key, (moment, epitaph) in list(self._departures.items()):
            if moment <= now:
                del self._departures[key]
                self._table.put(key, epitaph)
                self._end_waits([key])
        for connection in list(self._unproven.values()):
            if connection.drop_at <= now:
                self._drop(connection, f"it proved nothing within {HANDSHAKE_SECONDS:g} s")
        for connection in [one for one in self._waiting if one.wait_until <= now]:
            assert connection.waiting is not None
            answer = Message(Op.LATE, connection.waiting.number)
            self._leave_waits(connection)
            self._reply(connection, answer)
        self._strangers.flush()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is left for now
            time.sleep(_PAUSE_SECONDS)
            return
        keep_from_children(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven.values()))
            self._drop(oldest, f"more than {MAX_UNPROVEN} connections have proved nothing")
        connection = _Connection(sock, f"{address[0]}:{address[1]}", self._secret)
        self._connections[sock] = self._unproven[sock] = connection
        self._selector.register(sock, selectors.EVENT_READ)
        self._send(connection)

    def _turn_to(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(connection)
        if events & selectors.EVENT_READ and connection.socket in self._connections:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        most = PROOF_BYTES - len(connection.proof) if connection.reader is None else _RECEIVE_BYTES
        try:
            data = connection.socket.recv(most)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and connection.reader is None:
            self._drop(connection, "it closed the connection before it proved anything")
        elif not data:
            self._end(connection)
        else:
            try:
                self._take_in(connection, data)
            except (HandshakeError, FrameError) as error:
                self._drop(connection, str(error))

    def _take_in(self, connection: _Connection, data: bytes) -> None:
        if connection.reader is None:
            self._prove(connection, data)
            return
        for request in connection.reader.feed(data):
            if connection.waiting is not None or connection.unsent:
                raise FrameError("it asked again before it was answered")
            self._note_active(connection)
            answer = self._answer(connection, request)
            if answer is not None:
                self._reply(connection, answer)

    def _prove(self, connection: _Connection, data: bytes) -> None:
        connection.proof += data
        if len(connection.proof) < PROOF_BYTES:
            return
        answer, keys = connection.handshake.check(connection.proof)
        if len(self._connections) - len(self._unproven) >= MAX_PROVEN:
            raise HandshakeError(f"{MAX_PROVEN} connections of this job are open already")
        del self._unproven[connection.socket]
        connection.reader, connection.writer = FrameReader(keys.to_server), FrameWriter(keys.to_client)
        connection.unsent += answer
        self._send(connection)

    def _answer(self, connection: _Connection, request: Message) -> Message | None:
        """The answer, or None if it is due later."""
        keys, values, done = request.keys, request.values, Message(Op.DONE, request.number)
        match request.op:
            case Op.HELLO if len(values) == 1 and len(values[0]) == NAME_BYTES:
                connection.name = values[0]
                return done
            case Op.REGISTER if len(keys) == 1 and len(values) == 1:
                self._register(connection, keys[0], values[0])
                return done
            case Op.GOODBYE:
                self._forget(connection)
                return done
            case Op.SET | Op.ADD | Op.COMPARE_SET | Op.DELETE:
                answer = self._table.change(connection.name, request)
                self._end_waits(keys)
                return answer
            case Op.READ | Op.WAIT:
                return self._answer_when_there(connection, request)
            case Op.CHECK:
                return replace(done, amount=int(all(key in self._table.values for key in keys)))
            case Op.COUNT if len(keys) == 1:
                return replace(done, amount=sum(key.startswith(keys[0]) for key in self._table.values))
            case Op.BEAT if keys and len(values) == 1:
                self._table.put(keys[0], values[0], logged=False)
                found = {key: value for folder in keys[1:] for key, value in self._table.folder(folder).items()}
                return replace(done, keys=tuple(found), values=tuple(found.values()))
        raise FrameError(f"a request {request.op.name} with {len(keys)} keys and {len(values)} values")

    def _answer_when_there(self, connection: _Connection, request: Message) -> Message | None:
        missing = next((key for key in request.keys if key not in self._table.values), None)
        if missing is None:
            asked = request.keys if request.op is Op.READ else ()
            return Message(Op.DONE, request.number, values=tuple(self._table.values[key] for key in asked))
        if connection.waiting is None:
            if request.amount <= 0:
                return Message(Op.LATE, request.number)
            connection.waiting = request
            connection.wait_until = time.monotonic() + request.amount / MILLISECONDS
            self._waiting.add(connection)
        self._waits.setdefault(missing, []).append(connection)
        return None

    def _end_waits(self, keys: Iterable[str]) -> None:
        """Answers who has waited for these keys, and for no others that are missing."""
        for key in keys:
            for connection in self._waits.pop(key, ()) if key in self._table.values else ():
                assert connection.waiting is not None
                if (answer := self._answer_when_there(connection, connection.waiting)) is not None:
                    self._leave_waits(connection)
                    self._reply(connection, answer)

    def _leave_waits(self, connection: _Connection) -> None:
        self._waiting.discard(connection)
        for key in connection.waiting.keys if connection.waiting is not None else ():
            if connection in (waiting := self._waits.get(key, [])):
                waiting.remove(connection)
                if not waiting:
                    del self._waits[key]
        connection.waiting = None

    def _register(self, connection: _Connection, key: str, epitaph: bytes) -> None:
        for other in self._connections.values():
            if other.registered == key:
                other.registered = ""  # the rank has come back over a new connection
        self._departures.pop(key, None)
        connection.registered, connection.epitaph = key, epitaph
        self._note_active(connection)

    def _forget(self, connection: _Connection) -> None:
        with self._guard:
            self._active.pop(connection.registered, None)
        connection.registered = ""

    def _note_active(self, connection: _Connection) -> None:
        if connection.registered:
            with self._guard:
                self._active[connection.registered] = time.monotonic()

    def _reply(self, connection: _Connection, answer: Message) -> None:
        assert connection.writer is not None
        try:
            frame = connection.writer.write(answer)
        except FrameError as error:  # more than one answer can hold
            frame = connection.writer.write(Message(Op.REFUSED, answer.number, values=(str(error).encode(),)))
        connection.unsent += frame
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except OSError:
            self._end(connection)
        else:
            self._selector.modify(connection.socket, selectors.EVENT_READ)

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._strangers.note(connection.address, reason)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is None:
            return
        self._unproven.pop(connection.socket, None)
        self._leave_waits(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.registered:
            self._departures[connection.registered] = (time.monotonic() + GONE_AFTER_SECONDS, connection.epitaph)
            self._forget(connection)


def keep_alive(sock: socket.socket) -> None:
    """Lets the kernel notice that the other host has vanished, where it can be told when."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
