"""Fuzzes the readers of what crosses the network.

`python tests/fuzz/fuzz_frames.py -runs=100000`, with libFuzzer's other options.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["poseidon"]):
    from fuzz.running import fuzz
    from fuzz.targets import FRAMES

if __name__ == "__main__":
    fuzz(atheris, FRAMES)
