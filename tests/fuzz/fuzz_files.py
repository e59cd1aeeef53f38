"""Fuzzes the readers of files and of texts from other processes.

`python tests/fuzz/fuzz_files.py -runs=100000`, with libFuzzer's other options.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["poseidon"]):
    from fuzz.running import fuzz
    from fuzz.targets import FILES

if __name__ == "__main__":
    fuzz(atheris, FILES)
