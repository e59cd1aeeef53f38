"""Starts Python programs on one host, again and again, without waiting for the import of torch.

A script of its own, run as `python _fork_server.py FD`, where `FD` is a Unix socket that keeps messages apart. It
imports once what a rank needs and starts no thread. Each message is one JSON object; the first comes with a descriptor
for the program's output:

```
{"command": [...], "kind": "script", "program": ["train.py", "--epochs", "3"], "env": {...}}
                    is answered by {"pid": 4711}
{"reap": 4711}      is answered by {"status": 9}, as of `os.waitpid`
```

A program runs in a child of this process, in a session of its own, as Python would run it: as `__main__`, with its own
arguments, path and environment. What ends it ends the child.
"""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the folder of this script, which is not the program's

import atexit
import builtins
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import types
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "poseidon.auto", "poseidon.runtime.join")
"""What ranks import anyway; one that cannot be imported is passed over. The first optimizer imports torch._dynamo."""
MESSAGE_BYTES = 1 << 20
"""The largest message: arguments and environment of a program."""


ended: list[int] = []
"""The exit code of a program that has come to its end."""


def end_at_once() -> None:
    """Ends this process where only the interpreter is left to be taken apart, which takes longer than to start one.

    Registered before all else, so that it is the last thing that Python calls at a program's end.
    """
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # what libraries of C have written
        os._exit(ended[0])


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answers requests until the other side is gone.

    Returns:
        In a child, what it is to run; in the server, None once nobody asks any more.
    """
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        if not data:
            return None
        request = json.loads(data)
        if "reap" in request:
            connection.send(json.dumps({"status": os.waitpid(request["reap"], 0)[1]}).encode())
            continue
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            become(request, descriptors[0], parent)
            connection.close()
            return dict(request)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps({"pid": child}).encode())


def become(request: dict[str, Any], output: int, parent: int) -> None:
    """Makes of a forked child what a fresh process is: its own session, output, environment and random numbers."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call above
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.orig_argv = request["command"]
    os.environ.clear()
    os.environ.update(request["env"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in os.environ:
        with suppress(ValueError):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run(kind: str, arguments: list[str]) -> None:
    """Runs a script or a module as Python does when it is named on the command line.

    Args:
        kind: `script` or `module`.
        arguments: Its path or name, then its arguments.
    """
    name, *rest = arguments
    spec = None
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or spec.origin is None:
            sys.exit(f"{sys.executable}: No module named {name}")
        path = spec.origin
    else:
        path = name
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *rest]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __spec__=spec, __package__=spec.parent if spec else None)
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    try:
        exec(compile(source, path, "exec"), main.__dict__)
    except SystemExit as end:
        ended.append(end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:
        ended.append(1)
        raise
    ended.append(0)


if __name__ == "__main__":
    atexit.register(end_at_once)
    for module in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # a program's end would look through all that was imported, and copy every page of it
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        this = sys.modules["__main__"]  # its functions are in use although another module takes its name
        run(program["kind"], program["program"])
