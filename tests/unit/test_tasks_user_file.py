"""A user's own task in a file of theirs."""

import textwrap
from pathlib import Path

import pytest

from poseidon.errors import ConfigError
from poseidon.tasks import Task, load_task

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from poseidon.tasks import CLASSIFICATION, Task, TaskData

def samples():
    return TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))

def mine(*, batch_size: int = 2) -> Task:
    return Task(
        name="mine",
        note="synthetic zeros",
        make_model=lambda: nn.Linear(3, 2),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        objective=CLASSIFICATION,
        data=TaskData(make_train=samples, make_test=samples),
        batch_size=batch_size,
    )
"""


def write(folder: Path, text: str, name: str = "my_task.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_users_own_task_is_loaded_and_takes_options(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    task = load_task(f"{path}:mine", batch_size=3)
    assert isinstance(task, Task)
    assert task.batch_size == 3
    assert task.loss(task.make_model(), task.collate([task.make_train_data()[0]])).item() > 0


def test_the_example_in_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    path = write(tmp_path, page.split("```python\n")[1].split("```")[0])
    task = load_task(f"{path}:mine")
    batch = task.collate([task.make_train_data()[index] for index in range(4)])
    assert task.evaluate(task.make_model(), batch)["samples"].item() == 4


def test_a_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_task("my_task.py:mine").name == "mine"


def test_a_file_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere"])
    write(tmp_path, GOOD, "neighbour_of_the_task.py")
    path = write(tmp_path, "from neighbour_of_the_task import mine\n")
    assert load_task(f"{path}:mine").name == "mine"


@pytest.mark.parametrize("location", ["my_task.py", "my_task.py:", "notes.txt:mine", ":mine"])
def test_a_location_of_another_form_is_refused(location: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as path/to/file.py:function"):
        load_task(location)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*absent.py; check the path"):
        load_task(f"{tmp_path}/absent.py:mine")


def test_a_missing_function_gets_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"has no function 'yours'; it has samples, mine"):
        load_task(f"{path}:yours")


def test_a_file_without_functions_says_what_to_write(tmp_path: Path) -> None:
    path = write(tmp_path, "mine = 3\n")
    with pytest.raises(ConfigError, match=r"has no function 'mine'; write one that returns a poseidon.tasks.Task"):
        load_task(f"{path}:mine")


def test_a_function_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "def mine():\n    return 3\n")
    with pytest.raises(ConfigError, match=r"it returned a int; return a poseidon.tasks.Task"):
        load_task(f"{path}:mine")


def test_an_option_that_the_function_does_not_take_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"'size'; it takes \(\*, batch_size: int = 2\)"):
        load_task(f"{path}:mine", size=3)


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        ("x = 1\ny = undefined\n", NameError, 2),
        ("import not_a_module_anywhere\n", ModuleNotFoundError, 1),
        ("x = 1\ndef mine(:\n", SyntaxError, 2),
        ("def mine():\n    return broken()\n\n\ndef broken():\n    return {}['key']\n", KeyError, 6),
        ("import json\ndef mine():\n    return json.loads('{')\n", ValueError, 3),
    ],
)
def test_an_error_in_the_users_file_keeps_its_cause_and_line(
    tmp_path: Path, text: str, cause: type[Exception], line: int
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"my_task.py, line {line}") as caught:
        load_task(f"{path}:mine")
    assert isinstance(caught.value.__cause__, cause)


def test_our_own_errors_pass_through_the_users_file(tmp_path: Path) -> None:
    path = write(tmp_path, "from poseidon.tasks import load_task\ndef mine():\n    return load_task('vgg')\n")
    with pytest.raises(ConfigError, match="cannot find a task 'vgg'"):
        load_task(f"{path}:mine")
