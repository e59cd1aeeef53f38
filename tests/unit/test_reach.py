"""Which card leads where, what the hosts file says about a name, and who connects to whom, on this host alone."""

import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from poseidon.comm import reach
from poseidon.comm.pairs import rounds
from poseidon.errors import CommError, ConfigError


def hosts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    monkeypatch.setattr(reach, "HOSTS_FILE", path)
    return path


def test_the_entry_that_leads_a_name_to_loopback_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hosts_file(tmp_path, monkeypatch, "# by hand\n10.0.0.7 other\n127.0.1.1\tnode1.lan node1 # own\n")
    assert reach.loopback_entry("node1") == f'{path} line 3: "127.0.1.1 node1.lan node1"'
    assert reach.loopback_entry("other") is None
    assert reach.loopback_entry("own") is None
    monkeypatch.setattr(reach, "HOSTS_FILE", tmp_path / "none")
    assert reach.loopback_entry("node1") is None


def test_the_card_that_leads_to_an_address() -> None:
    found = reach.interface_to("127.0.0.1")
    assert (found.name, found.address, found.reason) == ("lo", "127.0.0.1", "it leads to 127.0.0.1")
    with pytest.raises(CommError, match=r"no route to MASTER_ADDR|cannot find a route to MASTER_ADDR=no.such.invalid"):
        reach.interface_to("no.such.invalid")


def test_the_card_in_use_is_the_named_one_and_the_reason_tells_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = reach.interface_in_use()
    assert found is not None
    assert found.reason == "it leads to 127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    found = reach.interface_in_use()
    assert found is not None
    assert found.reason == "GLOO_SOCKET_IFNAME names it"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no0,lo")
    with pytest.raises(ConfigError, match=r"names the interface 'no0', which this host has not"):
        reach.interface_in_use()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert reach.interface_in_use() is None


def check(store: dist.Store, rank: int, address: str, host: str, outcome: dict[int, str]) -> None:
    try:
        reach.check_pairs(store, rank, 3, address=address, host=host, patience=20.0, coordinator="10.0.0.1:29500")
        outcome[rank] = ""
    except CommError as error:
        outcome[rank] = str(error)


@pytest.mark.parametrize("breaks", [False, True])
def test_every_rank_names_the_same_pair(breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 tells the others an address at which nothing listens, as one behind a wrong route would."""
    real = reach.Place.model_dump_json

    def tell(place: reach.Place) -> str:
        with socket.socket() as closed:  # bound and not listening: nobody else gets this port meanwhile
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        return real(place.model_copy(update={"port": port}) if breaks and place.host == "b" else place)

    monkeypatch.setattr(reach.Place, "model_dump_json", tell)
    store = dist.HashStore()
    outcome: dict[int, str] = {}
    threads = [
        threading.Thread(target=check, args=(store, rank, "127.0.0.1", "abc"[rank], outcome)) for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(outcome.values())) == 1
    if not breaks:
        assert outcome == {0: "", 1: "", 2: ""}
        return
    expected = (
        r"all ranks reached the rendezvous store at 10\.0\.0\.1:29500, but rank 0 \(a, 127\.0\.0\.1\) cannot connect "
        r"to rank 1 \(b\) at 127\.0\.0\.1:\d+: Connection refused \(1 more of 6 fail\); rank 1 listens on loopback: "
        r"set GLOO_SOCKET_IFNAME on b to another card"
    )
    with pytest.raises(CommError, match=f"^{expected}$"):
        raise CommError(outcome[0])


def test_who_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 0.1)
    with pytest.raises(
        CommError, match=r"rank 0 reached the rendezvous store at there:1 and waited 200ms there for ranks 1, 2"
    ):
        reach.check_pairs(dist.HashStore(), 0, 3, address="127.0.0.1", host="a", patience=0.2, coordinator="there:1")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_nobody_twice(count: int) -> None:
    members = [10 * member for member in range(count)]
    found = rounds(members)
    pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in found)
    assert len(found) == (count - 1 if count % 2 == 0 else count if count > 1 else 1)
