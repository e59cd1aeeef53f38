"""The networks of the built-in tasks, written from the shapes that their papers publish.

Every size can be made smaller for tests; the defaults are the published ones. Fully connected layers are plain
`nn.Linear`. Inputs are images `(samples, channels, image_size, image_size)`, features `(samples, features)` or
characters `(samples, positions)`; outputs are logits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poseidon.errors import ConfigError


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _initialize(model: nn.Module) -> None:
    """Keeps the variance of activations from layer to layer, without which VGG19 does not start to learn.

    The last layer starts near zero, so that the first loss is that of equal logits.

    Source: He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2, equation 10.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    nn.init.normal_(layers[-1].weight, std=0.01)


def fully_connected(features: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers of these sizes, input first and logits last, with ReLU and dropout after each but the last."""
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(features):
        layers += [nn.Linear(in_features, out_features), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


class AlexNet(nn.Sequential):
    """Five convolutions and three fully connected layers: 61.10 M parameters, 58.6 M of them fully connected.

    Args:
        width: Share of the published channels and features.
        image_size: Side of the images `(samples, 3, image_size, image_size)` in pixels, 63 or more.
        num_classes: Logits per sample.
        dropout: Probability after the first two fully connected layers; 0 makes a step repeatable on any ranks.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012, sections
    3.5 and 4.2, with the channels of the one-tower variant: Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks", 2014, section 5. Local response normalization is left out: it has no parameters,
    and later networks showed that it is not needed.
    """

    def __init__(
        self, *, width: float = 1.0, image_size: int = 224, num_classes: int = 1000, dropout: float = 0.5
    ) -> None:
        if image_size < 63:
            raise ConfigError(f"cannot make AlexNet for images of {image_size} pixels: use 63 or more")
        first, second, third, fourth, fifth = (_scaled(channels, width) for channels in (64, 192, 384, 256, 256))
        features = nn.Sequential(
            nn.Conv2d(3, first, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(second, third, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(third, fourth, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(fourth, fifth, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        side = (image_size - 7) // 4 + 1
        for _ in range(3):
            side = (side - 3) // 2 + 1
        hidden = _scaled(4096, width)
        classifier = fully_connected((fifth * side * side, hidden, hidden, num_classes), dropout=dropout)
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
        _initialize(self)


class VGG19(nn.Sequential):
    """Sixteen convolutions and three fully connected layers: 143.67 M parameters, 123.6 M of them fully connected.

    With `num_classes=21841`, all classes of ImageNet 22K, it is the VGG19-22K of the Poseidon paper: 229.05 M.

    Args:
        width: Share of the published channels and features.
        image_size: Side of the images `(samples, 3, image_size, image_size)` in pixels, a multiple of 32.
        num_classes: Logits per sample.
        dropout: Probability after the first two fully connected layers; 0 makes a step repeatable on any ranks.

    Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015,
    table 1, column E; Zhang et al., "Poseidon", USENIX ATC 2017, table 3.
    """

    def __init__(
        self, *, width: float = 1.0, image_size: int = 224, num_classes: int = 1000, dropout: float = 0.5
    ) -> None:
        if image_size < 32 or image_size % 32:
            raise ConfigError(f"cannot make VGG19 for images of {image_size} pixels: use a multiple of 32")
        layers: list[nn.Module] = []
        in_channels = 3
        for stage_channels, num_convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(num_convolutions):
                out_channels = _scaled(stage_channels, width)
                layers += [nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1), nn.ReLU()]
                in_channels = out_channels
            layers.append(nn.MaxPool2d(kernel_size=2))
        hidden, side = _scaled(4096, width), image_size // 32
        classifier = fully_connected((in_channels * side * side, hidden, hidden, num_classes), dropout=dropout)
        super().__init__(OrderedDict(features=nn.Sequential(*layers), flatten=nn.Flatten(), classifier=classifier))
        _initialize(self)


def _convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the side, divided by the stride, and batch normalization."""
    padding = kernel_size // 2
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class _Residual(nn.Module):
    """relu(body(x) + shortcut(x)), the shortcut being a projection only where the shape changes."""

    def __init__(self, body: nn.Sequential, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(in_channels, out_channels, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


def _basic_block(in_channels: int, channels: int, stride: int) -> _Residual:
    body = nn.Sequential(
        _convolution(in_channels, channels, 3, stride),
        nn.ReLU(),
        _convolution(channels, channels, 3),
    )
    return _Residual(body, in_channels, channels, stride)


def _bottleneck_block(in_channels: int, channels: int, stride: int) -> _Residual:
    body = nn.Sequential(
        _convolution(in_channels, channels, 1, stride),
        nn.ReLU(),
        _convolution(channels, channels, 3),
        nn.ReLU(),
        _convolution(channels, 4 * channels, 1),
    )
    return _Residual(body, in_channels, 4 * channels, stride)


class ResNet20(nn.Sequential):
    """Nineteen convolutions and one fully connected layer for small images: 0.27 M parameters, many small tensors.

    Args:
        width: Channels of the first of the three stages; 16 is the published one.
        num_classes: Logits per sample.

    Images are `(samples, 3, image_size, image_size)`, published with 32 pixels. Batch normalization takes its
    statistics from the samples of one rank, so the result depends on how many there are.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2. The paper pads the
    shortcut with zeros where the channels grow (269 722 parameters); ours projects it as in section 3.3, option B
    (272 474), as in ResNet50.
    """

    def __init__(self, *, width: int = 16, num_classes: int = 10) -> None:
        blocks = []
        in_channels = width
        for stage_index in range(3):
            channels = width * 2**stage_index
            for block_index in range(3):
                stride = 2 if stage_index > 0 and block_index == 0 else 1
                blocks.append(_basic_block(in_channels, channels, stride))
                in_channels = channels
        super().__init__(
            OrderedDict(
                stem=nn.Sequential(_convolution(3, width, 3), nn.ReLU()),
                blocks=nn.Sequential(*blocks),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(in_channels, num_classes),
            )
        )
        _initialize(self)


class ResNet50(nn.Sequential):
    """Forty-nine convolutions and one fully connected layer: 25.56 M parameters, little traffic for much compute.

    Args:
        width: Inner channels of the first of the four stages; 64 is the published one.
        num_classes: Logits per sample.

    Images are `(samples, 3, image_size, image_size)`, published with 224 pixels. Batch normalization takes its
    statistics from the samples of one rank.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1 and section 3.4.
    """

    def __init__(self, *, width: int = 64, num_classes: int = 1000) -> None:
        blocks = []
        in_channels = width
        for stage_index, num_blocks in enumerate((3, 4, 6, 3)):
            channels = width * 2**stage_index
            for block_index in range(num_blocks):
                stride = 2 if stage_index > 0 and block_index == 0 else 1
                blocks.append(_bottleneck_block(in_channels, channels, stride))
                in_channels = 4 * channels
        stem = nn.Sequential(
            _convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        )
        super().__init__(
            OrderedDict(
                stem=stem,
                blocks=nn.Sequential(*blocks),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(in_channels, num_classes),
            )
        )
        _initialize(self)


class _TransformerBlock(nn.Module):
    """Causal attention and a two-layer network, each on normalized input and added to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.projection(self._attend(self.attention_norm(hidden)))
        changed: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + changed

    def _attend(self, hidden: Tensor) -> Tensor:
        num_samples, num_positions, width = hidden.shape
        parts = self.query_key_value(hidden).view(num_samples, num_positions, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(num_samples, num_positions, width)


class GPT(nn.Module):
    """A decoder-only Transformer whose output layer is its input embedding: one parameter, two uses.

    Args:
        vocabulary_size: Different characters.
        context: Positions that a character can look back on, itself included.
        width: Features per position, a multiple of `num_heads`.
        num_layers: Transformer blocks.
        num_heads: Attention heads per block.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3 (norm before each
    part, initialization scaled by depth); Press and Wolf, "Using the Output Embedding to Improve Language Models",
    EACL 2017 (tied embedding). No dropout: the text is seen about once.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int = 128,
        context: int = 128,
        width: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(f"cannot make a GPT {width} features wide with {num_heads} heads: use a multiple")
        self.characters = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_TransformerBlock(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.head.weight = self.characters.weight
        self._initialize(num_layers)

    def _initialize(self, num_layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                added_to_the_stream = name.endswith(("projection", "feed_forward.2"))
                nn.init.normal_(module.weight, std=0.02 / (2 * num_layers) ** (0.5 if added_to_the_stream else 0.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next character, `(samples, positions, vocabulary_size)`, from `(samples, positions)`."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.characters(characters) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits
