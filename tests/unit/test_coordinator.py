"""The coordinator and a rank's side of it, over real sockets: who is let in, what is done once, what survives."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from poseidon.comm import handshake, remote_store, store_server, store_table
from poseidon.comm.frames import MAX_BODY_BYTES, FrameReader, FrameWriter, Message, Op
from poseidon.comm.handshake import ANSWER_BYTES, GREETING_BYTES, ClientHandshake
from poseidon.comm.remote_store import Coordinator, Patience, RemoteStore, StoreLostError, Trouble
from poseidon.comm.secret import Secret
from poseidon.comm.store_server import StoreServer
from poseidon.comm.store_table import NOBODY, Table, TableLog
from poseidon.errors import ConfigError
from poseidon.launch import local

SECRET = Secret.make()
PATIENCE = Patience(first=20.0, refused=20.0, silent=20.0, cut_off=20.0)
Connect = Callable[..., RemoteStore]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)) as made:
        yield made


@pytest.fixture
def connect(server: StoreServer) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect(prefix: str = "", secret: Secret = SECRET) -> RemoteStore:
            return stack.enter_context(closing(store_at(server.port, prefix, secret)))

        yield connect


def store_at(port: int, prefix: str = "", secret: Secret = SECRET, patience: Patience = PATIENCE) -> RemoteStore:
    return RemoteStore(Coordinator(address="127.0.0.1", port=port, secret=secret, patience=patience), prefix=prefix)


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection; what it said before is read away."""
    with suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


Prove = Callable[[], tuple[socket.socket, FrameWriter, FrameReader]]


@pytest.fixture
def prove(server: StoreServer) -> Iterator[Prove]:
    with ExitStack() as stack:

        def prove() -> tuple[socket.socket, FrameWriter, FrameReader]:
            sock, client = stack.enter_context(raw(server)), ClientHandshake(SECRET)
            sock.sendall(client.prove(receive(sock, GREETING_BYTES)))
            keys = client.check(receive(sock, ANSWER_BYTES))
            return sock, FrameWriter(keys.to_server), FrameReader(keys.to_client)

        yield prove


def test_a_store_as_torchs(connect: Connect) -> None:
    one, other = connect(), connect()
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert (one.add("n", 3), other.add("n", -1), one.get("n")) == (3, 2, b"2")
    assert one.check(["key", "n"])
    assert not one.check(["key", "none"])
    assert one.compare_set("c", "", "first") == b"first"
    assert other.compare_set("c", "", "second") == b"first"
    assert other.compare_set("c", "first", "second") == b"second"
    assert one.compare_set("absent", "expected", "x") == b"expected"
    assert one.num_keys() == 3
    assert one.delete_key("c")
    assert not one.delete_key("c")
    one.multi_set(["a", "b"], ["1", b"2"])
    assert other.multi_get(["b", "a"]) == [b"2", b"1"]
    with pytest.raises(DistStoreError, match="'key', which holds no number"):
        one.add("key", 1)
    prefixed = PrefixStore("p", one)
    prefixed.set("key", "under p")
    assert prefixed.get("key") == other.get("p/key") == b"under p"
    assert connect("p/").get("key") == b"under p"


def test_a_wait_ends_with_the_last_of_its_keys_or_names_those_that_are_missing(connect: Connect) -> None:
    one, other = connect(), connect()
    for key in ("b", "a"):
        threading.Timer(0.1, other.set, (key, "")).start()
    one.wait(["a", "b"], timedelta(seconds=20))
    with pytest.raises(DistStoreError, match="for c, d in vain"):
        one.wait(["c", "a", "d"], timedelta(seconds=0.05))


def test_one_store_serves_threads_that_wait_and_others(connect: Connect) -> None:
    store = connect()
    threads = [threading.Thread(target=store.wait, args=([f"k{number}"],)) for number in range(5)]
    for thread in threads:
        thread.start()
    for number in range(5):
        store.set(f"k{number}", "")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_rank_that_ends_without_goodbye_is_gone_and_one_that_says_it_is_not(prove: Prove, connect: Connect) -> None:
    watcher = connect()
    polite = connect("job/")
    polite.register("poseidon/gone/1", "host1")
    polite.close()
    sock, writer, _ = prove()
    sock.sendall(writer.write(Message(Op.REGISTER, 1, keys=("job/poseidon/gone/2",), values=(b"host2",))))
    sock.close()
    assert watcher.get("job/poseidon/gone/2") == b"host2"
    assert not watcher.check(["job/poseidon/gone/1"])


def test_a_rank_that_comes_back_over_a_new_connection_is_not_gone(connect: Connect) -> None:
    watcher, rank = connect(), connect()
    rank.register("gone/2", "")
    assert rank._registered is not None
    first = rank._registered._session
    assert first is not None
    first.socket.shutdown(socket.SHUT_RDWR)
    assert rank.beat("beat/2", "here", ["beat/"]) == {"beat/2": b"here"}
    with pytest.raises(DistStoreError):
        watcher.wait(["gone/2"], timedelta(seconds=2 * store_server.GONE_AFTER_SECONDS))
    rank._registered._session.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    watcher.wait(["gone/2"], timedelta(seconds=20))


def test_a_wrong_secret_is_told_from_no_coordinator_and_a_silent_one(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "UNPROVED_SECONDS", 0.0)
    monkeypatch.setattr(remote_store, "HANDSHAKE_SECONDS", 0.1)
    hurry = Patience(first=0.0)
    with pytest.raises(StoreLostError, match="does not know the job's secret") as caught:
        connect(secret=Secret.make()).connect()
    assert caught.value.trouble is Trouble.UNPROVED
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StoreLostError, match=f"127.0.0.1:{port} .*took the connection and") as caught:
            store_at(port, patience=hurry).connect()
        assert caught.value.trouble is Trouble.SILENT
    with pytest.raises(StoreLostError, match="nobody listens there") as caught:
        store_at(port, patience=hurry).connect()
    assert caught.value.trouble is Trouble.REFUSED


def test_a_proof_has_its_time_whatever_trouble_came_before(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens for longer than a proof is tried again; then a flood of strangers has two proofs dropped."""
    monkeypatch.setattr(remote_store, "UNPROVED_SECONDS", 0.3)
    monkeypatch.setattr(remote_store, "RETRY_SECONDS", 0.01)
    start, floods, make = time.monotonic(), iter(range(1)), remote_store._Session

    def session(coordinator: Coordinator) -> remote_store._Session:
        if time.monotonic() < start + 0.4:
            raise remote_store._NoAnswerError(Trouble.REFUSED, "nobody listens there")
        for _ in floods:
            raise remote_store._NoAnswerError(Trouble.UNPROVED, "it dropped this rank")
        return make(coordinator)

    monkeypatch.setattr(remote_store, "_Session", session)
    with closing(store_at(server.port)) as store:
        store.connect()


def test_a_copy_of_the_process_holds_no_connection(server: StoreServer, connect: Connect) -> None:
    """The parent's stay open; so a rank that is killed counts as gone although its loader's workers live on."""
    store = connect()
    store.set("key", "value")
    (line,) = store._all
    assert line._session is not None
    (accepted,) = server._connections
    held = [server._listener.fileno(), accepted.fileno(), line._session.socket.fileno()]
    child = os.fork()
    if child == 0:
        os._exit(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in held))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("key") == b"value"
    assert connect().get("key") == b"value"


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(74), b"\x80\x04\x95." * 40, b"poseidon\x00\x01" + bytes(64)]
)
def test_what_strangers_say_is_not_looked_at(
    server: StoreServer, connect: Connect, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with raw(server) as sock:
        sock.sendall(said)
        assert is_closed(sock)
    connect().set("the job", "goes on")
    assert server.num_strangers == 1
    assert "dropped a stranger at 127.0.0.1" in caplog.text


def test_silent_strangers_are_dropped(connect: Connect, server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_SECONDS", 0.05)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(b"poseidon")
        assert is_closed(silent)
        assert is_closed(slow)
    connect().set("the job", "goes on")


def test_many_strangers_at_a_time_keep_nobody_out(server: StoreServer, connect: Connect) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(raw(server)) for _ in range(store_server.MAX_UNPROVEN + 20)]
        connect().set("the job", "goes on")
        assert all(is_closed(sock) for sock in crowd[:20])
        assert server.num_strangers >= 20


def test_a_rank_that_breaks_the_protocol_is_dropped(prove: Prove, connect: Connect) -> None:
    replayed = FrameWriter(bytes(32)).write(Message(Op.CHECK))
    sock, writer, reader = prove()
    frame = writer.write(Message(Op.ADD, 7, 1, keys=("n",)))
    sock.sendall(frame)
    assert reader.feed(sock.recv(65536))[0].amount == 1
    sock.sendall(frame)  # once more
    assert is_closed(sock)
    for said in (replayed, b"PSDF\0\1\xff\xff\xff\xff" + bytes(10)):
        sock, _, _ = prove()
        sock.sendall(said)
        assert is_closed(sock)
    for request in (Message(Op.LATE), Message(Op.HELLO, values=(b"short",)), Message(Op.BEAT), Message(Op.ANSWERED)):
        sock, writer, _ = prove()
        sock.sendall(writer.write(request))
        assert is_closed(sock)
    sock, writer, _ = prove()
    wait = Message(Op.WAIT, amount=10_000, keys=("none",))
    sock.sendall(writer.write(wait) + writer.write(wait))
    assert is_closed(sock), "it has to wait for an answer"
    assert connect().add("n", 0) == 1


def test_a_full_store_refuses(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MAX_TABLE_BYTES", 1000)
    store = connect()
    store.set("small", b"1")
    with pytest.raises(DistStoreError, match="the store is full"):
        store.set("large", bytes(1000))
    assert store.delete_key("small")
    store.set("other", bytes(800))


def test_an_answer_that_is_too_large_is_refused(connect: Connect) -> None:
    store = connect()
    half = bytes(MAX_BODY_BYTES // 2)
    store.set("a", half)
    store.set("b", half)
    with pytest.raises(DistStoreError, match="bytes at once"):
        store.multi_get(["a", "b"])
    assert store.get("a") == half


def test_a_request_whose_answer_was_lost_is_not_done_twice(prove: Prove, connect: Connect) -> None:
    name = b"the same rank   "
    for _ in range(3):
        sock, writer, reader = prove()
        sock.sendall(writer.write(Message(Op.HELLO, 0, values=(name,))))
        reader.feed(sock.recv(65536))
        sock.sendall(writer.write(Message(Op.ADD, 1, 5, keys=("n",))))
        assert reader.feed(sock.recv(65536))[0].amount == 5
        sock.close()
    assert connect().get("n") == b"5"


def test_the_table_is_the_same_after_its_log_was_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    table = Table(TableLog(log))
    table.change(b"a" * 16, Message(Op.ADD, 1, 5, keys=("n",)))
    table.change(b"b" * 16, Message(Op.SET, 9, keys=("x/y", "z"), values=(b"1", b"2")))
    table.change(b"b" * 16, Message(Op.DELETE, 10, keys=("z",)))
    table.change(b"c" * 16, Message(Op.COMPARE_SET, 1, keys=("v",), values=(b"", b"first")))
    table.put("beat", b"", logged=False)
    table.put("gone", b"host")
    for _ in range(2):  # from the changes, then from what was written instead of them
        table.close()
        table = Table(TableLog(log))
        assert table.values == {"n": b"5", "x/y": b"1", "v": b"first", "gone": b"host"}
        assert table.folder("x/") == {"x/y": b"1"}
        assert table.change(b"a" * 16, Message(Op.ADD, 1, 5, keys=("n",))).amount == 5, "asked again"
        assert table.change(b"c" * 16, Message(Op.COMPARE_SET, 1, keys=("v",), values=(b"", b"first"))).values == (
            b"first",
        )
    assert table.change(b"a" * 16, Message(Op.ADD, 2, 5, keys=("n",))).amount == 10
    assert log.stat().st_mode & 0o777 == 0o600
    table.close()


def test_a_record_that_is_cut_short_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    table = Table(TableLog(log))
    table.put("first", b"1")
    whole = log.stat().st_size
    table.put("second", b"2")
    table.close()
    data = log.read_bytes()
    for cut in range(whole, len(data)):
        log.write_bytes(data[:cut])
        found = Table(TableLog(log))
        assert found.values == {"first": b"1"}
        found.put("third", b"3")
        found.close()
        again = Table(TableLog(log))
        assert again.values == {"first": b"1", "third": b"3"}
        again.close()


def test_a_log_grows_with_what_is_kept_not_with_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MIB", 256)
    log = tmp_path / "log"
    table = Table(TableLog(log))
    for number in range(500):
        table.change(NOBODY, Message(Op.SET, keys=("key",), values=(str(number).encode(),)))
    assert log.stat().st_size < 4000
    table.close()
    again = Table(TableLog(log))
    assert again.values == {"key": b"499"}
    again.close()


def test_without_room_for_the_log_the_job_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    table = Table(TableLog(log))
    with pytest.raises(ConfigError, match="cannot use the coordinator's log"):
        Table(TableLog(tmp_path / "none" / "log"))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: len(data) - 1)
        assert table.change(NOBODY, Message(Op.SET, keys=("key",), values=(b"v",))).op is Op.DONE
    assert table.values == {"key": b"v"}
    assert "can no longer be replaced" in caplog.text
    assert not log.exists(), "half a log would be worse than none"


def test_ranks_go_on_with_a_coordinator_that_was_killed_and_started_again(tmp_path: Path) -> None:
    """Adds from one thread, waits in another: none is lost, none done twice."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        store = stack.enter_context(closing(store_at(listener.getsockname()[1], patience=Patience())))

        def start() -> subprocess.Popen[bytes]:
            script = [
                sys.executable,
                "-P",
                local._COORDINATOR_SCRIPT,
                str(listener.fileno()),
                "--log",
                str(tmp_path / "l"),
            ]
            env = {"POSEIDON_SECRET": SECRET.hex}
            process = subprocess.Popen(script, env=env, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        process = start()
        waiter = threading.Thread(target=store.wait, args=(["go"], timedelta(seconds=50)))
        waiter.start()
        count = 0
        for _ in range(2):
            for _ in range(200):
                count += 1
                assert store.add("n", 1) == count
            process.kill()
            process.wait()
            process = start()
        store.set("go", "")
        waiter.join(50)
        assert not waiter.is_alive()
        assert store.get("n") == str(count).encode()


def test_the_process_that_serves_waits_for_goodbyes(server: StoreServer, connect: Connect) -> None:
    rank = connect()
    rank.register("gone/1", "")
    waiter = threading.Thread(target=server.await_goodbyes, args=(50.0,))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    rank.close()
    waiter.join(20)
    assert not waiter.is_alive()


def test_what_a_handshake_takes_is_small() -> None:
    assert max(handshake.GREETING_BYTES, handshake.PROOF_BYTES) < 100
