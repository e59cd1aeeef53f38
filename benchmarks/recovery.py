"""Seconds to go on from memory, with a host lost, and from disk: what copies on a neighbor are worth.

    python benchmarks/recovery.py --model 200MB --rounds 5

A model on `sharded_server` with Adam, on four ranks that each count as a host with memory of its own, is committed and
saved at the same step. Then the job starts again in three ways, in turns: as it is; without the memory of one host, so
that the parts of that host come from its neighbor; and without any memory, so that all comes from the folder of
checkpoints, whose files are put out of the page cache before. What is timed is `run.resume`: looking, sending, checking
and restoring, on the rank that took longest. Hosts are joined by loopback, and each round begins with fresh processes.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from tests.support.ranks import run_ranks  # noqa: E402

from poseidon.comm import ShardedServer  # noqa: E402
from poseidon.comm.group import Group  # noqa: E402
from poseidon.plan import uniform_plan  # noqa: E402
from poseidon.profile.structure import profile_structure  # noqa: E402
from poseidon.runtime.attach import Run, attach  # noqa: E402
from poseidon.runtime.memory import TMPFS  # noqa: E402
from poseidon.units import BYTES_PER_FLOAT32, format_bytes, format_seconds, parse_bytes  # noqa: E402

NUM_HOSTS = 4
LOST = 1
WIDTH = 1024
PATIENCE = 600.0
WAYS = ("memory", "memory, a host lost", "disk")


def make_run(rank: int, world_size: int, memory: Path, attempt: int, num_layers: int) -> Run:
    """A run on a host of its own."""
    os.environ |= {
        "GROUP_RANK": str(rank),
        "POSEIDON_MEMORY": str(memory / f"host{rank}"),
        "POSEIDON_MAX_RESTARTS": "1",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    plan = uniform_plan(profile_structure(model), world_size, ShardedServer())
    return attach(model, torch.optim.Adam(model.parameters()), plan, Group.of_default())


def keep(rank: int, world_size: int, memory: Path, folder: Path, num_layers: int) -> int:
    """One step, committed and saved; bytes of the model."""
    run = make_run(rank, world_size, memory, 0, num_layers)
    assert run.optimizer is not None
    F.mse_loss(run.model(torch.randn(2, WIDTH)), torch.zeros(2, WIDTH)).backward()
    run.optimizer.step()
    run.save(folder, wait=True)
    assert run.commit()
    run.detach()
    return sum(p.numel() for p in run.model.parameters()) * BYTES_PER_FLOAT32


def go_on(rank: int, world_size: int, memory: Path, folder: Path | None, num_layers: int) -> tuple[str, float]:
    """From where, and the seconds it took."""
    run = make_run(rank, world_size, memory, 1, num_layers)
    assert run.resume(folder) == 1
    assert run.resumption is not None
    run.detach()
    return run.resumption.place, run.resumption.seconds


def measure(way: str, kept: Path, memory: Path, folder: Path, num_layers: int) -> float:
    """One start of the job, in one of the ways."""
    shutil.copytree(kept, memory)
    try:
        if way == WAYS[1]:
            shutil.rmtree(memory / f"host{LOST}")
        elif way == "disk":
            shutil.rmtree(memory)
            forget(folder)
        found = run_ranks(NUM_HOSTS, go_on, memory, folder if way == "disk" else None, num_layers, timeout=PATIENCE)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    assert {place == "memory" for place, _ in found} == {way != "disk"}
    return max(seconds for _, seconds in found)


def forget(folder: Path) -> None:
    """Has the system put the files of a folder out of its cache."""
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="200MB", help="about so large, without the optimizer's state")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    num_layers = max(1, round(parse_bytes(chosen.model) / (WIDTH * WIDTH * BYTES_PER_FLOAT32)))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=TMPFS) as in_memory, tempfile.TemporaryDirectory() as on_disk:
        kept, memory, folder = Path(in_memory, "kept"), Path(in_memory, "memory"), Path(on_disk, "checkpoints")
        num_bytes = run_ranks(NUM_HOSTS, keep, kept, folder, num_layers, timeout=PATIENCE)[0]
        for number in range(chosen.rounds):
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                seconds[way].append(measure(way, kept, memory, folder, num_layers))
    print(f"a model of {format_bytes(num_bytes)} on {NUM_HOSTS} hosts of one rank, {chosen.rounds} rounds\n")
    print(f"| {'from':<20} | {'median':<8} | {'least':<8} | {'most':<8} |\n| {'-' * 20} |{' -------- |' * 3}")
    for way, times in seconds.items():
        figures = " | ".join(f"{format_seconds(f(times)):<8}" for f in (statistics.median, min, max))
        print(f"| {way:<20} | {figures} |")


if __name__ == "__main__":
    from benchmarks import recovery  # by this name ranks find its functions

    recovery.main()
