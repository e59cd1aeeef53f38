"""Gloo's sockets under watch: a range of ports, strangers at the listeners, what is under way ended, ranks on ::1."""

import json
import os
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from poseidon.comm import mesh as mesh_module
from poseidon.comm.mesh import BACKEND, Mesh, Published
from poseidon.comm.sockets import foreign_listeners, own_end
from poseidon.errors import CommError
from poseidon.runtime import join
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

PORTS = "23100-23159"


def total(group, value):
    tensor = torch.full((1000,), float(value))
    group.all_reduce(tensor).wait()
    return tensor[0].item()


def in_a_range(rank, world_size):
    os.environ["POSEIDON_PORT_RANGE"] = PORTS
    group = join.init(max_connections=2)
    side = group.side()
    group.join_lanes()
    assert torch.distributed.get_backend() == BACKEND
    assert group.takes_short_messages
    group.connections = 2
    assert total(group, rank) == total(side, rank) == sum(range(world_size))
    ports = [own_end(one)[1] for one in foreign_listeners()]
    group.barrier()
    join.shutdown()
    return sorted(ports)


def test_every_listener_of_gloo_is_in_the_range():
    """The ranks share an address, so that gloo decides by ports who connects to whom."""
    found = run_ranks(3, in_a_range, init=False)
    first, last = map(int, PORTS.split("-"))
    ports = [port for ports in found for port in ports]
    assert all(len(ports) >= 3 for ports in found)
    assert len(set(ports)) == len(ports)
    assert all(first <= port <= last for port in ports)


def knock(endpoints, stop, outcome):
    """A stranger who tries every listener, over and over."""
    while not stop.is_set():
        for endpoint in endpoints:
            with suppress(TimeoutError), socket.create_connection(tuple(endpoint), timeout=0.1):
                outcome.append(endpoint)


def strangers_knock(rank, world_size):
    group = join.init(max_connections=2)
    endpoints = [own_end(one) for one in foreign_listeners()]
    assert len(endpoints) == 2
    everywhere = [endpoint for text in group.all_gather_text(json.dumps(endpoints)) for endpoint in json.loads(text)]
    stop, outcome = threading.Event(), []
    stranger = threading.Thread(target=knock, args=(everywhere, stop, outcome))
    stranger.start()
    for _ in range(30):
        assert total(group, 1) == world_size
    stop.set()
    stranger.join()
    assert outcome == []
    group.barrier()
    join.shutdown()


def test_strangers_find_the_listeners_closed_and_training_goes_on():
    run_ranks(2, strangers_knock, init=False)


def hangs(rank, world_size):
    """Rank 0 waits for a sum in which rank 1 takes no part, until another thread gives up."""
    group = join.init(max_connections=2)
    group.barrier()
    if rank == 0:
        pending = group.all_reduce(torch.ones(1000), "the sum")
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        with pytest.raises(CommError, match="rank 0: the sum failed"):
            pending.wait()
        timer.join()
    else:
        time.sleep(1.0)
        with pytest.raises(CommError):
            group.barrier()
    with suppress(CommError):
        join.shutdown("it was aborted")


def test_an_abort_ends_what_hangs():
    run_ranks(2, hangs, init=False)


def on_ipv6(rank, world_size, port):
    os.environ.update(MASTER_ADDR="::1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    group = join.init()
    assert total(group, rank) == 1
    assert {own_end(one)[0] for one in foreign_listeners()} == {join.interface_of_process().address}
    group.barrier()
    join.shutdown()


def test_two_ranks_on_ipv6_loopback():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
    run_ranks(2, on_ipv6, port, init=False)


def starts(rank, world_size):
    os.environ["POSEIDON_PORT_RANGE"] = PORTS
    group = join.init(max_connections=1)
    assert total(group, 1) == world_size
    join.shutdown()


def test_jobs_that_start_together_do_not_take_each_others_ports():
    """Five jobs of two ranks each, all at once, in one range."""
    failures = []

    def run():
        try:
            run_ranks(2, starts, init=False)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)

    jobs = [threading.Thread(target=run) for _ in range(5)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if failures:
        raise failures[0]


def one_comes_early(rank, world_size):
    """A stranger with the address of a rank connects while the group is made, and says nothing."""
    strangers = []
    opened = Mesh._opened

    def open_and_let_in(mesh, key, published):
        told = opened(mesh, key, published)
        strangers.append(socket.create_connection(Published.find(told).endpoint))
        return told

    Mesh._opened = open_and_let_in
    with pytest.MonkeyPatch.context() as patch:
        warnings = []
        patch.setattr(mesh_module.log, "warning", lambda text, *values: warnings.append(text % values))
        group = join.init(max_connections=1)
    assert total(group, 1) == world_size
    (stranger,) = strangers
    stranger.settimeout(5.0)
    assert stranger.recv(1) == b"", "its connection was ended"
    here = "{}:{}".format(*stranger.getsockname())
    assert warnings == [f"{here} connected to gloo's listener and is no rank: the connection was ended"]
    stranger.close()
    group.barrier()
    join.shutdown()


def test_a_stranger_that_came_before_the_ranks_is_put_out():
    run_ranks(2, one_comes_early, init=False)
