"""The proof that replicas are still equal, and the name of what has drifted apart where they are not.

Every rank makes a digest of the bits of all that has to be equal: parameters, buffers where the run keeps them equal,
and the hyperparameters of the optimizer, which a scheduler may have changed on one rank only. One digest of it all is
compared; only where it differs do the ranks tell each other more.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.errors import CommError

WHAT = "comparing replicas"


class DriftCheck:
    """Compares the replicas of one run, now and then or when it is asked.

    Args:
        model: The root module.
        optimizers: Whose hyperparameters are compared.
        group: The ranks.
        every: After how many exchanges; 0 for never.
        equal_buffers: The names of the buffers that have to be equal at present.
        ignored: Names of what stays each rank's own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        *,
        every: int = 0,
        equal_buffers: Callable[[], Container[str]] = tuple,
        ignored: Container[str] = (),
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._group = group
        self._every = every
        self._equal_buffers = equal_buffers
        self._ignored = ignored
        self._proven = 0
        """After how many exchanges the replicas were last seen to be equal."""

    def is_due(self, num_exchanges: int) -> bool:
        """Whether it is time; the same on every rank that has as many exchanges behind it."""
        return self._every > 0 and num_exchanges - self._proven >= self._every

    def compare(self, num_exchanges: int) -> None:
        """Compares all of it, on all ranks together.

        Args:
            num_exchanges: How many exchanges lie behind this rank.

        Raises:
            CommError: Something differs; the first such thing and the ranks that are odd are named.
        """
        tensors, settings = self._digests(), self._settings()
        whole = hashlib.blake2b(json.dumps([tensors, settings]).encode(), digest_size=16).hexdigest()
        if len(set(self._group.all_gather_text(whole, WHAT))) > 1:
            self._name_difference(tensors, settings, num_exchanges)
        self._proven = num_exchanges

    def _settings(self) -> dict[str, str]:
        """Those of the first optimizer, and of further ones under their number."""
        found: dict[str, str] = {}
        for number, optimizer in enumerate(self._optimizers):
            which = f" of optimizer {number}" if number else ""
            found |= {f"{name}{which}": value for name, value in settings_of(optimizer).items()}
        return found

    def _digests(self) -> dict[str, str]:
        """Of each tensor that has to be equal, by what messages call it."""
        named: list[tuple[str, str, torch.Tensor]] = [("parameter", *one) for one in self._model.named_parameters()]
        equal = self._equal_buffers()
        named += [("buffer", *one) for one in self._model.named_buffers() if one[0] in equal]
        return {f"{kind} {name!r}": digest(tensor) for kind, name, tensor in named if name not in self._ignored}

    def _name_difference(self, tensors: dict[str, str], settings: dict[str, str], num_exchanges: int) -> None:
        texts = self._group.all_gather_text(json.dumps([tensors, settings]), WHAT)
        everyone = [json.loads(text) for text in texts]
        when = f"after exchange {num_exchanges}"
        if self._proven:
            when += f" (equal after exchange {self._proven})"
        drifted = _differences([one[0] for one in everyone])
        if drifted:
            name, values = drifted[0]
            odd, like = odd_ranks(values)
            more = f", and so do {len(drifted) - 1} more" if len(drifted) > 1 else ""
            raise CommError(
                f"the replicas have drifted apart {when}: {name} on rank(s) {_listed(odd)} differs from rank {like}'s"
                f"{more}; did something besides the optimizer change it, or do the hosts compute differently (another "
                "processor or another number of threads)?"
            )
        name, values = _differences([one[1] for one in everyone])[0]
        odd, like = odd_ranks(values)
        raise CommError(
            f"the optimizers have drifted apart {when}: {name} is {values[odd[0]]} on rank(s) {_listed(odd)} and "
            f"{values[like]} on rank {like}; does every rank step its scheduler equally often?"
        )


def settings_of(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """The hyperparameters of each of an optimizer's groups, in words."""
    settings: dict[str, str] = {}
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        settings[f"the number of parameters in group {index}"] = str(len(group["params"]))
        for key, value in group.items():
            if key not in ("params", "param_names"):
                settings[f"{key!r} of parameter group {index}"] = _in_words(value)
    return settings


def _in_words(value: object) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's shape, type and bits."""
    data = tensor.detach()
    if data.layout is not torch.strided:
        data = data.to_dense()
    bits = data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    hashed = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    hashed.update(bits.data)
    return hashed.hexdigest()


def _differences(everyone: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """What is not the same on all ranks, each with its value by rank."""
    names = dict.fromkeys(name for one in everyone for name in one)
    by_name = {name: [one.get(name, "missing") for one in everyone] for name in names}
    return [(name, values) for name, values in by_name.items() if len(set(values)) > 1]


def odd_ranks(values: Sequence[str]) -> tuple[list[int], int]:
    """The ranks that differ from most, and the first of those they differ from; in a tie from rank 0 or so."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != usual], values.index(usual)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
