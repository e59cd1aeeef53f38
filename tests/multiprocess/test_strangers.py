"""Where a job listens, and what strangers can do there: nothing but be dropped."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch
from benchmarks import hostile
from torch import nn

import poseidon
from poseidon.cluster.emulated import why_unavailable
from poseidon.runtime import join
from poseidon.units import MIB
from support.hostile import find_ports, listening, to_text
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def be_served_by_rank_0(world_size, port):
    """As where no launcher serves anything."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world_size))


def train_and_look(rank, world_size, port):
    """The addresses on which this process listens while it trains; with a port, rank 0 serves what the ranks need."""
    if port:
        be_served_by_rank_0(world_size, port)
    group = poseidon.init()
    model = nn.Linear(8, 8)
    run = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="all_reduce")
    model(torch.ones(2, 8)).sum().backward()
    group.side()
    found = list(listening(os.getpid()))
    seen_by_psutil = {one.laddr[:2] for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
    assert set(found) == seen_by_psutil
    group.barrier()
    run.detach()
    join.shutdown()
    return found


@pytest.mark.parametrize("serves", [False, True], ids=["the launcher serves", "rank 0 serves"])
def test_ranks_listen_on_the_chosen_address_only(serves):
    port = free_port() if serves else 0
    found = run_ranks(2, train_and_look, port, init=False)
    assert all(found), "each rank has a listener of gloo's"
    assert {address for rank in found for address, _ in rank} == {"127.0.0.1"}
    assert (("127.0.0.1", port) in found[0]) == serves


def train_under_attack(rank, world_size, port, out, stop):
    be_served_by_rank_0(world_size, port)
    return hostile.train(hostile.MOST_STEPS, out, stop)


def train_plainly(rank, world_size, steps):
    return hostile.train(steps)


def test_a_job_under_attack_ends_as_if_nobody_had_been_there(tmp_path):
    port, story = free_port(), hostile.Story()
    out, stop = tmp_path / "result.json", tmp_path / "stop"
    stranger = hostile.Stranger(story, out, stop, hostile.here, patience_s=0.5)
    attack = threading.Thread(target=stranger.attack, args=(200, 5, 4 * MIB))
    attack.start()
    try:
        story.result = run_ranks(2, train_under_attack, port, out, stop, init=False)[0]
    finally:
        stop.touch()
        attack.join()
    plain = run_ranks(2, train_plainly, story.result.steps, init=False)[0]
    held = hostile.verdicts(story, plain)
    held.pop("strangers were named")  # on rank 0's stderr, which nobody reads here
    assert all(held.values()), held
    of_coordinator = {row.attack: row.outcome for row in story.rows if row.port == f"127.0.0.1:{port}"}
    assert "dropped" in of_coordinator["wrong secret"]
    assert "left open" not in of_coordinator["wrong secret"]
    assert "dropped" in of_coordinator["fuzzed"]
    assert of_coordinator["sends 4MiB"].startswith("dropped after")
    others = [row for row in story.rows if row.port != f"127.0.0.1:{port}"]
    assert len(others) >= 4 * 5, "two listeners of gloo's in each rank"
    assert {row.outcome.removeprefix(f"{row.connections} ") for row in others} == {"not taken in"}


@pytest.fixture
def sleeper(tmp_path) -> Iterator[subprocess.Popen]:
    """A process that listens on all addresses."""
    code = (
        "import socket, time; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_port_on_every_address_would_be_found(sleeper):
    number = int(sleeper.stdout.readline())
    assert ("0.0.0.0", number) in {(port.address, port.number) for port in find_ports(psutil.Process())}


def test_addresses_as_the_kernel_writes_them():
    assert to_text("0100007F" if sys.byteorder == "little" else "7F000001") == "127.0.0.1"
    assert to_text("0" * 32) == "::"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listener.getsockname() in list(listening(os.getpid()))


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "on_hosts",
    [
        False,
        pytest.param(
            True, marks=[pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]
        ),
    ],
)
def test_under_a_launcher_too(on_hosts):
    story = hostile.play(frames=200, silent=5, flood_bytes=4 * MIB, num_ranks=2, on_hosts=on_hosts)
    plain = hostile.play_undisturbed(story.result.steps, num_ranks=2)
    assert {what: holds for what, holds in hostile.verdicts(story, plain).items() if not holds} == {}
    for rank in range(2):
        address = f"10.77.0.{rank + 1}" if on_hosts else "127.0.0.1"
        assert {row.port.rpartition(":")[0] for row in story.rows if row.what == f"rank {rank}"} == {address}
