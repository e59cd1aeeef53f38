"""Fashion-MNIST: real images of clothes in ten classes, and a CNN with two wide fully connected layers.

The 10 000 test images travel with the package. The whole set, 60 000 images to train on and these 10 000 to test on,
is used where it is found, and fetched where an address is given. Files are used only when their checksum agrees, so any
number of ranks may load them at once and all of them have the same samples.

Source: Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
"""

import os
from collections import OrderedDict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from poseidon.errors import ConfigError
from poseidon.tasks.download import download
from poseidon.tasks.idx import read_idx
from poseidon.tasks.models import fully_connected
from poseidon.tasks.task import CLASSIFICATION, Task, TaskData

EMBEDDED = "embedded"
"""The value of `data` and of `POSEIDON_DATA` that asks for the part that travels with the package."""

_EMBEDDED_FOLDER = Path(__file__).parent / "data"
_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_NUM_EMBEDDED_TRAIN = 9000
_MEAN, _STD = 0.2860, 0.3530  # of the 60 000 training images, pixels from 0 to 1

# SHA-256 of the content after decompression, in hexadecimal.
_CHECKSUMS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class FashionImages:
    """Normalized images `(1, 28, 28)` with their labels.

    Args:
        images: Pixels from 0 to 255, `(samples, 28, 28)`, dtype uint8.
        labels: Classes from 0 to 9, `(samples,)`, dtype uint8.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images.unsqueeze(1)
        self._labels = labels.long()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = self._images[index].float().div_(255)
        return pixels.sub_(_MEAN).div_(_STD), self._labels[index]


def fashion_mnist(*, data: str | Path | None = None, width: float = 1.0) -> Task:
    """A CNN of 9.6 M parameters, nearly all of them fully connected, on Fashion-MNIST.

    Args:
        data: Folder with the four IDX files, plain or gzipped, or `"embedded"`, or the address, `https://…`, of a
            folder with the four gzipped files, each of which is fetched once for all ranks of a machine when Debian's
            folder is not there. Without it the environment variable `POSEIDON_DATA` counts, then Debian's folder, then
            the embedded part.
        width: Share of the channels and features, for tests.

    Raises:
        ConfigError: The folder that was asked for does not hold the four files.
    """
    address = _address(data)
    folder = None if address else _find_folder(data)
    if address:
        note = f"real images: all of Fashion-MNIST from {address}, 60 000 to train and 10 000 to test"
        samples = TaskData(make_train=partial(_fetch, address, "train"), make_test=partial(_fetch, address, "t10k"))
    elif folder is None:
        note = "real images: the embedded 10 000 of Fashion-MNIST, split 9 000/1 000"
        samples = TaskData(make_train=_embedded_train, make_test=_embedded_test)
    else:
        note = f"real images: all of Fashion-MNIST from {folder}, 60 000 to train and 10 000 to test"
        samples = TaskData(make_train=partial(_load, folder, "train"), make_test=partial(_load, folder, "t10k"))
    return Task(
        name="fashion-mnist",
        note=note,
        make_model=partial(_make_model, width),
        make_optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        objective=CLASSIFICATION,
        data=samples,
        batch_size=64,
        epochs=5,
    )


def _make_model(width: float) -> nn.Module:
    first, second, third, fourth = (max(1, round(size * width)) for size in (32, 64, 2048, 1536))
    features = nn.Sequential(
        nn.Conv2d(1, first, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=2),
        nn.Conv2d(first, second, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=2),
    )
    classifier = fully_connected((second * 7 * 7, third, fourth, 10))
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))


def _address(data: str | Path | None) -> str | None:
    """The address to fetch from, if one was given and the set is not on this machine anyway."""
    asked = str(data or os.environ.get("POSEIDON_DATA", ""))
    return asked if "://" in asked and _missing(_DEBIAN_FOLDER) else None


def _find_folder(data: str | Path | None) -> Path | None:
    """Where the whole set is; None for the embedded part."""
    asked = data or os.environ.get("POSEIDON_DATA")
    if not asked or "://" in str(asked):
        return None if _missing(_DEBIAN_FOLDER) else _DEBIAN_FOLDER
    if str(asked) == EMBEDDED:
        return None
    folders = (Path(asked), Path(asked) / "fashion-mnist")
    for folder in folders:
        if not _missing(folder):
            return folder
    origin = "as given" if data else "as POSEIDON_DATA says"
    fewest = min(folders, key=lambda folder: len(_missing(folder)))
    raise ConfigError(
        f"cannot load Fashion-MNIST from {asked}, {origin}: {fewest} lacks {', '.join(_missing(fewest))} "
        f"(plain or .gz); give a folder with all four files, or {EMBEDDED!r} for the part that travels with Poseidon"
    )


def _missing(folder: Path) -> list[str]:
    return [name for name in _CHECKSUMS if not _file(folder, name).is_file()]


def _file(folder: Path, name: str) -> Path:
    """The plain file if it is there, else the gzipped one."""
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    images, labels = (read_idx(_file(folder, name), sha256=_CHECKSUMS[name]) for name in names)
    return images, labels


def _fetch(address: str, part: str) -> FashionImages:
    paths = {
        name: download(f"{address.rstrip('/')}/{name}.gz", sha256=checksum, unpacked=True)
        for name, checksum in _CHECKSUMS.items()
        if name.startswith(part)
    }
    images, labels = (read_idx(path, sha256=_CHECKSUMS[name]) for name, path in paths.items())
    return FashionImages(images, labels)


def _load(folder: Path, part: str) -> FashionImages:
    return FashionImages(*_read(folder, part))


def _embedded_train() -> FashionImages:
    images, labels = _read(_EMBEDDED_FOLDER, "t10k")
    return FashionImages(images[:_NUM_EMBEDDED_TRAIN], labels[:_NUM_EMBEDDED_TRAIN])


def _embedded_test() -> FashionImages:
    images, labels = _read(_EMBEDDED_FOLDER, "t10k")
    return FashionImages(images[_NUM_EMBEDDED_TRAIN:], labels[_NUM_EMBEDDED_TRAIN:])
