"""Where the ranks of a job meet: which coordinator, with which secret, and waiting there for whoever starts later.

- A launcher of ours serves the coordinator and names it in POSEIDON_COORDINATOR, with the secret in POSEIDON_SECRET.
- Under torchrun, rank 0 serves one on the card that leads to the others, and publishes where in torchrun's own store.
- Where nobody serves anything, rank 0 serves one on MASTER_ADDR:MASTER_PORT.

Where no secret is set and all ranks are on one host, rank 0 makes one and leaves it in a file that only this user can
read. Across hosts without one the ranks say so, and use one that rank 0 publishes in torch's store: that keeps other
jobs apart, and nobody out who wants to come in.
"""

import hashlib
import itertools
import json
import logging
import os
import socket
import stat
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from poseidon.comm.group import machine_identity
from poseidon.comm.liveness import Liveness
from poseidon.comm.ports import listen
from poseidon.comm.remote_store import Coordinator, Patience, RemoteStore, StoreLostError, Trouble
from poseidon.comm.secret import FILE_VARIABLE, SECRET_VARIABLE, Secret
from poseidon.comm.store_server import StoreServer
from poseidon.errors import CommError, ConfigError, PeerLostError
from poseidon.runtime.interfaces import control_of_process, seen_from_here
from poseidon.units import format_seconds

log = logging.getLogger(__name__)

COORDINATOR_VARIABLE = "POSEIDON_COORDINATOR"
JOIN_SECONDS = 1800.0
"""How long to wait for the other ranks to start."""
SAY_SECONDS = 15.0
"""How often rank 0 says who is missing, and a rank what it waits for."""
_PAUSE_SECONDS = 0.02
_UNREAD_SECONDS = 0.2
_PATIENCE_WITH_A_RANK = Patience(refused=0.5, silent=7.0)
"""A coordinator that lives in a rank's process is gone where its port is: nobody starts it again."""
_meetings = itertools.count()
"""Numbers the meetings of this process: all ranks join equally often."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank stands among the others, as torch's variables say."""

    rank: int
    world_size: int
    address: str
    """MASTER_ADDR, as this host should see it."""
    port: int
    is_one_host: bool
    """Whether all ranks are on this host, as the launcher says."""
    prefix: str
    """Of all keys of this meeting: another one, and another attempt at this job, find nothing of it."""

    @classmethod
    def find(cls, rank: int, world_size: int, port: int) -> "Place":
        """From torch's variables, once for each meeting; the numbers are read already."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", os.environ.get("POSEIDON_JOB", "0"))
        return cls(
            rank=rank,
            world_size=world_size,
            address=seen_from_here(os.environ["MASTER_ADDR"]),
            port=port,
            is_one_host=world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
            prefix=f"{job}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_meetings)}/",
        )


@dataclass(kw_only=True)
class Meeting:
    """The coordinator that was found, and what this process serves of it."""

    coordinator: Coordinator
    prefix: str
    serving_rank: int | None = None
    """The rank in whose process it lives."""
    server: StoreServer | None = None
    """What this rank serves."""
    torch_store: Store | None = None
    """What rank 0 of several hosts without a secret serves, to publish the coordinator in."""
    secret_file: Path | None = None
    """What rank 0 wrote; to be removed when all have come."""

    def connect(self) -> RemoteStore:
        """The store of this attempt over connections of its own.

        Raises:
            DistStoreError: The coordinator does not answer.
        """
        store = RemoteStore(self.coordinator, prefix=self.prefix, on_trouble=_Waiter(self.coordinator))
        store.connect()
        return store

    def remove_secret_file(self) -> None:
        """Takes the file away: everybody has read it."""
        if self.secret_file is not None:
            self.secret_file.unlink(missing_ok=True)
            self.secret_file = None

    def close(self, seconds: float) -> None:
        """Ends what this process serves, once every rank has said goodbye or so many seconds have passed."""
        self.remove_secret_file()
        if self.server is not None:
            self.server.await_goodbyes(seconds)
            self.server.close()
        self.torch_store = None


def meet(place: Place) -> Meeting:
    """Finds the coordinator, or serves it.

    Raises:
        ConfigError: A variable cannot be used.
        CommError: The port cannot be listened on.
        DistStoreError: The coordinator does not answer, or has another secret.
    """
    secret = Secret.find()
    if text := os.environ.get(COORDINATOR_VARIABLE):
        return Meeting(coordinator=_named_coordinator(text, secret), prefix=place.prefix)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _through_torch(place, secret)
    if secret is None and not place.is_one_host:
        return _through_torch(place, None, serves=place.rank == 0)
    if place.rank == 0:
        return _serve(place, secret, _listen_at(place.address, place.port))
    return _find(place, secret, place.address, place.port)


def wait_for_all(liveness: Liveness, place: Place, where: str) -> None:
    """Waits until every rank has come; rank 0 says now and then who is missing.

    Args:
        liveness: Which ranks are there.
        place: Of this rank.
        where: What errors call the coordinator.

    Raises:
        PeerLostError: A rank came and ended meanwhile.
        CommError: Some did not come in time.
    """
    start = time.monotonic()
    next_line = start + SAY_SECONDS
    while missing := liveness.missing():
        if lost := liveness.lost():
            raise PeerLostError(f"rank {place.rank}: start-up cannot end: {lost}")
        now = time.monotonic()
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        if now > start + JOIN_SECONDS:
            raise CommError(
                f"rank {place.rank} reached the coordinator at {where} and waited {format_seconds(now - start)} there "
                f"for {names} in vain; look at what became of {names}"
            )
        if place.rank == 0 and now >= next_line:
            log.info("waiting for %s of %d at %s, for %.0f s now", names, place.world_size, where, now - start)
            next_line += SAY_SECONDS
        time.sleep(_PAUSE_SECONDS)


class _Waiter:
    """Says now and then that this rank waits for the coordinator, and why."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._since = self._said_at = self._called_at = 0.0

    def __call__(self, why: str) -> None:
        now = time.monotonic()
        if now - self._called_at > SAY_SECONDS:
            self._since = self._said_at = now
        elif now - self._said_at >= SAY_SECONDS:
            waited = now - self._since
            log.warning("waiting for the coordinator at %s, for %.0f s now: %s", self._coordinator, waited, why)
            self._said_at = now
        self._called_at = now


def _named_coordinator(text: str, secret: Secret | None) -> Coordinator:
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal():
        raise ConfigError(
            f"cannot use {COORDINATOR_VARIABLE}={text!r}: it names an address and a port, as 10.0.0.1:29500"
        )
    if secret is None:
        raise ConfigError(
            f"cannot join the coordinator at {text}: it needs the job's secret in {SECRET_VARIABLE} or {FILE_VARIABLE}"
        )
    return _coordinator(address.strip("[]"), int(port), secret, Patience())


def _coordinator(address: str, port: int, secret: Secret, patience: Patience = _PATIENCE_WITH_A_RANK) -> Coordinator:
    return Coordinator(address=address, port=port, secret=secret, patience=replace(patience, first=JOIN_SECONDS))


def _serve(place: Place, secret: Secret | None, listener: socket.socket) -> Meeting:
    """Serves the coordinator on this rank; without a secret, with a new one that the others find in a file."""
    path = None
    if secret is None:
        secret, path = Secret.make(), _secret_path(place)
        _write_private(path, secret.hex)
    server = StoreServer(listener, secret)
    return Meeting(
        coordinator=_coordinator(server.address, server.port, secret),
        prefix=place.prefix,
        serving_rank=0,
        server=server,
        secret_file=path,
    )


def _find(place: Place, secret: Secret | None, address: str, port: int) -> Meeting:
    """The coordinator that rank 0 serves; without a secret, with the one that it leaves in a file."""
    if secret is not None:
        return Meeting(coordinator=_coordinator(address, port, secret), prefix=place.prefix, serving_rank=0)
    path = _secret_path(place)
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            coordinator = _coordinator(address, port, Secret.read(path))
            meeting = Meeting(coordinator=coordinator, prefix=place.prefix, serving_rank=0)
            meeting.connect().close()
            return meeting
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or time.monotonic() > deadline:
                raise DistStoreError(f"rank 0 has left no secret: {error}") from error
        except StoreLostError as error:
            if error.trouble is not Trouble.UNPROVED or time.monotonic() > deadline:
                raise  # else the file is of an earlier job, and rank 0 is about to replace it
        time.sleep(_UNREAD_SECONDS)


def _through_torch(place: Place, secret: Secret | None, *, serves: bool = False) -> Meeting:
    """Rank 0 serves the coordinator on the card of this job and publishes where, in a store of torch's.

    Args:
        place: Of this rank.
        secret: Of the job, if one was set.
        serves: Whether this rank serves torch's store too.
    """
    served = _serve_torch(place) if serves else None
    store = PrefixStore(f"poseidon/{place.prefix}", _torch_client(place))
    if place.rank == 0:
        chosen = control_of_process()
        listener = listen(chosen.address if chosen is not None else place.address)
        if secret is None and not place.is_one_host:
            secret = Secret.make()
            _say_not_authenticated()
        meeting = _serve(place, secret, listener)
        meeting.torch_store = served
        public = "" if Secret.find() is not None or place.is_one_host else meeting.coordinator.secret.hex
        store.set("coordinator", json.dumps([meeting.coordinator.address, meeting.coordinator.port, public]))
        return meeting
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    address, port, public = json.loads(store.get("coordinator"))
    if secret is None and public and not place.is_one_host:
        secret = Secret.find({SECRET_VARIABLE: public})
    if secret is None and not place.is_one_host:
        raise ConfigError(
            f"rank 0 has a secret and rank {place.rank} has none: set {SECRET_VARIABLE} or {FILE_VARIABLE} on each host"
        )
    return _find(place, secret, address, port)


def _say_not_authenticated() -> None:
    log.warning(
        "NOT AUTHENTICATED: these ranks are on several hosts and share no secret, so whoever reaches their ports may "
        "join; put the output of `openssl rand -hex 32` into a file on each host, `chmod 600` it, and name it in %s",
        FILE_VARIABLE,
    )


def _torch_client(place: Place) -> Store:
    try:
        return TCPStore(place.address, place.port, None, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise DistStoreError(
            f"{first_line} (if rank 0 has a secret in {SECRET_VARIABLE} or {FILE_VARIABLE}, this rank needs it too)"
        ) from error


def _serve_torch(place: Place) -> Store:
    listener = _listen_at(place.address, place.port)
    return TCPStore(
        place.address,
        place.port,
        None,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_SECONDS),
        master_listen_fd=listener.detach(),
    )


def _listen_at(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise CommError(f"rank 0 cannot listen on {address}:{port}: {error.strerror}; is another job there?") from error
    return listener


def _secret_path(place: Place) -> Path:
    """Where rank 0 leaves the secret for the other ranks on this host: one path for each attempt."""
    names = (machine_identity(), place.address, str(place.port), place.prefix)
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:32]
    return _private_folder() / digest


def _private_folder() -> Path:
    """A folder that nobody else can enter.

    Raises:
        ConfigError: Somebody else made one of that name.
    """
    folder = Path(tempfile.gettempdir()) / f"poseidon-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"cannot leave a secret in {folder}: it is not a folder that only this user can enter; remove it, or set "
            f"{FILE_VARIABLE}"
        )
    return folder


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
