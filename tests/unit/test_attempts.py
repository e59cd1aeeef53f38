"""Whether and with which hosts a job is started again: decisions only, no processes."""

import signal

import pytest

from poseidon.errors import LaunchError
from poseidon.launch.attempts import Attempts, Ending

HOSTS = ("host0", "host1", "host2", "host3")
KILLED = Ending(what="host2 (rank 2)", code=-signal.SIGKILL, step=7)


def failed(step: int | None = None, *, code: int = 1, last_line: str = "ValueError: bad") -> Ending:
    return Ending(what="rank 1", code=code, last_line=last_line, step=step)


def leaving(*hosts: str) -> Ending:
    return Ending(what="rank 0", code=75, step=9, leaving=frozenset(hosts))


def go_on(attempts: Attempts, ending: Ending, reachable: tuple[str, ...] = HOSTS) -> str:
    attempts.take_in(ending)
    return attempts.next(ending, reachable)


def test_all_start_again_and_the_line_says_who_failed_and_what_goes_on() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=2)
    line = go_on(attempts, KILLED)
    assert line == (
        "attempt 0: host2 (rank 2) failed first after step 7, with signal SIGKILL (restart 1 of 2); "
        "attempt 1 starts with all again"
    )
    assert (attempts.number, attempts.present) == (1, HOSTS)


def test_the_last_line_of_who_failed_first_is_told() -> None:
    line = go_on(Attempts(hosts=HOSTS, restarts=2), failed(3, last_line="PeerLostError: rank 2 is gone"))
    assert "rank 1 failed first after step 3, with exit code 1: PeerLostError: rank 2 is gone (restart 1 of 2)" in line


def test_restarts_are_used_up() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=1)
    go_on(attempts, KILLED)
    with pytest.raises(LaunchError, match=r"its restarts \(1\) are used up"):
        attempts.take_in(KILLED)


def test_a_host_that_cannot_be_reached_is_left_out_and_taken_in_once_it_can() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=9)
    line = go_on(attempts, KILLED, ("host0", "host1", "host3"))
    assert line.endswith("attempt 1 starts with 3 of 4: host0, host1, host3; host2 cannot be reached")
    assert attempts.present == ("host0", "host1", "host3")
    line = go_on(attempts, KILLED)
    assert line.endswith("attempt 2 starts with 4 of 4: host0, host1, host2, host3; host2 can be reached again")


@pytest.mark.parametrize(
    ("num_before", "num_reachable", "goes_on"),
    [(4, 2, True), (4, 1, False), (3, 2, True), (3, 1, False), (2, 1, True), (1, 0, False)],
)
def test_half_of_the_hosts_go_on_where_the_coordinator_is(num_before: int, num_reachable: int, goes_on: bool) -> None:
    attempts = Attempts(hosts=HOSTS[:num_before], restarts=1)
    if goes_on:
        go_on(attempts, KILLED, HOSTS[:num_reachable])
        assert attempts.present == HOSTS[:num_reachable]
    else:
        with pytest.raises(LaunchError, match=f"{num_reachable} of {num_before} hosts reach the coordinator"):
            go_on(attempts, KILLED, HOSTS[:num_reachable])


def test_half_is_of_those_before_and_the_user_may_ask_for_more() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=9)
    go_on(attempts, KILLED, HOSTS[:2])
    go_on(attempts, KILLED, HOSTS[:1])
    assert attempts.present == ("host0",)
    with pytest.raises(LaunchError, match="and 3 are needed"):
        go_on(Attempts(hosts=HOSTS, restarts=9, min_hosts=3), KILLED, HOSTS[:2])


def test_who_leaves_as_asked_costs_no_restart_and_does_not_come_back() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=0)
    line = go_on(attempts, leaving("host2"))
    assert line == ("attempt 0: host2 leaves after step 9, as asked; attempt 1 starts with 3 of 4: host0, host1, host3")
    assert attempts.used == 0
    go_on(attempts, leaving("host0", "host1"))
    assert attempts.present == ("host3",)


def test_who_left_as_asked_does_not_come_back_where_another_fails_meanwhile() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=1)
    ending = Ending(what="rank 3", code=-signal.SIGKILL, step=9, leaving=frozenset(["host2"]))
    line = go_on(attempts, ending)
    assert "rank 3 failed first after step 9, with signal SIGKILL (restart 1 of 1); host2 leaves, as asked" in line
    assert attempts.present == ("host0", "host1", "host3")


def test_the_code_of_leaving_without_anybody_who_leaves_is_a_failure() -> None:
    with pytest.raises(LaunchError, match="used up"):
        Attempts(hosts=HOSTS, restarts=0).take_in(failed(code=75))


@pytest.mark.parametrize("step", [None, 57])
def test_the_same_end_three_times_at_the_same_step_is_the_programs_own(step: int | None) -> None:
    attempts = Attempts(hosts=HOSTS, restarts=9)
    go_on(attempts, failed(step))
    go_on(attempts, failed(step))
    with pytest.raises(LaunchError, match="3 times in a row with exit code 1"):
        attempts.take_in(failed(step))


def test_progress_another_end_or_a_kill_from_outside_begin_the_count_anew() -> None:
    attempts = Attempts(hosts=HOSTS, restarts=99)
    for ending in [
        *(failed(step) for step in range(10)),
        *(failed(9, last_line=f"ValueError: {i}") for i in range(5)),
        *[failed(9), KILLED] * 5,
        *[KILLED] * 5,
    ]:
        go_on(attempts, ending)
    assert attempts.used == attempts.number == 30
