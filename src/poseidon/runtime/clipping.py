"""The norm of the whole gradient, and clipping by it, whoever holds the gradient's parts.

Most schemes leave the mean gradient in `p.grad` on every rank. Where an exchange leaves each rank's optimizer a part of
it instead, the ranks tell each other a number each, and all come to the same norm, bit by bit.
"""

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from poseidon.comm.group import Group
from poseidon.comm.scheme import Exchange
from poseidon.errors import ConfigError

NORM_TAG = 6


def grad_norm(
    parameters: Sequence[nn.Parameter],
    exchanges: Sequence[Exchange],
    group: Group,
    norm_type: float = 2.0,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all gradients as if they were one vector; the same on every rank, who call this together.

    Args:
        parameters: Those whose gradients count.
        exchanges: Of which some may leave the mean with the optimizer instead of in `p.grad`.
        group: The ranks.
        norm_type: As for `torch.nn.utils.clip_grad_norm_`: a positive number, or `inf`.
        foreach: As there.

    Raises:
        ConfigError: No such norm can be put together from parts.
    """
    seen = [p.grad for p in parameters if p.grad is not None]
    if not any(exchange.held for exchange in exchanges):
        return get_total_norm([_values(gradient) for gradient in seen], norm_type, foreach=foreach)
    if not norm_type > 0.0:
        raise ConfigError(
            f"cannot put a norm of type {norm_type} together from what each rank holds of layers on sharded_server: "
            "use a positive number, or inf"
        )
    held = [p.grad for exchange in exchanges for p in exchange.held if p.grad is not None]
    mine = _norm([*seen, *held] if group.rank == 0 else held, norm_type)
    total = _combined(_everyone(mine, group), norm_type)
    return total.to(_dtype_of([*seen, *held]))


def clip_grad_norm_(
    parameters: Sequence[nn.Parameter],
    exchanges: Sequence[Exchange],
    group: Group,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales all gradients down to a norm, where theirs is larger; otherwise as `grad_norm`.

    Raises:
        RuntimeError: The norm is not finite, and that was to be an error.
    """
    total = grad_norm(parameters, exchanges, group, norm_type, foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of type {norm_type} of all gradients is {total.item()}, so they cannot be clipped to {max_norm}"
        )
    held = (p for exchange in exchanges for p in exchange.held)
    with_gradients = [p for p in (*parameters, *held) if p.grad is not None]
    dense = [p for p in with_gradients if not _grad(p).is_sparse]
    clip_grads_with_norm_(dense, max_norm, total, foreach)
    for parameter in with_gradients:
        if (gradient := _grad(parameter)).is_sparse:
            gradient.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # as torch does for dense ones
    return total


class Oversight:
    """Notices that what changes the gradients in `p.grad` before the update passes by those that the optimizer holds.

    That is what `torch.nn.utils.clip_grad_norm_` does, which does not know of them.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._held: list[tuple[torch.Tensor, int]] = []
        self.was_told = False

    def remember(self, exchanges: Iterable[Exchange]) -> None:
        """The gradients are final."""
        self._seen, self._held = [], []
        if self.was_told:
            return
        for exchange in exchanges:
            into = self._held if exchange.held else self._seen
            gradients = [p.grad for p in exchange.held or exchange.parameters if p.grad is not None]
            into += [(gradient, gradient._version) for gradient in gradients if type(gradient) is torch.Tensor]

    def happened(self) -> bool:
        """Just before the update: whether all gradients in `p.grad` have been changed, and none of the others."""
        seen, held = self._seen, self._held
        self._seen, self._held = [], []
        if not seen or not held or not all(gradient._version > version for gradient, version in seen):
            return False
        self.was_told = all(gradient._version == version for gradient, version in held)
        return self.was_told


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _dtype_of(gradients: Sequence[torch.Tensor]) -> torch.dtype:
    """Of the widest, and single precision at least."""
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    return dtype


def _norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of all of them, in double precision, shape `(1,)`; on the first one's device."""
    if not gradients:
        return torch.zeros(1, dtype=torch.float64)
    device = gradients[0].device
    norms = [
        torch.linalg.vector_norm(_values(g), norm_type, dtype=_dtype_of([g])).to(device, torch.float64)
        for g in gradients
        if _values(g).numel()
    ]
    return _combined(norms, norm_type).reshape(1) if norms else torch.zeros(1, dtype=torch.float64, device=device)


def _combined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of a vector from those of its parts, added in the order in which they are given."""
    stacked = torch.cat([norm.reshape(1) for norm in norms])
    if norm_type == inf:
        return stacked.max()
    total = stacked[0] ** norm_type
    for norm in stacked[1:]:
        total = total + norm**norm_type
    return total ** (1.0 / norm_type)


def _everyone(mine: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Every rank's number, by rank.

    Point to point: a collective would have to keep its place among those that communication threads start.
    """
    theirs = {peer: torch.zeros_like(mine) for peer in group.peers}
    what = "adding up the norm of the gradient"
    with group.waiting(what):
        group.exchange([(peer, mine) for peer in group.peers], list(theirs.items()), tag=NORM_TAG, what=what).wait()
    return [mine if rank == group.rank else theirs[rank] for rank in range(group.world_size)]
