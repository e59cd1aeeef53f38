"""The exceptions that Poseidon raises, one class for each thing a caller can handle differently.

```
PoseidonError
├── ConfigError        a file or option cannot be used: path, key, value, what is known instead
├── ProfileError       a model cannot be traced or measured: which layer
├── ClusterError       hosts cannot be made, or their description contradicts itself
├── InfeasibleError    no plan fits, or a plan does not fit the model: the first difference
├── CommError
│   ├── PeerLostError      which rank is gone, at which step
│   └── CommTimeoutError   which exchange is late, and whose parts are missing
├── CheckpointError    no valid checkpoint, or one of another model
├── LaunchError        the workers did not start or did not end well: the last lines
└── ExportError        an operation that the target cannot express
```

A message says what was attempted, where (rank, layer, file, key), the value found and the next step.
"""


class PoseidonError(Exception):
    """Base of every error that Poseidon raises on purpose."""


class ConfigError(PoseidonError):
    """A file or an option cannot be used."""


class ProfileError(PoseidonError):
    """A model cannot be traced or measured."""


class ClusterError(PoseidonError):
    """Hosts cannot be made or measured, or their description contradicts itself."""


class InfeasibleError(PoseidonError):
    """No plan fits, or a given plan does not fit the model or the ranks."""


class CommError(PoseidonError):
    """Ranks could not exchange what the plan says."""


class PeerLostError(CommError):
    """A rank is gone while the others still need it."""


class CommTimeoutError(CommError):
    """An exchange did not end before its deadline."""


class CheckpointError(PoseidonError):
    """No valid checkpoint, or one that belongs to another model."""


class LaunchError(PoseidonError):
    """An engine could not start the workers, or one of them failed."""


class ExportError(PoseidonError):
    """An operation that the target format cannot express."""
