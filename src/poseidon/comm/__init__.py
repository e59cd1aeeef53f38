"""The ways across the network, and what keeps a job's ranks together.

The schemes are imported when they are first used: the process that serves a job's coordinator needs no torch, and is
there again in an instant after it was killed.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from poseidon.comm.all_reduce import AllReduce as AllReduce
    from poseidon.comm.scheme import BoundLayer as BoundLayer
    from poseidon.comm.scheme import CommScheme as CommScheme
    from poseidon.comm.scheme import Cost as Cost
    from poseidon.comm.scheme import Exchange as Exchange
    from poseidon.comm.scheme import Message as Message
    from poseidon.comm.scheme import StepState as StepState
    from poseidon.comm.scheme import Transfer as Transfer
    from poseidon.comm.schemes import SCHEMES as SCHEMES
    from poseidon.comm.schemes import AnyScheme as AnyScheme
    from poseidon.comm.sharded_server import ShardedServer as ShardedServer
    from poseidon.comm.sparse_rows import SparseRows as SparseRows
    from poseidon.comm.sufficient_factor import SufficientFactor as SufficientFactor

_SCHEME = ("BoundLayer", "CommScheme", "Cost", "Exchange", "Message", "StepState", "Transfer")
_HOMES = {
    "AllReduce": "poseidon.comm.all_reduce",
    "AnyScheme": "poseidon.comm.schemes",
    "SCHEMES": "poseidon.comm.schemes",
    "ShardedServer": "poseidon.comm.sharded_server",
    "SparseRows": "poseidon.comm.sparse_rows",
    "SufficientFactor": "poseidon.comm.sufficient_factor",
    **dict.fromkeys(_SCHEME, "poseidon.comm.scheme"),
}

__all__ = [
    "SCHEMES",
    "AllReduce",
    "AnyScheme",
    "BoundLayer",
    "CommScheme",
    "Cost",
    "Exchange",
    "Message",
    "ShardedServer",
    "SparseRows",
    "StepState",
    "SufficientFactor",
    "Transfer",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poseidon.comm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
