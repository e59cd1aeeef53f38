"""Operations of one forward call of a layer: from what the module is and the shapes that went in and came out."""

from math import prod

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def forward_flops(module: nn.Module, given: torch.Tensor, made: torch.Tensor) -> int:
    """Operations of one forward call, two for each multiply-add.

    Exact for fully connected layers and convolutions, but that the addition of a bias is not counted. A lookup computes
    nothing. Whatever else owns parameters is taken for one multiply-add per number that it makes, as in a
    normalization.

    Args:
        module: A module that owns parameters.
        given: Its first input.
        made: Its output.
    """
    if isinstance(module, nn.Linear):
        return 2 * made.numel() * module.in_features
    if isinstance(module, _CONVOLUTIONS):
        return 2 * made.numel() * (module.in_channels // module.groups) * prod(module.kernel_size)
    if isinstance(module, _TRANSPOSED):
        return 2 * given.numel() * (module.out_channels // module.groups) * prod(module.kernel_size)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0
    return 2 * made.numel()
