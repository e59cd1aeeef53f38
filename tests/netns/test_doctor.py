"""`poseidon doctor` on emulated hosts, inside a range of ports: all is well, or it says which pair cannot connect."""

import json
import re
import sys

import pytest
from pyroute2 import IPRoute

from poseidon.cluster.emulated import INTERFACE, why_unavailable
from poseidon.cluster.spec import ClusterSpec
from poseidon.errors import LaunchError
from poseidon.launch.local import LabEngine

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

DOCTOR = [sys.executable, "-m", "poseidon", "doctor", "--json"]
PORTS = range(20000, 20064)
NOWHERE = "02:00:00:00:00:99"


def lose_packets_to(address: str) -> None:
    """As a firewall does: nothing comes back, neither an answer nor a refusal."""
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=INTERFACE)
        ip.neigh("add", dst=address, lladdr=NOWHERE, ifindex=index, state=0x80)


def examine(engine: LabEngine) -> list[dict[str, str]]:
    """What rank 0 finds; the exit code is one where it found trouble."""
    lines: list[str] = []

    def keep(label: str, line: str) -> None:
        if label == "host0" and not line.startswith("poseidon:"):
            lines.append(line)

    engine.start(DOCTOR, on_line=keep, env={"POSEIDON_PORT_RANGE": f"{PORTS[0]}-{PORTS[-1]}"})
    failed = False
    try:
        engine.wait()
    except LaunchError:
        failed = True
    found: list[dict[str, str]] = json.loads("\n".join(lines))
    assert failed == any(one["level"] == "trouble" for one in found)
    return found


def test_the_pair_that_a_firewall_parts_is_named() -> None:
    with LabEngine(ClusterSpec.uniform(num_hosts=3, bandwidth="1Gbit/s")) as engine:
        engine.cluster.run("host2", lose_packets_to, "10.77.0.2")
        found = examine(engine)
    (trouble,) = [one for one in found if one["level"] == "trouble"]
    assert trouble["subject"] == "pairs"
    said = re.fullmatch(
        r".*rank 1 \(host1, 10\.77\.0\.2\) cannot connect to rank 2 \(host2\) at 10\.77\.0\.3:(\d+): "
        r"no answer within 5s .*",
        trouble["said"],
    )
    assert said is not None, trouble["said"]
    assert int(said[1]) in PORTS
    assert trouble["advice"].startswith("check the firewalls and the route between the two")


@pytest.mark.thorough
def test_all_is_well() -> None:
    with LabEngine(ClusterSpec.uniform(num_hosts=2, bandwidth="200Mbit/s")) as engine:
        found = examine(engine)
    said = {one["subject"]: one["said"] for one in found}
    assert said["pairs"] == "all 2 connections between ranks"
    assert re.fullmatch(r"2 directions, 1\d\d(\.\d)?Mbit/s to .*bit/s, .* at most", said["links"])
    assert re.fullmatch(r"\d+ of 20000-20063 are free", said["ports"])
