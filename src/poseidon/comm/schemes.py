"""The ways across the network: every scheme with what it costs and what it does, in one table."""

from typing import Annotated

from pydantic import Field

from poseidon.comm.all_reduce import AllReduce
from poseidon.comm.scheme import CommScheme
from poseidon.comm.sharded_server import ShardedServer
from poseidon.comm.sparse_rows import SparseRows
from poseidon.comm.sufficient_factor import SufficientFactor

SCHEMES: dict[str, type[CommScheme]] = {
    "all_reduce": AllReduce,
    "sufficient_factor": SufficientFactor,
    "sparse_rows": SparseRows,
    "sharded_server": ShardedServer,
}

AnyScheme = Annotated[AllReduce | SufficientFactor | SparseRows | ShardedServer, Field(discriminator="kind")]
"""A member of the table above, told apart by `kind`."""
