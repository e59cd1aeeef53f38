"""Random numbers: another stream on every rank, the same in every run, and draws that depend on what they are for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.runtime.join import group_of_process


def seed(number: int, *, group: Group | None = None) -> None:
    """Seeds Python, numpy, torch and its accelerators, differently on every rank and alike in every run.

    Build the model first: `distribute` makes the replicas equal whatever they were drawn from, and what is drawn later,
    such as the masks of dropout, should differ between ranks.

    Args:
        number: The seed of the whole run, zero or more, the same on every rank.
        group: The ranks; those that `poseidon.init` has joined if left out.

    Raises:
        ConfigError: The number is negative.

    Example:
        ```python
        torch.manual_seed(7)                 # the same first weights in every run
        model = make_model()
        poseidon.seed(7)                     # from here on each rank draws its own
        ```
    """
    if number < 0:
        raise ConfigError(f"cannot seed with {number}: use 0 or more")
    ranks = group or group_of_process()
    sequence = np.random.SeedSequence((number, ranks.rank))
    _seed_host(sequence)
    torch.manual_seed(number_from(number, ranks.rank))


@contextmanager
def draws_of(*numbers: int) -> Iterator[None]:
    """What is drawn inside from the global generators depends on these numbers alone; outside nothing has changed.

    Of Python, numpy and torch on the processor.

    Args:
        numbers: Zero or more each, such as a seed, an epoch and the index of a sample.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed_host(np.random.SeedSequence(numbers))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def number_from(*numbers: int) -> int:
    """One number of 63 bits from several, for a generator."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _seed_host(sequence: np.random.SeedSequence) -> None:
    """The global generators of Python, numpy and torch on the processor."""
    of_torch, of_python, *of_numpy = sequence.generate_state(6, np.uint64)
    torch.default_generator.manual_seed(int(of_torch >> 1))
    random.seed(int(of_python))
    np.random.seed(np.array(of_numpy).view(np.uint32))
