"""A small character model on text that every machine has: the sources of Python's own standard library."""

import platform
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poseidon.errors import ConfigError
from poseidon.tasks.models import GPT
from poseidon.tasks.task import Batch, Objective, Task, TaskData

_VOCABULARY_SIZE = 128
_NUM_CHARACTERS = 3_000_000
_TRAIN_SHARE = 0.98
_NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class TextWindows:
    """Windows of a text, one after the other, with the same window one character later as the target.

    Args:
        characters: Codes below 128, shape `(characters,)`, dtype uint8.
        context: Positions per window.
    """

    def __init__(self, characters: Tensor, context: int) -> None:
        self._characters = characters
        self._context = context

    def __len__(self) -> int:
        return max(0, len(self._characters) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._context
        window = self._characters[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def gpt_mini(
    *,
    context: int = 128,
    width: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    num_characters: int = _NUM_CHARACTERS,
) -> Task:
    """A decoder-only Transformer of 3.2 M parameters that guesses the next character of Python code.

    Args:
        context: Positions per sample.
        width: Features per position, a multiple of `num_heads`.
        num_layers: Transformer blocks.
        num_heads: Attention heads per block.
        num_characters: Length of the text, its last fiftieth for testing.
    """
    return Task(
        name="gpt-mini",
        note=f"real text: the first {num_characters} characters of the standard library of "
        f"Python {platform.python_version()}",
        make_model=partial(GPT, context=context, width=width, num_layers=num_layers, num_heads=num_heads),
        make_optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
        objective=NEXT_CHARACTER,
        data=TaskData(
            make_train=partial(_windows, num_characters, context, train=True),
            make_test=partial(_windows, num_characters, context, train=False),
        ),
        batch_size=16,
    )


def _windows(num_characters: int, context: int, *, train: bool) -> TextWindows:
    characters = _read_library(Path(sysconfig.get_path("stdlib")), num_characters)
    split = int(len(characters) * _TRAIN_SHARE)
    return TextWindows(characters[:split] if train else characters[split:], context)


def _read_library(folder: Path, num_characters: int) -> Tensor:
    """The start of all sources in `folder`, in the order of their names: codes below 128, anything else as `?`.

    Raises:
        ConfigError: The sources are not there or too short.
    """
    content = bytearray()
    for path in _sources(folder):
        content += path.read_bytes()
        if len(content) >= num_characters:
            break
    if len(content) < num_characters:
        raise ConfigError(
            f"cannot read {num_characters} characters of Python sources in {folder}: found {len(content)}; "
            "use a Python whose standard library is installed as files"
        )
    characters = np.frombuffer(content, dtype=np.uint8)[:num_characters]
    return torch.from_numpy(np.where(characters < _VOCABULARY_SIZE, characters, ord("?")).astype(np.uint8))


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in _NOT_TEXT:
            if path.is_dir():
                yield from _sources(path)
            elif path.suffix == ".py":
                yield path


def _next_character_loss(model: nn.Module, batch: Batch) -> Tensor:
    characters, targets = batch
    return F.cross_entropy(model(characters).flatten(0, 1), targets.flatten())


def _count_next_characters(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Per window the mean over its positions, summed over the windows: a window is a sample."""
    characters, targets = batch
    logits = model(characters)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return {
        "correct": (logits.argmax(dim=-1) == targets).float().mean(dim=1).sum(),
        "loss_sum": losses.mean(dim=1).sum(),
        "samples": torch.full((), len(targets), device=targets.device),
    }


NEXT_CHARACTER = Objective(loss=_next_character_loss, evaluate=_count_next_characters)
"""Batches `(characters, targets)`, both `(samples, positions)`: cross entropy and accuracy per character."""
