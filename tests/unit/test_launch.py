"""Ranks on loopback: where they stand, what becomes of their output, and how they end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from poseidon.cluster.children import Keeper, spawn
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.errors import ClusterError, LaunchError
from poseidon.launch import local, ranks
from poseidon.launch.local import LabEngine, LoopbackEngine, engine_for
from poseidon.launch.output import LineSplitter

Lines = list[tuple[str, str]]
NAP = f"86400.{os.getpid()}"
"""Seconds that no other process on this machine sleeps for."""


def launch(script: str, *, num_ranks: int = 2, grace_s: float = 10.0, env: dict[str, str] | None = None) -> Lines:
    lines: Lines = []
    command = ["sh", "-c", script]
    LoopbackEngine(num_ranks, grace_s=grace_s).run(command, on_line=lambda *line: lines.append(line), env=env)
    return lines


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it was true at some moment: a second look may find a process in the middle of its exec, without words."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def running(*words: str) -> list[int]:
    """Processes whose command line contains all of these words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words_there = set(process.info["cmdline"] or [])
        if words_there.issuperset(words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_every_rank_knows_its_place() -> None:
    lines = launch(
        'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $GROUP_RANK $MASTER_ADDR"', num_ranks=3
    )
    assert sorted(lines) == [(f"rank{i}", f"{i}/3 {i}/3 0 0 127.0.0.1") for i in range(3)]


def test_ranks_share_the_cores_and_devices_are_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for num_ranks, threads in ((1, 8), (3, 2), (9, 1)):
        lines = launch("env | grep -E 'OMP|CUDA|THREADS'", num_ranks=num_ranks)
        assert lines == [(label, f"OMP_NUM_THREADS={threads}") for label, _ in lines]


def test_the_users_number_of_threads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert sorted(launch('echo "$OMP_NUM_THREADS"', num_ranks=2)) == [("rank0", "3"), ("rank1", "3")]


def test_variables_of_the_caller_reach_every_rank() -> None:
    assert launch('echo "$COLOR"', num_ranks=1, env={"COLOR": "blue"}) == [("rank0", "blue")]


def test_lines_stay_whole_and_errors_are_among_them() -> None:
    lines = launch('for i in 1 2 3 4 5; do printf "a$RANK"; sleep 0.01; echo "b$RANK"; echo "e$RANK" >&2; done')
    for rank in (0, 1):
        assert [text for label, text in lines if label == f"rank{rank}"] == [f"a{rank}b{rank}", f"e{rank}"] * 5


def test_the_first_failure_is_named_with_its_last_lines() -> None:
    script = '[ "$RANK" = 1 ] || { sleep 0.5; echo peer 1 is lost; exit 9; }; seq 1 30; exit 3'
    with pytest.raises(LaunchError) as caught:
        launch(script)
    first, *tail = str(caught.value).splitlines()
    assert first == "rank 1 failed first, with exit code 3; its last lines:"
    assert [line.strip() for line in tail] == [str(i) for i in range(11, 31)]


def test_the_others_have_time_to_say_whom_they_lost() -> None:
    lines: Lines = []
    command = ["sh", "-c", '[ "$RANK" = 1 ] && exit 3; sleep 0.5; echo lost rank 1; exit 9']
    with pytest.raises(LaunchError, match="rank 1"):
        LoopbackEngine(2).run(command, on_line=lambda *line: lines.append(line))
    assert lines == [("rank0", "lost rank 1")]


def test_a_signal_is_named() -> None:
    with pytest.raises(LaunchError, match="rank 0 failed first, with signal SIGKILL and no output"):
        launch("kill -9 $$", num_ranks=1)


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match=r"exit code 127(.|\n)*cannot run no-such-command: (No such|Permission)"):
        LoopbackEngine(1).run(["no-such-command"], on_line=lambda *_: None)


def test_after_the_grace_period_the_others_are_asked_to_end() -> None:
    lines: Lines = []
    script = '[ "$RANK" = 1 ] && exit 3; trap "echo asked; exit 0" TERM; while true; do sleep 0.05; done'
    with pytest.raises(LaunchError, match="rank 1"):
        LoopbackEngine(2, grace_s=0.3).run(["sh", "-c", script], on_line=lambda *line: lines.append(line))
    assert lines[-1] == ("rank0", "asked")


def test_who_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_TERM_S", 0.3)
    with pytest.raises(LaunchError, match="rank 1"):
        launch('[ "$RANK" = 1 ] && exit 3; trap "" TERM; while true; do sleep 0.05; done', grace_s=0.1)


def test_what_a_rank_left_running_ends_with_it() -> None:
    launch(f"sleep {NAP} & exit 0", num_ranks=1)
    assert running("sleep", NAP) == []


def test_leaving_the_block_ends_every_rank() -> None:
    with LoopbackEngine(2) as engine:
        engine.start(["sleep", NAP], on_line=lambda *_: None)
        assert eventually(lambda: len(running("sleep", NAP)) == 2)
    assert running("sleep", NAP) == []


def test_output_that_nobody_takes_ends_every_rank() -> None:
    def refuse(label: str, line: str) -> None:
        raise BrokenPipeError(f"{label}: {line}")

    with pytest.raises(BrokenPipeError):
        LoopbackEngine(2).run(["sh", "-c", f"echo 1; exec sleep {NAP}"], on_line=refuse)
    assert running("sleep", NAP) == []


def test_what_is_due_happens_while_something_is_looked_at() -> None:
    happened = threading.Event()
    supervision = ranks.Supervision(lambda *_: None, grace_s=1.0, actions=[(0.1, happened.set)])
    try:
        assert supervision.meanwhile(lambda: happened.wait(5)), "only what is due lets it be seen"
    finally:
        supervision.stop()


def test_waiting_without_a_start_is_refused() -> None:
    with LoopbackEngine(1) as engine, pytest.raises(LaunchError, match="none was started"):
        engine.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_launcher_that_is_killed_leaves_nothing(number: signal.Signals) -> None:
    """Neither the ranks nor what they started, in their process group."""
    program = f"""
        from poseidon.launch.local import LoopbackEngine
        LoopbackEngine(2).run(["sh", "-c", "sleep {NAP} & sleep {NAP}"], on_line=lambda *_: None)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as launcher:
        assert eventually(lambda: len(running("sleep", NAP)) == 4)
        launcher.send_signal(number)
    assert eventually(lambda: running("sleep", NAP) == [])


def test_the_keeper_forgets_what_it_is_told_to() -> None:
    with Keeper() as keeper:
        kept, forgotten = spawn(["sleep", "60"]), spawn(["sleep", "60"])
        for process in (kept, forgotten):
            keeper.keep("group", process.pid)
        keeper.forget("group", forgotten.pid)
    assert kept.wait() == -signal.SIGKILL
    assert forgotten.poll() is None
    os.killpg(forgotten.pid, signal.SIGKILL)
    forgotten.wait()
    for process in (kept, forgotten):
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.multiprocess
def test_ranks_meet_at_the_port_that_the_launcher_holds() -> None:
    """And it listens on 127.0.0.1 only."""
    program = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        value = total.item()
        del total
        dist.barrier()
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
        print(value, *{row[1].removesuffix(port) for row in rows if row[1].endswith(port) and row[3] == "0A"})
        dist.barrier()
        dist.destroy_process_group()
    """
    lines: Lines = []
    LoopbackEngine(2).run([sys.executable, "-c", textwrap.dedent(program)], on_line=lambda *line: lines.append(line))
    assert sorted(lines) == [("rank0", "3.0 0100007F"), ("rank1", "3.0 0100007F")]


def test_without_namespaces_ranks_run_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "why_unavailable", lambda: "the kernel says no")
    spec = ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s", num_ranks=2)
    engine, warning = engine_for(cluster=spec)
    assert isinstance(engine, LoopbackEngine)
    assert warning is not None
    assert "4 ranks run on loopback" in warning
    assert "the kernel says no" in warning


def test_with_namespaces_ranks_run_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "why_unavailable", lambda: None)
    engine, warning = engine_for(cluster=ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s"))
    assert isinstance(engine, LabEngine)
    assert warning is None
    assert isinstance(engine_for(num_ranks=2)[0], LoopbackEngine)


def test_a_change_of_an_unknown_host_is_refused_before_anything_starts() -> None:
    change = LinkChange.parse("1s:host9=cut")
    with pytest.raises(ClusterError, match="host9"):
        LabEngine(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s"), changes=[change])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_out_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\r\n\nthr") == ["two", ""]
    assert splitter.flush() == ["thr"]
    assert splitter.flush() == []


def test_characters_may_be_cut_between_reads_or_be_broken() -> None:
    splitter = LineSplitter()
    assert splitter.feed("µ".encode()[:1]) == []
    assert splitter.feed("µ".encode()[1:] + b"\xff\n") == ["µ\ufffd"]


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    splitter = LineSplitter(clock := Clock())
    shown = []
    for percent in range(101):
        clock.now = percent / 10
        shown += splitter.feed(f"\r{percent:3d}%".encode())
    shown += splitter.feed(b"\n")
    assert shown[-1] == "100%"
    assert 3 <= len(shown) <= 6


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 10_000)]
    assert sum(map(len, lines)) > 900_000
    assert max(map(len, lines)) < 100_000
