"""What the command line can train out of the box, and how a user's own task is found."""

from collections.abc import Callable
from difflib import get_close_matches

from poseidon.errors import ConfigError
from poseidon.tasks import fashion_mnist, recsys, synthetic, text
from poseidon.tasks.task import CLASSIFICATION, Batch, Objective, Samples, Task, TaskData
from poseidon.tasks.user_file import check_options, load_user_task

__all__ = ["CLASSIFICATION", "TASKS", "Batch", "Objective", "Samples", "Task", "TaskData", "load_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "fashion-mnist": fashion_mnist.fashion_mnist,
    "alexnet": synthetic.alexnet,
    "vgg19": synthetic.vgg19,
    "vgg19-22k": synthetic.vgg19_22k,
    "resnet20": synthetic.resnet20,
    "resnet50": synthetic.resnet50,
    "fc-heavy": synthetic.fc_heavy,
    "gpt-mini": text.gpt_mini,
    "recsys": recsys.recsys,
}


def load_task(name_or_path: str, **options: object) -> Task:
    """A built-in task by its name, or a user's own from `path/to/file.py:function`.

    Args:
        name_or_path: A key of `TASKS`, or a file and a function in it that returns a Task.
        **options: Handed to the function, such as `width=0.25`; each task documents its own.

    Raises:
        ConfigError: There is no such task, it does not take these options, or the user's file fails.

    Example:
        `load_task("vgg19", width=0.125, image_size=32)`
    """
    if name_or_path in TASKS:
        make_task = TASKS[name_or_path]
        check_options(make_task, name_or_path, options)
        return make_task(**options)
    if ":" in name_or_path or name_or_path.endswith(".py"):
        return load_user_task(name_or_path, **options)
    close = get_close_matches(name_or_path, TASKS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"cannot find a task {name_or_path!r}: {hint}known are {', '.join(TASKS)}; "
        "or write path/to/file.py:function for your own"
    )
