"""Joining the ranks that torchrun, a launcher of ours or anything else that sets torch's variables has started."""

import atexit
import ctypes
import logging
import os
import socket
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group as a default argument, evaluated when it is imported. Imported later, by an
# optimizer say, it would hold the group for good: gloo's threads would outlive the interpreter and abort the process.
import torch.distributed.nn.functional

from poseidon.comm.group import EXCHANGE_SECONDS, Group
from poseidon.comm.liveness import Liveness
from poseidon.comm.mesh import Mesh, backend_for
from poseidon.comm.ports import PortRange
from poseidon.comm.reach import check_pairs
from poseidon.comm.remote_store import RemoteStore
from poseidon.errors import CommError, ConfigError, PeerLostError, PoseidonError
from poseidon.runtime.interfaces import choose_interface, forget, hint, interface_of_process
from poseidon.runtime.memory import remove_opened
from poseidon.runtime.rendezvous import Place, meet, wait_for_all
from poseidon.runtime.surroundings import listed_name
from poseidon.units import GIB, MIB

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 60.0
"""The rank that serves the coordinator waits so long for the others' goodbye, once all have come to the end."""
CONNECT_SECONDS = 120.0
"""All ranks are there and try their connections: how long the slowest may take."""
FAREWELL_SECONDS = 3.0
"""One that ends by an error has told the others by then."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h. Setting one stops glibc from moving the other by itself, so both are set."""
_LARGEST_MMAP_THRESHOLD = 32 * MIB

_joined: dict[str, Any] = {}
"""What `init` made in this process: the group, and what `shutdown` has to undo."""


def init(*, max_connections: int = 2) -> Group:
    """Joins the other ranks, or stays alone where no launcher has set RANK and WORLD_SIZE.

    Chooses the network interface by the route to MASTER_ADDR, listens on no other, and gives torch the cores of
    this host divided by the ranks on it unless OMP_NUM_THREADS says otherwise. A process group that exists is used.

    Args:
        max_connections: Connections to each peer that are made; a plan uses more than one only where measuring shows
            that it is faster.

    Returns:
        The group of all ranks.

    Raises:
        ConfigError: The launcher's variables are incomplete or contradict each other.
        CommError: The others did not come in time, or could not be reached; or a group that failed is left here.
    """
    if "group" in _joined:
        group: Group = _joined["group"]
        return group
    if "abandoned" in _joined and dist.is_initialized():
        raise CommError("cannot join again in this process: a failed group is left in it; start the process again")
    _speak_up()
    set_threads()
    keep_freed_memory()
    atexit.register(_leave_at_exit, os.getpid())
    liveness: Liveness | None = None
    try:
        if not dist.is_initialized():
            liveness = _join()
        _joined["group"] = _group(max_connections, liveness)
    except PoseidonError as error:
        _joined["abandoned"] = isinstance(error, PeerLostError)
        shutdown(str(error))
        raise
    _joined.pop("abandoned", None)  # of an earlier try
    return group_of_process()


def _group(max_connections: int, liveness: Liveness | None) -> Group:
    if liveness is None:
        return Group.of_default(max_connections=max_connections)
    connect = partial(Group.of_default, max_connections=max_connections, liveness=liveness, mesh=_joined.get("mesh"))
    group = liveness.watch_over(connect, "connecting to the other ranks")
    liveness.follow(lambda: group.num_exchanges)
    liveness.on_lost(group.abort)
    return group


def group_of_process() -> Group:
    """The group that `init` made; calls `init` if nobody has.

    Raises:
        ConfigError: As `init`.
        CommError: As `init`.
    """
    return _joined["group"] if "group" in _joined else init()


def shutdown(reason: str = "") -> None:
    """Leaves the group when all ranks have come to this point, so that nobody's last exchange loses its peer.

    Args:
        reason: Why this rank ends early; then it waits for nobody, and the others learn the reason.

    Raises:
        PeerLostError: A rank ended without coming here.
    """
    liveness = _joined.pop("liveness", None)
    group: Group | None = _joined.pop("group", None)
    try:
        if group is not None and not reason:
            group.barrier()
            remove_opened()
    finally:
        if liveness is not None:
            liveness.close(reason)
        made_group = _joined.pop("made_group", False) and dist.is_initialized()
        abandoned = _joined.pop("abandoned", False)
        store, meeting = _joined.pop("store", None), _joined.pop("meeting", None)
        _joined.clear()
        forget()
        if made_group and reason:
            abandoned = True  # peers may be gone in the middle of an exchange, which nothing can end
        elif made_group:
            if group is not None:
                group.close()
            dist.destroy_process_group()
        if store is not None:
            store.close()
        if meeting is not None:
            meeting.close(FAREWELL_SECONDS if reason else GOODBYE_SECONDS)
        if abandoned:
            _joined["abandoned"] = True


def _leave_at_exit(process: int) -> None:
    """Ends what is left of the group when the program ends; nothing in a copy of the process that has joined.

    One that simply ends waits for the others, as with `shutdown`. One that ends by an error waits for nobody. Gloo's
    threads may be in the middle of an exchange then, and would abort the process when Python's interpreter goes; so
    what was said is flushed and the process ends here, with the exit code of an error.
    """
    if os.getpid() != process:
        return
    failed = hasattr(sys, "last_value") or "abandoned" in _joined
    if "group" in _joined:
        try:
            shutdown(_why_it_failed() if failed else "")
        except PoseidonError as error:
            log.warning("%s", error)
            failed = True
    if failed and _joined.pop("abandoned", False):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _why_it_failed() -> str:
    """The exception that ended the program, for the other ranks to read."""
    error: BaseException | None = getattr(sys, "last_value", None)
    what = f": {type(error).__name__}: {error}" if error is not None else ""
    return f"its program ended by an error{what}"


def _speak_up() -> None:
    """What is decided is said on rank 0's stderr, unless the program has set up logging itself."""
    log_of_all = logging.getLogger("poseidon")
    if log_of_all.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("poseidon: %(message)s"))
    log_of_all.addHandler(handler)
    log_of_all.setLevel(logging.INFO if _number("RANK", 0) == 0 else logging.WARNING)


def set_threads() -> None:
    """Gives torch this rank's share of the cores, unless OMP_NUM_THREADS has said how many it may use."""
    if "OMP_NUM_THREADS" in os.environ and not _set_by_torchrun():
        log.info("computing with %d threads, as OMP_NUM_THREADS says", torch.get_num_threads())
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = _number("LOCAL_WORLD_SIZE", 1)
    threads = max(1, cores // ranks)
    torch.set_num_threads(threads)
    log.info("computing with %d of %d cores (%d ranks on this host)", threads, cores, ranks)


def keep_freed_memory() -> bool:
    """Lets glibc keep what a step has freed for the next one, unless a MALLOC_ variable says otherwise.

    Activations are freed in backward and asked for again in the next forward. With gradients in buckets nothing stays
    above them on the heap, so glibc would give the memory back to the system after every step, and each page of it
    would be a fault in the next: a twentieth of the step of a small convolutional network.

    Returns:
        Whether it was set: false where there is no glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, GIB))


def _set_by_torchrun() -> bool:
    """Torchrun sets 1 thread when nobody said anything; that is its caution, not the user's wish."""
    return os.environ["OMP_NUM_THREADS"] == "1" and "TORCHELASTIC_RUN_ID" in os.environ


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"cannot join the other ranks: {name}={text!r} is not a whole number") from error


def _join() -> Liveness | None:
    """Makes torch's default group; who watches over its ranks, or None where there is one rank only."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"cannot join the other ranks: {', '.join(missing)} not set; "
            "start with torchrun or `poseidon lab`, or set all four"
        )
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"cannot join the other ranks: RANK={rank} is not below WORLD_SIZE={world_size}")
    choose_interface(os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))
    place = Place.find(rank, world_size, _number("MASTER_PORT", 0))
    try:
        return _join_others(place)
    except (RuntimeError, OSError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise CommError(
            f"rank {rank} could not join the other {world_size - 1} through "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {first_line}; "
            f"is rank 0 running, and is the port open?{hint(os.environ['MASTER_ADDR'])}"
        ) from error


def _join_others(place: Place) -> Liveness:
    meeting = _joined["meeting"] = meet(place)
    store = _joined["store"] = meeting.connect()
    listed = listed_name()
    host = listed if listed not in ("", "localhost") else socket.gethostname()
    liveness = _joined["liveness"] = Liveness(
        store.clone(), place.rank, place.world_size, host=host, serving_rank=meeting.serving_rank
    )
    wait_for_all(liveness, place, str(meeting.coordinator))
    meeting.remove_secret_file()

    def connect() -> None:
        sources = _check_pairs(store, place, host, str(meeting.coordinator))
        ports = PortRange.find()
        mesh = _joined["mesh"] = Mesh(store, sources=sources, ports=ports)
        gloo = backend_for(ports)
        dist.init_process_group(
            f"cpu:{gloo},cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else gloo,
            store=mesh,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=EXCHANGE_SECONDS),
        )
        assert dist.group.WORLD is not None
        _joined["made_group"] = True
        mesh.seal(dist.group.WORLD)

    liveness.watch_over(connect, "connecting to the other ranks")
    return liveness


def _check_pairs(store: RemoteStore, place: Place, host: str, coordinator: str) -> list[str]:
    """Tries every pair; from which addresses the others connect, nothing where that is not known."""
    chosen = interface_of_process()
    if chosen is None or place.world_size == 1:
        return []
    return check_pairs(
        store,
        place.rank,
        place.world_size,
        address=chosen.address,
        host=host,
        patience=CONNECT_SECONDS,
        coordinator=coordinator,
    )
