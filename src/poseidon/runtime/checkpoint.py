"""Checkpoints on disk or in memory: complete or absent, checked when read, and nothing but data.

A `Shelf` is a folder of checkpoints. Each is a folder of its own:

| file | what |
| --- | --- |
| `step-000000700/model.safetensors` | one part of the state; which parts there are is the caller's choice |
| `step-000000700/manifest.json` | step, time, facts, and of each part its file, size and checksum |
| `step-000000700.partial/` | one that is being written; becomes the above by a single rename when all is there |
| `step-000000700.trash/` | one that is being removed |
| `step-000000700.aside/` | one that training has gone back behind; no reader looks at it |
| `lock` | held by the run that writes here |

The manifest is written last, files and folders are flushed to the disk before the rename and after it, so that whenever
a writer is killed or the power fails, what is found is what was complete before. Parts may be written by several
processes, and by several hosts each in a folder of its own: then a folder holds some of the parts that its manifest
lists, and whether all hosts together hold all of them is for the caller to find out.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from poseidon.artifact import Value, describe
from poseidon.errors import CheckpointError, ConfigError
from poseidon.reading import parse_json
from poseidon.runtime.packing import pack, unpack
from poseidon.runtime.tensor_file import PIECE, pieces, read_tensors
from poseidon.units import MIB, format_bytes

VERSION = 1
MANIFEST = "manifest.json"
OF_RUN = "checkpoints"
"""Where the folder of a run has its checkpoints."""
LOCK = "lock"
MAX_MANIFEST = 64 * MIB
SUFFIX = ".safetensors"
STRUCTURE = "poseidon.structure"
"""In the metadata of a part's file: everything that is no tensor."""

logger = logging.getLogger(__name__)

_STEP_FOLDER = re.compile(r"step-([0-9]{9,18})(?:-([0-9]{1,9}))?")
_LEFTOVER = re.compile(_STEP_FOLDER.pattern + r"\.(?:partial|trash)")
_PART_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"
_REASONS = {
    errno.ENOSPC: "the disk is full; what was saved before is intact",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the limit on the size of a file is reached",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.ENOTDIR: "a part of the path is a file; name a folder",
    errno.EEXIST: "it is a file; name a folder",
    errno.ELOOP: "it is a symbolic link",
}


class Entry(Value):
    """One part of a checkpoint, as its manifest lists it."""

    part: Annotated[str, Field(pattern=f"^{_PART_NAME}$")]
    """Its name."""
    size: Annotated[int, Field(ge=0)]
    """Of its file, in bytes."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of its file."""

    @property
    def file(self) -> str:
        """The name of its file in the folder of the checkpoint."""
        return self.part + SUFFIX


class Manifest(Value):
    """What a checkpoint is."""

    version: int = VERSION
    """Of this format."""
    step: Annotated[int, Field(ge=0)]
    """After which its state was."""
    time: float
    """When it was complete, in seconds since 1970."""
    facts: dict[str, JsonValue]
    """What the caller wants known before any part is read: `world_size`, and `score` where there is one."""
    entries: tuple[Entry, ...]
    """All parts, those on other hosts too."""

    @model_validator(mode="after")
    def _no_part_twice(self) -> "Manifest":
        if len({entry.part for entry in self.entries}) < len(self.entries):
            raise ValueError("a part is listed twice")
        return self


@dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest is readable; `damage` says whether its files are too."""

    path: Path
    """Its folder."""
    manifest: Manifest

    @property
    def step(self) -> int:
        """After which its state was."""
        return self.manifest.step

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the writer wanted known of it."""
        return self.manifest.facts

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All parts, those on other hosts too."""
        return self.manifest.entries

    @property
    def world_size(self) -> int:
        """Of how many ranks it is the state; one, where the writer did not say."""
        world_size = self.facts.get("world_size")
        return world_size if isinstance(world_size, int) else 1

    @property
    def score(self) -> float | None:
        """How good its model is, where the writer said so."""
        score = self.facts.get("score")
        return float(score) if isinstance(score, int | float) and math.isfinite(score) else None

    def entry(self, part: str) -> Entry:
        """The entry of a part.

        Raises:
            CheckpointError: There is none of this name.
        """
        for entry in self.entries:
            if entry.part == part:
                return entry
        known = ", ".join(entry.part for entry in self.entries)
        raise CheckpointError(f"cannot read part {part!r} of {self.path}: it has {known}")

    def file(self, part: str) -> Path:
        """Where the file of a part is, or would be."""
        return self.path / self.entry(part).file

    def missing(self) -> list[str]:
        """Parts of which no file is here."""
        return [entry.part for entry in self.entries if not os.path.lexists(self.path / entry.file)]

    def damage(self, *, checksums: bool = True) -> str:
        """What is wrong with the files that are here, or nothing.

        Args:
            checksums: Read them whole; otherwise only their sizes are compared.
        """
        missing = self.missing()
        for entry in self.entries:
            if entry.part in missing:
                continue
            try:
                with _Reader(self.path / entry.file, entry) as reader:
                    if checksums:
                        reader.finish()
            except CheckpointError as error:
                return str(error)
        return ""

    def read(self, part: str) -> Any:
        """The state of a part, as it was given to `Draft.write`.

        Raises:
            CheckpointError: Its file is missing or damaged; the message says how.
        """
        entry = self.entry(part)
        try:
            with _Reader(self.path / entry.file, entry) as reader:
                tensors, metadata = read_tensors(reader.read_into, entry.size)
                reader.finish()
            return unpack(tensors, metadata.get(STRUCTURE, ""))
        except CheckpointError as error:
            raise CheckpointError(f"cannot read part {part!r} of {self.path}: {error}") from error


@dataclass(frozen=True)
class Damaged:
    """A folder that should be a checkpoint and cannot be used."""

    path: Path
    step: int
    """As its name says."""
    what: str
    """Is wrong."""


class Shelf:
    """A folder of checkpoints.

    Args:
        path: Need not exist before the first is written.
        durable: Whether what is complete survives a loss of power; not needed for a folder in memory.
    """

    def __init__(self, path: str | Path, *, durable: bool = True) -> None:
        self.path = Path(path)
        self.durable = durable

    def begin(self, step: int) -> "Draft":
        """Begins a checkpoint; every process that writes parts of it begins it. One at a time: others are leftovers.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        if step < 0:
            raise CheckpointError(f"cannot begin a checkpoint of step {step}: steps count from 0")
        draft = Draft(self, step)
        with _explained(f"begin the checkpoint of step {step} in {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self._folders(_LEFTOVER):
                if leftover != draft.path:
                    shutil.rmtree(leftover, ignore_errors=True)
            draft.path.mkdir(exist_ok=True)
        return draft

    def scan(self) -> list[Found | Damaged]:
        """Every checkpoint, the newest first, with those whose manifest cannot be read."""
        folders = [(_numbers(path), path) for path in self._folders(_STEP_FOLDER)]
        return [_look(path) for _, path in sorted(folders, reverse=True)]

    def found(self) -> list[Found]:
        """Every checkpoint with a readable manifest, the newest first; some of its parts may be missing or damaged."""
        return [each for each in self.scan() if isinstance(each, Found)]

    def newest(self, log: Callable[[str], object] = logger.warning) -> Found | None:
        """The newest checkpoint of which every part is here and undamaged, checksums compared.

        Args:
            log: Told of each that is skipped, and why.
        """
        for each in self.scan():
            what = each.what if isinstance(each, Damaged) else what_is_wrong(each)
            if isinstance(each, Found) and not what:
                return each
            log(f"the checkpoint {each.path} is skipped: {what}")
        return None

    def prune(self, keep_last: int, keep_best: int = 0, *, better: Literal["lower", "higher"] = "lower") -> list[Found]:
        """Removes checkpoints that are neither among the newest nor among the best.

        Those that are damaged, as far as sizes tell, count for nothing: they go when enough newer ones are sound.

        Args:
            keep_last: So many of the newest stay; at least one.
            keep_best: And so many of those with the best `score` in their facts; of equal ones the newest.
            better: Which scores are.

        Returns:
            Those that were removed.

        Raises:
            CheckpointError: One cannot be removed.
        """
        found = self.found()
        sound = [each for each in found if not each.damage(checksums=False)]
        scored = [(each.score, each) for each in sound if each.score is not None]
        best = sorted(scored, key=lambda pair: pair[0], reverse=better == "higher")[:keep_best]
        newest = sound[: max(1, keep_last)]
        kept = {each.path for each in (*newest, *(each for _, each in best))}
        oldest = min((each.step for each in newest), default=0)
        removed = [each for each in found if each.path not in kept and each.step <= oldest]
        for each in removed:
            self._remove(each.path)
        return removed

    def set_aside_after(self, step: int) -> list[Path]:
        """Sets aside what is of later steps: training has gone back behind them, and nobody is to go on from there.

        Args:
            step: Of the checkpoint that was made last.

        Returns:
            Where they lie now. They stay until somebody removes them, or others of their steps are set aside.

        Raises:
            CheckpointError: One cannot be renamed.
        """
        later = [path for path in self._folders(_STEP_FOLDER) if _numbers(path)[0] > step]
        return [self._set_aside(path) for path in later]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder: no other run may write into it meanwhile. It ends with the process, however that ends.

        Raises:
            CheckpointError: Another run holds it.
        """
        holder = self.path.resolve()
        if holder in _LOCKED:
            raise CheckpointError(
                f"cannot save into {self.path}: another run of this process does; name another folder"
            )
        with _explained(f"lock {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+", encoding="utf-8")
        with file:
            try:
                # Of the process, and not inherited: workers of a loader that outlive a killed rank do not hold it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                who = file.read(200).strip() or "unknown"
                raise CheckpointError(
                    f"cannot save into {self.path}: another run does ({who}); end it or name another folder"
                ) from error
            except OSError as error:
                logger.warning(
                    "cannot lock %s (%s): see to it that no other run saves there", self.path, _reason(error)
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            _LOCKED.add(holder)
            try:
                yield
            finally:
                _LOCKED.discard(holder)

    def _folders(self, pattern: re.Pattern[str]) -> list[Path]:
        """Of what is here, the names that match."""
        try:
            return [self.path / name for name in sorted(os.listdir(self.path)) if pattern.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot look for checkpoints in {self.path}: {_reason(error)}") from error

    def _set_aside(self, path: Path) -> Path:
        aside = path.with_name(f"{path.name}.aside")
        with _explained(f"set the checkpoint {path} aside"):
            shutil.rmtree(aside, ignore_errors=True)
            return path.rename(aside)

    def _remove(self, path: Path) -> None:
        """At once for every reader: a name that no reader looks at comes first."""
        with _explained(f"remove the checkpoint {path}"):
            trash = path.with_name(f"{path.name}.trash")
            path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)  # what stays, the next one that begins removes


_LOCKED: set[Path] = set()
"""Folders that this process holds: the system's locks do not tell two runs of one process apart."""


class Draft:
    """A checkpoint that is being written, as one process sees it."""

    def __init__(self, shelf: Shelf, step: int) -> None:
        self.step = step
        self.path = shelf.path / f"step-{step:09d}.partial"
        self._shelf = shelf
        self._what = f"save the checkpoint of step {step} in {shelf.path}"

    def write(self, part: str, state: Any) -> Entry:
        """Writes a part.

        Args:
            part: Its name, such as `model` or `rank-00003`.
            state: What `pack` takes.

        Raises:
            CheckpointError: It is not data, or cannot be written, as when the disk is full.
        """
        tensors, structure = pack(state)
        return self.copy(part, pieces(tensors, {STRUCTURE: structure}))

    def copy(self, part: str, content: Iterable[bytes | memoryview]) -> Entry:
        """Writes a part whose file exists elsewhere, by that file's bytes.

        Raises:
            CheckpointError: As `write`.
        """
        if not re.fullmatch(_PART_NAME, part):
            raise CheckpointError(f"cannot {self._what}: a part cannot be named {part!r}; use letters, digits, - and _")
        path = self.path / (part + SUFFIX)
        digest = hashlib.sha256()
        size = 0
        with _explained(self._what):
            path.unlink(missing_ok=True)
            try:
                with open(path, "xb", buffering=0) as file:
                    for piece in content:
                        _write_all(file.fileno(), memoryview(piece))
                        digest.update(piece)
                        size += len(piece)
                    self._flush(file.fileno())
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return Entry(part=part, size=size, sha256=digest.hexdigest())

    def seal(self, entries: Sequence[Entry], facts: Mapping[str, Any]) -> Found:
        """Makes it complete, by one process when all parts are written; files that are not in `entries` are removed.

        Args:
            entries: All parts, those in folders of other hosts too.
            facts: What can be known of it before any part is read, as JSON: `world_size`, `score`, and more.

        Raises:
            CheckpointError: A part is not as its writer said, or the manifest cannot be written.
        """
        try:
            manifest = Manifest(step=self.step, time=time.time(), facts=dict(facts), entries=tuple(entries))
        except ValidationError as error:
            raise CheckpointError(f"cannot {self._what}: {describe(error)}") from error
        with _explained(self._what):
            files = {entry.file for entry in entries}
            for path in self.path.iterdir():
                if path.name not in files:
                    path.unlink()
            draft = Found(self.path, manifest)
            if what := draft.damage(checksums=False):
                raise CheckpointError(f"cannot {self._what}: {what}")
            with open(self.path / MANIFEST, "xb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(_to_bytes(manifest)))
                self._flush(file.fileno())
            self._flush_folder(self.path)
            name = f"step-{self.step:09d}"
            before = [path for path in self._shelf._folders(_STEP_FOLDER) if _numbers(path)[0] == self.step]
            revision = max((_numbers(path)[1] for path in before), default=-1) + 1
            final = self.path.with_name(f"{name}-{revision}" if revision else name)
            self.path.rename(final)
            self._flush_folder(self._shelf.path)
        for path in before:
            self._shelf._remove(path)
        return Found(final, manifest)

    def drop(self) -> None:
        """Removes what was written, if anything was."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _flush(self, fd: int) -> None:
        if self._shelf.durable:
            os.fsync(fd)

    def _flush_folder(self, path: Path) -> None:
        if self._shelf.durable:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def open_checkpoint(path: str | Path) -> Found:
    """One checkpoint by its own folder, whatever that is named.

    Raises:
        CheckpointError: It has no manifest, or one that cannot be used.
    """
    path = Path(path).resolve()
    try:
        return Found(path, _read_manifest(path))
    except CheckpointError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error


def shelf_in(path: str | Path) -> Shelf:
    """The checkpoints in a folder: of a run, or of checkpoints only."""
    path = Path(path)
    return Shelf(path / OF_RUN if (path / OF_RUN).is_dir() else path)


def what_is_wrong(found: Found, *, checksums: bool = True) -> str:
    """What keeps a checkpoint from being read whole from its folder, or nothing.

    Args:
        found: The checkpoint.
        checksums: Read its files whole; otherwise only their sizes are compared.
    """
    if missing := found.missing():
        return f"the file of {', '.join(missing)} is missing"
    return found.damage(checksums=checksums)


class _Reader:
    """The file of a part while it is read, once and in order."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self._entry = entry
        self._left = entry.size
        self._digest = hashlib.sha256()
        self._fd = _open_plain(path)
        size = os.fstat(self._fd).st_size
        if size != entry.size:
            os.close(self._fd)
            raise CheckpointError(f"{entry.file} has {size} bytes instead of {entry.size}")

    def read_into(self, buffer: memoryview) -> None:
        """Fills the buffer with the next bytes."""
        for start in range(0, len(buffer), PIECE):
            self._fill(buffer[start : start + PIECE])

    def _fill(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                count = os.readv(self._fd, [piece[done:]])
            except OSError as error:
                raise CheckpointError(f"{self._entry.file} cannot be read: {_reason(error)}") from error
            if count == 0:
                raise CheckpointError(f"{self._entry.file} ends early")
            done += count
        self._digest.update(piece)
        self._left -= done

    def finish(self) -> None:
        """Reads what is left and compares the checksum."""
        buffer = memoryview(bytearray(min(PIECE, self._left)))
        while self._left:
            self._fill(buffer[: self._left])
        if self._digest.hexdigest() != self._entry.sha256:
            raise CheckpointError(f"{self._entry.file} is not what was written: its checksum is another")

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _look(path: Path) -> Found | Damaged:
    step = _numbers(path)[0]
    try:
        manifest = _read_manifest(path)
    except CheckpointError as error:
        return Damaged(path, step, str(error))
    if manifest.step != step:
        return Damaged(path, step, f"its manifest is of step {manifest.step}")
    return Found(path, manifest)


def _read_manifest(folder: Path) -> Manifest:
    if folder.is_symlink():
        raise CheckpointError("it is a symbolic link")
    fd = _open_plain(folder / MANIFEST)
    with open(fd, "rb") as file:
        text = file.read(MAX_MANIFEST + 1)
    if len(text) > MAX_MANIFEST:
        raise CheckpointError(f"its manifest is larger than {format_bytes(MAX_MANIFEST)}")
    try:
        data = parse_json(text.decode(), "it", finite=False)
        content, digest = data["manifest"], data["sha256"]
        version = content["version"]
    except (ConfigError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest is torn ({error})") from error
    if version != VERSION:
        raise CheckpointError(f"its format is version {version!r}; this Poseidon reads version {VERSION}")
    if _digest_of(content) != digest:
        raise CheckpointError("its manifest is not what was written: its checksum is another")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"its manifest cannot be used: {describe(error)}") from error


def _to_bytes(manifest: Manifest) -> bytes:
    content = manifest.model_dump(mode="json")
    return json.dumps({"manifest": content, "sha256": _digest_of(content)}, indent=2).encode() + b"\n"


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _numbers(path: Path) -> tuple[int, int]:
    """Step and revision of a checkpoint, from its folder's name: a step that is saved again gets a new folder."""
    match = _STEP_FOLDER.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named as a checkpoint is")
    return int(match[1]), int(match[2] or 0)


def _open_plain(path: Path) -> int:
    """Opens a file to read, if it is one: no link, pipe or device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be opened: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path.name} is not a file")
    return fd


def _write_all(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content) :]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns errors of the system into one of ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)
