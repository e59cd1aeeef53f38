"""The weights of a model from wherever they lie, and into a file that opens without Poseidon.

They come from a checkpoint or the folder of a run, from a file of safetensors, or from a state_dict that `torch.save`
wrote, which is read without running what a pickle can contain.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import MANIFEST, STRUCTURE, Found, open_checkpoint, shelf_in
from poseidon.runtime.packing import DTYPES, unpack
from poseidon.runtime.tensor_file import pieces

MODEL = "model"
"""The part of a checkpoint in which the weights are, as a state_dict."""
MODEL_FILE = "model.safetensors"
"""In the folder of a run that has ended."""
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which a file that holds more than weights may hold them."""
WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""
EXTRA_STATE = "_extra_state"
"""What a module's own state, which is no weight, is called in a state_dict."""
MOST_NAMED = 5
"""Of the keys that do not fit."""

logger = logging.getLogger(__name__)


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Reads the weights of a model, on the CPU.

    Args:
        path: A checkpoint, a folder of checkpoints or of a run (the newest counts), a `.safetensors` file, or a `.pt`
            or `.pth` file with a state_dict, be it the whole file or under `state_dict`, `model_state_dict` or `model`.

    Raises:
        CheckpointError: There are none, they are damaged, or the file holds things that could run code when read.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"cannot load weights from {path}: it does not exist")
    if path.is_dir():
        return _from_folder(path)
    return _weights_in(_read_file(path), path)


def apply_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads weights into a model of the same names and shapes; weights that are tied may be given once.

    Raises:
        CheckpointError: They belong to another model; the message names what is missing, too much or of another shape.
            The model is as it was.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    given = {_memory(own[name]) for name in weights if name in own}
    missing = [name for name, value in own.items() if name not in weights and _memory(value) not in given]
    unexpected = [name for name in weights if name not in own]
    others = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    problems = [("missing", missing), ("not in the model", unexpected), ("of another shape", others)]
    if any(names for _, names in problems):
        told = "; ".join(f"{what}: {_some(names)}" for what, names in problems if names)
        raise CheckpointError(f"cannot load these weights into {type(model).__name__}: {told}")
    model.load_state_dict(dict(weights), strict=False)


def save_weights(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Writes weights as a file that opens without Poseidon, whole or not at all.

    Args:
        weights: As `load_weights` reads them.
        path: `.safetensors`, for `safetensors.torch.load_file`, where tied weights are written as often as they have
            names; or `.pt` or `.pth`, for `torch.load`, where they stay tied.

    Raises:
        CheckpointError: The name ends otherwise, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise CheckpointError(f"cannot write weights into {path}: its name must end with {', '.join(_WRITERS)}")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _WRITERS[path.suffix](plain, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # the latter from torch, when its disk is full
        raise CheckpointError(f"cannot write weights into {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _from_folder(path: Path) -> dict[str, Tensor]:
    if (path / MANIFEST).exists():
        return _from_checkpoint(open_checkpoint(path))
    newest = shelf_in(path).newest()
    model = path / MODEL_FILE
    if model.exists() and (newest is None or model.stat().st_mtime >= newest.manifest.time):
        return _weights_in(_read_file(model), model)
    if newest is None:
        raise CheckpointError(
            f"cannot load weights from {path}: there is neither a complete checkpoint in it nor a {MODEL_FILE}"
        )
    return _from_checkpoint(newest)


def _from_checkpoint(found: Found) -> dict[str, Tensor]:
    return _weights_in(found.read(MODEL), found.path)


def _read_file(path: Path) -> Any:
    if path.suffix not in _READERS:
        raise CheckpointError(f"cannot load weights from {path}: its name must end with {', '.join(_READERS)}")
    try:
        return _READERS[path.suffix](path)
    except OSError as error:
        raise CheckpointError(f"cannot load weights from {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"cannot load weights from {path}: it is no file of safetensors ({error})") from error


def _read_safetensors(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    if STRUCTURE in metadata:
        return unpack(tensors, metadata[STRUCTURE])
    tied = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}  # as safetensors' save_model
    return {**tied, **tensors}


def _read_pt(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file can make torch's reader raise anything
        if asked := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"cannot load weights from {path}: to read it, {asked[1]} would have to be called, and a file that "
                "calls things can run any code; where it comes from, save model.state_dict() alone"
            ) from error
        raise CheckpointError(f"cannot load weights from {path}: it is not what torch.save writes") from error


def _weights_in(content: Any, path: Path) -> dict[str, Tensor]:
    """The state_dict in what was read."""
    for _ in NESTED:  # so deep and no deeper: what was read may contain itself
        inner = [key for key in NESTED if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        if inner:
            logger.info("weights are under %r in %s", inner[0], path)
            content = content[inner[0]]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"cannot load weights from {path}: it holds a {type(content).__name__}, not a state_dict")
    weights = {name: value for name, value in content.items() if not str(name).endswith(EXTRA_STATE)}
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"cannot load weights from {path}: {name!r} is of type {type(value).__name__}; a state_dict has a "
                f"tensor under each name, and is looked for under {', '.join(NESTED)}, too"
            )
    if not weights:
        raise CheckpointError(f"cannot load weights from {path}: there are no tensors in it")
    return _without_wrappers(weights, path)


def _without_wrappers(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in weights):
            logger.info("the names of the weights in %s are used without %r", path, wrapper)
            return _without_wrappers({name.removeprefix(wrapper): value for name, value in weights.items()}, path)
    return weights


def _write_safetensors(weights: Mapping[str, Tensor], path: Path) -> None:
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"cannot write {name!r} into safetensors: {tensor.dtype} is not known there; use .pt")
    with path.open("wb") as file:
        file.writelines(pieces(weights, {"format": "pt"}))


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".bin": _read_pt,
    ".ckpt": _read_pt,
}
_WRITERS: Mapping[str, Callable[[dict[str, Tensor], Path], None]] = {
    ".safetensors": _write_safetensors,
    ".pt": torch.save,
    ".pth": torch.save,
}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one weight have in common; an empty tensor has it with itself alone."""
    return (tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
