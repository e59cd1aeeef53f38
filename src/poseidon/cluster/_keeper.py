"""Ends what a launcher leaves behind, however the launcher ends.

A script of its own, run as `python -I -S _keeper.py` with a pipe as standard input that only the launcher can write to.
Lines say what to end once the pipe closes, which the kernel does even when the launcher is killed:

```
+group 4711       kill the processes of this process group
+net 4026532281   kill the processes in the network namespace with this inode
+cgroup /sys/…    then remove this control group
+folder /dev/…    and this folder with all that is in it
-group 4711       forget it: its processes are gone
```
"""

import contextlib
import os
import shutil
import signal
import sys
import time

_PASSES = 100
_PAUSE_SECONDS = 0.02


def main() -> None:
    """Listens until the launcher is gone, then kills and removes until nothing is left."""
    kept = listen()
    folders = [which for kind, which in kept if kind == "cgroup"]
    for _ in range(_PASSES):
        left = [pid for pid in running() if is_kept(pid, kept)]
        for pid in left:
            kill(pid)
        folders = [folder for folder in folders if not remove(folder)]
        if not left and not folders:
            break
        time.sleep(_PAUSE_SECONDS)
    for kind, which in kept:
        if kind == "folder":
            shutil.rmtree(which, ignore_errors=True)


def listen() -> set[tuple[str, str]]:
    """What the launcher asked for, once the pipe is closed."""
    kept: set[tuple[str, str]] = set()
    for line in sys.stdin:
        kind, which = line[1:].rstrip("\n").split(" ", 1)
        if line[0] == "+":
            kept.add((kind, which))
        else:
            kept.discard((kind, which))
    return kept


def running() -> list[int]:
    """Every process but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def is_kept(pid: int, kept: set[tuple[str, str]]) -> bool:
    """Whether a process belongs to one of the groups or namespaces and has not ended already."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
        if state in "ZX":
            return False
        return ("group", group) in kept or ("net", str(os.stat(f"/proc/{pid}/ns/net").st_ino)) in kept
    except OSError:  # gone meanwhile, or of another user
        return False


def kill(pid: int) -> None:
    """Ends one process at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def remove(folder: str) -> bool:
    """Whether a control group is gone; it stays as long as a process in it has not ended."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
