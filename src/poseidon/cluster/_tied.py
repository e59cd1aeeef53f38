"""Runs a command that the kernel kills when the process that started it dies.

A script of its own, run as `python -I -S _tied.py PARENT CGROUP COMMAND…`: it needs nothing but the standard library
and is replaced by the command. `PARENT` is the process id that is expected as parent, `CGROUP` the folder of the
control group to run in, empty for the parent's own.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent, puts it into its control group, then becomes the command."""
    parent, cgroup, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call above
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        if cgroup:
            enter(cgroup)
        os.execvp(command[0], command)
    except OSError as error:
        where = f" in {cgroup}" if cgroup else ""
        sys.stderr.write(f"cannot run {command[0]}{where}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def enter(cgroup: str) -> None:
    """Moves this process into a control group; 0 stands for the process that writes."""
    with open(f"{cgroup}/cgroup.procs", "w", encoding="ascii") as file:
        file.write("0")


if __name__ == "__main__":
    main()
