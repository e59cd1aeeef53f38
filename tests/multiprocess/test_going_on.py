"""`poseidon train` that goes on: as the undisturbed run, each sample once per epoch, nothing twice on file."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from poseidon.cli.main import app
from support.ranks import preload, run_ranks

preload("poseidon.cli.main")
pytestmark = pytest.mark.multiprocess

NUM_TRAIN, BATCH = 40, 4  # with 2 ranks 5 steps an epoch, with 3 ranks 4
TASK = f'''
import os
import signal

import torch
from torch import nn

from poseidon.tasks import CLASSIFICATION, Objective, Task, TaskData

made = 0


class Numbered:
    def __len__(self):
        return {NUM_TRAIN}

    def __getitem__(self, index):
        return torch.tensor([float(index % 7), index % 3, 1.0]), torch.tensor(index % 5), torch.tensor(index)


def loss(model, batch):
    """Notes which samples each step is trained on; dies where it is told to."""
    global made
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if attempt == "0" and str(made) == os.environ.get("DIE_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.path.join(os.environ["SEEN"], f"{{attempt}}-{{rank}}-{{made}}"), "a") as file:
        file.write("".join(f"{{index}}\\n" for index in batch[2].tolist()))
    made += 1
    return CLASSIFICATION.loss(model, batch[:2])


def task():
    return Task(
        name="numbered",
        note="synthetic: forty numbers",
        make_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 5)),
        make_optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        objective=Objective(loss=loss, evaluate=lambda model, batch: CLASSIFICATION.evaluate(model, batch[:2])),
        data=TaskData(make_train=Numbered, make_test=Numbered),
        batch_size={BATCH},
        epochs=2,
    )
'''


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "numbered.py"
    path.write_text(TASK)
    return f"{path}:task"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, task_file: str) -> Path:
    """The folder of a run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(2, folder, task_file, "--out", str(folder / "out"))
    return folder / "out"


def train_rank(rank: int, world_size: int, folder: Path, arguments: list[str], settings: dict[str, str]) -> str:
    """What it says."""
    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    os.environ |= {"SEEN": str(seen), "POSEIDON_MEMORY": str(folder / "memory"), **settings}
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app(["train", *arguments], standalone_mode=False)
        except SystemExit as end:
            end.add_note(said.getvalue())
            raise
    return said.getvalue()


def run(world_size: int, folder: Path, *arguments: str, attempt: int = 0, die_at: int | None = None) -> str:
    """What rank 0 says."""
    settings = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "DIE_AT": str(die_at), "POSEIDON_MAX_RESTARTS": "2"}
    dead = () if die_at is None else range(world_size)
    usual = ["--plan", "all_reduce", "--no-baseline"] if "--resume" not in arguments else []
    given = [*arguments, *usual]
    return str(run_ranks(world_size, train_rank, folder, given, settings, init=False, expect_dead=dead)[0])


def read_losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def read_facts(out: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / "run.json").read_text())
    return facts


def assert_same_training(here: Path, there: Path) -> None:
    assert read_losses(here) == read_losses(there)
    models = [load_file(out / "model.safetensors") for out in (here, there)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_that_is_killed_goes_on_from_memory(tmp_path: Path, task_file: str, undisturbed: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "0"
    command = [task_file, "--out", str(out), "--commit-every", "1steps"]
    run(2, folder, *command, die_at=7)
    said = run(2, folder, *command, attempt=1)
    assert_same_training(out, undisturbed)
    (resumption,) = read_facts(out)["result"]["kept"]["resumptions"]
    assert resumption["place"] == "memory"
    assert resumption["step"] in (6, 7)
    assert f"going on at step {resumption['step']} from memory" in said


def test_a_run_that_was_stopped_goes_on_in_its_folder(tmp_path: Path, task_file: str, undisturbed: Path) -> None:
    out = tmp_path / "out"
    run(2, tmp_path / "0", task_file, "--out", str(out), "--steps", "3")
    said = run(2, tmp_path / "0", "--resume", str(out), "--steps", "10")
    assert f"going on at step 3 from {out / 'checkpoints'}" in said
    assert_same_training(out, undisturbed)


def test_a_run_with_nothing_to_go_on_from_leaves_what_is_there(tmp_path: Path, task_file: str) -> None:
    out = tmp_path / "out"
    run(1, tmp_path / "0", task_file, "--out", str(out), "--steps", "1")
    shutil.rmtree(out / "checkpoints")
    facts = read_facts(out)
    with pytest.raises(SystemExit) as refusal:
        run(1, tmp_path / "0", "--resume", str(out))
    assert "checkpoints has no complete checkpoint; train anew" in "".join(refusal.value.__notes__)
    assert read_facts(out) == facts
    assert len(read_losses(out)) == 1


def test_with_fewer_ranks_the_global_batch_stays_and_each_sample_counts_once(tmp_path: Path, task_file: str) -> None:
    out, folder = tmp_path / "out", tmp_path / "0"
    command = [task_file, "--out", str(out), "--commit-every", "1steps"]
    run(3, folder, *command, die_at=2)
    said = run(2, folder, *command, attempt=1)
    assert (
        "2 ranks instead of 3: the global batch stays 12 samples, 6 a rank in 2 passes instead of 4 a rank; "
        "the learning rate stays 0.01" in said
    )
    first = read_facts(out)["result"]["kept"]["resumptions"][0]["step"]
    assert first in (1, 2)
    counts = [0] * NUM_TRAIN
    for path in (folder / "seen").iterdir():
        attempt, _, made = map(int, path.name.split("-"))
        if attempt or made < first:
            for index in path.read_text().split():
                counts[int(index)] += 1
    assert counts == [2] * NUM_TRAIN  # once in each of two epochs
    assert len(read_losses(out)) == 8


def test_a_run_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    begun = {"task": "fashion-mnist", "seed": 7, "plan": "auto", "accumulate": 1}
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "options": {"command": begun}}))
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), "--seed", "8"])
    assert result.exit_code == 1
    assert "cannot go on with the run" in result.stderr
    assert "seed 8: it was begun with 7" in result.stderr
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "its run.json cannot be read" in result.stderr
