"""Jobs that are started again on loopback: after a kill, without its coordinator, without a rank that leaves."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from poseidon.cli.drain import drain
from poseidon.cluster.children import spawn
from poseidon.errors import LaunchError
from poseidon.launch.forking import ForkServer, python_program
from poseidon.launch.local import LoopbackEngine

pytestmark = pytest.mark.multiprocess

TRAINING = """
    import os, signal, torch, poseidon
    poseidon.init()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = poseidon.distribute(model, optimizer, plan="all_reduce")
    print("job", os.environ["POSEIDON_JOB"], flush=True)
    print(f"attempt {attempt}: {run.resume()} steps made, {run.group.world_size} ranks", flush=True)
    while run.step < 40:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(run.step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        run.commit()
        print(f"attempt {attempt}: step {run.step}", flush=True)
        if (attempt, rank, run.step) == (0, 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"result {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)
"""


def children(*words: str) -> list[psutil.Process]:
    """Processes below this one whose command line contains all of these texts."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if all(word in " ".join(child.cmdline()) for word in words)]


class Onlooker:
    """Keeps what the ranks say; when they are so far, kills the coordinator, and later has rank 1 leave."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, label: str, line: str) -> None:
        self.lines.append(f"{label} {line}")
        if line == "attempt 1: step 8" and label == "rank0":
            (coordinator,) = children("_store_host.py")
            coordinator.send_signal(signal.SIGKILL)
        if line == "attempt 1: step 20" and label == "rank0":
            (job,) = {line.partition("job ")[2] for line in self.lines if " job " in line}
            drain(rank=1, job=job)

    def results(self) -> set[str]:
        return {line.partition("result ")[2] for line in self.lines if "result " in line}


@pytest.mark.alone
def test_a_training_outlives_a_rank_the_coordinator_and_one_that_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    seen = Onlooker()
    LoopbackEngine(3, restarts=2).run([sys.executable, str(script)], on_line=seen, env={"OMP_NUM_THREADS": "1"})
    said = [record.message for record in caplog.records if record.name.startswith("poseidon.launch")]
    assert said[0].startswith("attempt 0: rank 1 failed first after step 5, with signal SIGKILL (restart 1 of 2)")
    assert said[1].startswith("the coordinator ended with signal SIGKILL: it is started again")
    assert "rank1 leaves after step 2" in said[2]
    assert said[2].endswith("as asked; attempt 2 starts with 2 of 3: rank0, rank2")
    assert len(said) == 3
    (resumed,) = {line.partition("attempt 1: ")[2] for line in seen.lines if "attempt 1: " in line and "made" in line}
    assert int(resumed.split()[0]) >= 3
    (left_at,) = {line.partition("step ")[2].partition(",")[0] for line in said if "leaves after" in line}
    assert f"rank0 attempt 2: {left_at} steps made, 2 ranks" in seen.lines, "no step is lost by one that leaves"
    (result,) = seen.results()
    assert float(result) == pytest.approx(undisturbed(), rel=1e-5)


def undisturbed() -> float:
    """The same training on one process: every rank has the same samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(40):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return sum(p.double().sum().item() for p in model.parameters())


def test_a_failure_that_is_the_programs_own_is_not_tried_for_ever() -> None:
    lines: list[str] = []
    with pytest.raises(LaunchError, match="3 times in a row with exit code 3 before the first step"):
        LoopbackEngine(2, restarts=50, grace_s=0.1).run(
            ["sh", "-c", "echo no such column; exit 3"], on_line=lambda _, line: lines.append(line)
        )
    assert 3 <= len(lines) <= 6


def test_a_stopped_rank_holds_nobody_up() -> None:
    began = time.monotonic()
    script = 'case "$TORCHELASTIC_RESTART_COUNT$RANK" in 00) kill -STOP $$;; 01) sleep 0.5; exit 1;; esac'
    LoopbackEngine(2, restarts=1, grace_s=50).run(["sh", "-c", script], on_line=lambda *_: None)
    assert time.monotonic() - began < 40


@pytest.mark.thorough
def test_each_attempt_finds_an_empty_store_of_torchs() -> None:
    program = """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("met", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(4)
        dist.barrier()
        dist.destroy_process_group()
    """
    lines: list[str] = []
    command = [sys.executable, "-c", textwrap.dedent(program)]
    LoopbackEngine(2, restarts=1).run(command, on_line=lambda _, line: lines.append(line))
    assert lines.count("met") in (3, 4)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "train.py", "-m"], ("script", ["train.py", "-m"])),
        (["python", "-u", "-m", "poseidon", "train"], ("module", ["poseidon", "train"])),
        (["python", "POSEIDON", "train"], ("script", ["POSEIDON", "train"])),
        (["python", "folder/", "train"], None),
        (["python", "app.zip"], None),
        (["python", "train.pyc"], None),
        (["python", "-c", "pass"], None),
        (["python", "-W", "error", "train.py"], None),
        (["python"], None),
        (["sh", "train.py"], None),
        (["no-such-command", "train.py"], None),
    ],
)
def test_programs_of_this_python_are_told_from_other_commands(
    command: list[str], program: tuple[str, list[str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    here = {"POSEIDON": str(Path(sys.executable).with_name("poseidon"))}
    expected = program and (program[0], [here.get(word, word) for word in program[1]])
    assert python_program([here.get(word, word) for word in command]) == expected


PROGRAM = """
    import ctypes, os, signal, sys, __main__
    print(sys.argv, sys.path[0], __name__, __main__.__file__, os.environ["COLOR"], os.getpid() == os.getsid(0))
    sys.stdout.flush()
    end = sys.argv[1]
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "raise":
        raise ValueError("bad")
    elif end == "C":
        ctypes.CDLL(None).puts(b"written by C")
    else:
        sys.exit(7 if end == "code" else end)
"""


def test_a_forked_program_runs_and_ends_as_one_that_python_has_started(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "COLOR": "blue", "PYTHONUNBUFFERED": "1"}
    buffered = {**environment, "PYTHONUNBUFFERED": ""}  # else C's own output would not be buffered either
    server = ForkServer(lambda command, fd: spawn(command, env=buffered, pass_fds=[fd]))
    try:
        for end, code in (("code", 7), ("kill", -signal.SIGKILL), ("raise", 1), ("words", 1), ("C", 0)):
            process = server.start([sys.executable, str(script), end], environment)
            assert process.stdout is not None
            with process.stdout as output:
                said = output.read().decode()
            assert process.wait(20) == code
            first, *rest = said.splitlines()
            assert first == f"{[str(script), end]} {tmp_path} __main__ {script} blue True"
            last = {"raise": ["ValueError: bad"], "words": ["words"], "C": ["written by C"]}
            assert rest[-1:] == last.get(end, [])
    finally:
        server.close()
    with pytest.raises(LaunchError, match="cannot start a rank"):
        server.start([sys.executable, str(script), "code"], environment)
