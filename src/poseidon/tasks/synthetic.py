"""Tasks on synthetic samples: the published networks whose own data cannot be shipped.

What they show is time and traffic per step, which do not depend on what is in the images. So that a broken exchange
still shows, the labels follow a planted linear rule: the loss falls, and a held-out sample can be told.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from poseidon.tasks.models import VGG19, AlexNet, ResNet20, ResNet50, fully_connected
from poseidon.tasks.task import CLASSIFICATION, Task, TaskData
from poseidon.units import BYTES_PER_FLOAT32, MIB

NUM_CLASSES_22K = 21841
_NUM_PLANTED_CLASSES = 10
_NUM_PATTERNS = 16
_PATTERN_SIDE = 7  # images are patterns of 7 x 7 patches, so that a convolution and its pooling cannot lose them
_RULE_SEED = 2017
_NUM_TRAIN, _NUM_TEST = 1280, 256


class PlantedSamples:
    """Samples whose label is a linear function of them, the largest of up to ten.

    A sample is a random mixture of sixteen fixed patterns with noise on top, and its label the largest of random
    weightings of that mixture. A bank of them is made once and then only looked up, so that the loader costs next to
    nothing; where the bank has fewer than `num_samples`, it is gone through again.

    Args:
        shape: Of one sample, `(features,)` or `(channels, side, side)`.
        num_classes: Labels are below this, and below ten.
        num_samples: Length of the data set.
        seed: Of the mixtures and the noise; the patterns and the rule are the same for every seed.
        bank_bytes: Bytes that the bank may take.
    """

    def __init__(
        self, shape: tuple[int, ...], *, num_classes: int, num_samples: int, seed: int, bank_bytes: int = 64 * MIB
    ) -> None:
        self._num_samples = num_samples
        rule = torch.Generator().manual_seed(_RULE_SEED)
        patterns = _patterns(shape, rule)
        weights = torch.randn(min(num_classes, _NUM_PLANTED_CLASSES), len(patterns), generator=rule)
        own = torch.Generator().manual_seed(seed)
        bank_size = max(1, min(num_samples, bank_bytes // (BYTES_PER_FLOAT32 * prod(shape))))
        mixtures = torch.randn(bank_size, len(patterns), generator=own)
        self._labels = (mixtures @ weights.T).argmax(dim=1)
        clean = (mixtures @ patterns.flatten(1)) / len(patterns) ** 0.5
        self._inputs = clean.add_(torch.randn(clean.shape, generator=own), alpha=0.1).view(-1, *shape)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        bank_index = index % len(self._inputs)
        return self._inputs[bank_index], self._labels[bank_index]


def _patterns(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fixed patterns `(16, *shape)` of mean 0 and variance 1 per element."""
    if len(shape) == 1:
        return torch.randn(_NUM_PATTERNS, *shape, generator=generator)
    channels, height, width = shape
    patches = torch.randn(_NUM_PATTERNS, channels, _PATTERN_SIDE, _PATTERN_SIDE, generator=generator)
    return nn.functional.interpolate(patches, size=(height, width), mode="nearest")


def _task(
    name: str,
    make_model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    num_classes: int,
    learning_rate: float,
    batch_size: int = 32,
) -> Task:
    kind = "images" if len(shape) > 1 else "features"
    size = "x".join(str(length) for length in shape)
    make = partial(PlantedSamples, shape, num_classes=num_classes)
    return Task(
        name=name,
        note=f"synthetic {kind} of {size}, labels follow a planted linear rule "
        f"over {min(num_classes, _NUM_PLANTED_CLASSES)} of {num_classes} classes",
        make_model=make_model,
        make_optimizer=partial(torch.optim.SGD, lr=learning_rate, momentum=0.9),
        objective=CLASSIFICATION,
        data=TaskData(
            make_train=partial(make, num_samples=_NUM_TRAIN, seed=1),
            make_test=partial(make, num_samples=_NUM_TEST, seed=2),
        ),
        batch_size=batch_size,
    )


def alexnet(*, width: float = 1.0, image_size: int = 224, num_classes: int = 1000, dropout: float = 0.5) -> Task:
    """AlexNet on synthetic images; the arguments are those of `AlexNet`."""
    model = partial(AlexNet, width=width, image_size=image_size, num_classes=num_classes, dropout=dropout)
    return _task("alexnet", model, (3, image_size, image_size), num_classes=num_classes, learning_rate=0.001)


def vgg19(*, width: float = 1.0, image_size: int = 224, num_classes: int = 1000, dropout: float = 0.5) -> Task:
    """VGG19 on synthetic images; the arguments are those of `VGG19`."""
    model = partial(VGG19, width=width, image_size=image_size, num_classes=num_classes, dropout=dropout)
    return _task("vgg19", model, (3, image_size, image_size), num_classes=num_classes, learning_rate=0.0005)


def vgg19_22k(*, width: float = 1.0, image_size: int = 224, dropout: float = 0.5) -> Task:
    """VGG19 with the 21841 classes of ImageNet 22K on synthetic images."""
    model = partial(VGG19, width=width, image_size=image_size, num_classes=NUM_CLASSES_22K, dropout=dropout)
    shape = (3, image_size, image_size)
    return _task("vgg19-22k", model, shape, num_classes=NUM_CLASSES_22K, learning_rate=0.0005)


def resnet20(*, width: int = 16, image_size: int = 32, num_classes: int = 10) -> Task:
    """ResNet-20 on synthetic images of CIFAR's size; `width` and `num_classes` are those of `ResNet20`."""
    model = partial(ResNet20, width=width, num_classes=num_classes)
    shape = (3, image_size, image_size)
    return _task("resnet20", model, shape, num_classes=num_classes, learning_rate=0.05, batch_size=128)


def resnet50(*, width: int = 64, image_size: int = 224, num_classes: int = 1000) -> Task:
    """ResNet-50 on synthetic images; `width` and `num_classes` are those of `ResNet50`."""
    model = partial(ResNet50, width=width, num_classes=num_classes)
    return _task("resnet50", model, (3, image_size, image_size), num_classes=num_classes, learning_rate=0.001)


def fc_heavy(*, num_features: int = 9216, hidden: int = 4096, num_classes: int = 1000) -> Task:
    """The three fully connected layers of AlexNet alone, 58.6 M parameters, on synthetic features."""
    model = partial(fully_connected, (num_features, hidden, hidden, num_classes))
    return _task("fc-heavy", model, (num_features,), num_classes=num_classes, learning_rate=0.01)
