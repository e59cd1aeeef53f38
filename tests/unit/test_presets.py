"""The clusters that come with Poseidon: all of them can be used, each says what its name says."""

import re
from pathlib import Path

import pytest

from poseidon.cluster.spec import ClusterSpec, preset_names
from poseidon.cluster.topology import bottleneck, levels, rates_of
from poseidon.errors import ConfigError
from poseidon.units import parse_bandwidth


def test_what_there_is() -> None:
    assert preset_names() == [
        "gpu-32x10GbE",
        "gpu-4x25GbE-8gpus",
        "gpu-8x10GbE",
        "home-2x1GbE-unequal",
        "lab-4x1GbE",
        "wan",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_what_its_name_says(name: str) -> None:
    cluster = ClusterSpec.load_preset(name)
    if match := re.search(r"(\d+)x(\d+)GbE", name):
        num_hosts, gigabits = match.groups()
        assert len(cluster.hosts) == int(num_hosts)
        assert {host.link.up for host in cluster.hosts} == {parse_bandwidth(f"{gigabits}Gbit/s")}
    assert {host.num_ranks for host in cluster.hosts} == {8 if "8gpus" in name else 1}
    rates = rates_of(cluster)
    assert rates.world_size == cluster.num_ranks
    assert rates.all_reduce_bandwidth == pytest.approx(0.95 * min(min(h.link.up, h.link.down) for h in cluster.hosts))


def test_what_makes_them_special() -> None:
    wan = ClusterSpec.load_preset("wan")
    assert rates_of(wan).latency >= 0.01
    assert bottleneck(wan).direction == "up"
    assert bottleneck(ClusterSpec.load_preset("home-2x1GbE-unequal")).stands_out
    inside, between = levels(ClusterSpec.load_preset("gpu-4x25GbE-8gpus"))
    assert (inside.size, between.size) == (8, 4)
    assert inside.bandwidth > between.bandwidth


def test_a_name_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ClusterSpec.find("wan") == ClusterSpec.load_preset("wan")
    mine = ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s")
    mine.save("mine.toml")
    assert ClusterSpec.find("mine.toml") == ClusterSpec.find(tmp_path / "mine.toml") == mine
    mine.save("wan")
    assert ClusterSpec.find("wan") == mine, "a file that is there comes first"
    with pytest.raises(ConfigError, match=r"no preset is named 'lan': there are gpu-32x10GbE, .*, wan"):
        ClusterSpec.find("lan")
    with pytest.raises(ConfigError, match=r"cannot read wan.toml: No such file"):
        ClusterSpec.find("wan.toml")
