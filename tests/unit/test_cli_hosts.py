"""What a run says about the hosts that were asked for."""

import pytest

from poseidon.cli.hosts import describe_links, read_hosts


def test_no_options_ask_for_no_hosts() -> None:
    assert read_hosts(None, 1, None, None, None) is None
    assert describe_links(None) is None


@pytest.mark.parametrize(
    ("links", "cpus", "text"),
    [
        (["1Gbit/s"], None, "1Gbit/s"),
        (["1Gbit/s", "host2=100Mbit/s"], None, "1Gbit/s, host2 100Mbit/s"),
        (["1Gbit/s"], ["40%"], "1Gbit/s, 40% of a core"),
        (["1Gbit/s"], ["40%", "host2=10%"], "1Gbit/s, 40% of a core, host2 10% of a core"),
        (["1Gbit/s"], ["host0=10%"], "1Gbit/s, all cores, host0 10% of a core"),
    ],
)
def test_what_most_hosts_have_and_what_is_odd(links: list[str], cpus: list[str] | None, text: str) -> None:
    assert describe_links(read_hosts(3, 1, links, None, cpus)) == text
