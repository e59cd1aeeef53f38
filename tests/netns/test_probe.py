"""Probing emulated hosts: the rates that are set are found, and whatever is wrong with a link is named."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from poseidon.cluster.emulated import INTERFACE, why_unavailable
from poseidon.cluster.spec import ClusterSpec
from poseidon.launch.local import LabEngine

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

TOLERANCE = 0.1
TRIES = 3
MEASURE_PAIRS = """
import json
from poseidon.comm.pairs import measure_pairs
from poseidon.runtime import join
from poseidon.runtime.surroundings import find_hosts
group = join.init()
pairs = measure_pairs(group, {name: ranks[0] for name, ranks in find_hosts(group).items()})
if group.rank == 0:
    print(json.dumps([pair.model_dump() for pair in pairs]))
join.shutdown()
"""
JOIN = """
from poseidon.errors import CommError
from poseidon.runtime import join
try:
    join.init()
except CommError as error:
    print(error)
"""
NOWHERE = "02:00:00:00:00:99"


def run(engine: LabEngine, script: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    engine.start([sys.executable, "-c", script], on_line=lambda label, line: lines.append((label, line)))
    engine.wait()
    return lines


def rates(spec: ClusterSpec) -> dict[tuple[str, str], float]:
    with LabEngine(spec) as engine:
        ((_, text),) = [(label, line) for label, line in run(engine, MEASURE_PAIRS) if line.startswith("[")]
    return {(pair["sender"], pair["receiver"]): pair["bandwidth"] for pair in json.loads(text)}


def test_every_pair_has_the_rate_that_its_links_allow() -> None:
    """Best of a few: another process may take both cores meanwhile."""
    spec = ClusterSpec.uniform(num_hosts=3, bandwidth="100Mbit/s")
    spec = spec.with_link("host2", spec.hosts[2].link.model_copy(update={"up": 2.5e6}))
    wanted = {(a.name, b.name): min(a.link.up, b.link.down) for a in spec.hosts for b in spec.hosts if a.name != b.name}
    for _ in range(TRIES):
        found = rates(spec)
        assert set(found) == set(wanted)
        worst = max(abs(found[pair] / wanted[pair] - 1) for pair in wanted)
        if worst < TOLERANCE:
            break
    assert worst < TOLERANCE, found


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.thorough
def test_the_command_writes_a_cluster_and_names_the_slow_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "poseidon", "probe", "--hosts", "3", "--link", "200Mbit/s"]
    done = subprocess.run(
        [*command, "--link", "host1=40Mbit/s", "-o", "cluster.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=140,
        env=os.environ | {"COLUMNS": "80"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 160, "tables fit 80 columns, sentences may wrap"
    cluster = ClusterSpec.load(tmp_path / "cluster.toml")
    assert [host.name for host in cluster.hosts] == ["host0", "host1", "host2"]
    assert cluster.measured is not None
    assert any(note.startswith("the link of host1 is slow: ") for note in cluster.measured.notes)
    assert "note: the link of host1 is slow: " in done.stdout
    assert "host1 talks over eth0 (10.77.0.2): it leads to 10.77.0.1" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


def break_way_to(address: str) -> None:
    """Packets to the address go to a card that nobody has, as with a wrong entry in a switch."""
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=INTERFACE)
        ip.neigh("add", dst=address, lladdr=NOWHERE, ifindex=index, state=0x80)


@pytest.mark.thorough
def test_a_pair_that_cannot_connect_is_named_by_every_rank() -> None:
    with LabEngine(ClusterSpec.uniform(num_hosts=3, bandwidth="1Gbit/s")) as engine:
        engine.cluster.run("host2", break_way_to, engine.cluster.address("host1"))
        said = [line for _, line in run(engine, JOIN) if "cannot connect" in line]
    assert len(said) == 3
    assert len(set(said)) == 1
    assert re.fullmatch(
        r"all ranks reached the rendezvous store at 10\.77\.\S+:\d+, but rank 1 \(host1, 10\.77\.0\.2\) "
        r"cannot connect to rank 2 \(host2\) at 10\.77\.0\.3:\d+: no answer within 5s \(1 more of 6 fail\); check .*",
        said[0],
    )


def add_second_card(address: str) -> None:
    """A card that leads nowhere, with an address of its own, which comes first in every list."""
    with IPRoute() as ip:
        ip.link("add", ifname="a0", kind="veth", peer="a1")
        (index,) = ip.link_lookup(ifname="a0")
        ip.addr("add", index=index, address=address, prefixlen=24)
        ip.link("set", index=index, state="up")


UNNAMED = "import os; del os.environ['GLOO_SOCKET_IFNAME']"
SAY_CARD = "print(os.environ['GLOO_SOCKET_IFNAME'])\njoin.shutdown()"


def test_of_two_cards_the_one_that_leads_to_the_others_is_used() -> None:
    with LabEngine(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s")) as engine:
        for index, name in enumerate(("host0", "host1")):
            engine.cluster.run(name, add_second_card, f"10.78.{index}.1")
        lines = run(engine, UNNAMED + JOIN + SAY_CARD)
    assert [line for _, line in lines if line in (INTERFACE, "a0")] == [INTERFACE] * 2


MISLED = """
import ctypes
from pathlib import Path
from poseidon.cluster.namespaces import replace_file
address = "127.0.1.1" if os.environ["RANK"] == "0" else "10.77.0.1"
text = f"{address} boss\\n" + Path("/etc/hosts").read_text()
libc = ctypes.CDLL(None)
libc.unshare(0x20000)  # CLONE_NEWNS
libc.umount2(b"/etc/hosts", 2)  # the lab's own, which cannot be mounted over: its file is gone already
replace_file("/etc/hosts", text)
os.environ["MASTER_ADDR"] = "boss"
"""


def test_a_hosts_file_that_leads_the_own_name_to_loopback_is_named_and_not_followed() -> None:
    with LabEngine(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s")) as engine:
        lines = run(engine, UNNAMED + MISLED + JOIN + SAY_CARD)
    assert [line for _, line in lines if line in (INTERFACE, "lo")] == [INTERFACE] * 2
    assert (
        "host0",
        'poseidon: /etc/hosts line 1: "127.0.1.1 boss" leads the name of this host to loopback, where no other host '
        "reaches it; the others are told 10.77.0.1",
    ) in lines
