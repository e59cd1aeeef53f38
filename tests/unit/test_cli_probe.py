"""What `poseidon probe` shows, and what it refuses."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from poseidon.cli.probe import draw
from poseidon.cluster.curve import Curve
from poseidon.cluster.measurements import Interface, Measurements, PairRate
from poseidon.cluster.spec import ClusterSpec, Device, Host, Link

CARD = Interface(name="eth0", address="10.0.0.1", reason="it leads to 10.0.0.1")


def cluster_of(num_hosts: int, *, num_ranks: int = 1, slow: str = "") -> ClusterSpec:
    names = [f"host{i}" for i in range(num_hosts)]
    curve = Curve(num_bytes=(1024, 4 * 1024, 16 * 2**20), seconds=(123e-6, 12.3e-3, 0.2223))
    device = Device(flops_per_s=58.89e9, memory_bandwidth=4.5e9, flops_per_s_by_busy={num_hosts * num_ranks: 35e9})
    hosts = tuple(
        Host(
            name=n,
            link=Link.symmetric(12e6 if n == slow else 123.4e6),
            num_ranks=num_ranks,
            device=device,
            interface=CARD,
        )
        for n in names
    )
    measured = Measurements(
        all_reduce={1: curve, 2: curve, 4: curve},
        exchange={1: curve, 2: curve, 4: curve},
        inner=curve if num_ranks > 1 else None,
        outer=curve if num_ranks > 1 else None,
        compute_slowdown=1.25,
        pairs=tuple(
            PairRate(sender=a, receiver=b, latency=37.2e-6, bandwidth=12e6 if slow in (a, b) else 123.4e6)
            for a in names
            for b in names
            if a != b
        ),
        notes=("the link of host1 is slow",) if slow else (),
    )
    return ClusterSpec(hosts=hosts, measured=measured)


def shown(cluster: ClusterSpec) -> str:
    text = StringIO()
    draw(cluster, Console(file=text, width=80, highlight=False))
    return text.getvalue()


@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(1, 2), (2, 1), (4, 2), (5, 1), (32, 1)])
def test_tables_fit_eighty_columns_whole(num_hosts: int, num_ranks: int) -> None:
    text = shown(cluster_of(num_hosts, num_ranks=num_ranks))
    assert "…" not in text, "nothing is cut off"
    assert "58.9GFLOP/s" in text
    assert "35GFLOP/s" in text
    assert "computing takes 1.25 times as long" in text
    assert ("987Mbit/s" in text) == (num_hosts > 1)


def test_what_stands_out_is_said() -> None:
    text = shown(cluster_of(3, slow="host1"))
    assert "the slowest link is the one from host1: 96Mbit/s, the others 987.2Mbit/s" in text
    assert "note: the link of host1 is slow" in text
    assert "host2 talks over eth0 (10.0.0.1): it leads to 10.0.0.1" in text
    assert "the links are alike, the slowest 987.2Mbit/s" in shown(cluster_of(3))


def test_of_many_pairs_the_slowest_are_shown() -> None:
    text = shown(cluster_of(8, slow="host1"))
    assert "the 8 slowest of 56 pairs" in text
    lines = [line for line in text.splitlines() if "96Mbit/s" in line and "37.2us" in line]
    assert len(lines) == 8
    assert all("host1" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "cluster.toml"], 1, "nothing to measure with one process"),
        (["--hosts", "2", "-o", "cluster.yaml"], 2, "must end with .toml or .json"),
        (["--hosts", "2", "-o", "no/such/folder/c.toml"], 1, "there is no folder"),
        (["--cluster", "lan"], 1, "no preset is named 'lan'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "poseidon", "probe", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
