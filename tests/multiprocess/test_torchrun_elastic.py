"""Under torchrun's elastic agents: what was committed survives a killed worker, and a killed agent with its worker."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough, pytest.mark.alone, pytest.mark.timeout(240)]

TRAINING = """
    import os, signal, torch, poseidon
    poseidon.init()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    run = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="all_reduce")
    made, before = run.resume(), run.group.world_size
    print(f"begins after {made} steps with {before} ranks", flush=True)
    while run.step < 20:
        run.optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(run.step))).square().mean().backward()
        run.optimizer.step()
        run.commit()
        if (made, run.step) == (0, 6) and os.environ.get("DIES") in (f"rank{rank}", "agent"):
            if os.environ["DIES"] == "agent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"result {sum(p.double().sum().item() for p in model.parameters()):.6f}", flush=True)
    run.detach()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(textwrap.dedent(TRAINING))
    return path


def torchrun(*arguments: str, dies: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DIES": dies}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(agent: subprocess.Popen[str]) -> str:
    try:
        return agent.communicate(timeout=200)[0]
    finally:
        for child in psutil.Process().children(recursive=True):
            child.kill()


def results(output: str) -> set[str]:
    return {line.partition("result ")[2] for line in output.splitlines() if "result " in line}


def begins(output: str) -> list[tuple[int, int]]:
    """Steps that lay behind and ranks, of each rank and start."""
    lines = [line.split() for line in output.splitlines() if "begins after" in line]
    return [(int(words[2]), int(words[5])) for words in lines]


def test_a_killed_worker_costs_the_steps_that_were_not_kept(script: Path) -> None:
    agent = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", str(script), dies="rank1")
    output = ended(agent)
    assert agent.returncode == 0, output
    first, again = begins(output)[:2], begins(output)[2:]
    assert first == [(0, 2)] * 2
    assert len(again) == 2
    assert all(made >= 4 and ranks == 2 for made, ranks in again)
    assert len(results(output)) == 1


def test_a_killed_agent_is_done_without(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = f"agents{os.getpid()}"
    quick = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=60"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job, "--rdzv-conf"]
    survivor = torchrun(*options, f"{quick},is_host=1", str(script))  # torchrun's own store is lost with its host
    other = torchrun(*options, f"{quick},is_host=0", str(script), dies="agent")
    try:
        output, _ = survivor.communicate(timeout=200)
        other.communicate(timeout=20)
    finally:
        for agent in (survivor, other):
            agent.kill()
        for folder in Path("/dev/shm").glob(f"poseidon-{os.getuid()}-{job}*"):
            shutil.rmtree(folder, ignore_errors=True)
    assert other.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, output
    (_, (made, ranks)) = begins(output)
    assert made >= 4
    assert ranks == 1
    assert len(results(output)) == 1
