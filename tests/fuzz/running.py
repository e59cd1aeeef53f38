"""Runs atheris over a table of targets; the module atheris is handed in, so that nothing else needs it."""

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuzz.targets import FOLDER, Target


def fuzz(atheris: Any, targets: Mapping[str, Target]) -> None:
    """Fuzzes all targets of a table; the first byte of an input says which. Ends the process.

    Args:
        atheris: The module.
        targets: By name.
    """
    readers = [target.read for target in targets.values()]
    corpus = Path(tempfile.mkdtemp(prefix="poseidon-corpus-"))
    for index, (name, target) in enumerate(targets.items()):
        for number, example in enumerate(target.examples):
            (corpus / f"{name}{number}").write_bytes(bytes([index]) + example)

    def read(data: bytes) -> None:
        if data:
            readers[data[0] % len(readers)](data[1:])

    atheris.Setup([*sys.argv, str(corpus)], read)
    try:
        atheris.Fuzz()
    finally:
        for folder in (corpus, FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
