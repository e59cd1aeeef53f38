"""What ranks and coordinator say to each other as bytes: frames of bounded size, each with its number and its tag.

A frame is a fixed header (magic, version, length of the body, number of the frame), the body, and an HMAC over both
with the key of this session and direction. A length above the bound is refused before memory is taken; a frame that is
changed, repeated, left out or sent back has a wrong tag or number. The body is one `Message` in a fixed binary form: no
pickle, and nothing that needs a parser. Reading is total: any bytes give messages or a `FrameError`.

All of it is pure: bytes in, bytes out. The sockets are in `store_server` and `remote_store`.
"""

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from poseidon.comm.secret import TAG_BYTES
from poseidon.errors import CommError
from poseidon.units import MIB

MAX_BODY_BYTES = 8 * MIB
"""A longer body is not taken in."""
MAX_ITEMS = 16384
"""Keys of a message, and values."""
MAX_KEY_BYTES = 1024

_MAGIC = b"PSDF"
_VERSION = 1
_HEADER = struct.Struct("!4sHIQ")  # magic, version, bytes of the body, number of the frame
_HEAD = struct.Struct("!BQqHH")  # op, number, amount, keys, values
_KEY_LENGTH = struct.Struct("!H")
_VALUE_LENGTH = struct.Struct("!I")
_LARGEST_NUMBER = 2**64 - 1
_LARGEST_AMOUNT = 2**63


class FrameError(CommError):
    """Bytes that are no frame of this session, or a message that fits into none."""


class Op(IntEnum):
    """What a message asks for or answers."""

    HELLO = 1
    """The asker's name, of 16 bytes, by which a repeated request is known."""
    REGISTER = 2
    """Sets a key to a value if this connection ends without goodbye."""
    GOODBYE = 3
    """Takes `REGISTER` back."""
    SET = 4
    ADD = 5
    COMPARE_SET = 6
    DELETE = 7
    READ = 8
    """The values of the keys, as soon as all are there; `amount` is how many milliseconds to wait for that."""
    WAIT = 9
    """As `READ`, without the values."""
    CHECK = 10
    COUNT = 11
    """How many keys begin with the given one."""
    BEAT = 12
    """Sets the first key, in memory only, and reads all that is in the folders that the further keys name."""
    ANSWERED = 13
    """What a request was answered; only in the file from which a coordinator goes on."""
    DONE = 20
    LATE = 21
    REFUSED = 22
    """The value says why."""


@dataclass(frozen=True)
class Message:
    """One request or answer."""

    op: Op
    number: int = 0
    """Of the request; its answer has the same."""
    amount: int = 0
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()


def encode(message: Message) -> bytes:
    """The body of a frame.

    Raises:
        FrameError: It is too large, or has too many parts.
    """
    try:
        keys = [key.encode() for key in message.keys]
    except UnicodeEncodeError as error:
        raise FrameError(f"cannot send a key that is no text: {error}") from error
    if max(len(keys), len(message.values)) > MAX_ITEMS:
        raise FrameError(f"cannot send {len(keys)} keys and {len(message.values)} values at once: at most {MAX_ITEMS}")
    if longest := max((len(key) for key in keys if len(key) > MAX_KEY_BYTES), default=0):
        raise FrameError(f"cannot send a key of {longest} bytes: at most {MAX_KEY_BYTES}")
    if not (0 <= message.number <= _LARGEST_NUMBER and -_LARGEST_AMOUNT <= message.amount < _LARGEST_AMOUNT):
        raise FrameError(f"cannot send the numbers {message.number} and {message.amount}: they need more than 64 bits")
    parts = [_HEAD.pack(message.op, message.number, message.amount, len(keys), len(message.values))]
    for key in keys:
        parts += (_KEY_LENGTH.pack(len(key)), key)
    for value in message.values:
        parts += (_VALUE_LENGTH.pack(len(value)), value)
    if (size := sum(map(len, parts))) > MAX_BODY_BYTES:
        raise FrameError(f"cannot send {size} bytes at once: at most {MAX_BODY_BYTES}")
    return b"".join(parts)


def decode(body: bytes) -> Message:
    """The message of a body, whatever its bytes are.

    Raises:
        FrameError: It is not exactly one message.
    """
    if len(body) > MAX_BODY_BYTES:
        raise FrameError(f"a body of {len(body)} bytes: at most {MAX_BODY_BYTES}")
    try:
        op, number, amount, num_keys, num_values = _HEAD.unpack_from(body)
        if max(num_keys, num_values) > MAX_ITEMS:
            raise FrameError(f"a message with {num_keys} keys and {num_values} values: at most {MAX_ITEMS}")
        place = _HEAD.size
        keys, values = [], []
        for _ in range(num_keys):
            key, place = _take(body, place, _KEY_LENGTH, MAX_KEY_BYTES)
            keys.append(key.decode())
        for _ in range(num_values):
            value, place = _take(body, place, _VALUE_LENGTH, MAX_BODY_BYTES)
            values.append(value)
        if place != len(body):
            raise FrameError(f"a message of {place} bytes in a body of {len(body)}")
        return Message(Op(op), number, amount, tuple(keys), tuple(values))
    except (struct.error, ValueError) as error:  # cut short; no text; no such op
        raise FrameError(f"no message: {error}") from error


def _take(body: bytes, place: int, length: struct.Struct, most: int) -> tuple[bytes, int]:
    (size,) = length.unpack_from(body, place)
    start = place + length.size
    if size > most or start + size > len(body):
        raise FrameError(f"a part of {size} bytes where {len(body) - start} are left and {most} allowed")
    return body[start : start + size], start + size


class FrameWriter:
    """Makes the frames of one direction of a session.

    Args:
        key: Of this session and direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def write(self, message: Message) -> bytes:
        """The next frame.

        Raises:
            FrameError: As `encode`.
        """
        body = encode(message)
        text = _HEADER.pack(_MAGIC, _VERSION, len(body), self._count) + body
        self._count += 1
        return text + hmac.digest(self._key, text, "sha256")


class FrameReader:
    """Takes the frames of one direction of a session out of a stream of bytes.

    Args:
        key: Of this session and direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._held = bytearray()
        self._failed = ""

    @property
    def num_held(self) -> int:
        """Bytes of a frame that has not come whole; never more than one frame and what came with its end."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Message]:
        """Takes in what came and gives the messages that are whole now.

        Raises:
            FrameError: This is no frame of the session. Nothing after it can be trusted: every further call raises too.
        """
        if self._failed:
            raise FrameError(self._failed)
        self._held += data
        messages = []
        try:
            while (message := self._next()) is not None:
                messages.append(message)
        except FrameError as error:
            self._failed = str(error)
            self._held.clear()
            raise
        return messages

    def _next(self) -> Message | None:
        if len(self._held) < _HEADER.size:
            return None
        magic, version, size, count = _HEADER.unpack_from(self._held)
        if (magic, version) != (_MAGIC, _VERSION):
            raise FrameError(f"no frame: it begins with {bytes(self._held[:6])!r}")
        if size > MAX_BODY_BYTES:
            raise FrameError(f"a frame with {size} bytes: at most {MAX_BODY_BYTES}")
        if count != self._count:
            raise FrameError(f"frame {count} where number {self._count} is due")
        end = _HEADER.size + size
        if len(self._held) < end + TAG_BYTES:
            return None
        text, tag = bytes(self._held[:end]), bytes(self._held[end : end + TAG_BYTES])
        if not hmac.compare_digest(tag, hmac.digest(self._key, text, "sha256")):
            raise FrameError("a frame with a wrong tag")
        del self._held[: end + TAG_BYTES]
        self._count += 1
        return decode(text[_HEADER.size :])
