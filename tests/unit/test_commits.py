"""Commits that are given up."""

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from poseidon.runtime.commits import Commits


def test_commits_that_are_given_up_keep_no_memory() -> None:
    run: Any = SimpleNamespace(
        group=SimpleNamespace(layout=None), recorder=SimpleNamespace(on_step=[]), note=lambda *args, **options: None
    )
    commits = Commits(run)
    copy = weakref.ref(commits._copies.copy([torch.ones(3)])[0])
    assert copy() is not None
    commits._stop("there is no room")
    assert copy() is None
