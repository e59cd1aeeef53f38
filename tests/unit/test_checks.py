"""What `poseidon doctor` says about facts, and how it is shown."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from poseidon.cli.doctor import draw, merged
from poseidon.cluster.measurements import Interface, PairRate
from poseidon.runtime import checks
from poseidon.runtime.checks import Finding, Level, compare, judge, judge_clocks, judge_pairs
from poseidon.runtime.clocks import ClockOffset
from poseidon.runtime.host_facts import Facts, collect
from poseidon.units import GIB, MIB

CARD = Interface(name="eth0", address="10.0.0.7", reason="it leads to head")
WELL = Facts(
    host="node1",
    python="3.11.7",
    torch="2.13.0",
    poseidon="0.1",
    has_gloo=True,
    has_gloo_tls=False,
    has_nccl=False,
    interface=CARD,
    interfaces=(CARD, Interface(name="lo", address="127.0.0.1", reason="")),
    own_name="node1",
    own_addresses=("10.0.0.7",),
    loopback_entry="",
    open_files=4096,
    cores=8,
    threads=4,
    memory=8 * GIB,
    shared_memory=4 * GIB,
    folder="runs",
    folder_free=50 * GIB,
    ports="20000-20100",
    ports_free=101,
    has_secret=True,
)


def facts(**changes: object) -> Facts:
    return WELL.model_copy(update=changes)


def found_about(subject: str, about: Facts, num_ranks: int = 4) -> Finding:
    (found,) = [finding for finding in judge(about, num_ranks) if finding.subject == subject]
    return found


def test_a_host_that_is_well_has_nothing_to_do() -> None:
    found = judge(WELL, 4)
    assert {one.level for one in found} == {Level.OK}
    assert {one.advice for one in found} == {""}
    assert [one.said for one in found] == [
        "3.11.7",
        "2.13.0, gloo without TLS, no NCCL",
        "eth0 (10.0.0.7): it leads to head",
        "node1 is 10.0.0.7",
        "4096 at most, 280 needed",
        "50GiB free for runs",
        "4GiB free in /dev/shm",
        "8GiB free",
        "torch computes with 4 of 8 cores",
        "101 of 20000-20100 are free",
        "set",
    ]


@pytest.mark.parametrize(
    ("subject", "changes", "level", "said", "advice"),
    [
        ("torch", {"has_gloo": False}, "trouble", "without gloo", "install a torch"),
        ("interface", {"interface": None, "interface_error": "no route"}, "trouble", "no route", "eth0 (10.0.0.7), lo"),
        ("own name", {"own_addresses": ()}, "warning", "node1 has no address", "/etc/hosts"),
        ("own name", {"own_addresses": ("127.0.1.1",)}, "warning", "leads to loopback", "loopback line"),
        ("own name", {"loopback_entry": 'x line 3: "y"'}, "warning", 'x line 3: "y"', "loopback line"),
        ("open files", {"open_files": 200}, "trouble", "200 at most, 4 ranks may need 280", "ulimit -n 560"),
        ("folder", {"folder_free": None}, "trouble", "runs cannot be written", "--out"),
        ("folder", {"folder_free": 10 * MIB}, "warning", "10MiB free", "make room"),
        ("shared memory", {"shared_memory": 64 * MIB}, "warning", "64MiB free", "--shm-size"),
        ("shared memory", {"shared_memory": None}, "warning", "there is no /dev/shm", "mount"),
        ("memory", {"memory": 100 * MIB}, "warning", "100MiB free", "end what else"),
        ("threads", {"threads": 9}, "warning", "9 of 8 cores", "OMP_NUM_THREADS"),
        ("ports", {"ports_free": 3}, "trouble", "3 of 20000-20100 are free", "widen POSEIDON_PORT_RANGE"),
        ("ports", {"ports_error": "no range"}, "trouble", "no range", "correct POSEIDON_PORT_RANGE"),
        ("secret", {"secret_error": "too short"}, "trouble", "too short", "POSEIDON_SECRET_FILE"),
    ],
)
def test_each_trouble_says_what_is_wrong_and_what_to_do(
    subject: str, changes: dict[str, object], level: str, said: str, advice: str
) -> None:
    found = found_about(subject, facts(**changes))
    assert found.level == level
    assert said in found.said
    assert advice in found.advice
    assert [one.subject for one in judge(facts(**changes), 4) if one.level is not Level.OK] == [subject]


def test_limits_that_only_many_ranks_reach() -> None:
    assert found_about("open files", WELL, 400).level is Level.OK
    assert found_about("open files", WELL, 500).level is Level.TROUBLE
    assert found_about("open files", facts(open_files=-1), 500).said == "no limit"


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    assert compare([WELL, facts(host="node2")]).said == "the same on 2 hosts"
    found = compare([WELL, facts(host="node2", torch="2.12.0"), facts(host="node3"), facts(host="n4", python="3.12")])
    assert found.level is Level.TROUBLE
    assert found.said == (
        "torch 2.13.0 on node1, node3, n4, 2.12.0 on node2; python 3.11.7 on node1, node2, node3, 3.12 on n4"
    )


@pytest.mark.parametrize(("offset", "level"), [(0.01, Level.OK), (-30.0, Level.WARNING)])
def test_clocks(offset: float, level: Level) -> None:
    offsets = [
        ClockOffset(at=1.0, offset_seconds=seconds, uncertainty_seconds=1e-4) for seconds in (0.0, offset, 0.002)
    ]
    found = judge_clocks(["node1", "node2", "node3"], offsets)
    assert found.level is level
    if level is Level.WARNING:
        assert (found.host, found.said) == ("node2", "apart by 30s at most, against node1")


def pair(sender: str, receiver: str, bandwidth: float) -> PairRate:
    return PairRate(sender=sender, receiver=receiver, latency=5e-5, bandwidth=bandwidth)


def test_a_slow_direction_is_pointed_out() -> None:
    pairs = [pair("a", "b", 125e6), pair("b", "a", 120e6), pair("a", "c", 12e6), pair("c", "a", 124e6)]
    summary, slow = judge_pairs(pairs)
    assert summary.said == "4 directions, 96Mbit/s to 1Gbit/s, 50us at most"
    assert slow.level is Level.WARNING
    assert slow.said == "a to c: 96Mbit/s, where others have 992Mbit/s"


def shown(found: list[Finding]) -> str:
    text = StringIO()
    draw(found, Console(file=text, width=80, highlight=False))
    return text.getvalue()


def test_what_all_hosts_have_alike_is_one_row() -> None:
    odd = facts(host="node2", own_addresses=("127.0.1.1",))
    found = [*judge(WELL, 4), *judge(odd, 4), compare([WELL, odd])]
    rows = {(one.subject, hosts) for hosts, one in merged(found)}
    assert {("python", "all"), ("own name", "node1"), ("own name", "node2"), ("versions", "all")} <= rows
    assert len(rows) == len(judge(WELL, 4)) + 2
    text = shown(found)
    assert "warning: node2: own name: node1 leads to loopback: the name service says 127.0.1.1\n    take node1" in text
    assert text.endswith("23 checks: 0 troubles, 1 warning\n")


def test_json_has_everything() -> None:
    found = judge(facts(ports_free=0), 4)
    read = [Finding.model_validate(one) for one in json.loads(checks.to_json(found))]
    assert read == found


def test_this_host_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_PORT_RANGE", "23160-23170")
    monkeypatch.setenv("POSEIDON_SECRET", "abc")
    here = collect(tmp_path / "runs" / "new", "127.0.0.1")
    assert here.interface is not None
    assert here.interface.name == "lo"
    assert here.folder_free is not None
    assert here.folder_free > 0
    assert here.ports_free is not None
    assert 0 <= here.ports_free <= 11
    assert not here.has_secret
    assert "POSEIDON_SECRET" in here.secret_error
    assert found_about("secret", here).level is Level.TROUBLE
    assert "abc" not in here.model_dump_json()
