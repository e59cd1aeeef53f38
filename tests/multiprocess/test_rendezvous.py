"""Where ranks meet: who serves the coordinator, with which secret, and how a rank without it is turned away."""

import logging
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from poseidon.comm import remote_store
from poseidon.comm.secret import Secret
from poseidon.comm.store_server import StoreServer
from poseidon.errors import CommError, ConfigError, PeerLostError
from poseidon.runtime import join, rendezvous
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


class Lines(logging.Handler):
    """What Poseidon says on this rank."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def listen_to_poseidon():
    lines = Lines()
    logging.getLogger("poseidon").addHandler(lines)
    return lines


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def meet(rank, world_size, variables, folder):
    """Joins, exchanges and leaves; what was said, and what is left in the folder of secrets."""
    lines = listen_to_poseidon()
    os.environ.update(variables, TMPDIR=folder)
    rendezvous.tempfile.tempdir = None
    group = join.init(max_connections=1)
    meeting = join._joined["meeting"]
    assert group.all_gather_text(f"from {rank}") == [f"from {r}" for r in range(world_size)]
    serving = meeting.serving_rank
    join.shutdown()
    left = [str(path) for path in Path(folder).rglob("*") if path.is_file()]
    return serving, left, lines.texts


def on_several_hosts(port):
    """As far as the variables say: then a secret is no matter of files."""
    return {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}


def test_on_one_host_the_secret_is_handed_over_in_a_file_that_is_removed(tmp_path):
    for agent in ("True", "False"):
        variables = {"TORCHELASTIC_USE_AGENT_STORE": agent}
        if agent == "False":
            variables["MASTER_PORT"] = str(free_port())
        for serving, left, _ in run_ranks(2, meet, variables, str(tmp_path), init=False):
            assert serving == 0
            assert left == []
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_across_hosts_without_a_secret_it_is_said_once(tmp_path):
    found = run_ranks(2, meet, on_several_hosts(free_port()), str(tmp_path), init=False)
    warnings = [text for _, _, texts in found for text in texts if "NOT AUTHENTICATED" in text]
    assert len(warnings) == 1
    assert "POSEIDON_SECRET_FILE" in warnings[0]


def test_across_hosts_with_a_secret_in_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(Secret.make().hex)
    path.chmod(0o600)
    variables = {**on_several_hosts(free_port()), "POSEIDON_SECRET_FILE": str(path)}
    for _, left, texts in run_ranks(2, meet, variables, str(tmp_path), init=False):
        assert left == [str(path)]
        assert not any("NOT AUTHENTICATED" in text for text in texts)


def test_at_a_coordinator_that_a_launcher_serves(tmp_path):
    secret = Secret.make()
    with closing(StoreServer(socket.create_server(("127.0.0.1", 0)), secret)) as server:
        variables = {"POSEIDON_COORDINATOR": f"127.0.0.1:{server.port}", "POSEIDON_SECRET": secret.hex}
        for attempt in ("0", "1"):  # what the one before left there is not found
            variables["TORCHELASTIC_RESTART_COUNT"] = attempt
            found = run_ranks(2, meet, variables, str(tmp_path), init=False)
            assert [serving for serving, _, _ in found] == [None, None]
        server.await_goodbyes(0.0)
        assert server.num_strangers == 0


def turned_away(rank, world_size, port):
    """Rank 1 has another secret than rank 0, or none."""
    remote_store.UNPROVED_SECONDS = 0.5
    os.environ.update(on_several_hosts(port), POSEIDON_SECRET=Secret.make().hex)
    if rank == 0:
        rendezvous.JOIN_SECONDS = 2.0
        with pytest.raises(
            CommError, match=r"rank 0 reached the coordinator at 127.0.0.1:\d+ and waited .* for rank 1 in"
        ):
            join.init()
        return
    with pytest.raises(CommError, match=f"rank 1 could not join .*127.0.0.1:{port}.*does not know the job's secret"):
        join.init()


def test_a_rank_with_another_secret_is_turned_away():
    run_ranks(2, turned_away, free_port(), init=False)


def unusable(rank, world_size):
    os.environ["POSEIDON_COORDINATOR"] = "127.0.0.1:29500"
    with pytest.raises(ConfigError, match="needs the job's secret in POSEIDON_SECRET or POSEIDON_SECRET_FILE"):
        join.init()
    os.environ["POSEIDON_SECRET"] = Secret.make().hex
    os.environ["POSEIDON_COORDINATOR"] = "29500"
    with pytest.raises(ConfigError, match="POSEIDON_COORDINATOR='29500': it names an address and a port"):
        join.init()


def test_variables_that_cannot_be_used():
    run_ranks(1, unusable, init=False)


def be_killed(liveness, place, where):
    while liveness.missing() != [2]:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_early(rank, world_size):
    """Rank 2 never starts; rank 1 comes, and is killed while it waits."""
    if rank == 2:
        return None
    if rank == 1:
        join.wait_for_all = be_killed
    with pytest.raises(PeerLostError, match="rank 0: start-up cannot end: rank 1 is gone") as caught:
        join.init()
    return str(caught.value)


def test_a_rank_that_came_and_was_killed_is_named_while_others_are_missing():
    run_ranks(3, dies_early, init=False, expect_dead=[1])


def serves_to_the_end(rank, world_size):
    """Rank 0, which serves the coordinator, is done first; the others still read there and say goodbye."""
    group = join.init(max_connections=1)
    liveness, store = join._joined["liveness"], join._joined["store"].clone()
    group.barrier()
    if rank == 0:
        join.shutdown("done early")
        return None
    while not liveness.lost():
        time.sleep(0.02)
    store.set(f"last words of {rank}", "heard")
    store.close()
    join.shutdown(liveness.lost())
    return liveness.lost()


def test_the_process_that_serves_the_coordinator_stays_until_the_others_know():
    for text in run_ranks(3, serves_to_the_end, init=False)[1:]:
        assert text.startswith("rank 0 ended with: done early")
