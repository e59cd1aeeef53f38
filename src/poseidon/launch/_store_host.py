"""Serves torch's rendezvous store on a socket that the launcher has bound already.

A script of its own, run as `python -P _store_host.py FD`, so that a launcher needs no torch. The port is never free
between the launcher's choice and the ranks' use of it, and only the launcher's address is listened on.
"""

import signal
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serves until it is killed."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    host, port = listener.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store:
        signal.pause()


if __name__ == "__main__":
    main()
