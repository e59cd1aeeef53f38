"""A host that has IPv6 only: everything finds its way, the coordinator, the pairs and gloo in a range of ports."""

import subprocess
import sys

import pytest

from poseidon.cluster.emulated import why_unavailable

pytestmark = [
    pytest.mark.netns,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason)),
]

RANK = """
import os, torch, poseidon
from poseidon.comm.sockets import foreign_listeners, own_end
from poseidon.runtime import join
group = poseidon.init()
tensor = torch.ones(4)
group.all_reduce(tensor).wait()
(address,) = {own_end(one)[0] for one in foreign_listeners()}
ports = [own_end(one)[1] for one in foreign_listeners()]
said = f"rank {group.rank}: {tensor[0].item():g} on {address}, {all(20200 <= port <= 20299 for port in ports)}\\n"
os.write(1, said.encode())  # at once, so that the ranks' lines do not mix
join.shutdown()
"""
IN_A_NAMESPACE = """
set -e
ip link set lo up
ip addr del 127.0.0.1/8 dev lo
ip link add d0 type veth peer name d1
ip link set d1 up
ip -6 addr add fd00::1/64 dev d0 nodad
ip link set d0 up
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=fd00::1 MASTER_PORT=29511 POSEIDON_PORT_RANGE=20200-20299
RANK=0 LOCAL_RANK=0 "$@" &
RANK=1 LOCAL_RANK=1 "$@"
wait $!
"""


def test_a_host_without_ipv4() -> None:
    command = ["unshare", "--net", "bash", "-c", IN_A_NAMESPACE, "bash", sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: 2 on fd00::1, True" for rank in range(2)]
