"""Emulated hosts with a part of a core: they get that part, and nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poseidon.cluster.cpu_quota import make_cpu_group
from poseidon.cluster.emulated import EmulatedCluster, why_unavailable
from poseidon.cluster.spec import ClusterSpec, limit_cpus
from poseidon.errors import ClusterError


def why_no_quota() -> str | None:
    if reason := why_unavailable():
        return reason
    try:
        make_cpu_group("probe", 0.5).rmdir()
    except ClusterError as error:
        return str(error)
    return None


pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_no_quota()), reason=str(reason))]

USE = """
import time
start, used = time.perf_counter(), time.process_time()
while time.perf_counter() - start < 1.5:
    pass
print((time.process_time() - used) / (time.perf_counter() - start))
"""
SLEEP_IN_LAB = """
import sys, time
from poseidon.cluster.emulated import EmulatedCluster
from poseidon.cluster.spec import ClusterSpec, limit_cpus
with EmulatedCluster(limit_cpus(ClusterSpec.uniform(num_hosts=1, bandwidth="1Gbit/s"), ["20%"])) as cluster:
    cluster.start([sys.executable, "-c", "import time; time.sleep(60)"], host="host0")
    print("ready", flush=True)
    time.sleep(60)
"""


def make_spec(*limits: str) -> ClusterSpec:
    return limit_cpus(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s"), limits)


def groups_of(pid: int) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"poseidon-{pid}-*") if path.is_dir()]


@pytest.mark.thorough
def test_a_host_gets_its_part_of_a_core_and_no_more() -> None:
    """Less is possible on a busy machine; the kernel pays back to within a period or two."""
    with EmulatedCluster(make_spec("host0=20%", "host1=5%")) as cluster:
        running = [cluster.start([sys.executable, "-c", USE], host=host) for host in ("host0", "host1")]
        used = [float(process.communicate(timeout=30)[0]) for process in running]
    assert used[0] <= 0.22
    assert used[1] <= 0.06


def test_what_a_host_starts_shares_its_part() -> None:
    command = f"for i in 1 2 3; do {sys.executable} -c '{USE}' & done; wait"
    with EmulatedCluster(make_spec("host0=30%")) as cluster:
        output, _ = cluster.start(["sh", "-c", command], host="host0").communicate(timeout=30)
    assert len(output.split()) == 3
    assert sum(map(float, output.split())) <= 0.33


def test_a_host_without_a_limit_is_in_no_group_of_its_own() -> None:
    with EmulatedCluster(make_spec("host0=30%")) as cluster:
        read = ["cat", "/proc/self/cgroup"]
        limited, free = (
            cluster.start(read, host=host).communicate(timeout=30)[0].decode() for host in ("host0", "host1")
        )
    assert f"poseidon-{os.getpid()}-host0" in limited
    assert "poseidon-" not in free


def test_groups_are_gone_when_the_hosts_are() -> None:
    with EmulatedCluster(make_spec("30%")) as cluster:
        process = cluster.start(["sleep", "60"], host="host0", output=subprocess.DEVNULL)
        assert len(groups_of(os.getpid())) == 2
    process.wait()
    assert groups_of(os.getpid()) == []


def test_groups_are_gone_when_their_maker_was_killed() -> None:
    maker = subprocess.Popen([sys.executable, "-c", SLEEP_IN_LAB], stdout=subprocess.PIPE)
    assert maker.stdout is not None
    with maker.stdout:
        assert maker.stdout.readline() == b"ready\n"
        assert len(groups_of(maker.pid)) == 1
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        deadline = time.monotonic() + 20
        while groups_of(maker.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert groups_of(maker.pid) == []
