"""`poseidon lab` from outside: what it prints, how it ends, and that nothing stays behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from poseidon.cluster.emulated import why_unavailable

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

POSEIDON = [sys.executable, "-m", "poseidon"]
AS_NOBODY = """
base=$1; shift
top=/$(echo "$base" | cut -d/ -f2)
hold=$(mktemp -d)
mount --bind "$base" "$hold" && mount -t tmpfs -o mode=755 tmpfs "$top"
mkdir -p "$base" && mount --move "$hold" "$base"
rmdir "$hold"
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""
"""Makes Python readable where it lies in a folder of root's, in a mount namespace of its own, then gives up root."""


def lab(*arguments: str, timeout: float = 50) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POSEIDON, "lab", *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def sleeping(seconds: str) -> int:
    """How many processes are `sleep` with this argument."""
    return sum(process.info["cmdline"] == ["sleep", seconds] for process in psutil.process_iter(["cmdline"]))


def network_namespaces(process: int | str = "[0-9]*") -> set[int]:
    """The network namespaces that threads are in, of one process or of all."""
    found = set()
    for path in Path("/proc").glob(f"{process}/task/[0-9]*/ns/net"):
        try:
            found.add(path.stat().st_ino)
        except OSError:
            continue
    return found


def test_every_host_runs_the_command_in_its_place() -> None:
    variables = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK"
    script = f'echo "{variables} $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME"'
    done = lab("--hosts", "2", "--procs-per-host", "2", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"[host{node}:{local}] {2 * node + local} 4 {local} 2 {node} 10.77.0.1:29500 eth0"
        for node in range(2)
        for local in range(2)
    ]


def test_the_first_host_to_fail_is_named() -> None:
    script = '[ "$RANK" = 1 ] || { sleep 0.3; echo lost; exit 1; }; echo broken; exit 4'
    done = lab("--hosts", "3", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[host0] lost", "[host1] broken", "[host2] lost"]
    assert done.stderr == (
        "poseidon: error: host1 (rank 1) failed first, with exit code 4; its last lines:\n    broken\n"
    )


@pytest.mark.thorough
def test_the_check_prints_set_against_measured(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(
        'hosts = [{name = "a", link = "100Mbit/s"}, {name = "b", link = {up = "10Mbit/s", down = "50Mbit/s"}}]'
    )
    done = lab("--cluster", str(tmp_path / "lab.toml"), "--check")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"│ (\w+) +│ (up|down) +│ (\S+) +│ (\S+) +│ ([+-][0-9.]+)% +│", done.stdout)
    assert [row[:3] for row in rows] == [
        ("a", "up", "100Mbit/s"),
        ("a", "down", "100Mbit/s"),
        ("b", "up", "10Mbit/s"),
        ("b", "down", "50Mbit/s"),
    ]
    assert all(abs(float(row[4])) < 5 for row in rows)


def test_links_change_while_the_command_runs() -> None:
    changes = ["--at", "0.3s:host1=10Mbit/s", "--at", "0.6s:host1=cut", "--at", "0.9s:host1=restore"]
    done = lab("--hosts", "2", *changes, "--", "sleep", "1.5")
    assert done.returncode == 0
    said = [line.partition("link of ")[2] for line in done.stderr.splitlines()]
    assert said == ["host1: 10Mbit/s", "host1: cut", "host1: restore"]


def heed_interrupts() -> None:
    """A shell that starts the tests in the background has them ignore SIGINT, and what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL), (signal.SIGSEGV, -signal.SIGSEGV)],
)
def test_however_it_ends_nothing_is_left(number: signal.Signals, code: int) -> None:
    seconds = f"{86410 + number}.{os.getpid()}"
    script = f"setsid sleep {seconds} & (sleep {seconds} &); exec sleep {seconds}"
    interfaces = os.listdir("/sys/class/net")
    command = [*POSEIDON, "lab", "--hosts", "2", "--", "sh", "-c", script]
    with subprocess.Popen(command, preexec_fn=heed_interrupts) as process:
        assert eventually(lambda: sleeping(seconds) == 6)
        made = network_namespaces(process.pid) - network_namespaces(os.getpid())
        assert len(made) == 3
        assert os.listdir("/sys/class/net") == interfaces
        process.send_signal(number)
    assert process.returncode == code
    assert eventually(lambda: sleeping(seconds) == 0)
    assert eventually(lambda: not network_namespaces() & made)


@pytest.mark.thorough
def test_two_labs_at_once_do_not_meet() -> None:
    """Same addresses, same ports, each its own network; the end of one leaves the other alone."""
    seconds = f"86402.{os.getpid()}"
    command = [*POSEIDON, "lab", "--hosts", "2", "--", "sleep", seconds]
    with (
        subprocess.Popen(command) as one,
        subprocess.Popen(command) as two,
    ):
        assert eventually(lambda: sleeping(seconds) == 4)
        one.kill()
        one.wait()
        assert eventually(lambda: sleeping(seconds) == 2)
        done = lab("--hosts", "2", "--link", "100Mbit/s", "--check")
        assert done.returncode == 0, done.stderr
        assert sleeping(seconds) == 2
        assert two.poll() is None
        two.terminate()
        assert two.wait(20) == 143
    assert sleeping(seconds) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("unshare")), reason="needs setpriv and unshare")
@pytest.mark.thorough
def test_an_ordinary_user_gets_hosts_too() -> None:
    """By way of a user namespace, with links as good and as little left behind."""
    seconds = f"86403.{os.getpid()}"
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o777)
        become = ["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh", sys.base_prefix, "env", f"HOME={home}"]
        check = ["lab", "--hosts", "2", "--link", "100Mbit/s", "--check"]
        identity = ["cat", "/proc/self/uid_map"]
        done = subprocess.run(
            [*become, *POSEIDON, *check, "--", *identity], capture_output=True, text=True, timeout=50, check=False
        )
        if "Permission denied" in done.stderr and not done.stdout:
            pytest.skip(f"nobody cannot read this Python: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        assert re.findall(r"\[host\d\] +0 +65534 +1", done.stdout)
        with subprocess.Popen([*become, *POSEIDON, "lab", "--", "sh", "-c", f"sleep {seconds} & wait"]) as process:
            assert eventually(lambda: sleeping(seconds) == 2)
            process.kill()
        assert eventually(lambda: sleeping(seconds) == 0)


@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("unshare")), reason="needs setpriv and unshare")
def test_what_the_system_forbids_is_said_in_one_line() -> None:
    """Without SYS_ADMIN, and without user namespaces either."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        f'{forbid} "$@"',
        "sh",
        *POSEIDON,
        "lab",
        "--",
        "true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "unshare(CLONE_NEWNET) fails with Operation not permitted (errno 1)" in done.stderr
    assert "unshare(CLONE_NEWUSER) fails with No space left on device (errno 28)" in done.stderr
    assert "user.max_user_namespaces" in done.stderr
