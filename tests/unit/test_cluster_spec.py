"""What a person may write about hosts and links, and what comes of it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from poseidon.cluster.spec import ClusterSpec, Host, Link, LinkChange, parse_links
from poseidon.errors import ClusterError, ConfigError

LAB = """
[[hosts]]
name = "fast"
num_ranks = 2
link = "1Gbit/s"
device = { flops_per_s = "120GFLOP/s" }

[[hosts]]
name = "slow"
link = { up = "10Mbit/s", down = "100Mbit/s", latency = "250us" }
"""


def test_a_file_says_hosts_ranks_devices_and_links(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(LAB)
    spec = ClusterSpec.load(tmp_path / "lab.toml")
    fast, slow = spec.hosts
    assert (fast.num_ranks, slow.num_ranks, spec.num_ranks) == (2, 1, 3)
    assert fast.link == Link(up=1.25e8, down=1.25e8)
    assert slow.link == Link(up=1.25e6, down=1.25e7, latency=250e-6)
    assert fast.device is not None
    assert fast.device.flops_per_s == 120e9
    assert slow.device is None


@pytest.mark.parametrize("name", ["lab.toml", "lab.json"])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, name: str) -> None:
    spec = ClusterSpec.parse(LAB, toml=True)
    spec.save(tmp_path / name)
    assert ClusterSpec.load(tmp_path / name) == spec


def test_uniform_hosts_are_counted_from_zero() -> None:
    spec = ClusterSpec.uniform(num_hosts=3, bandwidth="1Gbit/s", num_ranks=2)
    assert [host.name for host in spec.hosts] == ["host0", "host1", "host2"]
    assert {host.link for host in spec.hosts} == {Link.symmetric(1.25e8)}
    assert spec.num_ranks == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hosts = [{name="a", link="1Gbit/s"}, {name="a", link="1Gbit/s"}]', "two hosts are named 'a'"),
        ("hosts = []", "hosts"),
        ('hosts = [{name="a", link="1Gb"}]', "use one of the units"),
        ('hosts = [{name="a", link="0Gbit/s"}]', "above zero"),
        ('hosts = [{name="a", link="1Gbit/s", latncy="1ms"}]', "latncy"),
        ('hosts = [{name="a", link={up="1Gbit/s"}}]', "down"),
        ('hosts = [{name="a b", link="1Gbit/s"}]', "a b"),
        ('hosts = [{name="a", link="1Gbit/s", num_ranks=0}]', "num_ranks"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSpec.parse(text, source="lab.toml", toml=True)


def test_an_unknown_host_is_told_from_the_known_ones() -> None:
    spec = ClusterSpec.uniform(num_hosts=2, bandwidth=1e6)
    with pytest.raises(ClusterError, match="'host7': this cluster has host0, host1"):
        spec.host("host7")


def test_with_link_changes_one_host() -> None:
    spec = ClusterSpec.uniform(num_hosts=2, bandwidth=1e6)
    slower = spec.with_link("host1", Link(up=1.0, down=2.0))
    assert slower.hosts == (spec.hosts[0], Host(name="host1", link=Link(up=1.0, down=2.0)))


@pytest.mark.parametrize("texts", [["1Gbit/s", "host1=10Mbit/s"], ["host1=10Mbit/s", "1Gbit/s"], ["host1=10Mbit/s"]])
def test_link_options_set_all_or_one(texts: list[str]) -> None:
    spec = parse_links(texts, num_hosts=3)
    assert [host.link.up for host in spec.hosts] == [1.25e8, 1.25e6, 1.25e8]
    assert all(host.link.up == host.link.down for host in spec.hosts)


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["fast"], ConfigError, "link rate"),
        (["host1="], ConfigError, "link rate"),
        (["1Gbit/s", "2Gbit/s"], ConfigError, "every host is already set to 1Gbit/s"),
        (["host1=1Gbit/s", "host1=1Gbit/s"], ConfigError, "host1 is already set"),
        (["host9=1Gbit/s"], ClusterError, "no host is named 'host9'"),
    ],
)
def test_link_options_that_cannot_be_used_say_why(texts: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_links(texts, num_hosts=3)


@pytest.mark.parametrize("num_hosts", [0, -1, 251])
def test_the_number_of_hosts_has_bounds(num_hosts: int) -> None:
    with pytest.raises(ConfigError, match="1 to 250 hosts"):
        parse_links([], num_hosts=num_hosts)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("5s:host2=10Mbit/s", LinkChange(after=5, host="host2", action="set", bandwidth=1.25e6)),
        ("250ms:a=cut", LinkChange(after=0.25, host="a", action="cut")),
        ("1min:a=restore", LinkChange(after=60, host="a", action="restore")),
    ],
)
def test_changes_are_read(text: str, change: LinkChange) -> None:
    assert LinkChange.parse(text) == change


@pytest.mark.parametrize("text", ["host2=cut", "5s:host2", "5:host2=cut", "5s:=cut", "5s:host2=slow", ""])
def test_changes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        LinkChange.parse(text)


def test_only_a_new_rate_has_a_bandwidth() -> None:
    with pytest.raises(ValidationError, match="belongs to 'set'"):
        LinkChange(after=1, host="a", action="cut", bandwidth=1e6)
