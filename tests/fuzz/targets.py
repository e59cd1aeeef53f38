"""Everything that takes bytes from outside, and what must hold whatever they are.

Each gives an error of ours or a value in order. The tests here run them under hypothesis, the scripts under atheris,
which `pip install -e '.[fuzz]'` brings.
"""

import hmac
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from poseidon.artifact import Artifact, Value
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.comm.frames import MAX_BODY_BYTES, FrameError, FrameReader, FrameWriter, Message, Op, decode, encode
from poseidon.comm.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    ServerHandshake,
)
from poseidon.comm.mesh import Connections, Published
from poseidon.comm.reach import Place
from poseidon.comm.secret import TAG_BYTES, Secret
from poseidon.comm.store_table import NAME_BYTES, Table, TableLog
from poseidon.errors import CheckpointError, ConfigError
from poseidon.launch.output import LineSplitter
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.reading import printable
from poseidon.report.record import Facts
from poseidon.runtime.checkpoint import STRUCTURE, Damaged, Manifest, Shelf
from poseidon.runtime.packing import pack, unpack
from poseidon.runtime.tensor_file import pieces, read_tensors
from poseidon.tasks.idx import read_idx
from poseidon.timeline import Step, Timeline, to_line
from poseidon.units import parse_bandwidth, parse_bytes, parse_seconds
from support import runs

KEY = b"k" * TAG_BYTES
SECRET = Secret(KEY)
MESSAGES = (
    Message(Op.HELLO, 1, values=(bytes(NAME_BYTES),)),
    Message(Op.REGISTER, 2, keys=("poseidon/gone/1",), values=(b"gone",)),
    Message(Op.SET, 3, keys=("a", "b/c"), values=(b"1", b"")),
    Message(Op.ADD, 4, amount=-7, keys=("a",)),
    Message(Op.COMPARE_SET, 5, keys=("a",), values=(b"1", b"2")),
    Message(Op.DELETE, 6, keys=("a",)),
    Message(Op.READ, 7, amount=1000, keys=("a", "ä")),
    Message(Op.BEAT, 8, keys=("a", "b/"), values=(b"1",)),
    Message(Op.GOODBYE, 9),
)
STATE = {"weights": [torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16)], "step": 7, 2: (None, True, b"x", 1.5)}
FOLDER = Path(tempfile.mkdtemp(prefix="poseidon-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


@dataclass(frozen=True)
class Target:
    """One reader of bytes."""

    read: Callable[[bytes], object]
    """Raises nothing but an AssertionError, where what must hold does not."""
    examples: tuple[bytes, ...]
    """That are in order, to begin from."""


def read_body(data: bytes) -> None:
    with suppress(FrameError):
        message = decode(data)
        assert encode(message) == data, "one message has one form"


def read_stream(data: bytes) -> None:
    """Whatever comes in whatever pieces, nothing is taken that is not signed, and no more is held than a frame."""
    reader = FrameReader(KEY)
    size = 1 + (data[0] if data else 0)
    expected = b""
    with suppress(FrameError):
        for start in range(0, len(data), size):
            for message in reader.feed(data[start : start + size]):
                expected += FrameWriter(KEY).write(message)[-TAG_BYTES:]
            assert reader.num_held <= MAX_BODY_BYTES + 1024
    assert not expected or data.count(expected[:TAG_BYTES])


def read_signed(data: bytes) -> None:
    """What a member of the job signs may be anything, too."""
    header = FrameWriter(KEY).write(Message(Op.GOODBYE))[:18]
    text = header[:6] + len(data).to_bytes(4, "big") + header[10:] + data
    with suppress(FrameError):
        (message,) = FrameReader(KEY).feed(text + hmac.digest(KEY, text, "sha256"))
        assert encode(message) == data


def read_handshake(data: bytes) -> None:
    """Nobody proves the secret by luck."""
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    for check, size in ((server.check, PROOF_BYTES), (client.check, ANSWER_BYTES)):
        try:
            check(data[:size].ljust(size, b"\0"))
        except HandshakeError:
            continue
        raise AssertionError("a proof without the secret")
    with suppress(HandshakeError):
        assert len(client.prove(data[:GREETING_BYTES].ljust(GREETING_BYTES, b"\0"))) == PROOF_BYTES


def change_table(data: bytes) -> None:
    """Any requests of members are answered, and the table keeps count of what it holds."""
    table = Table()
    while data:
        size = int.from_bytes(data[:2], "big")
        body, data = data[2 : 2 + size], data[2 + size :]
        with suppress(FrameError):
            answer = table.change(bytes(NAME_BYTES), decode(body))
            assert answer.op in (Op.DONE, Op.REFUSED)
            encode(answer)
    held = sum(128 + len(key.encode()) + len(value) for key, value in table.values.items())
    assert held - 128 * len(table.values) <= 2 * max(table._num_bytes, 1)


def read_log(data: bytes) -> None:
    path = FOLDER / f"log{os.getpid()}"
    path.write_bytes(data)
    table = Table(TableLog(path))
    values = dict(table.values)
    table.close()
    again = Table(TableLog(path))
    assert again.values == values, "what was read once is read again"
    again.close()


def read_published(data: bytes) -> None:
    published = Published.find(data)
    if published is not None:
        address, port = published.endpoint
        moved = Published.find(published.with_port(port ^ 1))
        assert moved is not None
        assert moved.endpoint == (address, port ^ 1)


def read_as(artifact: type[Artifact], *, toml: bool = False) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        with suppress(ConfigError):
            value = artifact.parse(data.decode("utf-8", errors="replace"), toml=toml)
            assert artifact.parse(value.to_json()) == value

    return read


def read_value(value: type[Value]) -> Callable[[bytes], None]:
    """As it comes from another rank, whose text was authenticated."""

    def read(data: bytes) -> None:
        with suppress(ValidationError):
            found = value.model_validate_json(data)
            assert value.model_validate_json(found.model_dump_json()) == found

    return read


def read_facts(data: bytes) -> None:
    with suppress(ValidationError):
        Facts.model_validate_json(data)


def read_timeline(data: bytes) -> None:
    path = FOLDER / f"timeline{os.getpid()}.jsonl"
    path.write_bytes(data)
    with suppress(ConfigError):
        for step in Timeline.load(path).steps:
            assert Step.model_validate_json(to_line(step)) == step
            assert step.seconds_in() == 0
            assert step.bytes_sent >= 0


def read_state(data: bytes) -> None:
    """A structure without its tensors, then with some."""
    text = data.decode("utf-8", errors="replace")
    for tensors in ({}, pack(STATE)[0]):
        with suppress(CheckpointError):
            unpack(tensors, text)


def read_part(data: bytes) -> None:
    rest = memoryview(data)

    def read_into(buffer: memoryview) -> None:
        nonlocal rest
        assert len(buffer) <= len(data), "memory is taken for no more than the file has"
        buffer[:] = rest[: len(buffer)]
        rest = rest[len(buffer) :]

    with suppress(CheckpointError):
        tensors, metadata = read_tensors(read_into, len(data))
        unpack(tensors, metadata.get(STRUCTURE, ""))


def read_manifest(data: bytes) -> None:
    folder = FOLDER / f"shelf{os.getpid()}" / "step-000000007"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(data)
    (found,) = Shelf(folder.parent).scan()
    if not isinstance(found, Damaged):
        assert found.step == 7
        assert all(path.parent == folder for path in (folder / entry.file for entry in found.entries))
        assert isinstance(found.damage(), str)


def read_data_set(data: bytes) -> None:
    path = FOLDER / f"set{os.getpid()}"
    path.write_bytes(data)
    with suppress(ConfigError):
        assert read_idx(path).nbytes < max(100, 1100 * len(data))  # deflate makes 1032 of one at most


def read_quantity(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    for parse in (parse_seconds, parse_bytes, parse_bandwidth, LinkChange.parse):
        with suppress(ConfigError, ValidationError):
            parse(text)


def show(data: bytes) -> None:
    text = printable(data.decode("utf-8", errors="surrogateescape").encode("utf-8", "replace").decode())
    assert not any(ord(c) < 32 and c not in "\t\n" for c in text)
    assert printable(text) == text


def split_lines(data: bytes) -> None:
    splitter = LineSplitter(clock=lambda: 0.0)
    size = 1 + (data[0] if data else 0)
    lines: list[str] = []
    for start in range(0, len(data), size):
        lines += splitter.feed(data[start : start + size])
        assert len(splitter._pending) <= 65536 + size
    lines += splitter.flush()
    assert not any("\n" in line for line in lines)


def _sized(bodies: Iterable[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(2, "big") + body for body in bodies)


def _log() -> bytes:
    path = FOLDER / "log"
    table = Table(TableLog(path))
    for number, message in enumerate(MESSAGES):
        table.change(bytes([number]) * NAME_BYTES, message)
    table.close()
    return path.read_bytes()


def _part() -> bytes:
    tensors, structure = pack(STATE)
    return b"".join(pieces(tensors, {STRUCTURE: structure}))


def _manifest() -> bytes:
    shelf = Shelf(FOLDER / "valid", durable=False)
    draft = shelf.begin(7)
    found = draft.seal([draft.write("model", STATE)], {"world_size": 2, "score": 0.5})
    assert isinstance(found.manifest, Manifest)
    return (found.path / "manifest.json").read_bytes()


def _writer() -> bytes:
    writer = FrameWriter(KEY)
    return b"".join(map(writer.write, MESSAGES))


PUBLISHED = (
    (4).to_bytes(8, "little")
    + b"host"
    + bytes(4)
    + (136).to_bytes(8, "little")
    + b"\x02\x00\x1f\x90\x7f\x00\x00\x01"
    + bytes(128)
)
GREETING = ServerHandshake(SECRET).greeting
STEP = to_line(runs.make_step(0, 3)).encode()
IDX = bytes((0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6))
CLUSTER = b'[[hosts]]\nname = "a"\nlink = "1Gbit/s"\n[hosts.device]\nflops_per_s = "50GFLOP/s"\n'

FRAMES: Mapping[str, Target] = {
    "body": Target(read_body, tuple(map(encode, MESSAGES))),
    "stream": Target(read_stream, (_writer(),)),
    "signed": Target(read_signed, tuple(map(encode, MESSAGES))),
    "handshake": Target(read_handshake, (GREETING, ClientHandshake(SECRET).prove(GREETING))),
    "requests": Target(change_table, (_sized(map(encode, MESSAGES)),)),
    "log": Target(read_log, (_log(),)),
    "published": Target(read_published, (PUBLISHED,)),
}
FILES: Mapping[str, Target] = {
    "plan": Target(read_as(Plan), (runs.make_plan().to_json().encode(),)),
    "profile": Target(read_as(ModelProfile), (runs.make_plan().profile.to_json().encode(),)),
    "cluster": Target(read_as(ClusterSpec, toml=True), (CLUSTER,)),
    "facts": Target(read_facts, (Facts.model_validate(runs.make_facts()).model_dump_json().encode(),)),
    "timeline": Target(read_timeline, (STEP, STEP + STEP)),
    "idx": Target(read_data_set, (IDX,)),
    "quantity": Target(read_quantity, (b"10Gbit/s", b"64MiB", b"250us", b"5s:host2=10Mbit/s")),
    "terminal": Target(show, (b"\x1b[31mred\x1b[0m", "näme\u202e".encode())),
    "output": Target(split_lines, (b"a line\nhalf\rdrawn\r\n",)),
    "place": Target(read_value(Place), (b'{"host": "a", "address": "10.0.0.1", "port": 4711}',)),
    "connections": Target(
        read_value(Connections), (b'{"listener": ["::1", 1], "connections": [[["::1", 1], ["::1", 2]]]}',)
    ),
}
CHECKPOINTS: Mapping[str, Target] = {
    "structure": Target(read_state, (pack(STATE)[1].encode(),)),
    "part": Target(read_part, (_part(),)),
    "manifest": Target(read_manifest, (_manifest(),)),
}
TARGETS = {**FRAMES, **FILES, **CHECKPOINTS}
