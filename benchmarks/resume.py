"""Whether a run that is saved and gone on with is the run that never paused, and what saving costs.

    python benchmarks/resume.py --steps 200
    python benchmarks/resume.py --only stall

For each scheme a training with dropout, batch normalization, schedulers, samples drawn at random and epochs that end in
the middle (`tests/support/resuming.py`) is saved half way on four ranks and gone on with on four: every loss and every
bit at the end is compared. In double precision, without what depends on how samples are spread, it is gone on with on
three ranks: the table says by how much losses differ from those of four, relative to them.

Then a model of about 200 MB is saved to the folder of temporary files (set TMPDIR for another disk) and flushed to the
disk: for how long the training stands still, and how long it takes until the checkpoint is complete.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.resuming import (  # noqa: E402
    CASES,
    gone_on_with,
    interrupted,
    relative_difference,
    saved_on_the_way,
)

from poseidon.comm.group import Group  # noqa: E402
from poseidon.plan import uniform_plan  # noqa: E402
from poseidon.profile.structure import profile_structure  # noqa: E402
from poseidon.runtime.attach import attach  # noqa: E402
from poseidon.units import format_bytes, format_seconds  # noqa: E402

WIDTH = 2048
"""Of the layers of the model that is saved, each of 16 MiB."""
NUM_LAYERS = 12
NUM_SAVES = 2
PATIENCE = 1800.0


class Stall(NamedTuple):
    """One save, as the rank saw it that stood still longest."""

    stall_seconds: float
    seconds: float


def go_on_alike(rank: int, world_size: int, name: str, folder: Path, num_steps: int) -> str:
    """On as many ranks as before."""
    return interrupted(rank, CASES[name], folder, num_steps // 2, num_steps - num_steps // 2)


def save_half_way(rank: int, world_size: int, name: str, folder: Path, num_steps: int) -> list[float]:
    """The losses of the second half, nothing interrupted."""
    return saved_on_the_way(rank, CASES[name], folder, num_steps // 2, num_steps - num_steps // 2)


def go_on(rank: int, world_size: int, name: str, folder: Path, num_steps: int) -> list[float]:
    """The losses of the second half on these ranks."""
    return gone_on_with(rank, CASES[name], folder, num_steps - num_steps // 2)


def save_large(rank: int, world_size: int, folder: Path) -> tuple[int, list[tuple[float, float]]]:
    """Bytes of the state, and stall and seconds of each save while training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    plan = uniform_plan(profile_structure(model), world_size)
    run = attach(model, optimizer, plan, Group.of_default())
    times = []
    for _ in range(NUM_SAVES):
        saving = None
        while saving is None or not saving.done.is_set():
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(4, WIDTH)), torch.zeros(4, WIDTH)).backward()
            optimizer.step()
            saving = saving or run.save(folder)
            if any(map(int, run.group.all_gather_text(str(int(saving.done.is_set())), "asking whether it is saved"))):
                run.finish_saving()
        times.append((saving.stall_seconds, saving.seconds))
    run.detach()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return 3 * parameters, times


def print_schemes(num_steps: int, names: list[str]) -> bool:
    """The table; whether all is as it should be."""
    print(f"{num_steps} steps, saved half way\n")
    print(f"| {'scheme':<34} | 4 -> 4 ranks | 4 -> 3 ranks, largest difference of a loss |")
    print(f"| {'-' * 34} | {'-' * 12} | {'-' * 41} |")
    all_well = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            differences = set(run_ranks(4, go_on_alike, name, Path(folder) / "alike", num_steps, timeout=PATIENCE))
            alike = "bit-equal" if differences == {""} else "DIFFERENT"
            other, is_near = "rounded on the wire", True
            if not CASES[name].is_rounded:
                arguments = (name, Path(folder) / "other", num_steps)
                expected = run_ranks(4, save_half_way, *arguments, timeout=PATIENCE)[0]
                difference = relative_difference(run_ranks(3, go_on, *arguments, timeout=PATIENCE)[0], expected)
                other, is_near = f"{difference:.1e}", difference < 1e-6
        print(f"| {name:<34} | {alike:<12} | {other:<41} |", flush=True)
        all_well = all_well and is_near and differences == {""}
        for text in differences - {""}:
            print(f"  {text}", file=sys.stderr)
    return all_well


def print_stall() -> None:
    """What saving a model of about 200 MB costs."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(2, save_large, Path(folder), timeout=PATIENCE)
    num_bytes = by_rank[0][0]
    print(f"\n{format_bytes(num_bytes)} of parameters and Adam's state, two ranks, flushed to the disk\n")
    print("| save | stands still | complete after | share |\n| ---- | ------------ | -------------- | ----- |")
    for number, times in enumerate(zip(*(times for _, times in by_rank), strict=True), 1):
        worst = max(map(Stall._make, times))
        share = worst.stall_seconds / worst.seconds
        stall, whole = format_seconds(worst.stall_seconds), format_seconds(worst.seconds)
        print(f"| {number:<4} | {stall:<12} | {whole:<14} | {share:<5.1%} |")


def main() -> int:
    """Prints the tables; 1 if a run did not go on as it should."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: 200)")
    parser.add_argument("--only", choices=[*CASES, "stall"], help="one scheme, or what saving costs")
    chosen = parser.parse_args()
    names = [] if chosen.only == "stall" else [chosen.only] if chosen.only else list(CASES)
    all_well = print_schemes(chosen.steps, names) if names else True
    if chosen.only in (None, "stall"):
        print_stall()
    return 0 if all_well else 1


if __name__ == "__main__":
    from benchmarks import resume  # by this name ranks find its functions

    sys.exit(resume.main())
