"""Operations of one forward call of a layer: from what the module is and the shapes that went in and came out."""

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MOVES_ONLY = (nn.Embedding, nn.EmbeddingBag, nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.ChannelShuffle)


def forward_flops(module: nn.Module, given: Sequence[torch.Tensor], made: torch.Tensor) -> int:
    """Operations of one forward call, two for each multiply-add.

    Exact for fully connected layers, convolutions and recurrent layers, but that the addition of a bias is not counted.
    What only moves numbers computes nothing. Whatever else owns a matrix over its last dimension is taken for a product
    with it, and the rest for one multiply-add per number that it makes, as in a normalization.

    Args:
        module: A layer.
        given: Its inputs.
        made: Its first output.
    """
    if isinstance(module, nn.Linear):
        return 2 * made.numel() * module.in_features
    if isinstance(module, _CONVOLUTIONS):
        return 2 * made.numel() * (module.in_channels // module.groups) * prod(module.kernel_size)
    if isinstance(module, _TRANSPOSED):
        return 2 * given[0].numel() * (module.out_channels // module.groups) * prod(module.kernel_size)
    if isinstance(module, nn.RNNBase):
        steps = given[0].numel() // given[0].shape[-1]  # over the whole batch
        return 2 * steps * _matrix_elements(module)
    if isinstance(module, nn.MultiheadAttention):
        return _attention_flops(module, given)
    if isinstance(module, _MOVES_ONLY):
        return 0
    width = _own_matrix_width(module, made)
    return 2 * made.numel() * width


def _matrix_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)


def _attention_flops(module: nn.MultiheadAttention, given: Sequence[torch.Tensor]) -> int:
    """Three projections in, one out; the products of queries with keys and of weights with values."""
    query, key = given[0], given[1] if len(given) > 1 else given[0]
    width = module.embed_dim
    num_queries, num_keys = query.numel() // query.shape[-1], key.numel() // key.shape[-1]
    length = key.shape[1 if module.batch_first else 0] if key.dim() > 2 else key.shape[0]
    flops: int = 4 * width * width * (num_queries + num_keys) + 4 * num_queries * length * width
    return flops


def _own_matrix_width(module: nn.Module, made: torch.Tensor) -> int:
    """Multiply-adds for each number made: the other side of a matrix one of whose sides is as wide as the output."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 2 and made.dim() and made.shape[-1] in parameter.shape:
            return parameter.numel() // made.shape[-1]
    return 1
