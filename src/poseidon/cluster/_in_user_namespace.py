"""Runs a command as root of a user namespace of its own, in which an ordinary user may make network namespaces.

A script of its own, run as `python -I -S _in_user_namespace.py COMMAND…`: the kernel grants a user namespace only to a
process with a single thread, and this one is replaced by the command. Without a command it only tries, and its output
is the call that the system forbids, or nothing.
"""

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enters the namespaces, then becomes the command."""
    command = sys.argv[1:]
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER, "CLONE_NEWUSER")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")
        write("/proc/self/gid_map", f"0 {group} 1")
        if not command:
            unshare(CLONE_NEWNET, "CLONE_NEWNET")
            return
    except OSError as error:
        sys.stdout.write(f"{error.filename} fails with {error.strerror} (errno {error.errno})\n")
        sys.exit(1)
    os.execv(command[0], command)


def unshare(flag: int, name: str) -> None:
    """The system call, with its errno as OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flag):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"unshare({name})")


def write(path: str, text: str) -> None:
    """One write call, as the kernel wants it for these files."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"writing {path}") from error


if __name__ == "__main__":
    main()
