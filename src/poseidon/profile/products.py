"""How the backward of a fully connected layer divides into its two products, by computing either alone.

Autograd computes the gradient of the input and that of the weight in one node, so that no hook can come between. But
either is one matrix product of known sizes.
"""

import torch
from torch import nn

from poseidon.profile.device import seconds_of
from poseidon.profile.graph import LayerSpec

SECONDS_EACH = 0.02
"""How long either product is repeated, at least twice."""

LARGEST_MATRIX = 2**22
"""Elements; of a larger weight, a part of the outputs is computed."""

Sizes = tuple[int, int, int, torch.dtype]
"""Rows of one call, output features, input features, number type."""


class Products:
    """Measured shares, each kind of product once.

    Args:
        device: Where the layers compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shares: dict[Sizes, float] = {}

    def weight_gradient_share(self, layer: LayerSpec, module: nn.Module) -> float:
        """The weight gradient's part of a backward that computes both, between 0 and 1.

        Args:
            layer: Fully connected, with rows.
            module: The layer itself; one that does not compute says what its share is.
        """
        known = getattr(module, "weight_gradient_share", None)
        if isinstance(known, float):
            return known
        sizes = _sizes(layer)
        if sizes not in self._shares:
            self._shares[sizes] = self._measure(*sizes)
        return self._shares[sizes]

    @torch.no_grad()
    def _measure(self, rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        gradient = torch.ones(rows, out_features, dtype=dtype, device=self._device)
        x = torch.ones(rows, in_features, dtype=dtype, device=self._device)
        weight = torch.ones(out_features, in_features, dtype=dtype, device=self._device)
        of_weight = seconds_of(lambda: gradient.t() @ x, self._device, seconds=SECONDS_EACH)
        of_input = seconds_of(lambda: gradient @ weight, self._device, seconds=SECONDS_EACH)
        return of_weight / (of_weight + of_input)


def _sizes(layer: LayerSpec) -> Sizes:
    weight = layer.parameters[0]
    dtype: torch.dtype = getattr(torch, weight.dtype)
    if layer.factor_num_bytes < dtype.itemsize:
        dtype = torch.bfloat16  # under autocast
    out_features, in_features = layer.matrix
    out_features = max(1, min(out_features, LARGEST_MATRIX // in_features))
    return max(1, layer.rows // max(1, layer.calls)), out_features, in_features, dtype
