"""`poseidon train` and `poseidon bench`: what is refused before anything starts, and how progress is shown."""

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from poseidon.cli import hosts, progress
from poseidon.cli.main import app
from poseidon.cluster.spec import parse_links
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.runtime.ledger import StepResult
from poseidon.runtime.run_folder import check_unused
from poseidon.runtime.surroundings import Surroundings


@pytest.fixture(autouse=True)
def _stay_in_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an ordinary user a launching verb starts the program anew with other rights; here that would be pytest."""
    monkeypatch.setattr(hosts, "enter_user_namespace", lambda: None)


def refused(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stderr


@pytest.mark.parametrize("verb", ["train", "bench"])
@pytest.mark.parametrize(
    "options",
    [
        ["--link", "1Gbit/s"],
        ["--cpu", "40%"],
        ["--procs-per-host", "2"],
        ["--hosts", "0"],
        ["--hosts", "two"],
        ["--batch", "0"],
        ["--seed", "-1"],
        ["--cluster", "lab.toml", "--hosts", "2"],
        ["--cluster", "lab.toml", "--cpu", "40%"],
        ["--no-such-option"],
    ],
)
def test_wrong_usage_exits_with_2(verb: str, options: list[str]) -> None:
    assert refused(verb, "fashion-mnist", *options)[0] == 2


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--steps", "0"], ["--tensorboard"], ["--at", "5s:host1=cut"]])
def test_wrong_usage_of_train(options: list[str]) -> None:
    assert refused("train", "fashion-mnist", *options)[0] == 2


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--steps", "0"], ["--against", ","]])
def test_wrong_usage_of_bench(options: list[str]) -> None:
    assert refused("bench", "fashion-mnist", *options)[0] == 2


@pytest.mark.parametrize(
    "arguments", [["train", "fashion-mist"], ["train", "fashion-mist", "--hosts", "2"], ["bench", "x"]]
)
def test_an_unknown_task_is_one_line(arguments: list[str]) -> None:
    code, text = refused(*arguments)
    assert code == 1
    assert text.startswith("poseidon: error: cannot find a task")
    assert text.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--hosts", "2"]])
def test_an_unknown_level_of_exactness_is_one_line_that_lists_the_known(options: list[str]) -> None:
    code, text = refused("train", "fashion-mnist", "--allow", "nearly", *options)
    assert code == 1
    assert text == "poseidon: error: cannot allow 'nearly': choose one of exact, rounded, compressed, relaxed\n"


def test_an_unknown_contender_is_one_line_that_lists_the_known() -> None:
    code, text = refused("bench", "fashion-mnist", "--against", "ddp,horovod")
    assert code == 1
    assert text == (
        "poseidon: error: cannot race against 'horovod': known contenders are "
        "ddp, all_reduce, sufficient_factor, sparse_rows, sharded_server\n"
    )


def test_one_process_cannot_race_on_several_hosts() -> None:
    code, text = refused("bench", "fashion-mnist", "--hosts", "2", "--alone")
    assert code == 1
    assert "--alone goes with one host" in text


@pytest.mark.parametrize("options", [[], ["--hosts", "2"]])
def test_a_folder_with_files_in_it_is_refused(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "model.safetensors").touch()
    code, text = refused("train", "fashion-mnist", "--out", str(tmp_path), *options)
    assert code == 1
    assert f"cannot write the run into {tmp_path}: the folder is not empty" in text
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_empty_folder_can_be_used(tmp_path: Path) -> None:
    check_unused(tmp_path)
    check_unused(tmp_path / "new")
    with pytest.raises(ConfigError, match="it is a file"):
        check_unused(Path(__file__))


def test_the_links_in_one_text() -> None:
    assert hosts.describe_links(None) is None
    assert hosts.describe_links(parse_links(["1Gbit/s"], num_hosts=3)) == "1Gbit/s"
    odd = parse_links(["1Gbit/s", "host1=100Mbit/s"], num_hosts=3)
    assert hosts.describe_links(odd) == "1Gbit/s, host1 100Mbit/s"


def result(step: int) -> StepResult:
    return StepResult(step=step, epoch=0, loss=2.0 + step, seconds=0.5, num_samples=64)


def test_lines_instead_of_a_bar_come_first_at_once_and_then_now_and_then() -> None:
    now = [0.0]
    output = io.StringIO()
    console = Console(width=80, file=output)
    with progress.Progress("accuracy", console, clock=lambda: now[0]) as shown:
        shown.on_start(10)
        shown.on_results([result(0)])
        now[0] = 1.0
        shown.on_results([result(1), result(2)])
        now[0] = 6.0
        shown.on_results([result(3), result(4)])
        shown.on_epoch(0, 5, {"loss": 0.5, "accuracy": 0.75})
    assert output.getvalue().splitlines() == [
        "step 1 of 10, epoch 1: loss 2.0000, 128 samples/s in all, 4 s left",
        "step 5 of 10, epoch 1: loss 5.5000, 128 samples/s in all, 2 s left",
        "epoch 1 ended at step 5: test accuracy 0.7500, loss 0.5000",
    ]


def test_the_line_of_a_step() -> None:
    assert result(0).to_line() == (
        '{"step": 0, "epoch": 0, "loss": 2.0, "seconds": 0.5, "num_samples": 64, "samples_per_s": 128.0}\n'
    )
    assert '"loss": null' in result(0).model_copy(update={"loss": float("nan")}).to_line()


def test_tensorboard_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'poseidon-dl\[tensorboard\]'"):
        progress.Tensorboard.check()


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"world_size": 4, "hosts": 4, "link": "1Gbit/s", "shaped": True}, "4 hosts on 2 cores, 1Gbit/s, shaped"),
        (
            {"world_size": 4, "hosts": 1, "link": "1Gbit/s", "loopback": True},
            "4 ranks on 1 host on 2 cores, over loopback: the link was not limited",
        ),
        ({"world_size": 2, "hosts": 1, "loopback": True}, "2 ranks on 1 host on 2 cores, over loopback"),
        ({"world_size": 2, "hosts": 2}, "2 hosts on 2 cores, over their own network"),
        ({"world_size": 1, "hosts": 1}, "1 host on 2 cores"),
    ],
)
def test_hosts_cores_and_link_in_a_sentence(facts: dict[str, Any], sentence: str) -> None:
    assert Surroundings(cores=2, threads=1, device="cpu", **facts).sentence() == sentence


TASK = """
import torch
from torch import nn

from poseidon.tasks import CLASSIFICATION, Task, TaskData


def make():
    return [(torch.ones(2), torch.tensor(index % 2)) for index in range(8)]


def task():
    return Task(
        name="eight",
        note="synthetic: eight samples",
        make_model=lambda: nn.Linear(2, 2),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        objective=CLASSIFICATION,
        data=TaskData(make_train=make, make_test=make),
        batch_size=2,
        epochs=2,
    )
"""


def test_a_run_that_has_made_more_steps_than_are_asked_for_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POSEIDON_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr("poseidon.cli.train.joined", lambda: nullcontext(Group([])))
    (tmp_path / "eight.py").write_text(TASK)
    out = tmp_path / "out"
    assert refused("train", f"{tmp_path / 'eight.py'}:task", "--out", str(out), "--steps", "6") == (0, "")
    assert refused("train", "--resume", str(out), "--steps", "5") == (0, "")
    assert "nothing is left to train: 6 steps lie behind, and 5 were asked for" in caplog.text
    assert len((out / "steps.jsonl").read_text().splitlines()) == 6
