"""Ten seconds that show whether the installation works at all."""

import importlib.metadata
import subprocess
import sys

import poseidon


def test_the_installed_version_is_the_imported_one() -> None:
    assert importlib.metadata.version("poseidon-dl") == poseidon.__version__


def test_import_leaves_the_process_as_it_was() -> None:
    """No output, no handlers, no variables, no threads on import."""
    code = (
        "import os, logging, threading; before = dict(os.environ)\n"
        "import poseidon\n"
        "assert dict(os.environ) == before, 'variables'\n"
        "assert not logging.getLogger('poseidon').handlers, 'handlers'\n"
        "assert threading.active_count() == 1, 'threads'\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
