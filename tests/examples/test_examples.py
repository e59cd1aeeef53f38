"""What we show works: the examples, as a reader would start them."""

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from poseidon.tasks import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]  # ranks start cold


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment():
    path = [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def run_example(name: str, *options: str, launcher: Sequence[str] = (sys.executable,)) -> str:
    command = [*launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(text: str) -> list[float]:
    """Losses and accuracies as a script prints them, epoch by epoch."""
    return [float(number) for number in re.findall(r"(?:loss|accuracy) ([\d.]+)", text)]


def test_your_own_loop_under_torchrun():
    output = run_example("your_own_loop.py", launcher=TORCHRUN)
    assert output.count("epoch 1: loss") == 1
    assert "of the bytes of plain all-reduce" in output


def test_your_own_loop_alone():
    assert "epoch 1: loss" in run_example("your_own_loop.py")


def test_a_script_for_ddp_changes_in_five_lines():
    before, after = ((EXAMPLES / name).read_text() for name in ("ddp_script.py", "ddp_script_migrated.py"))
    code = [text.partition('\n"""\n')[2].splitlines() for text in (before, after)]
    changes = [line for line in difflib.ndiff(*code) if line[0] in "+-" and line[2:]]
    assert len([line for line in changes if line[0] == "-"]) <= 5
    added = [line for line in changes if line[0] == "+"]
    assert [int(line.rpartition("# ")[2]) for line in added] == [1, 2, 3, 4, 5]


def test_a_script_for_ddp_trains_alike_under_poseidon(tmp_path):
    options = ["--epochs", "2", "--out"]
    before = run_example("ddp_script.py", *options, str(tmp_path / "before.pt"), launcher=TORCHRUN)
    after = run_example("ddp_script_migrated.py", *options, str(tmp_path / "after.pt"), launcher=TORCHRUN)
    assert len(figures(before)) == 4
    assert figures(after) == pytest.approx(figures(before), rel=1e-5)
    weights, same_weights = (torch.load(tmp_path / name) for name in ("before.pt", "after.pt"))
    assert weights.keys() == same_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "num_figures"), [("with_accelerate.py", 6), ("with_fabric.py", 3)])
def test_two_ranks_train_as_one_process(name: str, num_figures: int):
    alone, together = figures(run_example(name)), figures(run_example(name, launcher=TORCHRUN))
    assert len(alone) == num_figures
    assert together == pytest.approx(alone, rel=1e-5)


def test_my_task_learns():
    task = load_task(f"{EXAMPLES / 'my_task.py'}:spirals")
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    data = task.make_train_data()
    batch = task.collate([data[index] for index in range(256)])
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
