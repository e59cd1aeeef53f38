"""Kills what a launcher leaves behind, however the launcher ends.

A script of its own, run as `python -I -S _keeper.py` with a pipe as standard input that only the launcher can write to.
Lines say what to kill once the pipe closes, which the kernel does even when the launcher is killed:

```
+group 4711       the processes of this process group
+net 4026532281   the processes in the network namespace with this inode
-group 4711       forget it: its processes are gone
```
"""

import contextlib
import os
import signal
import sys
import time

_PASSES = 100
_PAUSE_SECONDS = 0.02


def main() -> None:
    """Listens until the launcher is gone, then kills until nothing is left."""
    kept = listen()
    for _ in range(_PASSES):
        left = [pid for pid in running() if is_kept(pid, kept)]
        if not left:
            return
        for pid in left:
            kill(pid)
        time.sleep(_PAUSE_SECONDS)


def listen() -> set[tuple[str, int]]:
    """What the launcher asked for, once the pipe is closed."""
    kept: set[tuple[str, int]] = set()
    for line in sys.stdin:
        kind, number = line[1:].split()
        if line[0] == "+":
            kept.add((kind, int(number)))
        else:
            kept.discard((kind, int(number)))
    return kept


def running() -> list[int]:
    """Every process but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def is_kept(pid: int, kept: set[tuple[str, int]]) -> bool:
    """Whether a process belongs to one of the groups or namespaces and has not ended already."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
        if state in "ZX":
            return False
        return ("group", int(group)) in kept or ("net", os.stat(f"/proc/{pid}/ns/net").st_ino) in kept
    except OSError:  # gone meanwhile, or of another user
        return False


def kill(pid: int) -> None:
    """Ends one process at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
