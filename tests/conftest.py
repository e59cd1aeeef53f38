"""What holds for every test: nothing is left behind, hypothesis draws the same examples, CI has seen real links.

With pytest-xdist (`-n 2 --dist loadgroup --no-loadscope-reorder`) several tests run at a time. Those that watch time
have the machine to themselves all the same: they come last, one after the other, and wait until no other test runs.
"""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""How long threads and child processes that are ending anyway may take."""
NOT_OURS = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR"}
"""Environment variables that pytest, the terminal or torch itself changes."""

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("ci")  # --hypothesis-profile=explore looks further


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-netns", action="store_true", help="fail unless at least one netns test ran: on CI they must not skip"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also what is marked thorough, and each situation under each scheme on 1, 2, 3 and 4 ranks: much longer",
    )


class NetnsRan:
    """Fails a session in which no netns test ran."""

    def __init__(self) -> None:
        self.count = 0

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += "netns" in report.keywords and report.when == "call" and not report.skipped

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.count and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.count:
            terminalreporter.write_line("FAILED --require-netns: no netns test ran, so no real link was seen", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-netns") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NetnsRan())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Plain tests first, then ranks on loopback, then hosts with links: what fails early costs least."""
    if not config.getoption("--thorough") and not _are_named(config):
        left_out = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]
    for item in items:
        if _is_alone(item):
            item.add_marker(pytest.mark.xdist_group("alone"))
    items.sort(key=lambda item: (_is_alone(item), "netns" in item.keywords, "multiprocess" in item.keywords))


def _are_named(config: pytest.Config) -> bool:
    """Whether the command line names files or tests: then all that is named runs."""
    return any(Path(argument.partition("::")[0]).is_file() for argument in config.args)


def _is_alone(item: pytest.Item) -> bool:
    """Whether no other test is to run meanwhile."""
    return any(item.get_closest_marker(name) is not None for name in ("alone", "netns"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Beside other workers: keeps the machine for a test that is to have it alone. Waiting is not its own time."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process, a process group or a variable behind."""
    threads, children, environment = set(threading.enumerate()), _children(), dict(os.environ)
    yield
    leaks = [
        *_process_group(),
        *(f"thread {thread.name!r}" for thread in _left(lambda: _threads() - threads)),
        *(f"child process {_describe(child)}" for child in _left(lambda: _children() - children)),
        *(f"environment variable {name}" for name in _changed_variables(environment)),
    ]
    if leaks:
        pytest.fail("the test left behind: " + ", ".join(leaks), pytrace=False)


def _left(survey: Callable[[], set[T]]) -> set[T]:
    """What a survey still finds once what is ending anyway has had its time."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := survey()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon or thread.name.startswith("poseidon-")}


def _children() -> set[psutil.Process]:
    """Child processes and theirs, without the two that multiprocessing keeps for the whole session."""
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {child for child in psutil.Process().children(recursive=True) if child.pid not in kept and _running(child)}


def _running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _changed_variables(before: dict[str, str]) -> list[str]:
    """Names of the variables that differ, which are then set back for the tests to come."""
    after = dict(os.environ)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in (changed := [name for name in names if name not in NOT_OURS]):
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return changed


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")  # a test without torch does not pay for its import
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["torch.distributed process group"]
