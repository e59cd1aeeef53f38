"""Which card is taken: patterns that include and exclude, by name, address and network."""

import os

import pytest

from poseidon.cluster.measurements import Interface
from poseidon.errors import ConfigError
from poseidon.runtime import interfaces
from poseidon.runtime.interfaces import select


def card(name: str, address: str) -> Interface:
    return Interface(name=name, address=address, reason="")


CARDS = [
    card("lo", "127.0.0.1"),
    card("eth0", "10.0.0.7"),
    card("eth1", "192.168.1.7"),
    card("docker0", "172.17.0.1"),
    card("ib0", "fd00::7"),
]


@pytest.mark.parametrize(
    ("patterns", "name"),
    [
        ("eth1", "eth1"),
        ("eth*,!eth0", "eth1"),
        ("!docker*,!eth*", "ib0"),
        ("192.168.0.0/16", "eth1"),
        ("fd00::/16,eth0", "ib0"),
        ("172.17.0.1", "docker0"),
        ("ib*, eth*", "ib0"),
        ("!10.0.0.0/8", "eth1"),
        ("lo", "lo"),
    ],
)
def test_patterns_choose(patterns: str, name: str) -> None:
    chosen = select(patterns, CARDS)
    assert chosen.name == name
    assert chosen.reason == f"POSEIDON_INTERFACES={patterns} means it"


def test_the_route_is_kept_where_the_patterns_allow_it() -> None:
    routed = card("eth1", "192.168.1.7").model_copy(update={"reason": "it leads to x"})
    assert select("eth*", CARDS, preferred=routed) == routed
    assert select("!docker*", CARDS, preferred=routed) == routed
    assert select("eth*,!eth1", CARDS, preferred=routed).name == "eth0"


@pytest.mark.parametrize("patterns", ["wlan*", "!*", "eth0,!10.0.0.0/8", "8.8.0.0/16"])
def test_a_pattern_that_leaves_nothing_lists_what_exists(patterns: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(patterns, CARDS)
    assert str(caught.value) == (
        f"POSEIDON_INTERFACES={patterns!r} leaves no interface of this host; there are: lo (127.0.0.1), "
        "eth0 (10.0.0.7), eth1 (192.168.1.7), docker0 (172.17.0.1), ib0 (fd00::7)"
    )


def test_data_and_control_may_take_different_cards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # what is set meanwhile is taken back
    monkeypatch.setenv("POSEIDON_INTERFACES", "ib*")
    monkeypatch.setattr(interfaces, "interfaces", lambda: CARDS)
    routed = CARDS[1].model_copy(update={"reason": "it leads to head"})
    monkeypatch.setattr(interfaces, "interface_to", lambda address, port: routed)
    monkeypatch.setattr(interfaces, "_cards", {})
    with caplog.at_level("INFO"):
        interfaces.choose_interface("head", 1)
    data, control = interfaces.interface_of_process(), interfaces.control_of_process()
    assert data is not None
    assert control is not None
    assert (data.name, control.name) == ("ib0", "eth0")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert caplog.messages == [
        "control goes over eth0 (10.0.0.7): it leads to head",
        "using interface ib0 (fd00::7): POSEIDON_INTERFACES=ib* means it",
    ]
