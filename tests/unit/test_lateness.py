"""Who waits long says for whom: when, and which rank aloud."""

import logging

import pytest

from poseidon.comm import lateness
from poseidon.comm.lateness import Reminders, say_who_is_late


def reminded_at(monkeypatch: pytest.MonkeyPatch, until: int) -> list[int]:
    """The seconds, of whole ones, at which somebody who waits for so long is reminded."""
    now = 1000.0
    monkeypatch.setattr(lateness.time, "monotonic", lambda: now)
    reminders, found = Reminders(), []
    for second in range(until):
        now = 1000.0 + second
        if (waited := reminders.due()) is not None:
            assert waited == second
            found.append(second)
    return found


def test_the_pauses_grow_up_to_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reminded_at(monkeypatch, 4000)
    assert found == [10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440, 3040, 3640]


@pytest.mark.parametrize(
    ("rank", "late", "aloud"),
    [
        (0, {3: "rank 3 (host3)"}, True),
        (1, {3: "rank 3 (host3)"}, False),
        (2, {0: "rank 0 (host0)", 1: "rank 1 (host1)"}, True),
        (3, {0: "rank 0 (host0)", 1: "rank 1 (host1)"}, False),
    ],
)
def test_the_first_of_those_that_wait_says_it_aloud(
    rank: int, late: dict[int, str], aloud: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="poseidon"):
        say_who_is_late(rank, late, "counts of exchange 17", 20.4)
    (record,) = caplog.records
    assert (record.levelno == logging.WARNING) is aloud
    names, verb = " and ".join(late.values()), "is" if len(late) == 1 else "are"
    assert record.getMessage() == f"rank {rank}: waiting 20s for {names}, which {verb} alive, in counts of exchange 17"


def test_where_nobody_is_late_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="poseidon"):
        say_who_is_late(0, {}, "counts of exchange 17", 20.0)
    assert caplog.records == []
