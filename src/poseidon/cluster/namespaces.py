"""Network namespaces without a name: each is held by a thread and a file descriptor of this process.

The kernel destroys such a namespace, with its interfaces, as soon as the last process and descriptor in it are gone, so
even a killed process leaves none behind. Goes out: `NetworkNamespace`, and whether this process may make any.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import ParamSpec, TypeVar

from poseidon.errors import ClusterError

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_BIND = 4096
_MS_REC = 16384
_MS_SLAVE = 1 << 19
_USER_NAMESPACE_SCRIPT = str(Path(__file__).with_name("_in_user_namespace.py"))
_ADVICE = (
    "run as root, in a container with the capabilities SYS_ADMIN and NET_ADMIN, or allow user namespaces "
    "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
)

P = ParamSpec("P")
T = TypeVar("T")


class NetworkNamespace:
    """A network of its own, empty but for the loopback interface; to be closed.

    One thread lives in it as long as it is open. The children that this thread starts live in it too.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"poseidon-net-{name}")
        try:
            self.fd = self._thread.submit(_enter_new).result()
        except OSError as error:
            self._thread.shutdown()
            raise ClusterError(f"cannot make a network namespace: {_describe(error)}; {_ADVICE}") from error

    @property
    def inode(self) -> int:
        """What tells this namespace from every other, as in `/proc/PID/ns/net`."""
        return os.fstat(self.fd).st_ino

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a short function in the thread that lives here; calls wait for each other."""
        return self._thread.submit(function, *args, **kwargs).result()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function in a thread of its own that is moved here; calls may overlap."""
        with ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=f"poseidon-in-{self.name}", initializer=_enter, initargs=(self.fd,)
        ) as thread:
            return thread.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        """Lets go; the kernel destroys it once no process is left in it."""
        self._thread.shutdown()
        os.close(self.fd)


def why_no_namespaces() -> str | None:
    """Which call the system forbids this process, or None where namespaces can be made."""
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="poseidon-net-probe") as thread:
            os.close(thread.submit(_enter_new).result())
    except OSError as error:
        return _describe(error)
    return None


def enter_user_namespace() -> None:
    """Starts this program again as root of a user namespace, where that is what it takes to make network namespaces.

    Returns at once where the process may make them already. Otherwise it does not return: the program is replaced by
    itself, with the same arguments and process id, so call it before anything else is done.

    Raises:
        ClusterError: The system forbids user namespaces too.
    """
    reason = why_no_namespaces()
    if reason is None:
        return
    script = [sys.executable, "-I", "-S", _USER_NAMESPACE_SCRIPT]
    tried = subprocess.run(script, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        found = (tried.stdout or tried.stderr).strip()
        raise ClusterError(f"cannot make network namespaces: {reason}, and as an ordinary user {found}; {_ADVICE}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(script[0], [*script, sys.executable, *sys.orig_argv[1:]])


def replace_file(path: str, text: str) -> None:
    """Shows the calling thread, and the children that it starts, another content of one file.

    The thread moves to a mount namespace of its own for that, and so loses sight of later `os.chdir` calls of others.

    Raises:
        OSError: The system does not allow mounts, or there is no such file.
    """
    _system_call("unshare", _CLONE_NEWNS)
    _system_call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.chmod(file.name, 0o644)
        _system_call("mount", os.fsencode(file.name), os.fsencode(path), None, _MS_BIND, None)


def _enter_new() -> int:
    _system_call("unshare", _CLONE_NEWNET)
    with contextlib.suppress(OSError):  # no IPv6 here, or /proc/sys is read-only: then its few packets are borne
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1", encoding="ascii")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    _system_call("setns", fd, _CLONE_NEWNET)


def _system_call(function: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        code = ctypes.get_errno()
        flag = "(CLONE_NEWNET)" if _CLONE_NEWNET in arguments else ""
        raise OSError(code, os.strerror(code), function + flag)


def _describe(error: OSError) -> str:
    return f"{error.filename or 'a system call'} fails with {error.strerror} (errno {error.errno})"
