"""`poseidon bench`: every contender on the same ranks, and what is written about them. No time is asserted."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.cli.bench import bench
from poseidon.cluster.emulated import why_unavailable
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

ROUNDS, STEPS = 2, 2
TASK = """
import torch
from torch import nn

from poseidon.tasks import CLASSIFICATION, Task, TaskData


class Points:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        point = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return point, (point[0] > 0).long()


def task():
    return Task(
        name="points",
        note="synthetic: points on two sides",
        make_model=lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 2)),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        objective=CLASSIFICATION,
        data=TaskData(make_train=Points, make_test=Points),
        batch_size=4,
    )
"""


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    path = tmp_path / "points.py"
    path.write_text(TASK)
    return f"{path}:task"


def race(rank, world_size, task, options):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        bench(task, rounds=ROUNDS, steps=STEPS, **options)
    return output.getvalue()


def test_a_race_of_all_contenders(tmp_path: Path, task_file: str) -> None:
    file = tmp_path / "out.json"
    names = ["ddp", "all_reduce", "sharded_server", "sufficient_factor", "sparse_rows"]
    outputs = run_ranks(2, race, task_file, {"against": ",".join(names), "json_file": file}, init=False)

    data = json.loads(file.read_text())
    assert (data["task"], data["hosts"], data["world_size"], data["link"]) == ("points", 1, 2, None)
    assert [one["name"] for one in data["contenders"]] == ["poseidon", *names]
    assert list(data["speedup_over"]) == names
    num_bytes = 4 * (64 * 64 + 64 + 64 * 2 + 2)
    by_name = {one["name"]: one for one in data["contenders"]}
    assert by_name["ddp"]["bytes_sent_per_host"] == 2 * num_bytes  # two ranks on this host, 2(P-1)/P of all each
    assert by_name["all_reduce"]["bytes_sent_per_host"] >= 2 * num_bytes
    assert by_name["ddp"]["exposed_seconds"] is None
    assert by_name["poseidon"]["exposed_seconds"] >= 0
    for one in data["contenders"]:
        assert one["wire_bytes_per_host"] is None  # on loopback no interface is one host's alone
        assert 0 < one["step_seconds"]["p10"] <= one["step_seconds"]["median"] <= one["step_seconds"]["p90"]
        assert len(one["losses"]) >= data["compared_at_step"] >= ROUNDS * (STEPS + 1)
        # the same weights, samples and masks, so the same losses
        assert one["losses"][: data["compared_at_step"]] == pytest.approx(
            by_name["ddp"]["losses"][: data["compared_at_step"]], abs=1e-5
        )
    assert "round 2 of 2: poseidon" in outputs[0]
    assert "poseidon's step is" in outputs[0]
    assert outputs[1] == ""


def test_one_rank_against_a_plain_loop(tmp_path: Path, task_file: str) -> None:
    file = tmp_path / "out.json"
    race(0, 1, task_file, {"alone": True, "json_file": file})
    data = json.loads(file.read_text())
    assert [one["name"] for one in data["contenders"]] == ["poseidon", "ddp", "one process"]
    assert all(one["bytes_sent_per_host"] == 0 for one in data["contenders"])


@pytest.mark.netns
@pytest.mark.skipif(why_unavailable() is not None, reason="no emulated hosts here")
@pytest.mark.thorough
def test_on_emulated_hosts_the_wire_is_measured(tmp_path: Path, task_file: str) -> None:
    file = tmp_path / "out.json"
    options = ["--hosts", "2", "--link", "100Mbit/s", "--rounds", "1", "--steps", "1", "--json", str(file)]
    command = [sys.executable, "-m", "poseidon", "bench", task_file, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(file.read_text())
    assert (data["hosts"], data["link"], data["shaped"]) == (2, "100Mbit/s", True)
    for one in data["contenders"]:
        assert one["wire_bytes_per_host"] > one["bytes_sent_per_host"] > 0  # headers, and what keeps ranks in touch


def test_batches_that_are_larger_than_the_data_are_refused(task_file: str) -> None:
    with pytest.raises(Exception, match="use a smaller --batch"):
        race(0, 1, task_file, {"batch": 51})
