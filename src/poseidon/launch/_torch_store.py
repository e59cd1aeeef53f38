"""Serves torch's rendezvous store, for scripts that use torch alone, on a socket that the launcher has bound already.

A script of its own, run as `python -P _torch_store.py FD`, so that a launcher needs no torch. The port is never free
between the launcher's choice and the ranks' use of it, and only the launcher's address is listened on. At SIGHUP, which
the launcher has blocked from the beginning, an empty store takes the place of the one that served the attempt before.
"""

import os
import signal
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serves until it is killed."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    host, port = listener.getsockname()
    while True:
        descriptor = os.dup(listener.fileno())
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        signal.sigwait({signal.SIGHUP})
        del store


if __name__ == "__main__":
    main()
