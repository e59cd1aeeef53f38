"""Nothing that is read or received can run code: no pickle in the source, and one that is sent anyway does nothing."""

import ast
import io
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poseidon
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm.frames import FrameReader, FrameWriter, Message, Op, decode
from poseidon.comm.handshake import GREETING_BYTES, PROOF_BYTES, ClientHandshake, ServerHandshake
from poseidon.comm.reach import Place
from poseidon.comm.remote_store import Coordinator, Patience, RemoteStore
from poseidon.comm.secret import Secret
from poseidon.comm.store_server import StoreServer
from poseidon.comm.store_table import NOBODY, Table, TableLog
from poseidon.errors import PoseidonError
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.report.record import RunRecord
from poseidon.runtime.checkpoint import Shelf
from poseidon.runtime.packing import unpack
from poseidon.runtime.weights import load_weights
from poseidon.tasks.idx import read_idx
from poseidon.timeline import Timeline
from support import runs

SOURCE = Path(poseidon.__file__).parent
BANNED_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg", "xmlrpc"),
    *("multiprocessing", "torch.multiprocessing", "torch.package"),
    *("torch.distributed.rpc", "torch.distributed.checkpoint"),
}
"""Modules that read pickles, or whose queues and pipes do."""
BANNED_NAMES = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list"),
    *("recv_object_list", "_object_to_tensor", "_tensor_to_object", "unsafe_load", "full_load"),
}
ALLOWED = {
    "runtime/weights.py": {"torch.save"},  # exports for `torch.load` where a `.pt` file is asked for
    "launch/_fork_server.py": {"exec()", "compile()"},  # runs the user's program, as `python program.py` would
}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {one.name}" for one in names if is_banned(one.name))
            case ast.ImportFrom(module=str(module), names=names):
                found = [module, *(f"{module}.{one.name}" for one in names)]
                yield from (f"from {one}" for one in found if is_banned(one))
            case ast.Call(func=ast.Name(id=name)) if name in BANNED_NAMES:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id="torch"), attr="save"):
                yield "torch.save"
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in BANNED_ATTRIBUTES:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="load"), keywords=keywords):
                given = {one.arg: getattr(one.value, "value", None) for one in keywords}
                if owner in ("torch", "jit") and given.get("weights_only") is not True:
                    yield f"{owner}.load without weights_only=True"
                if owner in ("np", "numpy", "yaml", "joblib") and given.get("allow_pickle") is not False:
                    yield f"{owner}.load"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield "shell=True"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle=True"


def is_banned(module: str) -> bool:
    return any(module == banned or module.startswith(f"{banned}.") for banned in BANNED_MODULES)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_reads_no_pickles_and_runs_no_text(path: Path) -> None:
    found = set(findings(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == ALLOWED.get(str(path.relative_to(SOURCE)), set())


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import multiprocessing.connection as c",
        "from torch import multiprocessing",
        "from torch.distributed.rpc import rpc_sync",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.save(model, path)",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list as f; f(a); broadcast_object_list(a)",
        "eval(text)",
        "exec(text, {})",
        "np.load(path)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(findings(ast.parse(text)))


@pytest.mark.parametrize("text", ["model.eval()", "re.compile(x)", "torch.load(p, weights_only=True)", "json.loads(x)"])
def test_the_search_lets_pass_what_is_harmless(text: str) -> None:
    assert list(findings(ast.parse(text))) == []


class Harm:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (str(self.folder),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "somebody ran code"


@pytest.fixture
def harm(mark: Path) -> bytes:
    data = pickle.dumps(Harm(mark))
    pickle.loads(data)  # it would work
    mark.rmdir()
    return data


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a plan": ("plan.json", Plan.load),
    "a profile": ("profile.json", ModelProfile.load),
    "a cluster": ("lab.toml", ClusterSpec.load),
    "a timeline": ("timeline.jsonl", Timeline.load),
    "the facts of a run": ("run/run.json", lambda path: RunRecord.load(path.parent)),
    "the steps of a run": ("run/steps.jsonl", lambda path: RunRecord.load(path.parent)),
    "a data set": ("x-idx1-ubyte", read_idx),
    "weights": ("model.safetensors", load_weights),
    "a checkpoint's manifest": ("shelf/step-000000001/manifest.json", lambda path: Shelf(path.parent.parent).newest()),
    "a secret": ("secret", Secret.read),
    "a coordinator's log": ("log", lambda path: Table(TableLog(path))),
}


@pytest.mark.parametrize("what", READERS)
def test_a_pickle_in_a_file_is_not_run(tmp_path: Path, mark: Path, harm: bytes, what: str) -> None:
    name, read = READERS[what]
    path = tmp_path / name
    if name.startswith("run/"):
        runs.write_run(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(harm)
    path.chmod(0o600)
    with suppress(PoseidonError):  # where a part that is cut short is left out, nothing is said
        read(path)
    assert not mark.exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_foreign_weights_that_would_run_code_are_refused(tmp_path: Path, mark: Path, suffix: str, zipped: bool) -> None:
    path = tmp_path / f"model{suffix}"
    content = {"weight": torch.zeros(2), "more": Harm(mark)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(PoseidonError, match=f"cannot load weights from {path}"):
        load_weights(path)
    assert not mark.exists()


def test_foreign_arrays_of_objects_are_refused(tmp_path: Path, mark: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Harm(mark)], dtype=object), allow_pickle=True)
    path = tmp_path / "x-idx1-ubyte"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(PoseidonError):
        read_idx(path)
    assert not mark.exists()


def test_a_pickle_on_the_wire_is_not_run(mark: Path, harm: bytes) -> None:
    key = bytes(32)
    parsers: list[Callable[[], object]] = [
        lambda: decode(harm),
        lambda: FrameReader(key).feed(harm),
        lambda: FrameReader(key).feed(FrameWriter(key).write(Message(Op.SET, values=(harm,)))),
        lambda: ServerHandshake(Secret.make()).check(harm.ljust(PROOF_BYTES, b".")[:PROOF_BYTES]),
        lambda: ClientHandshake(Secret.make()).prove(harm.ljust(GREETING_BYTES, b".")[:GREETING_BYTES]),
        lambda: Place.model_validate_json(harm),
        lambda: unpack({}, harm.decode("latin-1")),
        lambda: unpack({}, struct.pack("<Q", len(harm)).decode("latin-1")),
        lambda: Table().change(NOBODY, Message(Op.SET, keys=("key",), values=(harm,))),
    ]
    for parse in parsers:
        with suppress(PoseidonError, ValueError):
            parse()
    assert not mark.exists()


def test_a_pickle_at_the_coordinator_is_dropped_and_the_job_is_served(mark: Path, harm: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    secret = Secret.make()
    server = StoreServer(listener, secret)
    store = RemoteStore(Coordinator(address="127.0.0.1", port=server.port, secret=secret, patience=Patience()))
    try:
        store.set("key", harm)  # of a member of the job it is bytes like any others
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), 5) as stranger, suppress(ConnectionResetError):
                stranger.sendall(struct.pack("<Q", len(harm)) + 20 * harm)
                while stranger.recv(4096):
                    pass
        assert store.get("key") == harm
        assert server.num_strangers == 3
    finally:
        store.close()
        server.close()
    assert not mark.exists()
