"""What a coordinator knows: keys with values, what it answered last to whom, and the file from which it goes on.

A request that changes something carries the asker's name and a number. Asked again, because the answer was lost with a
connection or with the coordinator's process, it is answered from memory and not done twice. Everything that changes is
appended to a file, if there is one, before it is answered; reading that file again gives the same table. A record at
its end that is cut short, by a kill in the middle of writing, was never answered: it is dropped.
"""

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.comm.frames import MAX_BODY_BYTES, FrameError, Message, Op, decode, encode
from poseidon.errors import ConfigError
from poseidon.units import MIB

_logger = logging.getLogger(__name__)

NAME_BYTES = 16
"""Of the name by which an asker is known again."""
NOBODY = bytes(NAME_BYTES)
"""The coordinator itself, whose changes are never repeated."""
MAX_TABLE_BYTES = 256 * MIB
"""Keys and values together."""
MAX_ASKERS = 65536
"""Last answers that are remembered; the oldest go first."""

_KEY_COST = 128
"""Bytes that a key costs beside its text and value, roughly: an empty value is not free."""
_RECORD = struct.Struct(f"!II{NAME_BYTES}s")  # bytes of the body, checksum of name and body, name


class Table:
    """Keys and values, changed by requests exactly once.

    Args:
        log: The file that changes are appended to and from which the table goes on.

    Raises:
        ConfigError: The file cannot be read or written.
    """

    def __init__(self, log: "TableLog | None" = None) -> None:
        self.values: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self._answers: dict[bytes, Message] = {}
        self._num_bytes = 0
        self._log: TableLog | None = None
        if log is not None:
            try:
                for name, request in log.read():
                    self._replay(name, request)
                log.begin(self._snapshot())
            except OSError as error:
                raise ConfigError(f"cannot use the coordinator's log {log.path}: {error.strerror}") from error
            self._log = log

    def change(self, name: bytes, request: Message) -> Message:
        """Does what a request asks for, or answers it as the last time.

        Args:
            name: Whose request it is.
            request: One of those that change something.
        """
        known = self._answers.get(name)
        if known is not None and known.number == request.number:
            return known
        self._write_down(name, request)
        answer = self._apply(request)
        self._remember(name, answer)
        return answer

    def put(self, key: str, value: bytes, *, logged: bool = True) -> None:
        """Sets one key, on nobody's request."""
        if logged:
            self._write_down(NOBODY, Message(Op.SET, keys=(key,), values=(value,)))
        self._set(key, value)

    def _write_down(self, name: bytes, request: Message) -> None:
        """Where the disk is full the job goes on without the file: a wrong one would be worse than none."""
        if self._log is None:
            return
        try:
            if self._log.is_worth_rewriting(self._num_bytes):
                self._log.begin(self._snapshot())
            self._log.append(name, request)
        except OSError as error:
            _logger.warning("%s; this coordinator can no longer be replaced by another", error)
            self._log.remove()
            self._log = None

    def folder(self, folder: str) -> dict[str, bytes]:
        """What lies in a folder: the keys whose last slash ends it."""
        return {key: self.values[key] for key in self._folders.get(folder, ())}

    def close(self) -> None:
        """Closes the file."""
        if self._log is not None:
            self._log.close()

    def _apply(self, request: Message) -> Message:
        keys, values = request.keys, request.values
        done = Message(Op.DONE, request.number)
        match request.op:
            case Op.SET if keys and len(keys) == len(values):
                if not self._has_room(request):
                    return self._refusal(request, f"the store is full ({self._num_bytes} bytes)")
                for key, value in zip(keys, values, strict=True):
                    self._set(key, value)
                return done
            case Op.ADD if len(keys) == 1:
                return self._add(request)
            case Op.COMPARE_SET if len(keys) == 1 and len(values) == 2:
                return self._compare_set(request)
            case Op.DELETE if len(keys) == 1:
                return Message(Op.DONE, request.number, amount=int(self._delete(keys[0])))
        return self._refusal(request, f"{request.op.name} with {len(keys)} keys and {len(values)} values")

    def _add(self, request: Message) -> Message:
        (key,) = request.keys
        try:
            total = int(self.values.get(key, b"0")) + request.amount
        except ValueError:
            return self._refusal(request, f"cannot add to {key!r}, which holds no number")
        if not -(2**63) <= total < 2**63:
            return self._refusal(request, f"cannot add to {key!r}: the sum needs more than 64 bits")
        if not self._has_room(request):
            return self._refusal(request, f"the store is full ({self._num_bytes} bytes)")
        self._set(key, str(total).encode())
        return Message(Op.DONE, request.number, amount=total)

    def _compare_set(self, request: Message) -> Message:
        """As torch's: a key that is absent is set where nothing is expected; the answer is what is there then."""
        (key,), (expected, desired) = request.keys, request.values
        present = self.values.get(key)
        if present == expected or (present is None and not expected):
            if not self._has_room(request):
                return self._refusal(request, f"the store is full ({self._num_bytes} bytes)")
            self._set(key, desired)
            present = desired
        return Message(Op.DONE, request.number, values=(expected if present is None else present,))

    @staticmethod
    def _refusal(request: Message, why: str) -> Message:
        return Message(Op.REFUSED, request.number, values=(why.encode(),))

    def _has_room(self, request: Message) -> bool:
        more = sum(map(len, request.values)) + sum(_KEY_COST + len(key) for key in request.keys)
        return self._num_bytes + more <= MAX_TABLE_BYTES

    def _set(self, key: str, value: bytes) -> None:
        if key in self.values:
            self._num_bytes += len(value) - len(self.values[key])
        else:
            self._num_bytes += _KEY_COST + len(key) + len(value)
            self._folders.setdefault(_folder_of(key), {})[key] = None
        self.values[key] = value

    def _delete(self, key: str) -> bool:
        if key not in self.values:
            return False
        self._num_bytes -= _KEY_COST + len(key) + len(self.values.pop(key))
        folder = self._folders[_folder_of(key)]
        del folder[key]
        if not folder:
            del self._folders[_folder_of(key)]
        return True

    def _remember(self, name: bytes, answer: Message) -> None:
        if name == NOBODY:
            return
        self._answers.pop(name, None)
        self._answers[name] = answer
        if len(self._answers) > MAX_ASKERS:
            del self._answers[next(iter(self._answers))]

    def _replay(self, name: bytes, request: Message) -> None:
        if request.op is Op.ANSWERED:
            answer = Message(Op.DONE, request.number, request.amount, values=request.values)
            self._remember(name, answer)
        else:
            self._remember(name, self._apply(request))

    def _snapshot(self) -> Iterator[tuple[bytes, Message]]:
        for key, value in self.values.items():
            yield NOBODY, Message(Op.SET, keys=(key,), values=(value,))
        for name, answer in self._answers.items():
            if answer.op is Op.DONE:
                yield name, Message(Op.ANSWERED, answer.number, answer.amount, values=answer.values)


def _folder_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


@dataclass
class TableLog:
    """The file of changes; one coordinator writes it at a time.

    It survives the end of the process at any moment, not that of the machine: nothing waits for the disk.
    """

    path: Path

    def __post_init__(self) -> None:
        self._fd = -1
        self._size = 0

    def read(self) -> Iterator[tuple[bytes, Message]]:
        """The changes in the file, up to the first that is cut short; none where there is no file.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                while len(head := file.read(_RECORD.size)) == _RECORD.size:
                    size, checksum, name = _RECORD.unpack(head)
                    body = file.read(size) if size <= MAX_BODY_BYTES else b""
                    if len(body) < size or zlib.crc32(name + body) != checksum:
                        return
                    with suppress(FrameError):
                        yield name, decode(body)
        except FileNotFoundError:
            return

    def begin(self, changes: Iterator[tuple[bytes, Message]]) -> None:
        """Replaces the file by one with these changes, whole or not at all, and appends to it from then on.

        Raises:
            OSError: The file cannot be written.
        """
        temporary = self.path.with_name(self.path.name + ".new")
        with open(temporary, "wb", opener=_private) as file:
            for name, change in changes:
                file.write(_record(name, change))
            self._size = file.tell()
        temporary.replace(self.path)
        self.close()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, name: bytes, change: Message) -> None:
        """Writes one change down.

        Raises:
            OSError: The disk is full.
        """
        record = _record(name, change)
        written = os.write(self._fd, record)
        if written < len(record):
            raise OSError(f"cannot write the coordinator's log {self.path}: {written} of {len(record)} bytes went in")
        self._size += written

    def remove(self) -> None:
        """Closes the file and takes it away."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def is_worth_rewriting(self, num_bytes: int) -> bool:
        """Whether most of the file is about what has changed since."""
        return self._size > 4 * num_bytes + 4 * MIB

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _record(name: bytes, change: Message) -> bytes:
    body = encode(change)
    return _RECORD.pack(len(body), zlib.crc32(name + body), name) + body


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
