"""A user's own task: a function in a Python file, `path/to/file.py:function`, that returns a Task."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from poseidon.errors import ConfigError, PoseidonError
from poseidon.tasks.task import Task


def load_user_task(location: str, **options: object) -> Task:
    """Runs the file, then the function, and returns its Task.

    The file's folder is appended to `sys.path`, so that the file can import its neighbours.

    Args:
        location: `path/to/file.py:function`.
        **options: Handed to the function.

    Raises:
        ConfigError: The file or the function is missing, one of them fails, or the function returns something else.
    """
    file, _, function = location.rpartition(":")
    if not file.endswith(".py") or not function:
        raise ConfigError(f"cannot load the task {location!r}: write it as path/to/file.py:function")
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"cannot load the task {location!r}: there is no file {path}; check the path")
    with _errors_named(path, location):
        module = _import(path)
    make_task = getattr(module, function, None)
    if not callable(make_task):
        raise ConfigError(
            f"cannot load the task {location!r}: {path} has no function {function!r}; {_functions(module)}"
        )
    check_options(make_task, location, options)
    with _errors_named(path, location):
        task = make_task(**options)
    if not isinstance(task, Task):
        found = type(task).__name__
        raise ConfigError(f"cannot use the task {location!r}: it returned a {found}; return a poseidon.tasks.Task")
    return task


def check_options(make_task: Callable[..., object], name: str, options: dict[str, object]) -> None:
    """Refuses options that the function does not take.

    Raises:
        ConfigError: An option is unknown or one is missing.
    """
    signature = inspect.signature(make_task)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"cannot make the task {name!r}: {error}; it takes {signature}") from error


def _import(path: Path) -> ModuleType:
    name = f"poseidon_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


@contextmanager
def _errors_named(path: Path, location: str) -> Iterator[None]:
    """Turns what the user's code raises into a ConfigError with the line, keeping the cause; our own errors pass."""
    try:
        yield
    except PoseidonError:
        raise
    except Exception as error:
        where = f"{path}, line {_line(path, error)}"
        raise ConfigError(
            f"cannot load the task {location!r}: {type(error).__name__}: {error} ({where}); correct the file"
        ) from error


def _line(path: Path, error: Exception) -> int | None:
    """The last line of the user's file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def _functions(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"it has {', '.join(names)}" if names else "write one that returns a poseidon.tasks.Task"
