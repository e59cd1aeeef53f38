"""Joining: threads, variables, and nothing that listens beyond the chosen interface."""

import os
import signal
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import poseidon
from poseidon.comm.group import Layout
from poseidon.comm.mesh import Mesh
from poseidon.errors import CommError, ConfigError, PeerLostError
from poseidon.runtime import join, rendezvous
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def listening():
    connections = psutil.Process().net_connections(kind="inet")
    return sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})


def joined(rank, world_size, own_store_port):
    if own_store_port:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(own_store_port)
    group = join.init(max_connections=2)
    assert (group.rank, group.world_size, group.max_connections) == (rank, world_size, 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert poseidon.init() is group
    assert join.group_of_process() is group
    assert group.all_gather_text(f"from {rank}") == [f"from {r}" for r in range(world_size)]
    assert group.broadcast_text(f"rank {rank}") == "rank 0"
    found = listening(), torch.get_num_threads()
    group.barrier()
    join.shutdown()
    assert not dist.is_initialized()
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("hosted_by_rank_0", [False, True])
def test_join(hosted_by_rank_0):
    cores = len(os.sched_getaffinity(0))
    for addresses, threads in run_ranks(2, joined, free_port() if hosted_by_rank_0 else 0, init=False):
        assert addresses == ["127.0.0.1"]
        assert threads == max(1, cores // 2)


def number_of_threads(rank, world_size):
    torch.set_num_threads(3)
    os.environ["OMP_NUM_THREADS"] = "3"
    join.set_threads()
    assert torch.get_num_threads() == 3, "the user's word"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    join.set_threads()
    assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2), "torchrun's caution is not"


def wrong_variables(rank, world_size):
    for change, message in (
        ({"MASTER_PORT": None}, "MASTER_PORT not set; start with torchrun"),
        ({"WORLD_SIZE": None, "MASTER_ADDR": None}, "WORLD_SIZE, MASTER_ADDR not set"),
        ({"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE='all' is not a whole number"),
    ):
        before = dict(os.environ)
        for name, value in change.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        with pytest.raises(ConfigError, match=message):
            join.init()
        os.environ.clear()
        os.environ.update(before)
    os.environ["MASTER_ADDR"] = "no.such.host.invalid"
    with pytest.raises(CommError, match=r"cannot find a route to MASTER_ADDR=no.such.host.invalid"):
        join.init()


def nobody_listens(rank, world_size, port):
    rendezvous.JOIN_SECONDS = 2.0
    os.environ["MASTER_PORT"] = str(port)
    with pytest.raises(CommError, match=f"rank 1 could not join .* 127.0.0.1:{port}.*is rank 0 running"):
        join.init()


def alone(rank, world_size):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    group = join.init()
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_gather_text("me") == ["me"]
    join.shutdown()


@pytest.mark.parametrize("check", [number_of_threads, wrong_variables])
def test_variables(check):
    run_ranks(2, check, init=False)


def test_alone():
    run_ranks(1, alone, init=False)


def only_rank_1(rank, world_size, port):
    if rank == 1:
        nobody_listens(rank, world_size, port)


def test_nobody_listens():
    run_ranks(2, only_rank_1, free_port(), init=False)


def joins_again(rank, world_size):
    """Rank 1 is there first each time: what it finds at the store is what the meeting before has left."""
    for attempt in range(2):
        if rank == 0:
            time.sleep(0.3)
        group = join.init(max_connections=1)
        assert group.all_gather_text(f"{rank} in {attempt}") == [f"{r} in {attempt}" for r in range(world_size)]
        assert "abandoned" not in join._joined
        join.shutdown()
        join._joined["abandoned"] = True  # as a try leaves it that found a rank lost


def test_a_process_can_join_again():
    run_ranks(2, joins_again, init=False)


def refused(rank, world_size):
    def refuse(mesh, group):
        raise CommError("not connected to each other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "seal", refuse)
        with pytest.raises(CommError, match="not connected to each other"):
            join.init()
    with pytest.raises(CommError, match="cannot join again in this process: a failed group is left in it"):
        join.init()


def test_a_group_whose_connections_were_refused_is_not_used():
    run_ranks(1, refused, init=False)


def loses_a_rank_between(rank, world_size):
    """Rank 1 is killed before it makes the connections for which rank 0 waits."""
    group = join.init(max_connections=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.layout = Layout.of_names(["one host", "another"])
    for make in (group.background, group.join_lanes):
        with pytest.raises(PeerLostError, match="rank 0: making further connections cannot end: rank 1 is gone"):
            make()
    join.shutdown("rank 1 is gone")


def test_a_rank_lost_while_further_connections_are_made_is_named():
    run_ranks(2, loses_a_rank_between, init=False, expect_dead=[1])


def leaves_as_a_copy(rank, world_size):
    group = join.init()
    join._leave_at_exit(os.getpid() + 1)
    assert join.group_of_process() is group
    join.shutdown()


def test_a_copy_of_the_process_ends_without_leaving():
    run_ranks(1, leaves_as_a_copy, init=False)
