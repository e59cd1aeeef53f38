"""Serves the store of a job on a socket that the launcher has bound already: the coordinator.

A script of its own, run as `python -P _store_host.py FD --log FILE` with the job's secret in POSEIDON_SECRET, so that a
launcher needs no torch. The port is never free between the launcher's choice and the ranks' use of it, and only the
launcher's address is listened on. It may be killed and started again with the same socket and file: it goes on where
the one before it stood, and ranks ask again what they had asked.
"""

import argparse
import logging
import socket
import sys
from pathlib import Path

from poseidon.comm.secret import FILE_VARIABLE, SECRET_VARIABLE, Secret
from poseidon.comm.store_server import StoreServer
from poseidon.errors import ConfigError, PoseidonError


def main() -> None:
    """Serves until it is killed."""
    logging.basicConfig(format="poseidon: %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("fd", type=int)
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    try:
        secret = Secret.find()
        if secret is None:
            raise ConfigError(f"a coordinator needs the job's secret in {SECRET_VARIABLE} or {FILE_VARIABLE}")
        StoreServer(socket.socket(fileno=arguments.fd), secret, arguments.log).join()
    except PoseidonError as error:
        sys.exit(f"poseidon: {error}")
    sys.exit("poseidon: the coordinator has ended")


if __name__ == "__main__":
    main()
