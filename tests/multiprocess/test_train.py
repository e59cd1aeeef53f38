"""`poseidon train` on several ranks: the same numbers as one process, everything in the run's folder."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from poseidon.cli.train import train
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.report.figures import compute_figures
from poseidon.report.record import RunRecord
from poseidon.runtime import trainer
from poseidon.tasks import load_task
from poseidon.timeline import Activity, Timeline
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

RANKS = 3
BATCH = 4
NUM_TRAIN, NUM_TEST = 37, 11  # the last global batch has one sample: two ranks have none
TASK = f'''
import os

import torch
from torch import nn
from torch.nn import functional as F

from poseidon.tasks import CLASSIFICATION, Objective, Task, TaskData


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 8)
        self.last = nn.Linear(8, 10, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, tokens):
        return self.last(torch.tanh(self.hidden(self.embedding(tokens).mean(dim=1))))


class Words:
    def __init__(self, count, seed):
        self.tokens = torch.randint(10, (count, 5), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.tokens[index].max()


def loss(model, batch):
    if os.environ.get("BREAK_RANK", "none") == os.environ.get("RANK"):
        raise RuntimeError("this rank breaks on purpose")
    return CLASSIFICATION.loss(model, batch)


def score(counts):
    return {{"accuracy": counts["correct"] / counts["samples"], "samples": counts["samples"]}}


def task():
    return Task(
        name="words",
        note="synthetic: ten words",
        make_model=Tied,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        objective=Objective(loss=loss, evaluate=CLASSIFICATION.evaluate, score=score),
        data=TaskData(make_train=lambda: Words({NUM_TRAIN}, 1), make_test=lambda: Words({NUM_TEST}, 2)),
        batch_size={BATCH},
        epochs=2,
    )
'''


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    path = tmp_path / "words.py"
    path.write_text(TASK)
    return f"{path}:task"


def train_rank(rank, world_size, task, options):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(task, **options)
    return output.getvalue()


def read_losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def read_model(task: str, folder: Path) -> dict[str, torch.Tensor]:
    model = load_task(task).make_model()
    assert load_model(model, str(folder / "model.safetensors")) == (set(), [])
    return dict(model.state_dict())


@pytest.mark.parametrize("plan", ["auto", "all_reduce"])
def test_several_ranks_train_like_one_process(tmp_path: Path, task_file: str, plan: str) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    outputs = run_ranks(
        RANKS,
        train_rank,
        task_file,
        {"plan": plan, "out": together, "check_replicas": True, "explain": True},
        init=False,
    )
    train(task_file, batch=RANKS * BATCH, out=alone)

    assert len(read_losses(together)) == 2 * 4
    assert read_losses(together) == pytest.approx(read_losses(alone), abs=1e-5)
    expected = read_model(task_file, alone)
    for name, value in read_model(task_file, together).items():
        assert torch.allclose(value, expected[name], atol=1e-5), name
    scores = [json.loads((folder / "run.json").read_text())["result"]["scores"] for folder in (together, alone)]
    assert scores[0] == scores[1]
    assert scores[0]["samples"] == NUM_TEST
    assert outputs[1:] == ["", ""]
    assert "epoch 2 ended at step 8: test accuracy" in outputs[0]
    assert re.search(r"^last\.weight +as embedding\.weight", outputs[0], flags=re.MULTILINE)


def test_accumulated_passes_train_like_one(tmp_path: Path, task_file: str) -> None:
    """37 samples, 16 in a step: the last of an epoch has 5, in three passes of one rank and two of the other."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    options = {"plan": "all_reduce", "batch": 2, "accumulate": 4, "out": together, "check_replicas": True}
    run_ranks(2, train_rank, task_file, options, init=False)
    train(task_file, batch=16, out=alone)

    assert len(read_losses(together)) == 2 * 3
    assert read_losses(together) == pytest.approx(read_losses(alone), abs=1e-5)
    expected = read_model(task_file, alone)
    for name, value in read_model(task_file, together).items():
        assert torch.allclose(value, expected[name], atol=1e-5), name
    facts = json.loads((together / "run.json").read_text())
    assert (facts["options"]["batch_size"], facts["options"]["accumulate"]) == (8, 4)
    assert facts["baseline"]["batch_size"] == 8
    passes = [
        sum(interval.activity is Activity.BACKWARD for interval in step.intervals)
        for step in Timeline.load(together / "timeline.jsonl").steps
        if step.rank == 0
    ]
    assert passes == [4, 4, 3] * 2


def test_the_folder_is_complete(tmp_path: Path, task_file: str) -> None:
    folder = tmp_path / "runs" / "first"
    (output, _) = run_ranks(2, train_rank, task_file, {"steps": 7, "out": folder, "tensorboard": True}, init=False)

    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "model.safetensors",
        "plan.json",
        "predicted.jsonl",
        "run.json",
        "steps.jsonl",
        "tensorboard",
        "timeline.jsonl",
    ]
    facts = json.loads((folder / "run.json").read_text())
    assert facts["options"]["max_steps"] == 7
    assert facts["surroundings"]["world_size"] == 2
    assert facts["surroundings"]["torch"] == torch.__version__
    assert facts["result"]["num_samples"] == NUM_TRAIN + 2 * 2 * BATCH
    assert facts["baseline"]["batch_size"] == BATCH
    assert facts["baseline"]["samples_per_s"] > 0
    for when in ("start", "end"):
        assert facts["clocks"][when][0]["offset_seconds"] == 0
        assert facts["clocks"][when][1]["uncertainty_seconds"] > 0
    assert sorted({layer for layers in facts["exchanges"].values() for layer in layers}) == ["embedding", "hidden"]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [(step["step"], step["epoch"]) for step in steps] == [(i, i // 5) for i in range(7)]
    timeline = Timeline.load(folder / "timeline.jsonl")
    assert [(step.index, step.rank) for step in timeline.steps] == [(i, rank) for i in range(7) for rank in range(2)]
    assert Plan.load(folder / "plan.json").world_size == 2
    assert all(step.seconds > 0 for step in Timeline.load(folder / "predicted.jsonl").steps)
    seen = {(interval.activity.value, interval.name) for step in timeline.steps for interval in step.intervals}
    whole = {(activity, "") for activity in ("loader", "forward", "backward", "optimizer")}
    assert seen >= whole | {("forward", "loss"), ("exposed", "losses")}
    assert list((folder / "tensorboard").iterdir())
    assert "waiting for a slow rank" in output
    assert max(len(line) for line in output.splitlines() if "%" in line and "plan" not in line) <= 80


def report_rank(rank, world_size, task, folder, options):
    train(task, out=folder, steps=9, **options)
    if rank != 0:
        return None
    record = RunRecord.load(folder)
    return compute_figures(record)


def test_the_folder_can_be_reported_on(tmp_path: Path, task_file: str) -> None:
    (figures, _) = run_ranks(2, report_rank, task_file, tmp_path / "run", {"plan": "all_reduce"}, init=False)
    assert figures.efficiency is not None
    assert figures.summary.num_steps == 9
    assert {layer for one in figures.exchanges for layer in one.layers} == {"embedding", "hidden"}
    assert all(one.scheme == "all_reduce" and one.bytes_sent > 0 for one in figures.exchanges)


@pytest.mark.thorough
def test_the_baseline_can_be_left_out_and_changes_no_number(tmp_path: Path, task_file: str) -> None:
    for name, options in (("with", {}), ("without", {"baseline": False})):
        run_ranks(2, train_rank, task_file, {"steps": 5, "out": tmp_path / name, **options}, init=False)
    assert json.loads((tmp_path / "without" / "run.json").read_text())["baseline"] is None
    assert read_losses(tmp_path / "with") == read_losses(tmp_path / "without")


@pytest.mark.thorough
def test_a_plan_from_a_folder_can_be_used_again(tmp_path: Path, task_file: str) -> None:
    run_ranks(2, train_rank, task_file, {"steps": 5, "out": tmp_path / "first"}, init=False)
    again = {"steps": 5, "out": tmp_path / "again", "plan": str(tmp_path / "first" / "plan.json")}
    run_ranks(2, train_rank, task_file, again, init=False)
    assert read_losses(tmp_path / "again") == pytest.approx(read_losses(tmp_path / "first"), abs=1e-5)


def test_a_folder_that_is_not_empty_is_refused_on_all_ranks(tmp_path: Path, task_file: str) -> None:
    folder = tmp_path / "used"
    folder.mkdir()
    (folder / "steps.jsonl").write_text("another run's\n")
    with pytest.raises(ConfigError, match="the folder is not empty"):
        run_ranks(2, train_rank, task_file, {"out": folder}, init=False)
    assert [path.name for path in folder.iterdir()] == ["steps.jsonl"]
    assert (folder / "steps.jsonl").read_text() == "another run's\n"


def launch(task: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """On emulated hosts where they can be made, on loopback elsewhere: that is part of what is tested."""
    command = [sys.executable, "-m", "poseidon", "train", task, "--hosts", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env={**os.environ, **variables})


def test_one_command_starts_all_ranks(tmp_path: Path, task_file: str) -> None:
    done = launch(task_file, "--steps", "3", "--out", str(tmp_path / "run"), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout
    assert len(read_losses(tmp_path / "run")) == 3
    assert done.stderr == "" or "the link was not limited" in done.stderr


@pytest.mark.thorough
def test_a_rank_that_fails_is_named_and_the_others_end(task_file: str) -> None:
    done = launch(task_file, BREAK_RANK="1", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "this rank breaks on purpose" in done.stderr


def test_evaluation_alone_counts_each_sample_once(task_file: str) -> None:
    counts = run_ranks(4, evaluate_rank, task_file, init=False)
    assert [scores["samples"] for scores in counts] == [NUM_TEST] * 4


def evaluate_rank(rank, world_size, location):
    from poseidon.cli.hosts import joined

    task = load_task(location)
    with joined() as group:
        return trainer.evaluate(task, task.make_model(), task.make_test_data(), group, 2)
